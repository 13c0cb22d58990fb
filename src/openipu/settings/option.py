"""Option: everything known about one option of IPUConfig, and the strict type check of its values."""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Type = Any
"""A type expression: a class, or a union, list, tuple or dict of such."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its full dotted name, its type and default, and what it does here.

    `no_effect` says why the option has no effect on XLA hardware; None means that it takes effect.
    `xla` names the XLA compiler option that it sets, by platform; on other platforms it has no effect.
    `minimum` is the smallest value allowed.

    >>> option = ipu.config.OPTIONS["auto_select_ipus"]
    >>> option.default, option.no_effect
    ([], None)
    """

    name: str
    type: Type
    default: object
    doc: str
    no_effect: str | None = None
    xla: Mapping[str, str] = field(default_factory=dict)
    minimum: int | None = None
    deprecated: str | None = None

    def check_type(self, value: object) -> None:
        """Raise TypeError unless `value` has exactly the type of this option: no subclasses, True is not an int."""
        if not _matches(value, self.type):
            raise TypeError(
                f"{self.name} must be of type {type_name(self.type)}, but {value!r} is of type {type(value).__name__}. "
                f"{_remedy(self.type, value)}"
            )


def type_name(expected: Type) -> str:
    """A type expression in readable form: "int, list[int] or tuple[int, ...]"."""
    if isinstance(expected, types.UnionType):
        *first, last = [type_name(part) for part in typing.get_args(expected)]
        return f"{', '.join(first)} or {last}"
    if typing.get_origin(expected) is not None:
        return str(expected)
    return str(expected.__name__)


def _matches(value: object, expected: Type) -> bool:
    if isinstance(expected, types.UnionType):
        return any(_matches(value, part) for part in typing.get_args(expected))
    arguments = typing.get_args(expected)
    container: Any = typing.get_origin(expected)
    if type(value) is not (container or expected):
        return False
    if isinstance(value, dict):
        return all(_matches(part, kind) for pair in value.items() for part, kind in zip(pair, arguments, strict=True))
    if isinstance(value, list | tuple):
        return all(_matches(part, arguments[0]) for part in value)
    return True


def _remedy(expected: Type, value: object) -> str:
    if isinstance(expected, type) and issubclass(expected, Enum):
        choices = ", ".join(f"{expected.__name__}.{choice.name}" for choice in expected)
        from_bool = getattr(expected, "from_bool", None)
        if isinstance(value, bool) and from_bool is not None:
            return f"Write {expected.__name__}.from_bool({value}), or one of {choices}."
        return f"Write one of {choices}."
    wanted = expected if isinstance(expected, type) else next(iter(typing.get_args(expected)))
    if wanted in (int, float, bool) and (isinstance(value, int | float) or hasattr(value, "__array__")):
        return f"Convert it: {wanted.__name__}({value})."
    return "Other types are not converted."
