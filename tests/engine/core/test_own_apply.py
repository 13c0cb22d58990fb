"""Wrappers with an `apply` or `apply_gradients` of their own: `fit` uses them, and its numbers are known ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import openipu as ipu
from openipu.engine.core.optimizer_chain import describe
from openipu.optimizers import (
    CrossReplicaGradientAccumulationOptimizerV2,
    CrossReplicaOptimizer,
    GradientAccumulationOptimizerV2,
    IpuOptimizer,
    MapGradientOptimizer,
)

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import estimators
import zoo

pytestmark = zoo.KERAS_WARNINGS

SGD = keras.optimizers.SGD


class Squares(IpuOptimizer):
    """Squares gradients. Its constructor has other arguments than the base class, and there is no `get_config`."""

    def __init__(self, opt: Any, factor: float = 1.0) -> None:
        super().__init__(opt, "squares")
        self.factor = factor

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        super().apply([self.factor * g * g for g in grads], trainable_variables)


class SquaresPairs(IpuOptimizer):
    def apply_gradients(self, grads_and_vars: Any, global_step: None = None, name: str | None = None) -> Any:
        pairs = [(keras.ops.cast(g, v.dtype) ** 2, v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs, global_step=global_step, name=name)


class SquaresInside(IpuOptimizer):
    """As older scripts do it, and with a decorator that makes the method look like that of the base class."""

    @functools.wraps(IpuOptimizer.apply_gradients)
    def apply_gradients(self, grads_and_vars: Any, **kwargs: Any) -> Any:
        return self._opt.apply_gradients([(g**2, v) for g, v in grads_and_vars], **kwargs)


class Assigns(IpuOptimizer):
    """Never calls the inner optimizer."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        for g, v in zip(grads, trainable_variables, strict=True):
            v.assign_sub(self.learning_rate * g * g)


class Normed(IpuOptimizer):
    """Divides by the largest gradient of all weights."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in grads]))
        super().apply([g / largest for g in grads], trainable_variables)


class Counting(IpuOptimizer):
    """Adds up what it has seen, and counts; applies gradient times count."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.count = self.add_variable((), name="count")
        self.sums = self.add_optimizer_variables(variables, "sum")

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        self.count.assign_add(1.0)
        for seen, g in zip(self.sums, grads, strict=True):
            seen.assign_add(g)
        super().apply([g * self.count for g in grads], trainable_variables)


@keras.saving.register_keras_serializable("tests")
def outputs(_: Any, y: Any) -> Any:
    """A loss whose gradients are the model's."""
    return keras.ops.sum(y, -1)


def configure(devices: int) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()


def line(optimizer: Any, steps: int = 1, **options: Any) -> keras.Model:
    """A weight that starts at zero. The gradient of a micro-batch of one sample is the sample."""
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")])
        model.compile(optimizer, loss=outputs, steps_per_execution=steps)
        if options:
            model.set_gradient_accumulation_options(**options)
    return model


def moved(model: keras.Model, samples: int) -> float:
    """How far SGD(1.0) moves the weight by the samples 1, 2, ... in micro-batches of one."""
    x = np.arange(1, samples + 1, dtype="float32")[:, None]
    model.fit(x, x, batch_size=1, shuffle=False, verbose=0)
    kernel = model.get_weights()[0]
    assert kernel[0, 0] == kernel[0, 1]
    return -float(kernel[0, 0])


WAYS = {"apply": Squares, "apply_gradients": SquaresPairs, "inside": SquaresInside, "assigning": Assigns}


@pytest.mark.parametrize("way", WAYS)
def test_one_device(way: str) -> None:
    configure(1)
    assert moved(line(WAYS[way](SGD(1.0)), steps=3), 6) == sum(i * i for i in range(1, 7))


@pytest.mark.parametrize("way", WAYS)
def test_plain_keras(way: str) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")])
    model.compile(WAYS[way](SGD(1.0)), loss=outputs)
    assert moved(model, 3) == 1 + 4 + 9


REPLICAS: dict[str, tuple[Callable[[], Any], int, float]] = {
    "sum": (lambda: Squares(SGD(1.0)), 1, 10**2),
    "pairs": (lambda: SquaresPairs(SGD(1.0)), 1, 10**2),
    "mean, outside": (lambda: CrossReplicaOptimizer(Squares(SGD(1.0))), 1, 2.5**2),
    "mean, inside": (lambda: Squares(CrossReplicaOptimizer(SGD(1.0))), 1, 2.5**2),
    "accumulated, outside": (lambda: GradientAccumulationOptimizerV2(Squares(SGD(1.0)), 2), 2, 36**2),
    "accumulated, inside": (lambda: SquaresPairs(GradientAccumulationOptimizerV2(SGD(1.0), 2)), 2, 36**2),
    "both": (lambda: CrossReplicaGradientAccumulationOptimizerV2(Squares(SGD(1.0), 3.0), 2), 2, 3 * 9**2),
    "mapped before": (lambda: Squares(MapGradientOptimizer(SGD(1.0), lambda g, _: g + 1)), 1, 14**2),
    "twice": (lambda: Squares(SquaresPairs(Squares(SGD(1.0)))), 1, 10**8),
    "divided state": (lambda: GradientAccumulationOptimizerV2(Squares(SGD(1.0, 0.9)), 2, None, True), 2, 36**2),
    "scaled, outside": (lambda: keras.optimizers.LossScaleOptimizer(Squares(SGD(1.0)), 8.0), 1, 10**2),
    "scaled, inside": (lambda: Squares(keras.optimizers.LossScaleOptimizer(SGD(1.0), 8.0)), 1, 8 * 10**2),
}


