"""Checks of what users give, and what they are told when it changes nothing: each once, in one wording."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("openipu")

_named: set[str] = set()
_lock = threading.Lock()


def positive(name: str, value: Any, *, optional: bool = False, least: int = 1) -> Any:
    """`value` as an int, checked to be a count; None stays None where it is optional."""
    if optional and value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"`{name}` is {value!r}, but it counts something: give a whole number of {least} or more.")
    return operator.index(value)


def name_once(without_effect: Mapping[str, str]) -> None:
    """Name settings that have no effect, with the reasons, in one warning; each setting once per process."""
    with _lock:
        new = {name: why for name, why in without_effect.items() if name not in _named}
        _named.update(new)
    if new:
        listed = "; ".join(f"{name} ({why})" for name, why in new.items())
        logger.warning("Without effect here: %s.", listed)
