"""Errors that name what happened between the host and a device, for scripts that tell them apart.

Each is also one of Python's own kinds, so that code that knows nothing of them catches what it expects.
"""

from __future__ import annotations

__all__ = ["FailedPreconditionError", "InvalidArgumentError", "NotFoundError", "OutOfRangeError"]


class FailedPreconditionError(RuntimeError):
    """Something was asked for too early."""


class InvalidArgumentError(ValueError):
    """What was given cannot be used."""


class NotFoundError(LookupError):
    """What was asked for is not there."""


class OutOfRangeError(RuntimeError):
    """The data ended before the program did."""
