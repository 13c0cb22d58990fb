"""How often `fit`, `evaluate` and `predict` compile and launch, and what their arguments do."""
# Keras decides the arguments of hooks, steps and metrics.
# ruff: noqa: ARG002

import contextlib

import jax
import keras
import numpy as np
import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS


@contextlib.contextmanager
def compilations():
    """A list that grows by one entry whenever XLA compiles something."""
    seen, listening = [], True

    def listen(event, duration, **_):
        if listening and event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        listening = False


class Batches(keras.callbacks.Callback):
    """Records what the callbacks of batches are told."""

    def __init__(self):
        super().__init__()
        self.train, self.test, self.predict = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.train.append([batch])

    def on_train_batch_end(self, batch, logs=None):
        self.train[-1].append(batch)

    def on_test_batch_begin(self, batch, logs=None):
        self.test.append([batch])

    def on_test_batch_end(self, batch, logs=None):
        self.test[-1].append(batch)

    def on_predict_batch_begin(self, batch, logs=None):
        self.predict.append([batch])

    def on_predict_batch_end(self, batch, logs=None):
        self.predict[-1].append(batch)


def warm(model):
    """Everything that Keras does eagerly around a loop, so that later counts are those of the loop alone."""
    other = zoo.make(zoo.CASES["dense"], 2)
    other.fit(*zoo.table(19), batch_size=8, epochs=2, verbose=0, validation_data=zoo.table(19))
    other.predict(zoo.table(19)[0], batch_size=8, verbose=0)
    model.evaluate(*zoo.table(1), batch_size=1, verbose=0)


# --- compiling and launching -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "steps_per_execution", "programs"), [(8, 7, 1), (96, 1, 1), (99, 7, 2), (99, 13, 2), (5, 7, 1)]
)
def test_one_program_per_kind_of_loop_and_one_for_the_last_partial_batch(rows, steps_per_execution, programs):
    model = zoo.make(zoo.CASES["dense"], steps_per_execution)
    x, y = zoo.table(rows)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    model.evaluate(x, y, batch_size=8, verbose=0)
    model.predict(x, batch_size=8, verbose=0)
    functions = model.train_function, model.test_function, model.predict_function
    assert [len(function.loop.programs) for function in functions] == [programs] * 3


def test_the_first_step_waits_for_one_copy_of_the_step_only():
    """What runs a remainder is compiled when the data first has one, not before."""
    model = zoo.make(zoo.CASES["dense"], 2)
    counts = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, _batch, logs=None):
            counts.append(len(model.train_function.loop.programs))

    x, y = zoo.table(8 * 5 + 3)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Count()])
    assert counts == [1, 1, 2, 2, 2, 2]
    [whole, rest] = (program.compiled.as_text() for program in model.train_function.loop.programs.values())
    assert " while(" in whole
    assert " conditional(" not in whole + rest


def test_xla_compiles_twice_for_training_with_a_remainder():
    model = zoo.make(zoo.CASES["dense"], 7)
    warm(model)
    x, y = zoo.table(99)
    # The initial learning rate and the optimizer's slots are made by small programs of their own.
    model.optimizer.build(model.trainable_variables)
    with compilations() as first:
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    assert len(first) == 2
    with compilations() as second:
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    assert len(second) == 0


def test_a_second_fit_evaluate_and_predict_of_the_same_shapes_compile_nothing():
    model = zoo.make(zoo.CASES["batchnorm_dropout"], 7)
    x, y = zoo.table(99)

    def everything():
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y))
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)

    everything()
    with compilations() as seen:
        everything()
    assert len(seen) == 0


def test_other_rows_of_the_same_shape_do_not_compile_again():
    model = zoo.make(zoo.CASES["dense"], 7)
    for seed in (1, 2):
        x, y = zoo.table(99)
        model.fit(x + seed, y, batch_size=8, verbose=0)
    assert len(model.train_function.loop.programs) == 2


def stream(rows, batch=8):
    x, y = zoo.table(rows)
    for start in range(0, rows, batch):
        yield x[start : start + batch], y[start : start + batch]


