"""Tracing and compiling (engine/loop/compile.py)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest


class Collector(keras.layers.Layer):
    """Notes whether Python's garbage collector is on when the layer is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.on: list[bool] = []

    def call(self, inputs: Any) -> Any:
        self.on.append(gc.isenabled())
        return inputs


class Refusing(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, keras.KerasTensor):
            return inputs
        raise RuntimeError("refused")


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    gc.enable()


def fit(layer: keras.layers.Layer) -> None:
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_collected_while_a_program_is_traced(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    layer = Collector()
    fit(layer)
    assert not layer.on[-1]
    assert gc.isenabled() is on


@pytest.mark.usefixtures("_restored")
def test_after_an_error_in_a_layer_the_collector_is_on_again() -> None:
    with pytest.raises(RuntimeError, match="refused"):
        fit(Refusing())
    assert gc.isenabled()
