"""Edits of the arguments of a call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from .edits import Edit
from .ops import Op, Parameter
from .script import Script


def keyword(argument: cst.Arg) -> str:
    """The name by which an argument is given, or nothing."""
    return argument.keyword.value if argument.keyword else ""


def find(call: cst.Call, name: str) -> cst.Arg | None:
    """The argument that is given by a name."""
    return next((argument for argument in call.args if keyword(argument) == name), None)


def rename(script: Script, argument: cst.Arg, name: str) -> Edit:
    """Give an argument by another name."""
    assert argument.keyword is not None
    return Edit(script.start(argument.keyword), script.end(argument.keyword), name)


def replace(script: Script, argument: cst.Arg, text: str) -> Edit:
    """Give another value, by the same name."""
    name = keyword(argument)
    return Edit(script.start(argument), script.end(argument), f"{name}={text}" if name else text)


def drop(script: Script, call: cst.Call, dropped: Sequence[cst.Arg]) -> Iterator[Edit]:
    """Leave arguments out, with the commas that they need."""
    kept_before = False
    for number, argument in enumerate(call.args):
        if argument not in dropped:
            kept_before = True
        elif kept_before:
            yield Edit(script.end(call.args[number - 1]), script.end(argument), "")
        elif argument is not call.args[-1]:
            yield Edit(script.start(argument), script.start(call.args[number + 1]), "")
        else:
            last = argument.comma if isinstance(argument.comma, cst.Comma) else argument
            yield Edit(script.start(argument), script.end(last), "")


def append(script: Script, call: cst.Call, text: str) -> Edit:
    """Give one more argument, at the end."""
    end = script.end(call.args[-1])
    return Edit(end, end, f", {text}")


def metric_edits(script: Script, call: cst.Call, metric: str, parameters: Sequence[str]) -> list[Edit] | None:
    """Write a metric of TensorFlow 1 as a Keras metric with its arguments, or None if it has other arguments."""
    names = [keyword(argument) for argument in call.args]
    if len(names) != len(parameters) or any(argument.star for argument in call.args):
        return None
    if any(name not in ("", parameter) for name, parameter in zip(names, parameters, strict=True)):
        return None
    edits = [Edit(script.start(call.func), script.start(call.args[0]), f"({metric}(), ")]
    for argument in call.args:
        if argument.keyword is not None:
            equals = re.compile(rb"\s*=\s*").match(script.content, script.end(argument.keyword))
            assert equals is not None
            edits.append(Edit(script.start(argument.keyword), equals.end(), ""))
    return edits


def op_edits(script: Script, call: cst.Call, op: Op) -> list[Edit] | str:
    """The edits of the arguments of an operation, or what it is that has no equivalent."""
    given: set[str] = set()
    edits: list[Edit] = []
    dropped: list[cst.Arg] = []
    for number, argument in enumerate(call.args):
        if argument.star:
            return f"arguments with {argument.star}"
        name = keyword(argument)
        if name in op.dropped:
            dropped.append(argument)
            continue
        parameter = _parameter(op, number, name)
        if parameter is None:
            return f"the argument {name}=" if name else f"argument number {number + 1} without a name"
        if parameter.whole_number and not isinstance(argument.value, cst.Integer):
            return f"{parameter.old}, unless it is a number"
        given.add(parameter.old)
        if name and name != parameter.new:
            edits.append(rename(script, argument, parameter.new))
    every = (*op.positional, *op.by_name)
    if missing := [parameter.old for parameter in every if parameter.required and parameter.old not in given]:
        return f"a call without {missing[0]}"
    added = [f"{p.new}={p.default}" for p in every if p.default and p.old not in given] + [op.added] * bool(op.added)
    if not given:
        return "a call without arguments"
    edits += drop(script, call, dropped)
    edits += [append(script, call, text) for text in added]
    return edits


def _parameter(op: Op, number: int, name: str) -> Parameter | None:
    if name:
        return next((p for p in (*op.positional, *op.by_name) if p.old == name), None)
    return op.positional[number] if number < len(op.positional) else None
