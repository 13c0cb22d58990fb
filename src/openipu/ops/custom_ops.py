"""Operations that users write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu import _validate as validate
from openipu._unavailable import unavailable

from ._operation import arrays

__all__ = ["codelet_expression_op"]


def __getattr__(name: str) -> Any:
    return unavailable("custom_ops", name)


def codelet_expression_op(vertex_expression: Callable[..., Any], *args: Any) -> Any:
    """`vertex_expression(*args)`. XLA makes one operation of it, as of any arithmetic on elements.

    >>> print(ipu.custom_ops.codelet_expression_op(lambda a, b: a * b + 1, np.array([1.0, 2.0]), np.array([3.0, 4.0])))
    [4. 9.]

    Args:
        vertex_expression: A function of arrays that computes each element by itself.
        *args: Arrays.
    """
    return validate.function("vertex_expression", vertex_expression)(*arrays(args))
