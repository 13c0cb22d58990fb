"""Which layer a name in a traced or compiled program stands for.

Keras names what each layer computes. In a trace, JAX keeps these names and its own derivatives apart; in a compiled
program, they are one text, such as "jit(run)/while/body/transpose(jvp(net))/dense/dot_general".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

IN_FLIGHT: Final = "activations in flight"
ACCUMULATED: Final = "accumulated gradients"
"""Names of what belongs to no single layer."""
_WRAPPER: Final = re.compile(r"^(jvp|transpose|vmap|remat)\((.*)\)$")
_OWN: Final = re.compile(
    r"p?jit\(.*\)|while|body|cond|closed_call|core_call|checkpoint|rematted_computation|shard_map|shmap_body|"
    r"branch_\d+_fun|true_fun|false_fun|custom_[jv]+p_call.*|.*->.*"
)
"""Names that are JAX's own; those with an arrow are the formulas of `einsum`."""


def layer_in_trace(names: Sequence[Any]) -> str:
    """The layer, after those around it, with slashes. Empty outside of all layers."""
    return "/".join(part.name for part in names if not _is_derivative(part) and not _OWN.fullmatch(part.name))


def is_backward_in_trace(names: Sequence[Any]) -> bool:
    """Whether an operation with these names belongs to a backward."""
    return any(_is_derivative(part) and part.name == "transpose" for part in names)


def layer_in_program(op_name: str) -> str:
    """The layer in the name of an operation in a compiled program; the last part is the operation itself."""
    layers = (_unwrapped(part) for part in op_name.split("/")[:-1])
    return "/".join(layer for layer in layers if layer and not _OWN.fullmatch(layer))


def _unwrapped(part: str) -> str:
    wrapped = _WRAPPER.match(part)
    return part if wrapped is None else _unwrapped(wrapped[2])


def _is_derivative(part: Any) -> bool:
    return type(part).__name__ == "Transform"
