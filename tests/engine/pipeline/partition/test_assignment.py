"""Reading, setting, resetting and printing which layers are in which stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu.engine.pipeline.partition.assignment import is_pipelined

import keras
import numpy as np
import pytest

from stages import Chain, PipelineStage, assign, built, dense, nested, options, stack, stages, two_branches
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True)
def scope() -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        yield


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


def test_a_model_without_layers_has_no_stages() -> None:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, inputs)
    model.set_pipeline_stage_assignment([])
    assert not is_pipelined(model, options(model).stages)


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
    (stack, lambda _: (0, 0, 1, 1), r"is \(0, 0, 1, 1\)\. Give the list that"),
    (stack, lambda _: "Auto", """is 'Auto'. Give the list .* or "auto" with the number"""),
    (stack, lambda _: 2, "is 2. Give the list that"),
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


def test_the_summary_names_unnamed_inputs_as_keras_does() -> None:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, dense("a")(inputs))
    assert any(line.split()[-2] == model.layers[0].name for line in printed(model) if line.startswith("a "))
    assert model.layers[0].name.startswith("input_layer")


def test_the_loop_of_the_page_sets_nested_models_too(repository: Path) -> None:
    page = (repository / "docs" / "pipelining.md").read_text(encoding="utf-8")
    code = next(part for part in page.split("```python\n")[1:] if part.startswith("def layer_calls"))
    inner = keras.Sequential([keras.Input((3,)), dense("encoder_a"), dense("b")], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner, dense("c")])
    exec(code.split("```")[0], {"model": model})
    assert stages(model) == [["inner/encoder_a"], ["inner/b", "c"]]
