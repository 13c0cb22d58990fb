"""Which functions of a script compute with a model's tensors, and which with data on the host.

`tf.cast` in a layer becomes `keras.ops.cast`; in a function that is mapped over a dataset it has to stay what it is.
A function is model code if it is a method of a layer, model, loss, metric or optimizer, if it is given to something
that compiles it (`strategy.run`, `ipu.loops.repeat`, a pipeline, an estimator, `compile(loss=...)`), if it builds a
model from `keras.Input`, or if a function of model code calls it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import libcst as cst

from .names import moved
from .script import Function, Script, dotted


class Region(Enum):
    """What the values in a function are."""

    MODEL = "model"
    DATA = "data"
    BOTH = "both"
    HOST = "host"
    UNKNOWN = "unknown"


_MODEL_BASES: Final = re.compile(
    r"keras\.(?:Layer|Model|Sequential|Loss|Metric|Optimizer|Initializer|Regularizer|constraints\.Constraint"
    r"|(?:layers|models|losses|metrics|optimizers|initializers|regularizers|constraints)\.\w.*)$|openipu\.(?:keras|optimizers)\.\w.*"
)
_COMPILES: Final = re.compile(
    r"openipu\.(?:loops|ipu_compiler|(?:ops\.)?pipelining_ops|ipu_estimator|ipu_pipeline_estimator)\.\w+$"
    r"|keras\.(?:layers\.\w+|ops\.\w+)$|tensorflow\.function$"
)
"""Functions whose arguments are model code."""
_COMPILING_METHODS: Final = frozenset({"run", "experimental_run_v2", "compile"})
_DATA_METHODS: Final = frozenset(
    {"map", "filter", "flat_map", "interleave", "from_generator", "apply", "py_function", "numpy_function", "scan"}
)
_Takes = Callable[[Script, cst.Call], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The region of each function of a script."""

    script: Script
    of: Mapping[cst.CSTNode, Region]
    mixed: frozenset[Function | None] = frozenset()
    """Functions of the host that build a model from inputs, too. None is the script outside of all functions."""

    def at(self, node: cst.CSTNode) -> Region:
        """The region in which a node is. Outside of all functions it is the host's."""
        function = self.function(node)
        return Region.HOST if function is None else self.of[function]

    def is_unclear(self, node: cst.CSTNode) -> bool:
        """Whether the values at a node may be a model's or data: nothing tells, or the code around it has both."""
        if self.at(node) is not Region.HOST:
            return self.at(node) in (Region.UNKNOWN, Region.BOTH)
        return self.function(node) in self.mixed

    def function(self, node: cst.CSTNode) -> Function | None:
        """The innermost function that contains a node, other than as a decorator or default."""
        before = node
        for parent in self.script.above(node):
            if isinstance(parent, Function) and before is parent.body:
                return parent
            before = parent
        return None


def find_regions(script: Script) -> Regions:
    """Sort the functions of a script into regions."""
    functions = [node for node in script.nodes() if isinstance(node, Function)]
    bare = Regions(script, {})
    parents = {function: bare.function(function) for function in functions}
    by_name: dict[str, list[Function]] = {}
    for function in functions:
        if isinstance(function, cst.FunctionDef):
            by_name.setdefault(function.name.value, []).append(function)
    data = set(_given(script, by_name, _takes_data_functions))
    model = {*_methods(script), *_given(script, by_name, _compiles), *_decorated(script), *_builders(script)}
    calls = {function: _called(script, function, by_name) for function in functions}
    model = _closure(model, calls, parents, data)
    data = _closure(data, calls, parents, set())
    regions: dict[cst.CSTNode, Region] = {
        function: _region(function in model, function in data, _is_host(script, function)) for function in functions
    }
    inputs = {bare.function(node) for node in script.nodes() if _is_input(script, node)}
    return Regions(script, regions, frozenset(inputs))


def _region(model: bool, data: bool, host: bool) -> Region:
    if model and data:
        return Region.BOTH
    if model or data:
        return Region.MODEL if model else Region.DATA
    return Region.HOST if host else Region.UNKNOWN


