"""State that stages on several devices use, and values between stages that are no real numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers, ops

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS
X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = X[:, :3] ** 2


def trained(make: Callable[[], keras.Model], stages: list[int] | None, optimizer: str, **options: Any) -> keras.Model:
    """A model after two updates of four micro-batches in each of two epochs."""
    replication.configure(1 if stages is None or "device_mapping" in options else max(stages) + 1)
    keras.utils.set_random_seed(5)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make()
    if stages is None:
        model.set_gradient_accumulation_options(4, "mean")
    else:
        assignment = model.get_pipeline_stage_assignment()
        for part, stage in zip(assignment, stages, strict=True):
            part.pipeline_stage = stage
        model.set_pipeline_stage_assignment(assignment)
        model.set_pipelining_options(4, gradient_accumulation_reduction_method="mean", **options)
    model.compile(optimizer, "mse", steps_per_execution=8)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    return model


def assert_equal(make: Callable[[], keras.Model], stages: list[int], optimizer: str = "sgd", **options: Any) -> None:
    """In stages, the model learns what it learns on one device."""
    expected = trained(make, None, optimizer)
    replication.assert_close(trained(make, stages, optimizer, **options).get_weights(), expected.get_weights())


class Warming(layers.Layer):
    """Counts its calls, and lets more through the more there were."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.counts_in = dtype

    def build(self, input_shape: Any) -> None:
        del input_shape
        self.calls = self.add_weight(shape=(), dtype=self.counts_in, initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
        return x * (1 - 0.5 ** (1 + 0.1 * ops.cast(self.calls, "float32")))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", ["int32", "float32", "SpectralNormalization"])
def test_state_that_two_devices_would_change_apart(kind: str, frozen: bool) -> None:
    """Whether it is a whole number, and whether its layer is frozen, makes no difference."""

    def twice() -> keras.Model:
        shared = layers.SpectralNormalization(layers.Dense(6)) if kind == "SpectralNormalization" else Warming(kind)
        x = shared(layers.Dense(6)(inputs := keras.Input((6,))))
        x = shared(layers.Dense(6)(x))
        shared.trainable = not frozen
        return keras.Model(inputs, layers.Dense(3)(x))

    with pytest.raises(ValueError, match=r"Stage [01] changes .*a stage on another device uses, too.*device_mapping"):
        trained(twice, [0, 0, 1, 1, 1], "sgd")
    assert_equal(twice, [0, 0, 1, 1, 1], device_mapping=[0, 0], pipeline_schedule="Sequential")


def test_an_operation_that_reads_moving_statistics_of_another_device() -> None:
    def reads() -> keras.Model:
        norm = layers.BatchNormalization()
        x = layers.Identity()(layers.Dense(6)(norm(inputs := keras.Input((6,)))))
        return keras.Model(inputs, layers.Dense(3)(ops.subtract(x, norm.moving_mean)))

    with pytest.raises(ValueError, match=r"Stage 0 changes .*moving_mean.*a stage on another device uses, too"):
        trained(reads, [0, 0, 1, 1], "sgd")


def test_frozen_statistics_may_be_on_two_devices() -> None:
    def frozen() -> keras.Model:
        norm = layers.BatchNormalization()
        x = norm(layers.Dense(6)(norm(inputs := keras.Input((6,)))))
        norm.trainable = False
        return keras.Model(inputs, layers.Dense(3)(x))

    assert_equal(frozen, [0, 0, 1, 1])


def test_complex_numbers_between_stages() -> None:
    def turned() -> keras.Model:
        x = layers.Dense(6)(inputs := keras.Input((6,)))
        x = ops.view_as_complex(ops.reshape(x, (-1, 3, 2)))
        x = layers.Identity(autocast=False)(x)
        return keras.Model(inputs, layers.Dense(3)(ops.real(x * x) + ops.imag(x)))

    assert_equal(turned, [0, 1, 1])


def test_names_of_layers_that_look_like_those_of_the_engine() -> None:
    def named() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), *(layers.Dense(3, name=f"x_slice{i}of4") for i in (3, 2, 1, 0))])

    assert_equal(named, [0, 0, 1, 1], optimizer="adam")
