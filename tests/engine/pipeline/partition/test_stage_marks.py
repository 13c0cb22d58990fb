"""`PipelineStage`: which layers and calls it puts into a stage, in every kind of model."""

from __future__ import annotations

import threading
from typing import Any

import openipu as ipu
from openipu.engine.pipeline.partition.assignment import is_pipelined, stages_of_model

import keras
import numpy as np
import pytest
from keras import ops

from stages import Chain, Marked, PipelineStage, built, dense, stages
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True)
def scope() -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        yield


def test_layers_made_and_calls_made_in_a_stage() -> None:
    inputs = keras.Input((3,))
    with PipelineStage(0):
        a, b, c = dense("a"), dense("b"), dense("c")
    with PipelineStage(1):
        d = dense("d")
        x = b(a(inputs))
    # `b` was called in stage 1, and so was `a`, although it was made in stage 0. Calls win.
    model = keras.Model(inputs, d(c(x)))
    assert [node.pipeline_stage for node in model.get_pipeline_stage_assignment()] == [1, 1, 0, 1]
    with pytest.raises(ValueError, match=r"'c' in stage 0 uses the output of 'b'.*in stage 1"):
        stages(model)


def test_operations_in_a_stage() -> None:
    inputs = keras.Input((3,))
    with PipelineStage(0):
        x = dense("a")(inputs)
    with PipelineStage(1):
        x = dense("b")(ops.tanh(x))
    found = stages_of_model(keras.Model(inputs, x), None)
    assert [node.operation.name.rstrip("_0123456789") for node in found[1].nodes] == ["tanh", "b"]


def test_the_call_of_a_nested_model_decides_over_what_is_inside() -> None:
    inner_in = keras.Input((3,))
    with PipelineStage(0):
        first = dense("first")(inner_in)
    with PipelineStage(1):
        inner = keras.Model(inner_in, dense("second")(first), name="inner")
    inputs = keras.Input((3,))
    x = inner(inputs)
    with PipelineStage(2):
        model = keras.Model(inputs, inner(x))
    assert stages(model) == [["inner/first"], ["inner/second"], ["inner/first (call 1)", "inner/second (call 1)"]]


def test_layers_made_in_a_stage_in_a_sequential_model() -> None:
    model = keras.Sequential(name="marked")
    for stage, name in enumerate("abc"):
        with PipelineStage(stage):
            model.add(dense(name))
    assert is_pipelined(model, None)
    assert [str(one)[-1] for one in model.get_pipeline_stage_assignment()] == ["0", "1", "2"]
    model.build((None, 3))
    assert stages(model) == [["a"], ["b"], ["c"]]


def test_subclassed_models() -> None:
    model = Marked()
    model(x := np.ones((2, 3), "float32"))
    assert is_pipelined(model, None)
    assert stages(model, x) == [["first", "second"], ["second (call 1)", "last"]]


class MarkedCalls(Chain):
    def call(self, inputs: Any) -> Any:
        with PipelineStage(0):
            x = self.parts[0](inputs)
        with PipelineStage(1):
            return self.parts[2](self.parts[1](x))


def test_what_call_will_do_is_known_before_the_model_is_built() -> None:
    for model, expected in ((MarkedCalls(), True), (Chain(), False)):
        assert is_pipelined(model, None) is expected
        assert is_pipelined(built(model), None) is expected


def test_subclassed_models_are_called_anywhere() -> None:
    model = Marked()
    worker_errors: list[BaseException] = []

    def elsewhere() -> None:
        # A thread in which no scope is active.
        try:
            model(x := np.ones((2, 3), "float32"))
            assert stages(model, x)[1] == ["second (call 1)", "last"]
        except BaseException as error:
            worker_errors.append(error)

    worker = threading.Thread(target=elsewhere)
    worker.start()
    worker.join()
    assert not worker_errors


class MarkedInside(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Marked(), dense("end")

    def call(self, inputs: Any) -> Any:
        x = self.part(inputs)
        with PipelineStage(2):
            return self.last(x)


def test_stages_inside_of_a_nested_subclassed_model() -> None:
    model = MarkedInside()
    model(x := np.ones((2, 3), "float32"))
    assert [len(names) for names in stages(model, x)] == [2, 2, 1]


def test_a_stage_is_of_one_thread() -> None:
    made: list[Any] = []
    with PipelineStage(3):
        worker = threading.Thread(target=lambda: made.append(dense("other")))
        worker.start()
        worker.join()
        made.append(dense("mine"))
    after = dense("after")
    model = keras.Sequential([keras.Input((3,)), *made, after])
    assert [one.pipeline_stage for one in model.get_pipeline_stage_assignment()] == [None, 3, None]


def test_stages_are_not_nested_and_end_after_errors() -> None:
    words = r"PipelineStage\(1\) is inside PipelineStage\(0\).*not be nested"
    with PipelineStage(0), pytest.raises(RuntimeError, match=words):
        PipelineStage(1).__enter__()
    with pytest.raises(KeyError), PipelineStage(0):
        raise KeyError
    with PipelineStage(1):
        pass


@pytest.mark.parametrize("stage", [-1, 1.0, "0", True, None])
def test_what_is_no_stage(stage: Any) -> None:
    with pytest.raises(ValueError, match=r"`stage` is .* Give a whole number of 0 or more"), PipelineStage(stage):
        pass


def test_outside_of_a_strategy() -> None:
    failures: list[BaseException] = []

    def outside() -> None:
        try:
            with PipelineStage(0):
                pass
        except RuntimeError as error:
            failures.append(error)

    worker = threading.Thread(target=outside)
    worker.start()
    worker.join()
    assert "outside of an IPUStrategy" in str(failures[0])
