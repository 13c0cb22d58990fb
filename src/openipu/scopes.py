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
    """Programs compiled until the `with` block ends run on this system: "/device:IPU:0" is the first one."""
    with on(ordinal_of(device)):
        yield


@contextlib.contextmanager
def ipu_jit_scope(ipu_scope: int) -> Iterator[None]:
    """Accepted for scripts that give it: what is compiled together is the function given to `compile`."""
    validate.no_effect(
        {"ipu_jit_scope": f"what is compiled together is the function given to `compile`, not scope {ipu_scope}"}
    )
    yield


@contextlib.contextmanager
def ipu_shard(index: int | Iterable[int]) -> Iterator[None]:
    """Accepted for scripts that give it: an operation is not placed on one device of a replica by hand."""
    validate.no_effect(
        {"ipu_shard": f"operations are not placed on device {index} by hand; split models with PipelineStage"}
    )
    yield


@contextlib.contextmanager
def frontend_attribute(attribute_name: str, attribute_value: str, restore_to: str | None = None) -> Iterator[None]:
    """Accepted for scripts that give it: attributes speak to the original compiler."""
    del restore_to
    validate.no_effect({f"frontend_attribute {attribute_name}={attribute_value}": "it speaks to the original compiler"})
    yield


@contextlib.contextmanager
def stochastic_rounding(override: bool) -> Iterator[None]:
    """Accepted for scripts that give it: XLA devices round to the nearest number."""
    if validate.flag("override", override):
        validate.no_effect({"stochastic_rounding(True)": "XLA devices round to the nearest number"})
    yield


@contextlib.contextmanager
def partials_type(override_type: DTypeLike) -> Iterator[None]:
    """Accepted for scripts that give it: XLA chooses what partial sums are kept in."""
    if np.dtype(override_type) not in (np.dtype(np.float16), np.dtype(np.float32)):
        raise ValueError(f"Partial sums cannot be kept in {np.dtype(override_type)}. Give float16 or float32.")
    validate.no_effect({f"partials_type({np.dtype(override_type)})": "XLA chooses what partial sums are kept in"})
    yield


@contextlib.contextmanager
def outside_compilation_scope(name: str = "outside") -> Iterator[None]:
    """An error: operations of a program do not leave it by being written inside a block."""
    where = "outside of a program" if current() is None else "inside a program"
    raise ValueError(
        f"`outside_compilation_scope({name!r})` was entered {where}. To run a part of a program on the host, call it "
        "through `jax.pure_callback` or `jax.experimental.io_callback`."
    )
    yield