@pytest.mark.parametrize(
    ("rows", "steps_per_execution", "programs"),
    [
        pytest.param(96, 6, 1, id="nothing over"),
        pytest.param(96, 7, 1, id="a short last execution"),
        pytest.param(99, 13, 2, id="remainder in the first execution"),
        pytest.param(99, 7, 2, id="remainder not foreseen"),
        pytest.param(99, 6, 2, id="remainder alone in the last execution"),
        pytest.param(99, 1, 2, id="one step at a time"),
    ],
)
def test_a_stream_costs_at_most_one_more_program_for_its_remainder(rows, steps_per_execution, programs):
    model = zoo.make(zoo.CASES["dense"], steps_per_execution)
    model.fit(stream(rows), verbose=0, shuffle=False)
    assert len(model.train_function.loop.programs) == programs


@pytest.mark.parametrize(("rows", "steps_per_execution"), [(96, 1), (96, 7), (99, 7), (99, 6), (99, 50), (5, 3)])
def test_one_launch_per_execution(rows, steps_per_execution):
    model, seen = zoo.make(zoo.CASES["dense"], steps_per_execution), Batches()
    x, y = zoo.table(rows)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[seen])
    steps = -(-rows // 8)
    expected = [[s, min(s + steps_per_execution, steps) - 1] for s in range(0, steps, steps_per_execution)]
    assert seen.train == expected
    model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[seen])
    assert seen.test == expected
    assert model.predict(x, batch_size=8, verbose=0, callbacks=[seen]).shape == (rows, 3)
    assert seen.predict == expected


def test_an_execution_is_one_launch_and_one_more_for_its_remainder(monkeypatch):
    model = zoo.make(zoo.CASES["dense"], 7)
    x, y = zoo.table(99)
    model.fit(x, y, batch_size=8, verbose=0)
    loop = model.train_function.loop
    calls, execute = [], loop.execute

    def counted(state, resident, slab):
        results, state = execute(state, resident, slab)
        calls.append(len(results))
        return results, state

    monkeypatch.setattr(loop, "execute", counted)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    assert calls == [1, 2] * 3


def test_compile_drops_the_programs():
    model = zoo.make(zoo.CASES["dense"], 7)
    x, y = zoo.table(99)
    model.fit(x, y, batch_size=8, verbose=0)
    before = model.train_function
    model.compile("sgd", "mse", steps_per_execution=3)
    assert model.train_function is None
    model.compile(**zoo.CASES["dense"].compile(), steps_per_execution=3)
    model.fit(x, y, batch_size=8, verbose=0)
    assert model.train_function is not before


def test_freezing_a_layer_after_training_takes_effect():
    model = zoo.make(zoo.CASES["dense"], 7)
    x, y = zoo.table(99)
    model.fit(x, y, batch_size=8, verbose=0)
    model.layers[0].trainable = False
    model.compile(**zoo.CASES["dense"].compile(), steps_per_execution=7)
    before = model.get_weights()
    model.fit(x, y, batch_size=8, verbose=0)
    after = model.get_weights()
    assert np.array_equal(before[0], after[0])
    assert not np.array_equal(before[2], after[2])


# --- arguments of fit ------------------------------------------------------------------------------------------------


def both(run, steps_per_execution=4, case="dense"):
    """`run(model)` for a plain model and for one of a strategy."""
    results = []
    for steps in (None, steps_per_execution):
        model = zoo.make(zoo.CASES[case], steps)
        results.append((run(model), model.get_weights()))
    return results


