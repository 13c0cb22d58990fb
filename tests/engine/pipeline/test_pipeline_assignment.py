"""Which layers are in which stage: all ways to say it, reading it back, saving it, and the rules."""

from __future__ import annotations

import itertools
import json
import pathlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openipu as ipu
from openipu import _validate
from openipu.engine.core import options as engine_options
from openipu.engine.core.accumulation import Accumulation, Reduction
from openipu.engine.core.pipelining import Pipelining
from openipu.engine.core.updates import Updates
from openipu.engine.pipeline.build import rules
from openipu.engine.pipeline.partition import balance
from openipu.engine.pipeline.partition.assignment import is_pipelined, stages_of_model
from openipu.engine.schedule.schedules import GPipe, Grouped, Interleaved, OneFOneB, Sequential

import keras
import numpy as np
import pytest
from keras import layers, ops

from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS
PipelineStage = ipu.keras.PipelineStage
PipelineSchedule = ipu.ops.pipelining_ops.PipelineSchedule
RecomputationMode = ipu.ops.pipelining_ops.RecomputationMode


@pytest.fixture(autouse=True)
def scope() -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        yield


def options(model: Any) -> engine_options.Options:
    return model._ipu_session.options


def stages(model: Any, x: Any = None, training: bool = False) -> list[list[str]]:
    """The names of the layers of each stage, as they are run."""
    found = stages_of_model(model, options(model).stages, x, training)
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


# --- PipelineStage ---------------------------------------------------------------------------------------------------


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


# --- get and set -----------------------------------------------------------------------------------------------------


def test_sequential_objects_and_whole_numbers() -> None:
    model = stack()
    given = [0, 0, 1, 1]
    model.set_pipeline_stage_assignment(given)
    assert given == [0, 0, 1, 1]
    found = model.get_pipeline_stage_assignment()
    assert all(type(one) is ipu.keras.SequentialLayerPipelineStageAssignment for one in found)
    assert [one.layer.name for one in found] == list("abcd")
    assert str(found[2]) == "Layer: c is assigned to pipeline stage: 1"
    found[1].pipeline_stage = 1
    model.set_pipeline_stage_assignment(found)
    assert stages(model) == [["a"], ["b", "c", "d"]]


def test_functional_objects() -> None:
    model = two_branches()
    found = model.get_pipeline_stage_assignment()
    assert all(type(one) is ipu.keras.FunctionalLayerPipelineStageAssignment for one in found)
    assert {one.layer.name: [la.name for la in one.inbound_layers] for one in found} == {
        "left": [], "right": [], "sum": ["left", "right"], "out": ["sum"],
    }  # fmt: skip
    assert [one.pipeline_stage for one in found] == [None] * 4
    assert str(found[0]) == "Layer: left (node index 0) is assigned to pipeline stage: None"
    assert not is_pipelined(model, options(model).stages)
    assign(model, [0, 1, 1, 2])
    assert is_pipelined(model, options(model).stages)
    assert stages(model) == [["left"], ["right", "sum"], ["out"]]


def test_subclassed_objects() -> None:
    model = built(Chain())
    found = model.get_pipeline_stage_assignment()
    assert all(type(one) is ipu.keras.ModelLayerPipelineStageAssignment for one in found)
    assert [(one.layer.name, one.node_index) for one in found] == [("a", 0), ("b", 0), ("c", 0), ("a", 1)]
    assert [la.name for la in found[3].inbound_layers] == ["c"]
    assign(model, [0, 0, 1, 2])
    x = np.ones((2, 3), "float32")
    assert stages(model, x) == stages(model, x, training=True) == [["a", "b"], ["c"], ["a (call 1)"]]


