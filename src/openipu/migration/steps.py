"""Functions that TensorFlow compiled, and checks of TensorFlow's version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import libcst as cst

from . import ops
from .arguments import find, op_edits, rename
from .edits import Edit, Remark
from .lines import without_line, without_lines
from .names import new_name
from .regions import is_tf_function
from .script import Script

_CONTROL: Final = {
    cst.For: "a loop over `tf.range` or a dataset becomes ipu.loops.repeat",
    cst.While: "`while` on a tensor becomes ipu.loops.while_loop",
    cst.If: "`if` on a tensor becomes ipu.loops.cond",
}
_VERSION: Final = re.compile(r"tensorflow\.__version__\b")
_CONVERSIONS: Final = {"int", "float", "tuple", "map"}


@dataclass(frozen=True, slots=True)
class Steps:
    """Edits and remarks, and the nodes that go away, whose names need no edits."""

    found: list[Edit | Remark] = field(default_factory=list)
    removed: set[cst.CSTNode] = field(default_factory=set)


def judge_steps(script: Script) -> Steps:
    """Remove what has no meaning here, and say what needs a person."""
    steps = Steps()
    for node in script.nodes():
        if isinstance(node, cst.If) and _is_version_check(script, node):
            steps.removed.add(node)
            steps.found.append(_removed_block(script, node))
        elif isinstance(node, cst.FunctionDef):
            for decorator in node.decorators:
                if is_tf_function(script, decorator):
                    _judge_function(script, node, decorator, steps)
    steps.found.extend(_numpy_calls(script))
    return steps


def _judge_function(script: Script, function: cst.FunctionDef, decorator: cst.Decorator, steps: Steps) -> None:
    """Remove `@tf.function`, because strategy.run compiles, unless TensorFlow gave it a meaning of its own."""
    if reasons := list(_reasons(script, function)):
        why = "; ".join(dict.fromkeys(reasons))
        steps.found.append(
            Remark(script.start(decorator), f"@tf.function {function.name.value}: {why} (docs/feeds.md)")
        )
        call = decorator.decorator
        if isinstance(call, cst.Call) and (argument := find(call, "experimental_compile")):
            steps.found.append(rename(script, argument, "jit_compile"))
        return
    steps.removed.add(decorator)
    steps.found.append(without_line(script, decorator))


def _reasons(script: Script, function: cst.FunctionDef) -> Iterator[str]:
    """What a compiled function does that strategy.run cannot do for it."""
    for node in script.walk(function.body):
        name = script.names.get(node, "")
        if name == "tensorflow.GradientTape":
            yield "its gradients come from ipu.training.minimize"
        elif type(node) in _CONTROL:
            yield _CONTROL[type(node)]
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "next":
            yield "its data comes from an IPUInfeedQueue and ipu.loops.repeat"
        elif name.startswith("tensorflow.") and not _is_replaced(script, node, name):
            yield "what else is TensorFlow's in it is listed below"


def _is_replaced(script: Script, node: cst.CSTNode, name: str) -> bool:
    if ops.dtype(name) or name in ("tensorflow.newaxis", "tensorflow.name_scope"):
        return True
    if op := ops.tensorflow_op(name):
        call = script.parents[node]
        if isinstance(call, cst.Call) and call.func is node:
            return not isinstance(op_edits(script, call, op), str)
        return op.keeps_its_arguments or name.startswith("tensorflow.nn.")
    verdict = new_name(name)
    return verdict is not None and bool(verdict.new)


def _is_version_check(script: Script, node: cst.If) -> bool:
    """Whether a statement only refuses other versions of TensorFlow."""
    if node.orelse is not None or not isinstance(node.body, cst.IndentedBlock) or len(node.body.body) != 1:
        return False
    if not isinstance(script.parents[node], cst.Module | cst.IndentedBlock):  # an `elif`
        return False
    (line,) = node.body.body
    raises = isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.Raise)
    names = {name for part in script.walk(node.test) if (name := script.names.get(part))}
    return raises and bool(names) and all(map(_VERSION.match, names)) and _others(script, node.test) <= _CONVERSIONS


def _others(script: Script, test: cst.BaseExpression) -> set[str]:
    """The names in an expression that are not imported."""
    names = (part for part in script.walk(test) if isinstance(part, cst.Name))
    in_uses = {part for use in script.walk(test) if use in script.names for part in script.walk(use)}
    return {name.value for name in names if name not in in_uses}


def _removed_block(script: Script, node: cst.If) -> Edit:
    """Remove a statement, or write `pass` if it is all that its block has."""
    parent = script.parents[node]
    if isinstance(parent, cst.IndentedBlock) and len(parent.body) == 1:
        return Edit(script.start(node), script.end(node), "pass")
    assert isinstance(node.body, cst.IndentedBlock)
    return without_lines(script, script.start(node), script.end(node.body.body[-1]))


def _numpy_calls(script: Script) -> Iterator[Remark]:
    """`.numpy()` of values that come from programs, in scripts that run any."""
    calls = [node for node in script.nodes() if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)]
    attributes = {call.func.attr.value for call in calls if isinstance(call.func, cst.Attribute)}
    if attributes.isdisjoint({"run", "dequeue"}):
        return
    for call in calls:
        assert isinstance(call.func, cst.Attribute)
        if call.func.attr.value == "numpy" and not call.args and not script.names.get(call.func):
            yield Remark(
                script.start(call), f"{script.text(call)}: results of programs are arrays; write numpy.asarray(...)"
            )
