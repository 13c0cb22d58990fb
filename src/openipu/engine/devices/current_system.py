"""Which system programs run on and which strategies are open, per thread: the innermost scope decides."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

from openipu import _validate as validate

from .systems import System, system

_active = threading.local()


def ordinal_of(device: object, kind: str = "IPU") -> int:
    """The number in a device's name, such as 1 in "/device:IPU:1"."""
    match = re.fullmatch(rf"/device:{kind}:(\d+)", device) if isinstance(device, str) else None
    if match is None:
        raise ValueError(f'{device!r} is not a device name. Give a name such as "/device:{kind}:0".')
    return int(match[1])


@contextlib.contextmanager
def on(ordinal: int) -> Iterator[None]:
    """Until the block ends, programs made in this thread run on system number `ordinal`."""
    stack: list[int] = _active.__dict__.setdefault("ordinals", [])
    stack.append(ordinal)
    try:
        yield
    finally:
        stack.pop()


def current_ordinal() -> int | None:
    """The number of the current system; None outside all scopes."""
    stack = _active.__dict__.get("ordinals")
    return stack[-1] if stack else None


def feed_ordinal(value: object) -> int:
    """The number of the system that a feed belongs to: the given one, else the current one, else 0."""
    given = validate.count("device_ordinal", value, optional=True, least=0)
    return current_ordinal() or 0 if given is None else given


def system_of(ordinal: int) -> System:
    """System number `ordinal`: with the devices of all instances if a strategy that is open here uses them."""
    for strategy in reversed(open_strategies()):
        if strategy.ordinal == ordinal:
            found: System = strategy.system
            return found
    return system(ordinal)


def open_strategies() -> list[Any]:
    """The strategies whose scopes are open in this thread, innermost last."""
    strategies: list[Any] = _active.__dict__.setdefault("strategies", [])
    return strategies


@contextlib.contextmanager
def within(strategy: Any) -> Iterator[None]:
    """Until the block ends, `strategy` is open in this thread, and programs run on its system."""
    stack = open_strategies()
    stack.append(strategy)
    try:
        with on(strategy.ordinal):
            yield
    finally:
        stack.pop()