def test_nested_objects() -> None:
    model = nested()
    first, between, second = model.get_pipeline_stage_assignment()
    assert type(first) is ipu.keras.FunctionalNestedModelPipelineStageAssignment
    assert (first.is_nested_model, between.is_nested_model) == (True, False)
    assert (first.nested_model, first.node_index, second.node_index) == (model.get_layer("inner"), 0, 1)
    inside = first.pipeline_stage_assignments
    assert [type(one) for one in inside] == [ipu.keras.SequentialLayerPipelineStageAssignment] * 2
    inside.clear()
    for number, one in enumerate([*first.pipeline_stage_assignments, between, *second.pipeline_stage_assignments]):
        one.pipeline_stage = number
    model.set_pipeline_stage_assignment([first, between, second])
    assert stages(model) == [
        ["inner/first"], ["inner/second"], ["between"], ["inner/first (call 1)"], ["inner/second (call 1)"],
    ]  # fmt: skip
    assert str(second).splitlines()[1] == "  Layer: first is assigned to pipeline stage: 3"


def test_nested_models_in_sequential_models() -> None:
    def make() -> keras.Model:
        unbuilt = keras.Sequential([dense("u"), dense("v")], name="unbuilt")
        return keras.Sequential([dense("a"), unbuilt, nested(), dense("z")])

    model = make()
    before = model.get_pipeline_stage_assignment()
    assert type(before[1]) is ipu.keras.SequentialNestedModelPipelineStageAssignment
    model.set_pipeline_stage_assignment([0, 0, 1, 2])
    model.build((None, 3))
    assert [len(names) for names in stages(model)] == [3, 5, 1]
    assert str(model.get_pipeline_stage_assignment()[2]).count("stage: 1") == 5


def test_assignments_of_a_nested_model_are_defaults() -> None:
    inner = stack("a", "b")
    inner.set_pipeline_stage_assignment([0, 1])
    model = keras.Sequential([keras.Input((3,)), inner, dense("c")])
    assert not is_pipelined(model, options(model).stages)
    first, last = model.get_pipeline_stage_assignment()
    assert [one.pipeline_stage for one in first.pipeline_stage_assignments] == [0, 1]
    last.pipeline_stage = 2
    model.set_pipeline_stage_assignment([first, last])
    assert stages(model) == [["stack/a"], ["stack/b"], ["c"]]


def test_reset() -> None:
    model = stack()
    model.set_pipeline_stage_assignment([0, 0, 1, 1])
    model.reset_pipeline_stage_assignment()
    assert not is_pipelined(model, options(model).stages)
    inputs = keras.Input((3,))
    with PipelineStage(0):
        model = keras.Model(inputs, dense("a")(inputs))
    assert is_pipelined(model, options(model).stages)
    model.reset_pipeline_stage_assignment()
    assert not is_pipelined(model, options(model).stages)
    assert model.get_pipeline_stage_assignment()[0].pipeline_stage is None


def test_the_model_has_changed() -> None:
    model = stack()
    model.set_pipeline_stage_assignment([0, 0, 1, 1])
    model.add(dense("e"))
    with pytest.raises(RuntimeError, match=r"no longer valid.*4 layer calls a, b, c, d, but it has 5"):
        stages(model)
    model.pop()
    assert stages(model) == [["a", "b"], ["c", "d"]]
    model.pop()
    model.add(dense("f"))
    with pytest.raises(RuntimeError, match="no longer valid"):
        model.get_pipeline_stage_assignment()


def functional_of(*numbers: int | None) -> list[Any]:
    kind = ipu.keras.FunctionalLayerPipelineStageAssignment
    return [kind(dense(f"x{i}"), 0, number) for i, number in enumerate(numbers)]


