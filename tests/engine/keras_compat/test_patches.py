"""Patches of Keras: all are listed, none outlives its use, and no thread sees those of another."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openipu
import openipu as ipu
from openipu.engine.keras_compat.patches import (
    LAYER_CALLS,
    NEW_MODELS,
    OPTIMIZER_MINIMIZE,
    RANDOM_FUNCTIONS,
    REGISTRY,
    SEEDS,
    STATELESS_CALL,
    TRAINING_FLAG,
    tracing,
)

import keras
import numpy as np
import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS

LISTED = {
    "BatchNormalization._moments",
    "CallContext.training",
    "KerasTensor of keras_tensor",
    "Layer.__call__",
    "Layer.add_loss",
    "Loss.__call__",
    "LossScaleOptimizer.apply",
    "LossScaleOptimizer.check_finite of single objects",
    "Model.__new__",
    "Model.compile of single objects",
    "Model.stateless_call of single objects",
    "Node.__init__",
    "Operation.__init__",
    "Optimizer.apply",
    "Optimizer.apply of single objects",
    "Optimizer.apply_gradients of single objects",
    "Optimizer.minimize",
    "Optimizer.stateless_apply of single objects",
    "SeedGenerator.next",
    "Variable.__init__",
    "jax of random",
}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert [patch.attribute for patch in REGISTRY if patch.active] == []


def _name(patch: Any) -> str:
    if not isinstance(patch.owner, type):
        return f"{patch.attribute} of {patch.owner.__name__.rpartition('.')[2]}"
    return f"{patch.owner.__name__}.{patch.attribute}" + (" of single objects" if patch.of_objects else "")


def test_all_patches_are_in_one_list_with_reason_and_lifetime() -> None:
    for module in pkgutil.walk_packages(openipu.__path__, "openipu."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert {_name(patch) for patch in REGISTRY} == LISTED
    assert len(REGISTRY) == len(LISTED)
    for patch in REGISTRY:
        assert patch.reason.endswith(".")
        assert patch.lifetime.startswith("while ")


def in_thread(call: Callable[[], Any]) -> Any:
    """What `call` gives in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_patch_acts_in_its_thread_alone_and_is_undone() -> None:
    original = keras.random.SeedGenerator.next
    generator = keras.random.SeedGenerator(1)

    def counted(next_seed: Callable[..., Any], *args: Any) -> Any:
        seen.append(args[0])
        return next_seed(*args)

    seen: list[Any] = []
    with SEEDS.using(counted):
        generator.next()
        in_thread(generator.next)
        assert seen == [generator]
    assert keras.random.SeedGenerator.next is original
    generator.next()
    assert seen == [generator]


def test_the_innermost_handler_comes_first_and_may_call_the_others() -> None:
    generator, order = keras.random.SeedGenerator(1), []

    def handler(name: str) -> Callable[..., Any]:
        def call(original: Callable[..., Any], *args: Any) -> Any:
            order.append(name)
            return original(*args)

        return call

    with SEEDS.using(handler("outer")), SEEDS.using(handler("inner")), SEEDS.using(handler("second"), once=True):
        generator.next()
    assert order == ["inner", "outer"]


def test_an_error_inside_leaves_nothing_behind() -> None:
    with contextlib.suppress(RuntimeError), LAYER_CALLS.using(lambda original, *args: original(*args)):
        raise RuntimeError
    assert not LAYER_CALLS.active


def test_threads_that_overlap_leave_the_original() -> None:
    original = vars(keras.random.SeedGenerator)["next"]
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with SEEDS.using(lambda call, *args: call(*args)):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    with SEEDS.using(lambda call, *args: call(*args)):
        thread.start()
        entered.wait()
    assert SEEDS.active
    leave.set()
    thread.join()
    assert vars(keras.random.SeedGenerator)["next"] is original


