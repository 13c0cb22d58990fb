"""The values that a graph is made of: nodes, one per call, and the entries into nested models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from openipu.engine.core.options import CLOSED, Opening
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat import graph_api
from openipu.engine.types import Tree

import keras

from .recorded_calls import converted, has_graph, is_symbolic, standardized

Tensor: TypeAlias = keras.KerasTensor
"""Stands for a value while nothing is computed."""
Training = bool | Literal["as run"] | None
"""The `training` argument of a call: fixed, the mode of the run, or not passed."""


class NestedCall(NamedTuple):
    """Call number `call` (from 0) of a nested model, or of a layer that is looked into."""

    model: keras.Layer
    call: int


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One call of a layer or of an operation of `keras.ops`."""

    operation: Any
    """A `keras.Operation`, such as a layer, or an `Entry`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    index: int
    """Which call of its operation this is, counted over the graph."""
    within: tuple[NestedCall, ...]
    """The nested models that it is part of, the outermost first."""
    stage: int | None
    """The stage that a `PipelineStage` gave it."""
    training: Training
    """The `training` argument: the mode of the run, or a value that the model's own `call` chose."""

    @property
    def is_layer(self) -> bool:
        """Whether it calls a layer, which must be given a stage. Other nodes follow their inputs."""
        return isinstance(self.operation, keras.Layer)

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the call: equal for the same call in another graph of the model."""
        return id(self.operation), self.index

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that it uses."""
        return [leaf for leaf in keras.tree.flatten((self.args, self.kwargs)) if is_symbolic(leaf)]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that it uses: its layer's, and any among its arguments."""
        leaves = keras.tree.flatten((self.args, self.kwargs))
        own = self.operation.variables if self.is_layer else []
        return [*own, *(leaf for leaf in leaves if isinstance(leaf, keras.Variable))]

    def __str__(self) -> str:
        name = "/".join([*(nested.model.name for nested in self.within), self.operation.name])
        return f"{name} (call {self.index})" if self.index else name


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Graph:
    """The calls of a model. Tensors are told apart by identity; each is an input or the output of one node."""

    model: keras.Model
    nodes: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    outputs: Tree
    """Tensors in the structure of the model's outputs."""
    traced: bool
    """Whether it comes from tracing `call`, so that it is valid only for the shapes and the mode of the trace."""
    training: bool
    """The mode of the trace."""
    opening: Opening = CLOSED
    """The layers that it looks into."""
    refused: tuple[tuple[keras.Layer, str], ...] = ()
    """Layers that it was to look into but cannot, and why."""

    def sources(self) -> dict[int, list[keras.Layer | Tensor]]:
        """For each node, by identity: the layers and model inputs that it uses, directly or through operations."""
        made: dict[int, list[Any]] = {id(tensor): [tensor] for tensor in self.inputs}
        found: dict[int, list[Any]] = {}
        for node in self.nodes:
            used = {id(source): source for tensor in node.inputs for source in made[id(tensor)]}
            found[id(node)] = list(used.values())
            made.update((id(t), [node.operation] if node.is_layer else found[id(node)]) for t in node.outputs)
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry into a nested model: converts inputs to the structure, dtype and rank that the model wants."""

    model: keras.Layer

    @property
    def name(self) -> str:
        """A name for messages."""
        return f"{self.model.name}:inputs"

    def __call__(self, inputs: Tree, mask: Tree = None) -> list[Any]:
        """The flat inputs of the nested model's graph."""
        if not has_graph(self.model):
            return converted(self.model, inputs)
        values = standardized(self.model, inputs)
        for value, given in zip(values, [] if mask is None else keras.tree.flatten(mask), strict=False):
            if given is not None:
                keras_api.set_keras_mask(value, given)
        return values


@dataclass(frozen=True, slots=True)
class LayerEntry(Entry):
    """The entry into a layer that is looked into: converts its inputs, and returns some of their masks as values."""

    masked: tuple[int, ...]
    """The numbers of the inputs whose masks follow the inputs."""

    def __call__(self, inputs: Tree, mask: Tree = None) -> list[Any]:  # noqa: ARG002
        """The converted inputs, then the masks."""
        values = converted(self.model, inputs)
        return [*values, *(keras_api.get_keras_mask(values[i]) for i in self.masked)]


@dataclass(frozen=True, slots=True)
class LayerExit:
    """The exit from a layer that is looked into and supports masking: gives the outputs their masks."""

    layer: keras.Layer

    @property
    def name(self) -> str:
        """A name for messages."""
        return f"{self.layer.name}:outputs"

    def __call__(self, outputs: list[Any], previous_mask: Tree, inputs: Tree) -> list[Any]:
        """The outputs. `inputs` is None unless the layer computes masks itself."""
        graph_api.set_output_masks(self.layer, inputs, outputs, previous_mask)
        return outputs