WRONG: list[tuple[Callable[[], Any], Callable[[Any], Any], str]] = [
    (stack, lambda _: (0, 0, 1, 1), "must be a list"),
    (stack, lambda _: [0, 1], "length .* is 2, which does not match the 4 layer calls"),
    (stack, lambda _: [1, 1, 1, 2], "'a' .* is in stage 1, but it is the first layer"),
    (stack, lambda _: [0, 0, 2, 2], "'c' .* is in stage 2, but the layer before it is in stage 0"),
    (stack, lambda _: [0, 1, 0, 1], "'c' .* is in stage 0, but the layer before it is in stage 1"),
    (stack, lambda _: [0, 0, 1, "1"], "must be an instance of `SequentialLayerPipelineStageAssignment`, or a whole"),
    (stack, lambda _: [0, -1, 1, 1], r"`pipeline_stage_assignment\[1\]` is -1"),
    (stack, lambda found: found[::-1], "'d' is where 'a' should be"),
    (stack, lambda found: found, "'a' .* has not been assigned"),
    (two_branches, lambda _: [0, 0, 1, 1], "must be an instance of `FunctionalLayerPipelineStageAssignment`, not 0"),
    (two_branches, lambda _: functional_of(0, 0, 1, 1), "'x0' is where"),
    (nested, lambda found: [found[1], found[0], found[2]], "must be an instance of `FunctionalNestedModel"),
    (nested, lambda found: [found[2], found[1], found[0]], r"'inner \(call 1\)' is where 'inner'"),
]


@pytest.mark.parametrize(("make", "change", "words"), WRONG)
def test_wrong_assignments(make: Callable[[], Any], change: Callable[[Any], Any], words: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=words):
        model.set_pipeline_stage_assignment(change(model.get_pipeline_stage_assignment()))
    assert options(model).stages is None


def test_an_earlier_stage_cannot_use_a_later_one() -> None:
    for make, numbers in ((two_branches, [0, 2, 1, 2]), (lambda: built(Chain()), [0, 1, 1, 0])):
        with pytest.raises(ValueError, match="computed later, in stage"):
            assign(make(), numbers)


def test_gaps_are_found_when_the_model_is_cut() -> None:
    model = two_branches()
    assign(model, [0, 0, 2, 2])
    with pytest.raises(RuntimeError, match="nothing in stage 1"):
        stages(model)


def test_subclassed_models_have_to_be_built() -> None:
    model = Chain()
    for method in (model.get_pipeline_stage_assignment, model.print_pipeline_stage_assignment_summary):
        with pytest.raises(RuntimeError, match="before it is built"):
            method()


def test_stages_of_objects_are_checked() -> None:
    one = stack().get_pipeline_stage_assignment()[0]
    with pytest.raises(ValueError, match="`pipeline_stage` is -1"):
        one.pipeline_stage = -1
    one.pipeline_stage = None


# --- printing --------------------------------------------------------------------------------------------------------


def printed(model: Any, **settings: Any) -> list[str]:
    lines: list[str] = []
    model.print_pipeline_stage_assignment_summary(print_fn=lines.append, **settings)
    return lines


def test_summary_of_a_sequential_model() -> None:
    model = stack("a", "a_layer_with_a_name_that_is_too_long")
    model.set_pipeline_stage_assignment([0, 1])
    assert printed(model) == [
        'Model: "stack"',
        "_" * 60,
        "Layer (type)                  Pipeline Stage",
        "=" * 60,
        "a (Dense)                     0",
        "_" * 60,
        "a_layer_with_a_name_that_is_t 1",
        "oo_long (Dense)",
        "=" * 60,
    ]


def test_summary_of_a_functional_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = two_branches()
    model.print_pipeline_stage_assignment_summary(line_length=60)
    lines = capsys.readouterr().out.splitlines()
    assert {len(line) for line in lines if set(line) <= {"_", "="}} == {60}
    assert "Layer (type) (node      Input Layers            Pipeline" in lines
    assert any(line.split() == ["sum", "(Add)", "(0)", "left,", "right", "None"] for line in lines)
    assert len(printed(nested())[1]) == 89
    assert any("inner/first (Dense) (1)" in line for line in printed(nested()))


# --- saving ----------------------------------------------------------------------------------------------------------


def reloaded(model: Any, tmp_path: Any, **settings: Any) -> Any:
    model.save(tmp_path / "model.keras")
    return keras.models.load_model(tmp_path / "model.keras", **settings)


