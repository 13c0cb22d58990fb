"""Gradients that users define, which may read whatever is there when their layer is called."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import replication
import stages
import zoo

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(scope="module", autouse=True)
def _systems() -> None:
    replication.configure_all()


class InALoop(layers.Layer):
    """Each pass has a gradient that reads the loop's variable."""

    def call(self, x: Any) -> Any:
        for scale in (10.0, 1.0):

            @ops.custom_gradient
            def scaled(x: Any) -> Any:
                def gradient(*args: Any, upstream: Any = None) -> Any:
                    return (args[0] if upstream is None else upstream) * scale  # noqa: B023 - that is the point

                return x, gradient

            x = scaled(x)
        return x


class ForwardMode(layers.Layer):
    def call(self, x: Any) -> Any:
        for scale in (10.0, 1.0):
            same = jax.custom_jvp(lambda x: x)
            same.defjvp(lambda p, t: (p[0], t[0] * scale))  # noqa: B023 - that is the point
            x = same(x)
        return x


class Scheduled(layers.Layer):
    """Reads a variable of the layer in its gradient."""

    def build(self, _shape: Any) -> None:
        self.strength = self.add_weight(initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        @ops.custom_gradient
        def reversed_(x: Any) -> Any:
            def gradient(*args: Any, upstream: Any = None) -> Any:
                return -(args[0] if upstream is None else upstream) * self.strength

            return x, gradient

        return reversed_(x)


class Masked(layers.Layer):
    """Reads a value from outside the function in its gradient."""

    def call(self, x: Any) -> Any:
        mask = ops.cast(x[:, :1] > 0, "float32")
        same = jax.custom_vjp(lambda x: x)
        same.defvjp(lambda x: (x, None), lambda _, g: (g * mask,))
        return same(x)


class Passed(layers.Layer):
    """`Masked` as the error advises."""

    def call(self, x: Any) -> Any:
        same = jax.custom_vjp(lambda x, _: x)
        same.defvjp(lambda x, mask: (x, mask), lambda mask, g: (g * mask, None))
        return same(x, ops.cast(x[:, :1] > 0, "float32"))


def model(layer: type[layers.Layer], scope: AbstractContextManager[Any]) -> keras.Model:
    keras.utils.set_random_seed(1)
    with scope:
        made = keras.Sequential([keras.Input((3,)), layers.Dense(4), layer(), layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.005), "mse", steps_per_execution=3)
    return made


def in_stages(layer: type[layers.Layer]) -> keras.Model:
    staged = model(layer, replication.strategy(2).scope())
    stages.assign(staged, [0, 0, 1])
    staged.set_pipelining_options(3, pipeline_schedule="OneFOneB", gradient_accumulation_reduction_method="mean")
    return staged


def trained(made: keras.Model, batch_size: int) -> list[float]:
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    losses: list[float] = made.fit(x, 2 * x[:, :1], batch_size=batch_size, epochs=3, shuffle=False, verbose=0).history[
        "loss"
    ]
    return losses


@pytest.mark.parametrize("layer", [InALoop, ForwardMode, Scheduled, Masked])
def test_a_gradient_sees_what_its_layer_saw(layer: type[layers.Layer]) -> None:
    expected = trained(model(layer, nullcontext()), 4)
    actual = trained(model(layer, replication.strategy(1).scope()), 4)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("layer", [InALoop, ForwardMode, Scheduled, Passed])
def test_and_in_stages(layer: type[layers.Layer]) -> None:
    expected = trained(model(layer, nullcontext()), 12)
    np.testing.assert_allclose(trained(in_stages(layer), 4), expected, rtol=1e-5)


def test_a_value_that_a_gradient_cannot_reach_is_named_as_the_reason() -> None:
    """A stage is traced apart from its gradient, which therefore gets only residuals."""
    with pytest.raises(ValueError, match=r"a gradient of your own .* reads a value from outside its function"):
        trained(in_stages(Masked), 4)
