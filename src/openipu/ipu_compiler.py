"""`compile`: run a function as one program on the current system."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.devices.current_system import current_ordinal
from openipu.engine.program.program_trace import current
from openipu.engine.program.user_program import Operation, user_program

__all__ = ["compile"]


def compile(computation: Callable[..., Any], inputs: Sequence[Any] | None = None) -> Any:
    """Compile `computation` into one program and run it on the devices of the current scope.

    A function is compiled once for arguments of the same shapes. Keras variables that it uses are read and updated.

    >>> with strategy.scope():
    ...     total, product = ipu.ipu_compiler.compile(lambda a, b: (a + b, a * b), [2.0, 3.0])
    >>> print(total, product)
    5.0 6.0

    Args:
        computation: A function of JAX or `keras.ops` operations. It returns values; operations may follow them.
        inputs: Its arguments, as a tuple or list.

    Returns:
        A tuple of its values, or an operation if there are none.
    """
    validate.function("computation", computation)
    return run_here(_computation, (computation, *validate.sequence("inputs", inputs, optional=True)))


def run_here(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `fn` on the system of the current scope, or as part of the program that is being traced."""
    if current() is not None:
        return fn(*args)
    ordinal = current_ordinal()
    if ordinal is None:
        raise Exception(  # the type that the original raises
            "A program was compiled outside of all scopes, so it is not clear which devices it is for. Compile it "
            'inside `with ipu.scopes.ipu_scope("/device:IPU:0"):` or `with strategy.scope():`.'
        )
    return user_program(fn, ordinal)(args)


def _computation(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function, and return its result as `compile` does."""
    result = function(*inputs)
    if type(result).__name__.endswith("EstimatorSpec"):
        raise ValueError("A computation returned an EstimatorSpec. Return arrays; only a `model_fn` returns specs.")
    parts = tuple(result) if isinstance(result, list | tuple) else (result,)
    operations = [part is None or isinstance(part, Operation) for part in parts]
    if any(before and not after for before, after in itertools.pairwise(operations)):
        raise ValueError("A computation returned an operation before a value. Return values first, then operations.")
    values = tuple(part for part, operation in zip(parts, operations, strict=True) if not operation)
    return values or Operation()