@pytest.mark.parametrize("make", [stack, two_branches, nested])
def test_stages_are_saved(make: Callable[[], Any], tmp_path: Any) -> None:
    model = make()
    model.set_pipeline_stage_assignment("auto", stages=2, print_fn=None)
    loaded = reloaded(model, tmp_path)
    assert stages(loaded) == stages(model)
    assert options(loaded) == options(model)


def test_marks_are_saved(tmp_path: Any) -> None:
    inputs = keras.Input((3,))
    with PipelineStage(0):
        x = dense("a")(inputs)
    with PipelineStage(1):
        model = keras.Model(inputs, dense("b")(ops.relu(x)))
    loaded = reloaded(model, tmp_path)
    assert stages(loaded) == [["a"], ["b"]]
    model.reset_pipeline_stage_assignment()
    loaded = reloaded(model, tmp_path)
    assert not is_pipelined(loaded, options(loaded).stages)


def test_subclassed_models_are_saved(tmp_path: Any) -> None:
    x = np.ones((2, 3), "float32")
    loaded = reloaded(built(Marked()), tmp_path, custom_objects={"Marked": Marked})
    assert stages(loaded, x) == [["first", "second"], ["second (call 1)", "last"]]


def test_plain_keras_opens_it(tmp_path: Any) -> None:
    model = stack()
    model.set_pipeline_stage_assignment([0, 0, 1, 1])
    model.save(tmp_path / "model.keras")
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(keras.models.load_model(tmp_path / "model.keras")))
    worker.start()
    worker.join()
    assert not hasattr(found[0], "set_pipelining_options")
    np.testing.assert_array_equal(found[0].predict(np.ones((2, 3)), verbose=0), 81.0)


@dataclass(frozen=True)
class Bursts:
    """A schedule as a user writes one."""

    size: int = 2

    def table(self, *args: Any, **kwargs: Any) -> Any:
        return GPipe().table(*args, **kwargs)


def test_options_are_saved(tmp_path: Any) -> None:
    model = stack()
    model.set_pipelining_options(
        8, [0, 1], True, "mean", pipeline_schedule=Bursts(3), gradient_accumulation_dtype="float16",
        recomputation_mode=RecomputationMode.RecomputeThenBackpropagate, replicated_optimizer_state_sharding=True,
        offload_weight_update_variables=True,
    )  # fmt: skip
    assert options(reloaded(model, tmp_path)) == options(model)
    kept = json.loads(options(model).to_json())["pipelining"]
    assert kept["schedule"] == {"class": f"{__name__}:Bursts", "fields": {"size": 3}}


def test_schedules_that_cannot_be_saved_or_found(tmp_path: Any) -> None:
    @dataclass(frozen=True)
    class Local(Bursts):
        pass

    model = stack()
    model.set_pipelining_options(pipeline_schedule=Local())
    with pytest.raises(ValueError, match=r"cannot be saved.*Make it one"):
        model.save(tmp_path / "model.keras")
    text = engine_options.Options(pipelining=Pipelining(Bursts())).to_json()
    with pytest.raises(ValueError, match=r"nowhere:Bursts, which cannot be found"):
        engine_options.Options.from_json(text.replace(__name__, "nowhere"))


