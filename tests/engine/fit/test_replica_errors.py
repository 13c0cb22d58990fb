"""Every rule about replicas and accumulation, broken once: the error says the numbers and the remedy."""

from __future__ import annotations

import re
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(autouse=True)
def _systems() -> None:
    replication.configure_all()


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(1)])


def made(replicas: int = 2, make: Any = dense, strategy: Any = None) -> Any:
    keras.utils.set_random_seed(5)
    with (strategy or replication.strategy(replicas)).scope():
        return make()


@pytest.mark.parametrize(("steps", "better"), [(1, 4), (6, 8)])
def test_an_execution_is_a_whole_number_of_updates(steps: int, better: int) -> None:
    model = made()
    model.set_gradient_accumulation_options(4)
    model.compile("sgd", "mse", steps_per_execution=steps)
    with pytest.raises(
        RuntimeError, match=f"is {steps}, which is not a multiple of the 4 .*example `steps_per_execution={better}`"
    ):
        model.fit(*zoo.numbers(32), batch_size=4, verbose=0)
    assert model.evaluate(*zoo.numbers(32), verbose=0) > 0, "evaluation does not accumulate"


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", [2], np.bool_(True), np.float32(2)])
def test_the_number_of_micro_batches_is_a_positive_int(value: Any) -> None:
    model = made()
    with pytest.raises(ValueError, match=r"`gradient_accumulation_steps_per_replica` is .* whole number of 1 or more"):
        model.set_gradient_accumulation_options(value)
    assert model._ipu_session.options.updates.steps == 1


@pytest.mark.parametrize("value", ["average", "", None, 1])
def test_the_reduction_is_one_of_three(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`gradient_accumulation_reduction_method` is .*\. Give one of SUM, MEAN, RUNNING_MEAN"
    ):
        made().set_gradient_accumulation_options(2, value)


@pytest.mark.parametrize("value", ["median", None, 1])
def test_the_metric_reduction_is_one_of_four(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`replicated_metric_reduction_method` is .* one of NONE, LIST, SUM, MEAN"):
        made().set_replication_options(value)


@pytest.mark.parametrize("key", ["opt", "num_mini_batches", "experimental_normalize_gradients"])
def test_what_the_model_sets_itself_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"`{key}` is set by the model itself"):
        made().set_gradient_accumulation_options(2, **{key: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gradient_accumulation_steps_per_replca", "Did you mean `gradient_accumulation_steps_per_replica`"),
        ("fusion", "The options are gradient_accumulation_steps_per_replica, gradient_accumulation_red"),
    ],
)
def test_unknown_options_are_refused(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"There is no option `{name}`\. {hint}"):
        made().set_gradient_accumulation_options(**{name: 2})