def _closure(
    found: set[Function],
    calls: Mapping[Function, set[Function]],
    parents: Mapping[Function, Function | None],
    apart: set[Function],
) -> set[Function]:
    """Functions, those that they call, and those inside of them, unless they are in `apart`."""
    found = set(found)
    while True:
        called = {other for function in found for other in calls[function]}
        inside = {function for function, parent in parents.items() if parent in found} - apart
        more = (called | inside) - found
        if not more:
            return found
        found |= more


def _methods(script: Script) -> Iterator[Function]:
    """The methods of layers, models, losses and the like, also through other classes of the script."""
    classes = [node for node in script.nodes() if isinstance(node, cst.ClassDef)]
    known: set[str] = set()
    while True:
        more = {c.name.value for c in classes if any(_is_model_base(script, base.value, known) for base in c.bases)}
        if more <= known:
            break
        known |= more
    for found in classes:
        if found.name.value in known:
            yield from (node for node in found.body.body if isinstance(node, cst.FunctionDef))


def _is_model_base(script: Script, base: cst.BaseExpression, known: set[str]) -> bool:
    name = script.names.get(base)
    return dotted(base) in known if name is None else bool(_MODEL_BASES.match(moved(name)))


def _decorated(script: Script) -> Iterator[Function]:
    for node in script.nodes():
        if isinstance(node, cst.FunctionDef) and any(is_tf_function(script, d) for d in node.decorators):
            yield node


def is_tf_function(script: Script, decorator: cst.Decorator) -> bool:
    """Whether a decorator is `@tf.function`, with or without arguments."""
    what = decorator.decorator
    return script.names.get(what.func if isinstance(what, cst.Call) else what) == "tensorflow.function"


def _builders(script: Script) -> Iterator[Function]:
    """Functions that build a model from inputs and do not handle data or train as well."""
    for node in script.nodes():
        if isinstance(node, cst.FunctionDef) and _builds_from_inputs(script, node) and not _is_host(script, node):
            yield node


def _builds_from_inputs(script: Script, function: Function) -> bool:
    return any(_is_input(script, node) for node in script.walk(function.body))


def _is_input(script: Script, node: cst.CSTNode) -> bool:
    return moved(script.names.get(node, "")) in ("keras.Input", "keras.layers.Input")


def _is_host(script: Script, function: Function) -> bool:
    """Whether a function handles datasets, or trains a model."""
    for node in script.walk(function.body):
        if script.names.get(node, "").startswith("tensorflow.data."):
            return True
        if isinstance(node, cst.Attribute) and node.attr.value in ("fit", "evaluate", "predict", "train"):
            return True
    return False


def _called(script: Script, function: Function, by_name: Mapping[str, list[Function]]) -> set[Function]:
    calls = (node for node in script.walk(function.body) if isinstance(node, cst.Call))
    names = {call.func.value for call in calls if isinstance(call.func, cst.Name)}
    return {other for name in names for other in by_name.get(name, ())}


def _compiles(script: Script, call: cst.Call) -> bool:
    name = script.names.get(call.func)
    if name is not None:
        return bool(_COMPILES.match(moved(name)))
    return isinstance(call.func, cst.Attribute) and call.func.attr.value in _COMPILING_METHODS


def _takes_data_functions(script: Script, call: cst.Call) -> bool:
    name = script.names.get(call.func, "")
    if name and not name.startswith("tensorflow."):
        return False
    return isinstance(call.func, cst.Attribute) and call.func.attr.value in _DATA_METHODS


def _given(script: Script, by_name: Mapping[str, list[Function]], takes: _Takes) -> Iterator[Function]:
    """The functions that are given, by name or as a lambda, to calls that take functions of a kind."""
    for call in script.nodes():
        if isinstance(call, cst.Call) and takes(script, call):
            for argument in call.args:
                yield from _functions_in(argument.value, by_name)


def _functions_in(value: cst.BaseExpression, by_name: Mapping[str, list[Function]]) -> Iterable[Function]:
    match value:
        case cst.Name(value=name):
            yield from by_name.get(name, ())
        case cst.Lambda():
            yield value
        case cst.List() | cst.Tuple():
            for element in value.elements:
                yield from _functions_in(element.value, by_name)
        case cst.Dict():
            for item in value.elements:
                yield from _functions_in(item.value, by_name)
