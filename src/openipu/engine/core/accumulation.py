"""Gradients of several micro-batches -> the gradient of one update."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from openipu import _validate as validate
from openipu.engine.facts.layers import ACCUMULATED
from openipu.engine.types import Array, Scalar, Tree

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

if TYPE_CHECKING:
    import keras


class Reduction(enum.Enum):
    """How the gradients of an update's micro-batches become one gradient.

    >>> model.set_gradient_accumulation_options(
    ...     gradient_accumulation_steps_per_replica=2,
    ...     gradient_accumulation_reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN,
    ... )
    """

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, reduction_method: object) -> Reduction:
        """The member given, or the member with the given name, in upper or lower case. Part of the public API."""
        return validate.member("reduction_method", reduction_method, cls)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """`steps` micro-batches per update, reduced by `method`, accumulated in `dtype` (None: each gradient's own)."""

    steps: int = 1
    method: Reduction = Reduction.SUM
    dtype: str | tuple[str, ...] | Callable[[keras.Variable], DTypeLike | None] | None = None
    """One dtype for all weights, one per weight, or a function from a Keras variable to its dtype."""

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f" in {self.dtype}"
        return f"{self.steps} micro-batches ({self.method.name.lower()}{dtype})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `from_dict`."""
        return {"steps": self.steps, "method": self.method.name, "dtype": self.dtype}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Accumulation:
        """The inverse of `to_dict`, even after a round trip through JSON."""
        dtype = values["dtype"]
        return cls(values["steps"], Reduction[values["method"]], tuple(dtype) if isinstance(dtype, list) else dtype)

    def of_weights(self, variables: Sequence[keras.Variable]) -> Accumulation:
        """This accumulation for the weights of a model. A function in `dtype` is replaced by its results."""
        if not callable(self.dtype):
            return self
        names = tuple(floating(self.dtype(v) or v.dtype, f"The dtype of {v.path!r}") for v in variables)
        return replace(self, dtype=names[0] if len(set(names)) == 1 else names)

    def start(self, weights: Sequence[Array]) -> list[Array]:
        """The accumulators before the first micro-batch."""
        dtypes: Sequence[Any] = self.dtype if isinstance(self.dtype, tuple) else (self.dtype,) * len(weights)
        with jax.named_scope(ACCUMULATED):
            return [jnp.zeros(w.shape, d or w.dtype) for w, d in zip(weights, dtypes, strict=True)]

    def add(self, total: Tree, gradients: Tree, position: Array | int) -> Tree:
        """The accumulators after micro-batch number `position` (counting from 0) of a full update.

        For means, each gradient is scaled before it is added, so that nothing overflows where a sum would.
        """
        if self.method is Reduction.SUM:
            return self.add_scaled(total, gradients, 1)
        if self.method is Reduction.MEAN:
            return self.add_scaled(total, gradients, 1 / self.steps)
        share = 1 / (position + 1)
        return self.add_scaled(jax.tree.map(lambda t: t * jnp.asarray(1 - share, t.dtype), total), gradients, share)

    def add_scaled(self, total: Tree, gradients: Tree, scale: Scalar) -> Tree:
        """The accumulators after adding `scale` times the gradients."""

        def one(total: Array, gradient: Array) -> Array:
            gradient = gradient.astype(total.dtype)
            return total + gradient * jnp.asarray(scale, total.dtype)

        return jax.tree.map(one, total, gradients)

    def strength(self, replicas: int) -> int:
        """How many times the mean gradient over its samples a full update applies."""
        return replicas * (self.steps if self.method is Reduction.SUM else 1)


def floating(value: object, whose: str = "`dtype`", what: str = "gradients are accumulated") -> str:
    """The name of a floating dtype, in which `what` happens. Raises for any other dtype."""
    import keras  # late: users may name a reduction method before they load Keras

    try:
        name = str(keras.backend.standardize_dtype(value))
    except ValueError:
        name = str(value)
    if name not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"{whose} is {name!r}, but {what} in a floating dtype. Give float16, bfloat16 or float32.")
    return name


def dtype_option(value: object, option: str = "dtype") -> Any:
    """The accumulation dtype that a user gave, checked: None, a name, a type, or a function of a variable."""
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    return floating(value, f"`{option}`")


def check_divided(divided: bool, offloaded: bool | None) -> None:
    """Reject optimizer state that is to be divided over replicas and yet kept on each device in full."""
    if divided and offloaded is False:
        raise ValueError(
            "`replicated_optimizer_state_sharding` is True, but `offload_weight_update_variables` is False, which "
            "keeps the whole state on every device. Leave `offload_weight_update_variables` out."
        )
