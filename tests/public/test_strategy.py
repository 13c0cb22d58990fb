"""Which models a strategy takes, which it leaves alone, and that nothing of it stays behind."""

import inspect
import threading

import openipu as ipu
from openipu.keras.extensions import ModelExtension

import keras
import numpy as np
import pytest
from keras import layers

import zoo

pytestmark = zoo.KERAS_WARNINGS

X, Y = zoo.numbers(27)


@keras.saving.register_keras_serializable("our_package")
class Own(keras.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.first, self.last = layers.Dense(units, "tanh"), layers.Dense(1)

    def call(self, inputs):
        return self.last(self.first(inputs))

    def get_config(self):
        return super().get_config() | {"units": self.units}


class FunctionalOwn(keras.Model):
    """Passes `inputs` and `outputs` on, so Keras makes it a Functional."""

    def __init__(self, units=3):
        inputs = keras.Input((6,))
        super().__init__(inputs, layers.Dense(1)(layers.Dense(units, "tanh")(inputs)))


class SequentialOwn(keras.Sequential):
    def __init__(self):
        super().__init__([keras.Input((6,)), layers.Dense(1)])


def functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(inputs))


MAKERS = {
    "sequential": lambda: keras.Sequential([keras.Input((6,)), layers.Dense(1)]),
    "sequential without input": lambda: keras.Sequential([layers.Dense(1)]),
    "functional": functional,
    "subclass": Own,
    "functional subclass": FunctionalOwn,
    "sequential subclass": SequentialOwn,
    "clone": lambda: keras.models.clone_model(PLAIN["functional"]),
    "clone of sequential": lambda: keras.models.clone_model(PLAIN["sequential"]),
    "from_config": lambda: keras.Sequential.from_config(PLAIN["sequential"].get_config()),
    "functional from_config": lambda: keras.Model.from_config(PLAIN["functional"].get_config()),
    "json": lambda: keras.models.model_from_json(PLAIN["functional"].to_json()),
}
PLAIN = {name: MAKERS[name]() for name in ("sequential", "functional")}


@pytest.mark.parametrize("name", MAKERS)
def test_models_made_in_the_scope_use_the_loop(name):
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = MAKERS[name]()
    assert isinstance(model, ModelExtension)
    model.compile("sgd", "mse", steps_per_execution=3)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert len(model.train_function.loop.programs) == 2, "one for whole updates, one for the last partial batch"
    plain = MAKERS[name]()
    assert type(model).__name__ == type(plain).__name__
    assert type(model).__module__ == type(plain).__module__
    assert isinstance(model, inspect.getmro(type(plain))[0])


@pytest.mark.parametrize("name", MAKERS)
def test_models_made_elsewhere_are_untouched(name):
    before, new = MAKERS[name](), keras.Model.__new__
    kind, bases = type(before), type(before).__mro__
    with ipu.ipu_strategy.IPUStrategy().scope():
        during = []
        thread = threading.Thread(target=lambda: during.append(MAKERS[name]()))
        thread.start()
        thread.join()
        MAKERS[name]()
    after = MAKERS[name]()
    assert keras.Model.__new__ is new
    for model in (before, *during, after):
        assert type(model) is kind
        assert type(model).__mro__ == bases
        assert not isinstance(model, ModelExtension)
        assert not [attribute for attribute in vars(model) if "ipu" in attribute]
        assert type(model).fit is keras.Model.fit
    before.compile("sgd", "mse", steps_per_execution=2)
    before.fit(X, Y, verbose=0)