@pytest.mark.parametrize("name", REPLICAS)
def test_four_replicas(name: str) -> None:
    make, steps, expected = REPLICAS[name]
    configure(4)
    model = line(make(), steps)
    assert moved(model, 4 * steps) == pytest.approx(expected, rel=1e-6)
    assert int(model.optimizer.iterations) == 1


def test_accumulation_in_another_dtype_is_cast_by_the_user() -> None:
    configure(2)
    options = {"gradient_accumulation_steps_per_replica": 2, "dtype": "float16"}
    model = line(SquaresPairs(SGD(1.0)), 2, **options)
    assert moved(model, 4) == 10**2


def test_variables_of_its_own(tmp_path: Any) -> None:
    configure(2)
    optimizer = Counting(SGD(1.0, 0.0))
    model = line(optimizer, 2)
    assert moved(model, 8) == 3 * 1 + 7 * 2 + 11 * 3 + 15 * 4
    assert float(optimizer.count) == 4
    np.testing.assert_array_equal(optimizer.sums[0], np.full((1, 2), 36.0))
    model.save(tmp_path / "model.keras")
    with ipu.ipu_strategy.IPUStrategy().scope():
        loaded = keras.models.load_model(tmp_path / "model.keras", {"Counting": Counting})
    assert float(loaded.optimizer.count) == 4


def test_a_program_of_the_users_own_calls_it_once() -> None:
    configure(2)
    strategy = ipu.ipu_strategy.IPUStrategy()
    calls = []

    class Calls(IpuOptimizer):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            calls.append(len(grads))
            super().apply([2 * g for g in grads], trainable_variables)

    for optimizer in (Calls(SGD(1.0)), Calls(keras.optimizers.LossScaleOptimizer(SGD(1.0), 4.0))):
        weight = keras.Variable(np.zeros(1, "float32"))
        optimizer.build([weight])
        del calls[:]

        def step(own: Any = optimizer, variable: Any = weight) -> Any:
            before = len(calls)
            own.apply([own.scale_loss(jnp.ones(1))], [variable])
            assert len(calls) == before + 1
            return variable.value

        strategy.run(step)
        assert calls
        np.testing.assert_array_equal(weight, [-4.0])  # 2 replicas x 2


def test_around_a_scaled_optimizer_outside_of_programs() -> None:
    """Keras' own `apply` loses the new values there."""
    weight = keras.Variable([1.0, 2.0])
    optimizer = Squares(keras.optimizers.LossScaleOptimizer(SGD(1.0), 4.0))
    optimizer.apply([jnp.array([4.0, 8.0])], [weight])
    np.testing.assert_array_equal(weight, [1.0 - 4, 2.0 - 16])
    optimizer.apply([jnp.array([jnp.inf, 8.0])], [weight])
    np.testing.assert_array_equal(weight, [1.0 - 4, 2.0 - 16])
    assert float(optimizer.inner_optimizer.dynamic_scale) == 2.0


# --- pipelines -------------------------------------------------------------------------------------------------------


def product(optimizer: Any, stages: Sequence[int] = (0, 1), **options: Any) -> keras.Model:
    """x * a * b with a = 2 and b = 3, in two stages; 4 micro-batches per update."""
    with ipu.ipu_strategy.IPUStrategy().scope():
        made = [
            keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(value), name=name)
            for name, value in (("a", 2.0), ("b", 3.0))
        ]
        model = keras.Sequential([keras.Input((1,)), *made])
        model.compile(optimizer, loss=outputs, steps_per_execution=4)
        model.set_pipeline_stage_assignment(list(stages))
        model.set_pipelining_options(4, **options)
    return model


def trained(model: keras.Model, rows: int) -> list[float]:
    x = np.arange(1, rows + 1, dtype="float32")[:, None]
    model.fit(x, x, batch_size=1, shuffle=False, verbose=0)
    return [float(w[0, 0]) for w in model.get_weights()]


PIPELINES: dict[str, Callable[[Any], Any]] = {
    "apply": Squares,
    "apply_gradients": SquaresPairs,
    "outside": lambda opt: CrossReplicaGradientAccumulationOptimizerV2(Squares(opt), 4),
    "scaled": lambda opt: keras.optimizers.LossScaleOptimizer(Squares(opt), 4.0),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name: str, replicas: int) -> None:
    configure(2 * replicas)
    model = product(PIPELINES[name](SGD(0.001)))
    total = sum(range(1, 4 * replicas + 1)) / (replicas if name == "outside" else 1)
    expected = [2 - 0.001 * (3 * total) ** 2, 3 - 0.001 * (2 * total) ** 2]
    np.testing.assert_allclose(trained(model, 4 * replicas), expected, rtol=1e-6)


