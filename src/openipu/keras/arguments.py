"""Checks of arguments that several methods of a model share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def steps(value: Any, old: int) -> int:
    """A number of micro-batches per update, or `old` where none is given."""
    if value is None:
        return old
    if type(value) is not int or value < 1:
        raise ValueError(
            f"`gradient_accumulation_steps_per_replica` is {value!r}, but it counts micro-batches: give a whole number "
            "of 1 or more."
        )
    return value


def yes_or_no(options: Mapping[str, Any], name: str, default: Any) -> Any:
    """The option of that name, True or False, or `default` where it is not given."""
    value = options.get(name, default)
    if value is not default and not isinstance(value, bool):
        raise ValueError(f"`{name}` is {value!r}, but it switches something on or off: give True or False.")
    return value