def test_options_of_older_files_are_read() -> None:
    known = engine_options.Options(Updates(shard_optimizer=True))
    old = json.loads(known.to_json())
    del old["stages"], old["pipelining"]
    assert engine_options.Options.from_json(json.dumps(old)) == known


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_become_one_value() -> None:
    model = stack()
    assert options(model).pipelining is None
    model.set_pipelining_options(8, pipeline_schedule=PipelineSchedule.Interleaved)
    assert options(model).pipelining == Pipelining(Interleaved(), updates=Updates(Accumulation(8)))
    # What is not given stays as it was.
    model.set_pipelining_options(device_mapping=[0, 0], gradient_accumulation_reduction_method="MEAN")
    assert options(model).pipelining == Pipelining(
        Interleaved(), (0, 0), updates=Updates(Accumulation(8, Reduction.MEAN))
    )


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        (PipelineSchedule.Grouped, Grouped()),
        (PipelineSchedule.Interleaved, Interleaved()),
        (PipelineSchedule.Sequential, Sequential()),
        (PipelineSchedule.GPipe, GPipe()),
        (PipelineSchedule.OneFOneB, OneFOneB()),
        ("grouped", Grouped()),
        ("1F1B", OneFOneB()),
        (Bursts(4), Bursts(4)),
    ],
)
def test_schedules(given: Any, schedule: Any) -> None:
    model = stack()
    model.set_pipelining_options(pipeline_schedule=given)
    assert options(model).pipelining == Pipelining(schedule)


def test_each_setter_has_its_own_accumulation(tmp_path: pathlib.Path) -> None:
    """That of stages counts while the model is pipelined, the other one while it is not."""
    model = stack()
    model.set_pipelining_options(8, gradient_accumulation_reduction_method="mean")
    model.set_gradient_accumulation_options(2, replicated_optimizer_state_sharding=True)
    model.set_pipeline_stage_assignment([0, 0, 1, 1])

    def found(model: keras.Model) -> tuple[Any, ...]:
        updates = model._ipu_session.effective_options.updates
        return updates.steps, updates.accumulation.method.name, updates.shard_optimizer

    model.save(tmp_path / "model.keras")
    for same in (model, keras.models.load_model(tmp_path / "model.keras")):
        assert found(same) == (8, "MEAN", False)
        same.reset_pipeline_stage_assignment()
        assert found(same) == (2, "SUM", True)


POPLAR = ipu.ops.pipelining_ops.PipelineStageOptions()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"gradient_accumulation_steps_per_replica": 0}, ValueError, "is 0. Give a whole number of 1 or more"),
        ({"gradient_accumulation_steps_per_replica": 2.0}, ValueError, "is 2.0. Give a whole number"),
        ({"device_mapping": 1}, ValueError, "list with the device of each stage"),
        ({"device_mapping": [0, 1.0]}, ValueError, r"`device_mapping\[1\]` is 1.0. Give a whole number"),
        ({"device_mapping": [0, -1]}, ValueError, r"`device_mapping\[1\]` is -1"),
        ({"accumulate_outfeed": "yes"}, ValueError, "True or False"),
        ({"gradient_accumulation_reduction_method": "max"}, ValueError, "SUM, MEAN, RUNNING_MEAN"),
        ({"gradient_accumulation_dtype": "float17"}, ValueError, "float17"),
        ({"pipeline_schedule": 7}, TypeError, "7, which is not a schedule"),
        ({"pipeline_schedule": Bursts}, TypeError, r"Make an instance: Bursts\(\)"),
        ({"pipeline_schedule": "Groupd"}, ValueError, "Did you mean 'Grouped'"),
        ({"recomputation_mode": "Auto"}, TypeError, "RecomputationMode"),
        ({"gradient_accumulation_dtype": "int32"}, ValueError, "`gradient_accumulation_dtype` is 'int32'"),
        ({"gradient_accumulation_dtype": "float64"}, ValueError, "float16, bfloat16 or float32"),
        ({"replicated_optimizer_state_sharding": 1}, ValueError, "True or False"),
        (
            {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": False},
            ValueError,
            "Leave `offload_weight_update_variables` out",
        ),
        ({"offload_weight_update_variables": 1}, ValueError, "True or False"),
        ({"offload_activations": 1}, ValueError, "True or False"),
        ({"continuous_weight_updates": True}, NotImplementedError, "continuous_weight_updates"),
        ({"gradient_accumulation_count": 4}, ValueError, "`gradient_accumulation_steps_per_replica` here"),
        ({"experimental_normalize_gradients": True}, ValueError, "reduction_method"),
        ({"infeed_queue": None}, ValueError, "set by the model itself"),
        ({"outfeed_mask": [True]}, ValueError, "cannot be used with Keras"),
        ({"forward_propagation_stages_poplar_options": POPLAR}, TypeError, "is a PipelineStageOptions. Give a list"),
        (
            {"backward_propagation_stages_poplar_options": [{}]},
            TypeError,
            r"options\[0\]` is a dict. Give a `PipelineStageOptions`",
        ),
        ({"weight_update_poplar_options": [POPLAR]}, TypeError, "is a list. Give a `PipelineStageOptions`"),
        ({"schedule": "Grouped"}, ValueError, "no pipelining option 'schedule'"),
        (
            {"pipeline_schedule": "Sequential", "recomputation_mode": RecomputationMode.RecomputeThenBackpropagate},
            NotImplementedError,
            "Sequential does not work with",
        ),
        (
            {
                "pipeline_schedule": "Interleaved",
                "recomputation_mode": RecomputationMode.RecomputeAndBackpropagateInterleaved,
            },
            NotImplementedError,
            "Interleaved does not work with",
        ),
    ],
)
def test_wrong_options(given: dict[str, Any], error: type[Exception], words: str) -> None:
    model = stack()
    with pytest.raises(error, match=words):
        model.set_pipelining_options(**given)
    assert options(model) == engine_options.Options()