def test_a_patch_of_one_object_leaves_others_and_its_class_alone() -> None:
    mine, other = (keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]) for _ in range(2))
    arguments = [v.value for v in mine.trainable_variables], [], np.ones((1, 2), "float32")
    with STATELESS_CALL.using(lambda _original, *_: "stages", on=mine):
        assert mine.stateless_call(*arguments) == "stages"
        assert in_thread(lambda: mine.stateless_call(*arguments)) != "stages"
        assert other.stateless_call(*arguments) != "stages"
    assert "stateless_call" not in vars(mine)


def test_what_keras_does_not_have_is_there_for_one_thread_only() -> None:
    optimizer = keras.optimizers.SGD()
    before = hasattr(optimizer, "minimize")  # if a test in this process has loaded `openipu.tensorflow`, which adds one
    with OPTIMIZER_MINIMIZE.using(lambda _, loss: loss):
        assert optimizer.minimize(3) == 3
        assert in_thread(lambda: hasattr(optimizer, "minimize")) == before
    assert hasattr(keras.optimizers.Optimizer, "minimize") == before


def test_the_mode_of_layers() -> None:
    layer, x = keras.layers.Dropout(0.5, seed=1), np.ones((4, 8), "float32")
    with TRAINING_FLAG.using(lambda told: True if told is None else told):
        assert (np.asarray(layer(x)) == 0).any()
        assert (np.asarray(layer(x, training=False)) == 1).all()
        assert (np.asarray(in_thread(lambda: layer(x))) == 1).all()
    assert (np.asarray(layer(x)) == 1).all()


def test_random_functions_of_other_threads_stay_as_they_are() -> None:
    with RANDOM_FUNCTIONS.using(lambda function, name: (lambda *_, **__: name) if name == "normal" else function):
        assert RANDOM_FUNCTIONS.owner.jax.random.normal(None) == "normal"
        assert in_thread(lambda: keras.random.normal((2,), seed=1)).shape == (2,)


def test_models_made_in_another_thread_are_plain() -> None:
    with ipu.ipu_strategy.IPUStrategy().scope():
        assert NEW_MODELS.active
        ours, theirs = keras.Sequential(), in_thread(keras.Sequential)
    assert hasattr(ours, "set_pipelining_options")
    assert type(theirs) is keras.Sequential


def test_one_thread_traces_at_a_time_and_may_trace_inside() -> None:
    with tracing(), tracing():
        free = in_thread(lambda: tracing().acquire(blocking=False))
    assert free is False


# --- models in threads -----------------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(22, 5)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def network(seed: int) -> keras.Model:
    """Everything that is random has a seed, because all threads share Python's random numbers."""
    inputs = keras.Input((5,))
    first = keras.initializers.GlorotUniform(seed=seed)
    x = keras.layers.Dense(6, "relu", kernel_initializer=first)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.3, seed=seed)(x)
    last = keras.initializers.GlorotUniform(seed=seed + 1)
    model = keras.Model(inputs, keras.layers.Dense(2, "softmax", kernel_initializer=last)(x))
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", steps_per_execution=2)
    return model


def numbers(seed: int, ours: bool) -> list[np.ndarray]:
    """What training, evaluation and prediction of a new model give."""
    with ipu.ipu_strategy.IPUStrategy().scope() if ours else contextlib.nullcontext():
        model = network(seed)
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    evaluated = model.evaluate(X, Y, batch_size=4, verbose=0)
    return [*model.get_weights(), np.asarray(evaluated), model.predict(X, batch_size=4, verbose=0)]


def in_threads(jobs: list[tuple[int, bool]]) -> dict[int, list[np.ndarray]]:
    """The numbers of all jobs, done at the same time."""
    found: dict[int, list[np.ndarray]] = {}

    def run(number: int) -> None:
        found[number] = numbers(*jobs[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_models_in_several_threads_give_what_they_give_one_after_the_other(rounds: int) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    jobs = [(1, True), (2, True), (3, False)]
    expected = [numbers(*job) for job in jobs]
    for _ in range(rounds):
        found = in_threads(jobs)
        for i, arrays in enumerate(expected):
            for actual, wanted in zip(found[i], arrays, strict=True):
                np.testing.assert_array_equal(actual, wanted)
    assert keras.random.normal((4, 3)).shape == (4, 3)
