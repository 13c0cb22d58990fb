"""Small models to cut into stages, and what their stages are."""

from __future__ import annotations

from typing import Any

import openipu as ipu
from openipu.engine.core import options as engine_options
from openipu.engine.pipeline.partition.assignment import stages_of_model

import keras
import numpy as np
from keras import layers, ops

PipelineStage = ipu.keras.PipelineStage


def options(model: Any) -> engine_options.Options:
    return model._ipu_session.options


def stages(model: Any, x: Any = None, training: bool = False) -> list[list[str]]:
    """The names of the layers of each stage, as they are run."""
    found = stages_of_model(model, options(model).stages, x, training, options(model).opening)
    return [[str(node) for node in stage.nodes if node.is_layer] for stage in found]


def dense(name: str) -> Any:
    return layers.Dense(3, name=name, kernel_initializer="ones")


def stack(*names: str) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), *map(dense, names or "abcd")], name="stack")


def two_branches() -> keras.Model:
    inputs = keras.Input((3,), name="inputs")
    left, right = dense("left")(inputs), dense("right")(inputs)
    return keras.Model(inputs, dense("out")(layers.Add(name="sum")([ops.tanh(left), right])), name="branches")


def nested() -> keras.Model:
    inner = keras.Sequential([keras.Input((3,)), dense("first"), dense("second")], name="inner")
    inputs = keras.Input((3,))
    return keras.Model(inputs, inner(dense("between")(inner(inputs))), name="outer")


class Chain(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="chain")
        self.parts = [dense(name) for name in "abc"]

    def call(self, inputs: Any) -> Any:
        x = inputs
        for part in self.parts:
            x = part(x) + 1.0
        return self.parts[0](x)


def built(model: keras.Model) -> keras.Model:
    model(np.ones((2, 3), "float32"))
    return model


def assign(model: Any, numbers: list[int]) -> None:
    given = model.get_pipeline_stage_assignment()
    for one, number in zip(given, numbers, strict=True):
        one.pipeline_stage = number
    model.set_pipeline_stage_assignment(given)


class Marked(keras.Model):
    """Stages in `__init__` and in `call`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with PipelineStage(0):
            self.first, self.second = dense("first"), dense("second")
        self.last = dense("last")

    def call(self, inputs: Any) -> Any:
        x = self.second(self.first(inputs))
        with PipelineStage(1):
            return self.last(self.second(x))


def reloaded(model: Any, tmp_path: Any, **settings: Any) -> Any:
    model.save(tmp_path / "model.keras")
    return keras.models.load_model(tmp_path / "model.keras", **settings)


def accumulating(model: keras.Model, stages: bool) -> None:
    """Accumulate the mean of four micro-batches, in two automatic stages or on one device."""
    if stages:
        model.set_pipeline_stage_assignment("auto", stages=2, print_fn=None)
        model.set_pipelining_options(4, gradient_accumulation_reduction_method="mean")
    else:
        model.set_gradient_accumulation_options(4, "mean")
