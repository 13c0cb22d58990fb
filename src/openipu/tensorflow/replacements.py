"""Attributes of other packages that are replaced for as long as the process runs, and how to put them back.

These are not in the engine's registry of patches: that one is for replacements that end with a `with` block and act in
one thread. A script's namespace is one for all threads. Every replacement here does what the original does unless it
meets a value of JAX or Keras, or an argument that the original refuses.
"""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Replacements:
    """Replaced attributes, in order."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of a class or module."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the latest first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