def test_what_means_nothing_here_is_named_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(_validate, "_named", set())
    asked = {"offload_weights": True, "offload_activations": False, "weight_update_poplar_options": POPLAR}
    model = stack()
    for _ in range(2):
        model.set_pipelining_options(**asked, name="pipeline")
    assert [record.message for record in caplog.records] == [
        "No effect here: offload_weights (weights stay in device memory); "
        "weight_update_poplar_options (XLA has no such options)."
    ]


def test_a_dtype_for_each_variable() -> None:
    model = stack()

    def found() -> Accumulation:
        updates = options(model).pipelining.updates
        return rules.one_dtype(updates.of_weights(model.trainable_variables)).accumulation

    model.set_pipelining_options(gradient_accumulation_dtype=lambda _: "bfloat16")
    assert found().dtype == "bfloat16"
    model.set_pipelining_options(gradient_accumulation_dtype=lambda v: "float16" if len(v.shape) == 1 else None)
    with pytest.raises(ValueError, match=r"float16, float32.*in one dtype"):
        found()
    model.set_pipelining_options(gradient_accumulation_dtype=np.float32)
    assert found().dtype == "float32"


# --- rules of a plan -------------------------------------------------------------------------------------------------


def test_micro_batches_have_to_fit_the_schedule() -> None:
    def check(schedule: Any, steps: int, stages: int, devices: tuple[int, ...] | None = None) -> None:
        pipelining = Pipelining(schedule, devices, updates=Updates(Accumulation(steps))).for_stages(stages, True)
        rules.check_accumulation_is_set(pipelining)
        rules.check_micro_batches(pipelining, "`steps`")

    for schedule, steps in ((Grouped(), 8), (Interleaved(), 6), (Sequential(), 1), (GPipe(), 3), (OneFOneB(), 1)):
        check(schedule, steps, 2)
    with pytest.raises(ValueError, match=r"has not been set \(it is 1\).*multiple of 4"):
        check(Grouped(), 1, 2)
    with pytest.raises(ValueError, match=r"not a multiple of 6.*Use 6 or 12 \(`steps`\)"):
        check(Grouped(), 8, 3)
    with pytest.raises(NotImplementedError, match="Interleaved can only train"):
        check(Interleaved(), 6, 3, (0, 1, 0))


