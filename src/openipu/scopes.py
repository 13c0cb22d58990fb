"""Where programs run, and hints for operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from openipu import _validate as validate
from openipu.engine.devices.current_system import on, ordinal_of
from openipu.engine.program.program_trace import current

import numpy as np
from numpy.typing import DTypeLike

__all__ = [
    "frontend_attribute",
    "ipu_jit_scope",
    "ipu_scope",
    "ipu_shard",
    "outside_compilation_scope",
    "partials_type",
    "stochastic_rounding",
]


@contextlib.contextmanager
def ipu_scope(device: str) -> Iterator[None]:
    """Run the programs in the `with` block on this system; "/device:IPU:0" is the first one.

    >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
    ...     (result,) = ipu.ipu_compiler.compile(lambda a: a + 1, [1.0])
    >>> print(result)
    2.0
    """
    with on(ordinal_of(device)):
        yield


@contextlib.contextmanager
def ipu_jit_scope(ipu_scope: int) -> Iterator[None]:
    """Has no effect: the function given to `compile` is compiled as a whole.

    >>> with ipu.scopes.ipu_jit_scope(0):
    ...     pass
    """
    del ipu_scope
    validate.no_effect({"ipu_jit_scope": "the function given to `compile` is compiled as a whole"})
    yield


@contextlib.contextmanager
def ipu_shard(index: int | Iterable[int]) -> Iterator[None]:
    """Has no effect: use `PipelineStage` to choose the device of a layer.

    >>> with ipu.scopes.ipu_shard(1):
    ...     pass
    """
    del index
    validate.no_effect({"ipu_shard": "use `PipelineStage` to choose the device of a layer"})
    yield


@contextlib.contextmanager
def frontend_attribute(attribute_name: str, attribute_value: str, restore_to: str | None = None) -> Iterator[None]:
    """Has no effect: attributes are for the original compiler.

    >>> with ipu.scopes.frontend_attribute("name", "value"):
    ...     pass
    """
    del restore_to
    validate.no_effect({f"frontend_attribute {attribute_name}={attribute_value}": "it is for the original compiler"})
    yield


@contextlib.contextmanager
def stochastic_rounding(override: bool) -> Iterator[None]:
    """Has no effect: XLA devices round to the nearest number.

    >>> with ipu.scopes.stochastic_rounding(False):
    ...     pass
    """
    if validate.flag("override", override):
        validate.no_effect({"stochastic_rounding(True)": "XLA devices round to the nearest number"})
    yield


@contextlib.contextmanager
def partials_type(override_type: DTypeLike) -> Iterator[None]:
    """Has no effect: XLA chooses the type of partial sums.

    >>> with ipu.scopes.partials_type("float32"):
    ...     pass
    """
    if np.dtype(override_type) not in (np.dtype(np.float16), np.dtype(np.float32)):
        raise ValueError(f"Partial sums cannot be of type {np.dtype(override_type)}. Give float16 or float32.")
    validate.no_effect({f"partials_type({np.dtype(override_type)})": "XLA chooses the type of partial sums"})
    yield


@contextlib.contextmanager
def outside_compilation_scope(name: str = "outside") -> Iterator[None]:
    """Not available: a `with` block cannot move operations out of a program. The error says what to do."""
    where = "outside of a program" if current() is None else "inside a program"
    raise ValueError(
        f"`outside_compilation_scope({name!r})` was entered {where}, but it is not available. To run part of a program "
        "on the host, use `jax.pure_callback` or `jax.experimental.io_callback`."
    )
    yield
