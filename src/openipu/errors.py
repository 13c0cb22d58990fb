"""Errors between the host and a device, under the names that scripts for the original catch.

Each is also one of Python's built-in errors, so code that does not know these names still catches what it expects.
"""

from __future__ import annotations

__all__ = ["FailedPreconditionError", "InvalidArgumentError", "NotFoundError", "OutOfRangeError"]


class FailedPreconditionError(RuntimeError):
    """Something was requested before it was available."""


class InvalidArgumentError(ValueError):
    """An argument cannot be used."""


class NotFoundError(LookupError):
    """Something that was requested does not exist."""


class OutOfRangeError(RuntimeError):
    """The data ran out before the program ended."""