def test_devices_of_stages() -> None:
    def placed(mapping: tuple[int, ...] | None, stages: int) -> Pipelining:
        found = Pipelining(device_mapping=mapping).for_stages(stages, True)
        rules.check_all_devices_used(found)
        return found

    assert (placed(None, 3).devices, placed(None, 3).device_count) == ((0, 1, 2), 3)
    assert (placed((0, 1, 0), 3).devices, placed((0, 1, 0), 3).device_count) == ((0, 1, 0), 2)
    with pytest.raises(ValueError, match="2 devices are given for 3 stages"):
        placed((0, 1), 3)
    with pytest.raises(ValueError, match="leaves out device 1"):
        placed((0, 2), 2)


@pytest.mark.parametrize("name", ["train_step", "test_step", "predict_step", "make_train_function"])
def test_steps_of_the_users_own_are_refused(name: str) -> None:
    own = type("Own", (keras.Model,), {name: lambda *_: None, "__module__": __name__})
    inputs = keras.Input((3,))
    rules.check_model(stack())
    with pytest.raises(RuntimeError, match=f"has a `{name}` of its own"):
        rules.check_model(own(inputs, dense("a")(inputs)))


# --- automatic -------------------------------------------------------------------------------------------------------


def auto(model: Any, count: int, **settings: Any) -> list[int]:
    model.set_pipeline_stage_assignment("auto", stages=count, print_fn=None, **settings)
    return [stage for _, stage in options(model).stages or ()]