def assert_equal(results):
    (expected, weights), (actual, our_weights) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
    for a, b in zip(our_weights, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


X, Y = zoo.table(99)
X_VAL, Y_VAL = zoo.table(21)
ARGUMENTS = {
    "validation_split": {"validation_split": 0.3},
    "validation_split, unshuffled": {"validation_split": 0.25, "shuffle": False},
    "validation_freq 2": {"validation_data": (X_VAL, Y_VAL), "validation_freq": 2, "epochs": 5},
    "validation_freq list": {"validation_data": (X_VAL, Y_VAL), "validation_freq": [1, 4], "epochs": 5},
    "validation_steps": {"validation_data": (X_VAL, Y_VAL), "validation_steps": 2},
    "validation_batch_size": {"validation_data": (X_VAL, Y_VAL), "validation_batch_size": 5},
    "validation sample_weight": {"validation_data": (X_VAL, Y_VAL, np.linspace(0, 1, 21))},
    "class_weight": {"class_weight": {0: 1.0, 1: 0.3, 2: 2.5}},
    "sample_weight": {"sample_weight": np.linspace(0, 2, 99)},
    "sample_weight column": {"sample_weight": np.linspace(0, 2, 99)[:, None]},
    "shuffle batch": {"shuffle": "batch"},
    "shuffle off": {"shuffle": False},
    "initial_epoch": {"initial_epoch": 2, "epochs": 4},
    "initial_epoch beyond": {"initial_epoch": 5, "epochs": 4},
    "no epochs": {"epochs": 0},
    "steps_per_epoch below": {"steps_per_epoch": 5, "epochs": 2},
    "steps_per_epoch exact": {"steps_per_epoch": 13},
    "default batch size": {"batch_size": None},
    "steps without batch size": {"batch_size": None, "steps_per_epoch": 9},
    "batch larger than data": {"batch_size": 500},
}


@pytest.mark.parametrize("settings", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_arguments_mean_what_they_mean_in_keras(settings):
    settings = {"batch_size": 8, "epochs": 3, "verbose": 0, **settings}
    assert_equal(both(lambda model: model.fit(X, Y, **settings).history))


@pytest.mark.parametrize("settings", [{"steps": 2}, {"sample_weight": np.linspace(0, 1, 99)}, {"return_dict": True}])
def test_arguments_of_evaluate(settings):
    assert_equal(both(lambda model: model.evaluate(X, Y, batch_size=8, verbose=0, **settings)))


def test_predict_with_steps_gives_the_first_batches():
    assert_equal(both(lambda model: model.predict(X, batch_size=8, steps=3, verbose=0)))


def test_positional_arguments_of_fit():
    assert_equal(both(lambda model: model.fit(X, Y, 8, 2, 0).history))


def test_a_shuffled_unbuilt_model_sees_plain_keras_order():
    assert_equal(both(lambda m: m.fit(*zoo.numbers(21), 8, 3, 0, shuffle="batch").history, case="subclassed"))


def test_weighted_metrics_and_unweighted_ones():
    def run(model):
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"],
                      steps_per_execution=3)  # fmt: skip
        return model.fit(X, Y, 8, 2, 0, sample_weight=np.linspace(0, 1, 99)).history

    assert_equal(both(run))


# --- single batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["dense", "batchnorm_dropout", "own_step"])
def test_methods_on_a_batch(case):
    x, y = zoo.CASES[case].data(20)

    def run(model):
        logs = [model.train_on_batch(x[:8], y[:8]), model.train_on_batch(x[8:], y[8:], return_dict=True)]
        logs += [model.test_on_batch(x, y), model.test_on_batch(x[:3], y[:3], return_dict=True)]
        return [logs, model.predict_on_batch(x), model.train_on_batch(x, y, return_dict=True)]

    assert_equal(both(run, case=case))


def test_weights_on_a_batch():
    def run(model):
        weighted = model.train_on_batch(X[:8], Y[:8], sample_weight=np.linspace(0, 1, 8))
        return [weighted, model.train_on_batch(X[:8], Y[:8], class_weight={0: 1.0, 1: 2.0, 2: 0.5})]

    assert_equal(both(run))


def test_batches_and_fit_can_be_mixed():
    def run(model):
        logs = [model.fit(X, Y, 8, 1, 0).history, model.train_on_batch(X[:5], Y[:5], return_dict=True)]
        return [*logs, model.fit(X, Y, 8, 1, 0).history, model.test_on_batch(X, Y)]

    assert_equal(both(run))