def test_a_model_of_the_scope_trains_after_the_scope_ended():
    with zoo.scope_if(True):
        model = functional()
    model.compile("sgd", "mse", steps_per_execution=3)
    model.fit(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == (27, 1)


def test_a_model_made_before_stays_plain_when_trained_inside():
    model = functional()
    with zoo.scope_if(True):
        model.compile("sgd", "mse", steps_per_execution=3)
        model.fit(X, Y, verbose=0)
    assert not isinstance(model, ModelExtension)


def test_an_exception_ends_the_scope():
    new = keras.Model.__new__
    with pytest.raises(ZeroDivisionError), ipu.ipu_strategy.IPUStrategy().scope():
        _ = 1 / 0
    assert keras.Model.__new__ is new
    assert not ipu.ipu_strategy.has_strategy()


def test_the_scope_is_the_context():
    with pytest.raises(TypeError, match=r"Write `with strategy\.scope\(\):`"), ipu.ipu_strategy.IPUStrategy():
        pass


def test_nested_scopes():
    outer, inner = ipu.ipu_strategy.IPUStrategy(), ipu.ipu_strategy.IPUStrategy()
    new = keras.Model.__new__
    with outer.scope():
        with inner.scope():
            assert ipu.ipu_strategy.get_strategy() is inner
            model = functional()
        assert ipu.ipu_strategy.get_strategy() is outer
        assert model._ipu_session.strategy is inner
        assert functional()._ipu_session.strategy is outer
    assert keras.Model.__new__ is new


def test_scopes_in_two_threads_at_once():
    new, made, entered, may_leave = keras.Model.__new__, [], threading.Event(), threading.Event()

    def work():
        with ipu.ipu_strategy.IPUStrategy().scope():
            entered.set()
            may_leave.wait(20)
            made.append(functional())

    thread = threading.Thread(target=work)
    with ipu.ipu_strategy.IPUStrategy().scope():
        thread.start()
        assert entered.wait(20)
    plain = functional()
    may_leave.set()
    thread.join()
    assert isinstance(made[0], ModelExtension)
    assert not isinstance(plain, ModelExtension)
    assert keras.Model.__new__ is new


def test_no_strategy_outside():
    assert not ipu.ipu_strategy.has_strategy()
    with pytest.raises(RuntimeError, match=r"with strategy\.scope\(\)"):
        ipu.ipu_strategy.get_strategy()


def test_extensions_can_be_switched_off():
    with ipu.ipu_strategy.IPUStrategy(enable_keras_extensions=False).scope():
        model = functional()
    assert type(model) is type(PLAIN["functional"])


def test_strategy_facts():
    strategy = ipu.ipu_strategy.IPUStrategy()
    assert ipu.ipu_strategy.IPUStrategyV1 is ipu.ipu_strategy.IPUStrategy
    assert strategy.num_replicas_in_sync == 1
    assert strategy.supports_loss_scaling
    with strategy.scope() as entered:
        assert entered is strategy


@pytest.mark.parametrize("arguments", [{"ipu_device": "IPU:0"}, {"cpu_device": "/device:GPU:0"}, {"ipu_device": 0}])
def test_device_names_are_checked(arguments):
    with pytest.raises(ValueError, match="is not a device name"):
        ipu.ipu_strategy.IPUStrategy(**arguments)


# --- classes of users ------------------------------------------------------------------------------------------------


def test_a_users_fit_evaluate_and_predict_call_ours():
    calls = []

    class Chatty(keras.Model):
        def fit(self, *args, **kwargs):
            calls.append("fit")
            return super().fit(*args, **kwargs)

        def evaluate(self, *args, **kwargs):
            calls.append("evaluate")
            return super().evaluate(*args, **kwargs)

        def predict(self, *args, **kwargs):
            calls.append("predict")
            return super().predict(*args, **kwargs)

    inputs = keras.Input((6,))
    with zoo.scope_if(True):
        model = Chatty(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse", steps_per_execution=3)
    model.fit(X, Y, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert calls == ["fit", "evaluate", "predict"]
    assert len(model.train_function.loop.programs) == 1
    model.fit(X, Y, verbose=0, validation_data=(X, Y))
    assert calls[3:] == ["fit", "evaluate"], "Keras validates through the user's own `evaluate`"


def test_a_users_class_with_slots_of_its_own_and_mixins():
    class Mixin:
        def hello(self):
            return f"hello from {self.name}"

    class Mixed(Mixin, Own):
        pass

    with zoo.scope_if(True):
        model = Mixed(name="mixed")
    assert model.hello() == "hello from mixed"
    assert isinstance(model, Own)
    model.compile("sgd", "mse", steps_per_execution=3)
    model.fit(X, Y, verbose=0)


def test_models_inside_models():
    with zoo.scope_if(True):
        inner = functional()
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(1)(inner(inputs)))
    model.compile("sgd", "mse", steps_per_execution=3)
    before = inner.get_weights()
    model.fit(X, Y, verbose=0)
    assert not np.array_equal(inner.get_weights()[0], before[0])
    assert inner.predict(X, verbose=0).shape == (27, 1)


def test_two_models_train_in_turns():
    with zoo.scope_if(True):
        one, two = functional(), Own()
    for model in (one, two):
        model.compile("sgd", "mse", steps_per_execution=3)
    for _ in range(2):
        for model in (one, two):
            model.fit(X, Y, verbose=0)
    assert len(one.train_function.loop.programs) == len(two.train_function.loop.programs) == 1


def test_signatures_are_those_of_keras():
    with zoo.scope_if(True):
        model = functional()
    for name in ("fit", "evaluate", "predict"):
        assert inspect.signature(getattr(model, name)) == inspect.signature(getattr(PLAIN["functional"], name))


def test_an_argument_that_keras_does_not_have_is_an_error():
    with zoo.scope_if(True):
        model = functional()
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="nonsense"):
        model.fit(X, Y, nonsense=1)