@pytest.mark.parametrize("key", ["replicated_optimizer_state_sharding", "offload_weight_update_variables"])
@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_switches_are_booleans(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{key}` is {value!r}. Give True or False"):
        made().set_gradient_accumulation_options(2, **{key: value})


def test_the_type_to_accumulate_in_exists() -> None:
    with pytest.raises(ValueError, match="float33"):
        made().set_gradient_accumulation_options(2, dtype="float33")


def test_an_own_train_step_cannot_accumulate() -> None:
    model = made(make=zoo.own_step)
    model.set_gradient_accumulation_options(2)
    model.compile("sgd", "mse", steps_per_execution=2)
    with pytest.raises(RuntimeError, match=r"has its own `train_step`.*2 micro-batches.*Remove `train_step`, or accum"):
        model.fit(*zoo.numbers(16), batch_size=4, verbose=0)


def test_groups_of_batch_statistics_divide_the_replicas() -> None:
    replication.configure(4, batch_norm_group=3)
    model = made(strategy=ipu.ipu_strategy.IPUStrategy())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="replica_group_size is 3, which does not divide the 4 replicas"):
        model.fit(*zoo.numbers(16), verbose=0)


def test_an_error_leaves_the_model_usable() -> None:
    model = made(4)
    model.set_gradient_accumulation_options(2)
    model.compile("sgd", "mse", steps_per_execution=3)
    with pytest.raises(RuntimeError, match="is 3, which is not a multiple of the 2"):
        model.fit(*zoo.numbers(32), batch_size=2, verbose=0)
    model.compile("sgd", "mse", steps_per_execution=4)
    model.fit(*zoo.numbers(32), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2


class Scale(layers.Layer):
    """Has a weight, and uses it in one of several ways."""

    def __init__(self, how: str, regularizer: Any = None) -> None:
        super().__init__()
        self.how, self.regularizer = how, regularizer

    def build(self, shape: Any) -> None:
        del shape
        self.scale = self.add_weight(shape=(1,), initializer="ones", name="scale", regularizer=self.regularizer)

    def call(self, inputs: Any) -> Any:
        if self.how == "stopped":
            return inputs * keras.ops.stop_gradient(self.scale)
        if self.how == "compared":
            return inputs * keras.ops.cast(self.scale > 0, "float32")
        return inputs * self.scale if self.how == "used" else inputs


def scaled(how: str, replicas: int = 1, **settings: Any) -> Any:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), Scale(how, **settings), layers.Dense(1, name="last")])

    model = made(replicas, make)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(("how", "replicas"), [("unused", 1), ("unused", 2), ("stopped", 1), ("compared", 1)])
def test_a_weight_without_gradient_is_named(how: str, replicas: int, caplog: pytest.LogCaptureFixture) -> None:
    model = scaled(how, replicas)
    before = model.get_weights()
    model.fit(*zoo.numbers(8), batch_size=4, verbose=0)
    model.fit(*zoo.numbers(8), batch_size=4, verbose=0)
    [notice] = [record.message for record in caplog.records if "no gradient" in record.message]
    assert re.search(r"1 of 3 trainable weights .*: .*/scale[_0-9]*/scale\. They are not trained", notice)
    np.testing.assert_array_equal(model.layers[0].scale.numpy(), before[0])
    assert np.abs(model.layers[1].kernel.numpy() - before[1]).max() > 0
    caplog.clear()
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    model.fit(*zoo.numbers(8), batch_size=4, verbose=0)
    assert "no gradient" not in caplog.text


def test_a_weight_that_only_a_regularizer_uses_has_a_gradient() -> None:
    model = scaled("unused", regularizer=keras.regularizers.L2(0.1))
    model.fit(*zoo.numbers(8), batch_size=4, verbose=0)
    assert float(model.layers[0].scale[0]) < 1


# --- what is allowed, though it was not everywhere -------------------------------------------------------------------


def test_an_optimizer_with_an_own_apply_sees_reduced_gradients() -> None:
    class Signs(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply([keras.ops.sign(g) for g in grads], trainable_variables)

    x, y = zoo.numbers(32)
    models = [made(1), made(4)]
    models[1].set_gradient_accumulation_options(2)
    for model, batch, steps in ((models[0], 16, 1), (models[1], 2, 2)):
        model.compile(Signs(0.01), "mse", steps_per_execution=steps)
        model.fit(x, y, batch_size=batch, verbose=0, shuffle=False)
    replication.assert_close(models[1].get_weights(), models[0].get_weights())


def test_stateful_layers_need_one_replica() -> None:
    def recurrent() -> keras.Model:
        return keras.Sequential([keras.Input(batch_shape=(4, 3, 2)), layers.LSTM(3, stateful=True, name="carried")])

    x, y = np.ones((16, 3, 2), "float32"), np.ones((16, 3), "float32")
    model = made(2, recurrent)
    model.compile("sgd", "mse")
    for call in (model.fit, model.evaluate, lambda x, _, **settings: model.predict(x, **settings)):
        with pytest.raises(ValueError, match=r"Layer 'carried' .* is stateful.* with 2 replicas.*`stateful=False`"):
            call(x, y, batch_size=4, verbose=0)
    alone = made(1, recurrent)
    alone.compile("sgd", "mse")
    assert alone.fit(x, y, batch_size=4, verbose=0).history["loss"][0] > 0


@pytest.mark.parametrize(("replicas", "steps"), [(2, 1), (1, 2)])
def test_weights_that_gradients_overwrite_are_not_added_up(replicas: int, steps: int) -> None:
    """Keras' float8 layers return their new scales as gradients, which replace the old ones."""

    def quantized() -> keras.Model:
        policy = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "float32")
        return keras.Sequential([keras.Input((6,)), layers.Dense(1, dtype=policy, name="small")])

    model = made(replicas, quantized)
    model.set_gradient_accumulation_options(steps)
    model.compile("sgd", "mse", steps_per_execution=steps)
    with pytest.raises(
        ValueError, match=r"replaces the weight '.*small/.*the gradients of 2 micro-batches are added up"
    ):
        model.fit(*zoo.numbers(32), batch_size=4, verbose=0)


def test_weights_that_gradients_overwrite_are_trained(caplog: pytest.LogCaptureFixture) -> None:
    policy = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "float32")
    model = made(1, lambda: keras.Sequential([keras.Input((6,)), layers.Dense(1, dtype=policy)]))
    model.compile("sgd", "mse")
    before = model.get_weights()
    model.fit(*zoo.numbers(32), batch_size=4, verbose=0)
    assert all((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    assert "have no gradient" not in caplog.text
