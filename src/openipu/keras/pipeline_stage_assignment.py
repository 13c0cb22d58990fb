"""The objects through which you read and set the stages of a model: one per layer call, nested like the models.

for one in (stages := model.get_pipeline_stage_assignment()):
    one.pipeline_stage = 0 if one.layer.name.startswith("encoder") else 1
model.set_pipeline_stage_assignment(stages)

docs/pipelining.md has the loop for models inside models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

from openipu import _validate as validate
from openipu.engine.pipeline.partition.nodes import Graph, Node
from openipu.engine.pipeline.partition.recorded_calls import has_graph

import keras


class _Layer:
    """One call of a layer, and its stage."""

    def __init__(self, layer: keras.Layer, pipeline_stage: int | None) -> None:
        self._layer = layer
        self.pipeline_stage = pipeline_stage

    @property
    def layer(self) -> Any:
        """The layer."""
        return self._layer

    @property
    def is_nested_model(self) -> Literal[False]:
        """Whether this is a model with assignments of its own: no."""
        return False

    @property
    def pipeline_stage(self) -> int | None:
        """The number of the stage, from 0; None if it has not been set."""
        return self._stage

    @pipeline_stage.setter
    def pipeline_stage(self, stage: int | None) -> None:
        self._stage = validate.count("pipeline_stage", stage, optional=True, least=0)

    def __str__(self) -> str:
        return f"Layer: {self._layer.name} is assigned to pipeline stage: {self._stage}"

    def __repr__(self) -> str:
        return f"<{self}>"


class ModelLayerPipelineStageAssignment(_Layer):
    """One call of a layer in a subclassed model.

    >>> class Model(keras.Model):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.hidden, self.out = keras.layers.Dense(8), keras.layers.Dense(1)
    ...
    ...     def call(self, inputs):
    ...         return self.out(self.hidden(inputs))
    >>> with strategy.scope():
    ...     model = Model()
    >>> outputs = model(x)
    >>> [type(one).__name__ for one in model.get_pipeline_stage_assignment()]
    ['ModelLayerPipelineStageAssignment', 'ModelLayerPipelineStageAssignment']

    Args:
        layer: The layer.
        node_index: Which call of the layer this is, from 0.
        pipeline_stage: The number of its stage, or None.
        inbound_layers: The layers whose outputs this call uses.
    """

    def __init__(
        self,
        layer: keras.Layer,
        node_index: int,
        pipeline_stage: int | None = None,
        *,
        inbound_layers: Sequence[keras.Layer] = (),
    ) -> None:
        super().__init__(layer, pipeline_stage)
        self._node_index, self._inbound_layers = node_index, list(inbound_layers)

    @property
    def node_index(self) -> int:
        """Which call of the layer this is, from 0."""
        return self._node_index

    @property
    def inbound_layers(self) -> list[Any]:
        """The layers whose outputs this call uses."""
        return list(self._inbound_layers)

    def __str__(self) -> str:
        return (
            f"Layer: {self.layer.name} (node index {self._node_index}) is assigned to pipeline stage: "
            f"{self.pipeline_stage}"
        )


class FunctionalLayerPipelineStageAssignment(ModelLayerPipelineStageAssignment):
    """One call of a layer in a Functional model.

    >>> with strategy.scope():
    ...     inputs = keras.Input((4,))
    ...     model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8)(inputs)))
    >>> stages = model.get_pipeline_stage_assignment()
    >>> for number, one in enumerate(stages):
    ...     one.pipeline_stage = number
    >>> model.set_pipeline_stage_assignment(stages)
    """


class SequentialLayerPipelineStageAssignment(_Layer):
    """A layer of a Sequential model.

    >>> stages = model.get_pipeline_stage_assignment()
    >>> for number, one in enumerate(stages):
    ...     one.pipeline_stage = number
    >>> model.set_pipeline_stage_assignment(stages)
    """

    def __init__(self, layer: keras.Layer, pipeline_stage: int | None = None) -> None:
        super().__init__(layer, pipeline_stage)


class _Nested:
    """One call of a model inside another."""

    def __init__(self, nested_model: keras.Model, pipeline_stage_assignments: Sequence[Any]) -> None:
        self._nested_model, self._assignments = nested_model, list(pipeline_stage_assignments)

    @property
    def nested_model(self) -> Any:
        """The model."""
        return self._nested_model

    @property
    def pipeline_stage_assignments(self) -> list[Any]:
        """The assignments inside it: a new list of the same objects, whose stages you can change."""
        return list(self._assignments)

    @property
    def is_nested_model(self) -> Literal[True]:
        """Whether this is a model with assignments of its own: yes."""
        return True

    def _title(self) -> str:
        return f"Nested model: {self._nested_model.name}"

    def __str__(self) -> str:
        inside = "\n".join(str(assignment) for assignment in self._assignments)
        return f"{self._title()}\n" + "\n".join(f"  {line}" for line in inside.splitlines())

    def __repr__(self) -> str:
        return f"<{self}>"


class NestedModelPipelineStageAssignment(_Nested):
    """One call of a model in a subclassed model.

    >>> class Outer(keras.Model):
    ...     def __init__(self, inner):
    ...         super().__init__()
    ...         self.inner = inner
    ...
    ...     def call(self, inputs):
    ...         return self.inner(inputs)
    >>> with strategy.scope():
    ...     outer = Outer(model)
    >>> outputs = outer(x)
    >>> (nested,) = outer.get_pipeline_stage_assignment()
    >>> [one.pipeline_stage for one in nested.pipeline_stage_assignments]
    [None, None]

    Args:
        nested_model: The model.
        node_index: Which call of the model this is, from 0.
        pipeline_stage_assignments: The assignments of the layers inside, in the order in which they run.
    """

    def __init__(self, nested_model: keras.Model, node_index: int, pipeline_stage_assignments: Sequence[Any]) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)
        self._node_index = node_index

    @property
    def node_index(self) -> int:
        """Which call of the model this is, from 0."""
        return self._node_index

    def _title(self) -> str:
        return f"{super()._title()} (node index {self._node_index})"


class FunctionalNestedModelPipelineStageAssignment(NestedModelPipelineStageAssignment):
    """One call of a model in a Functional model.

    >>> with strategy.scope():
    ...     inputs = keras.Input((4,))
    ...     model = keras.Model(inputs, model(inputs))
    >>> (nested,) = model.get_pipeline_stage_assignment()
    >>> [one.layer.name for one in nested.pipeline_stage_assignments]
    ['hidden', 'output']
    """


class SequentialNestedModelPipelineStageAssignment(_Nested):
    """A model in a Sequential model.

    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((4,)), model])
    >>> (nested,) = model.get_pipeline_stage_assignment()
    >>> len(nested.pipeline_stage_assignments)
    2
    """


Assignment = _Layer | _Nested
"""The stage of a layer call, or those of all calls inside a nested model."""


# --- layer calls -> objects ------------------------------------------------------------------------------------------


def assignments(
    model: keras.Model, graph: Graph | None, calls: Sequence[Node], stages: Sequence[int | None]
) -> list[Any]:
    """The objects for the layer calls of a model."""
    sources = graph.sources() if graph else {}
    rows = [(node, stage, sources.get(id(node), [])) for node, stage in zip(calls, stages, strict=True)]
    return _level(model, rows, 0)


def _level(model: keras.Model, rows: list[tuple[Node, int | None, list[Any]]], depth: int) -> list[Any]:
    found: list[Any] = []
    for use, group in groupby(rows, lambda row: row[0].within[depth : depth + 1]):
        if not use:
            found += [_leaf(model, *row) for row in group]
            continue
        nested, call = use[0]
        inside = _level(nested, list(group), depth + 1)
        if isinstance(model, keras.Sequential):
            found.append(SequentialNestedModelPipelineStageAssignment(nested, inside))
        else:
            functional = has_graph(model)
            kind = FunctionalNestedModelPipelineStageAssignment if functional else NestedModelPipelineStageAssignment
            found.append(kind(nested, call, inside))
    return found


def _leaf(model: keras.Model, node: Node, stage: int | None, sources: list[Any]) -> _Layer:
    if isinstance(model, keras.Sequential):
        return SequentialLayerPipelineStageAssignment(node.operation, stage)
    functional = has_graph(model)
    kind = FunctionalLayerPipelineStageAssignment if functional else ModelLayerPipelineStageAssignment
    layers = [source for source in sources if isinstance(source, keras.Layer)]
    return kind(node.operation, node.index, stage, inbound_layers=layers)


# --- objects -> stages -----------------------------------------------------------------------------------------------


def collected(model: keras.Model, calls: Sequence[Node], given: object) -> list[int]:
    """The stage of each layer call, from the objects that a user gave. Raise if they do not fit the model."""
    return list(_collect(model, assignments(model, None, calls, [None] * len(calls)), given))


def _collect(model: keras.Model, expected: list[Any], given: object) -> Iterator[int]:
    if not isinstance(given, list):
        raise ValueError(
            f"The `pipeline_stage_assignment` has {given!r} where the layers of a nested model are. Change the list "
            "that `get_pipeline_stage_assignment` returns."
        )
    if len(given) != len(expected):
        raise ValueError(
            f"The length of the `pipeline_stage_assignment` is {len(given)}, which does not match the {len(expected)} "
            f"layer calls of model {model.name!r}: {', '.join(_name(one) for one in expected)}. Give one for each."
        )
    for position, (wanted, one) in enumerate(zip(expected, given, strict=True)):
        if isinstance(model, keras.Sequential) and hasattr(one, "__index__"):
            stage = validate.count(f"pipeline_stage_assignment[{position}]", one, least=0)
            yield from (stage for _ in _leaves(wanted))
        else:
            yield from _collect_one(model, wanted, one)


def _collect_one(model: keras.Model, wanted: Any, one: Any) -> Iterator[int]:
    if not isinstance(one, type(wanted)):
        whole = ", or a whole number" if isinstance(model, keras.Sequential) else ""
        raise ValueError(
            f"The pipeline stage assignment for layer {_name(wanted)!r} of model {model.name!r} must be an instance of "
            f"`{type(wanted).__name__}`{whole}, not {one!r}. Change the list from `get_pipeline_stage_assignment`."
        )
    if _identity(one) != _identity(wanted):
        raise ValueError(
            f"The `pipeline_stage_assignment` of model {model.name!r} is not in the order in which its layers run: "
            f"{_name(one)!r} is where {_name(wanted)!r} should be. Keep the order of `get_pipeline_stage_assignment`."
        )
    if one.is_nested_model:
        yield from _collect(one.nested_model, wanted.pipeline_stage_assignments, one.pipeline_stage_assignments)
    elif one.pipeline_stage is None:
        raise ValueError(
            f"Layer {_name(one)!r} of model {model.name!r} has not been assigned a pipeline stage. Set its "
            "`pipeline_stage`."
        )
    else:
        yield one.pipeline_stage


def _leaves(one: Assignment) -> Iterator[_Layer]:
    if not one.is_nested_model:
        yield one
        return
    for inside in one.pipeline_stage_assignments:
        yield from _leaves(inside)


def _identity(one: Assignment) -> tuple[int, int]:
    return id(one.nested_model if one.is_nested_model else one.layer), getattr(one, "node_index", 0)


def _name(one: Any) -> str:
    name = (one.nested_model if one.is_nested_model else one.layer).name
    return f"{name} (call {one.node_index})" if getattr(one, "node_index", 0) else str(name)
