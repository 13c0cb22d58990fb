"""Errors between the host and a device, under the names that scripts for the original catch.

Each is also one of Python's built-in errors, so code that does not know these names still catches what it expects.
"""

from __future__ import annotations

__all__ = ["FailedPreconditionError", "InvalidArgumentError", "NotFoundError", "OutOfRangeError"]


class FailedPreconditionError(RuntimeError):
    """Something was requested before it was available.

    >>> issubclass(ipu.errors.FailedPreconditionError, RuntimeError)
    True
    """


class InvalidArgumentError(ValueError):
    """An argument cannot be used.

    >>> try:
    ...     spec = ipu.ipu_infeed_queue.IPUInfeedQueue([np.ones(0)]).element_spec
    ... except ipu.errors.InvalidArgumentError as error:
    ...     print(error)
    The dataset's elements have shape (0,), in which a dimension is 0. Leave out empty arrays.
    """


class NotFoundError(LookupError):
    """Something that was requested does not exist.

    >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.ones(2)])
    >>> try:
    ...     infeed.deleter
    ... except ipu.errors.NotFoundError as error:
    ...     print(error)
    The infeed queue has not started, so there is nothing to delete. Use it first.
    """


class OutOfRangeError(RuntimeError):
    """The data ran out before the program ended.

    >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.ones(2)])
    >>> try:
    ...     strategy.run(lambda: ipu.loops.repeat(9, lambda total, row: total + row.sum(), 0.0, infeed))
    ... except ipu.errors.OutOfRangeError:
    ...     print("the dataset has too few elements")
    the dataset has too few elements
    """