def test_equal_layers_are_shared_out_equally() -> None:
    model = keras.Sequential([keras.Input((64,)), *(layers.Dense(64) for _ in range(8))])
    assert auto(model, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert auto(model, 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert auto(model, 8) == list(range(8))


class Heavy(layers.Layer):
    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, inputs: Any) -> Any:
        for _ in range(40):
            inputs = ops.tanh(ops.matmul(inputs, self.kernel))
        return inputs


def test_a_heavy_layer_has_a_stage_to_itself() -> None:
    model = keras.Sequential([keras.Input((64,)), *(layers.Dense(64) for _ in range(4)), Heavy(), layers.Dense(64)])
    assert auto(model, 3) == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, stages = 9, int(rng.integers(2, 5))
    costs, traffic = rng.exponential(size=size), np.array([0, *rng.exponential(size=size - 1), 0])

    def worth(begins: Any) -> tuple[float, float]:
        largest = max(part.sum() for part in np.split(costs, begins))
        return round(largest + max(traffic[list(begins)]), 9), sum(traffic[list(begins)])

    best = min(worth(begins) for begins in itertools.combinations(range(1, size), stages - 1))
    assert worth(balance.cuts(costs, traffic, stages)) == pytest.approx(best)


def test_cuts_avoid_large_boundaries() -> None:
    x = inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(32, 3, padding="same", name="a")(x)
    x = layers.MaxPooling2D(4, name="b")(x)
    x = layers.Conv2D(32, 3, padding="same", name="c")(x)
    x = layers.Conv2D(32, 3, padding="same", name="d")(x)
    assert auto(keras.Model(inputs, x), 2) == [0, 0, 1, 1]


def test_turns_of_a_loop_are_counted() -> None:
    model = keras.Sequential([
        keras.Input((50, 8)), layers.LSTM(32, name="loop"), *(layers.Dense(32) for _ in range(4)),
    ])  # fmt: skip
    assert auto(model, 2) == [0, 1, 1, 1, 1]


class Decoder(keras.Model):
    """A small language model with tied embeddings, of which the last product costs the most."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = layers.Embedding(2000, 32), [layers.Dense(32, "relu") for _ in range(6)]

    def call(self, inputs: Any) -> Any:
        x = self.embed(inputs)
        for block in self.blocks:
            x = x + block(x)
        return ops.matmul(x, ops.transpose(self.embed.embeddings))


def test_tied_embeddings() -> None:
    model = Decoder()
    model(x := np.ones((4, 10), "int32"))
    found = auto(model, 2, inputs=x)
    # The product with the embedding's weights goes with the last layer, and outweighs all others.
    assert found == sorted(found)
    assert found.count(1) <= 2
    first, last = stages_of_model(model, options(model).stages, x)
    assert [v.name for v in last.borrows] == ["embeddings"]
    assert all(tensor.shape == (4, 10, 32) for tensor in first.sends)


def test_the_balance_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = stack()
    model.set_pipeline_stage_assignment("auto", stages=2)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("2 stages, balance ")
    assert rest[0].endswith("2 layers (a ... b), sends 384 bytes")
    assert rest[1].endswith("2 layers (c ... d)")


def test_what_auto_needs() -> None:
    for count in (None, 1, True):
        with pytest.raises(ValueError, match=r"`stages` is .* Give a whole number of 2 or more"):
            stack().set_pipeline_stage_assignment("auto", stages=count)
    with pytest.raises(ValueError, match=r"4 layer calls.*at most 4"):
        auto(stack(), 5)
    with pytest.raises(RuntimeError, match="has not been built"):
        auto(keras.Sequential([dense("a"), dense("b")]), 2)
    model = keras.Sequential([keras.Input((None, 3)), dense("a"), dense("b")])
    with pytest.raises(ValueError, match="Give `inputs`"):
        auto(model, 2)
    assert auto(model, 2, inputs=np.ones((2, 7, 3), "float32")) == [0, 1]
    with pytest.raises(ValueError, match='Give `stages` only with "auto"'):
        stack().set_pipeline_stage_assignment([0, 0, 1, 1], stages=2)


# --- pipelining_ops --------------------------------------------------------------------------------------------------


def test_recomputation_checkpoint(tmp_path: Any) -> None:
    import jax

    checkpoint = ipu.ops.pipelining_ops.recomputation_checkpoint
    text = str(jax.make_jaxpr(lambda x: checkpoint({"a": x, "b": [x]})["b"])(1.0))
    assert "name=recomputation_checkpoint" in text
    inputs = keras.Input((3,))
    model = keras.Model(inputs, dense("b")(checkpoint(dense("a")(inputs))))
    np.testing.assert_array_equal(reloaded(model, tmp_path).predict(np.ones((2, 3)), verbose=0), 9.0)
    assign(model, [0, 1])
    assert len(stages(model)) == 2


@pytest.mark.parametrize("name", ["convolution_options", "matmul_options", "slice_options"])
def test_stage_options(name: str) -> None:
    made = ipu.ops.pipelining_ops.PipelineStageOptions(**{name: {"a": 1}})
    assert getattr(made, name) == {"a": 1}
    with pytest.raises(TypeError, match=name):
        ipu.ops.pipelining_ops.PipelineStageOptions(**{name: [1]})


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"opt": "sgd"}, TypeError, "`opt` is 'sgd'"),
        ({"loss": 1.0}, TypeError, "`loss` is 1.0"),
        ({"compute_gradients_args": [1]}, TypeError, "`compute_gradients_args` is"),
        ({"apply_gradients_kwargs": [1]}, TypeError, "`apply_gradients_kwargs` is"),
        ({"compute_gradients_args": (1,)}, ValueError, "`variables` says what to train"),
        ({"compute_gradients_kwargs": {"a": 1}}, ValueError, "`variables` says what to train"),
        ({"variables": [], "tape": 1}, ValueError, "`variables` and `tape`"),
        ({"tape": 1, "gradient_capture_context": 1}, ValueError, "`tape` and `gradient_capture_context`"),
        ({"captured_gradient_outfeed": 1}, ValueError, "`captured_gradient_outfeed` needs"),
    ],
)
def test_output_of_an_optimizer_function(given: dict[str, Any], error: type[Exception], words: str) -> None:
    right = {"opt": keras.optimizers.SGD(), "loss": ops.ones(())}
    made = ipu.ops.pipelining_ops.OptimizerFunctionOutput(**right)
    assert (made.opt, made.loss, made.variables) == (right["opt"], right["loss"], None)
    with pytest.raises(error, match=words):
        ipu.ops.pipelining_ops.OptimizerFunctionOutput(**right | given)
