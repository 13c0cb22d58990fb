"""Functions that an IPU keeps once in its memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from openipu import _validate as validate

import jax

__all__ = ["outlined_function"]
F = TypeVar("F", bound=Callable[..., Any])


@overload
def outlined_function(
    func: F, unique_sharding: bool = ..., keep_input_layouts: Sequence[bool] | bool | None = ..., name: str | None = ...
) -> F: ...
@overload
def outlined_function(
    func: None = ...,
    unique_sharding: bool = ...,
    keep_input_layouts: Sequence[bool] | bool | None = ...,
    name: str | None = ...,
) -> Callable[[F], F]: ...
def outlined_function(
    func: F | None = None,
    unique_sharding: bool = False,
    keep_input_layouts: Sequence[bool] | bool | None = None,
    name: str | None = None,
) -> F | Callable[[F], F]:
    """The function, which means the same as before. Also a decorator, with or without arguments.

    On an IPU, all its calls share their code. Here, XLA decides about that. As in the original, the function takes
    positional arguments only and returns something.

    >>> @ipu.outlined_function
    ... def block(a):
    ...     return keras.ops.relu(a - 1)
    >>> print(block(np.array([0.0, 3.0])))
    [0. 2.]

    Args:
        func: A function of arrays.
        unique_sharding: For the original compiler. It has no effect here.
        keep_input_layouts: For the original compiler. It has no effect here.
        name: A name for the function in profiles.
    """
    if func is None:
        return lambda function: outlined_function(function, unique_sharding, keep_input_layouts, name)
    validate.function("func", func)
    if unique_sharding or keep_input_layouts is not None:
        validate.no_effect({
            "outlined_function(unique_sharding=, keep_input_layouts=)": "XLA decides where code and values are"
        })  # fmt: skip
    scope = name or str(getattr(func, "__name__", "outlined_function"))

    @functools.wraps(func)
    def outlined(*args: Any) -> Any:
        with jax.named_scope(scope):
            result = func(*args)
        if result is None:
            raise ValueError(f"The outlined function {scope!r} returns nothing. Return at least one array.")
        return result

    return outlined