def test_a_pipeline_with_divided_state() -> None:
    configure(4)
    model = product(Squares(SGD(0.001, 0.9)), replicated_optimizer_state_sharding=True)
    np.testing.assert_allclose(trained(model, 8), [2 - 0.001 * 108**2, 3 - 0.001 * 72**2], rtol=1e-6)


def test_a_pipeline_keeps_its_variables() -> None:
    configure(2)
    optimizer = Counting(SGD(0.001))
    assert trained(product(optimizer), 4) == pytest.approx([2 - 0.03, 3 - 0.02])
    assert float(optimizer.count) == 1
    assert [float(seen[0, 0]) for seen in optimizer.sums] == [30, 20]


class ByName(IpuOptimizer):
    """Leaves the weights of layer b alone."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        names = [v.path.split("/")[-2:] for v in trainable_variables]
        super().apply([g * (name == ["a", "kernel"]) for g, name in zip(grads, names, strict=True)])


def test_names_of_weights_are_known_in_a_pipeline() -> None:
    configure(2)
    assert trained(product(ByName(SGD(0.001))), 4) == pytest.approx([2 - 0.03, 3.0])


def test_what_needs_all_gradients_is_refused_in_a_pipeline() -> None:
    configure(2)
    with pytest.raises(ValueError, match=r"its own `apply`, which computes .* from 'sequential[_0-9]*/b/kernel' as"):
        trained(product(Normed(SGD(0.001), "normed")), 4)
    with pytest.raises(ValueError, match="computes a variable that belongs to no weight from"):
        trained(product(Totalling(SGD(0.001))), 4)
    with pytest.raises(ValueError, match="train without stages"):
        trained(product(Squares(SGD(0.001, global_clipnorm=1.0))), 4)


def test_what_needs_all_gradients_of_one_device() -> None:
    configure(1)
    model = product(Normed(SGD(0.001)), device_mapping=[0, 0], pipeline_schedule="Sequential")
    assert trained(model, 4) == pytest.approx([2 - 0.001, 3 - 0.001 * 20 / 30])


class CountsElsewhere(IpuOptimizer):
    def __init__(self, opt: Any) -> None:
        super().__init__(opt)
        self.seen = keras.Variable(0.0)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        self.seen.assign_add(1.0)
        super().apply(grads, trainable_variables)


class Totalling(IpuOptimizer):
    """Adds up all gradients in a variable that belongs to no weight."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.total = self.add_variable((), name="total")

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        self.total.assign_add(sum(jnp.sum(g) for g in grads))
        super().apply(grads, trainable_variables)


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes() -> None:
    configure(1)
    with pytest.raises(ValueError, match=r"assigns 1 variable beyond .* `self.add_variable"):
        moved(line(CountsElsewhere(SGD(1.0))), 2)
    with pytest.raises(ValueError, match="has no variables yet"):
        Squares(SGD(1.0)).stateless_apply([], [], [])
    with pytest.raises(ValueError, match="`global_step` is given"):
        SquaresPairs(SGD(1.0)).apply_gradients([(jnp.ones(1), keras.Variable([1.0]))], global_step=0)  # type: ignore[arg-type]
    configure(2)
    for wrong in (Normed, Totalling):
        with pytest.raises(ValueError, match="cannot be divided over replicas"):
            moved(line(GradientAccumulationOptimizerV2(wrong(SGD(1.0)), 1, None, True)), 2)


def test_an_update_step_would_not_be_called() -> None:
    class Stepping(IpuOptimizer):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            variable.assign_sub(learning_rate * gradient)

    with pytest.raises(ValueError, match="a wrapper with an `update_step`"):
        describe(Stepping(SGD(1.0)))


# --- estimators ------------------------------------------------------------------------------------------------------


class Doubles(IpuOptimizer):
    """Doubles gradients, and counts in a variable of its own."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.count = self.add_variable((), name="count")

    def apply_gradients(self, grads_and_vars: Any, global_step: None = None, name: str | None = None) -> Any:
        self.count.assign_add(1.0)
        return super().apply_gradients([(2 * g, v) for g, v in grads_and_vars], global_step, name)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_estimators(tmp_path: Any, replicas: int) -> None:
    own, plain = (
        estimators.estimator(tmp_path / name, replicas, optimizer=estimators.replicated(make)).train(
            estimators.looped(), steps=8
        )
        for name, make in (("own", lambda: Doubles(SGD(0.01))), ("plain", lambda: SGD(0.02)))
    )
    estimators.assert_same_weights(own, plain)
    counts = [value for name, value in estimators.variables(own).items() if name.endswith("count")]
    assert [float(count) for count in counts] == [8.0]
