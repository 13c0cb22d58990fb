"""Gradients of several micro-batches -> the gradient of one update."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp


class Reduction(enum.Enum):
    """How the gradients of the micro-batches of one update become one gradient."""

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, value: Any) -> Reduction:
        """The method that a name (in any case) or a member stands for."""
        return validate.member("reduction_method", value, cls)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """`steps` micro-batches per update, reduced by `method`, added up in `dtype` (None: each gradient's own)."""

    steps: int = 1
    method: Reduction = Reduction.SUM
    dtype: str | tuple[str, ...] | Callable[[Any], Any] | None = None
    """One for all weights, one for each, or a function that gives that of a Keras variable."""

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f" in {self.dtype}"
        return f"{self.steps} micro-batches ({self.method.name.lower()}{dtype})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads."""
        return {"steps": self.steps, "method": self.method.name, "dtype": self.dtype}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Accumulation:
        """The inverse of `to_dict`, also after JSON."""
        dtype = values["dtype"]
        return cls(values["steps"], Reduction[values["method"]], tuple(dtype) if isinstance(dtype, list) else dtype)

    def of_weights(self, variables: Sequence[Any]) -> Accumulation:
        """This for the weights of a model: with what the function gives in its place, if `dtype` is one."""
        if not callable(self.dtype):
            return self
        names = tuple(floating(self.dtype(v) or v.dtype, f"that of {v.path!r}") for v in variables)
        return replace(self, dtype=names[0] if len(set(names)) == 1 else names)

    def start(self, weights: list[Any]) -> list[Any]:
        """The accumulators before the first micro-batch."""
        dtypes: Sequence[Any] = self.dtype if isinstance(self.dtype, tuple) else (self.dtype,) * len(weights)
        return [jnp.zeros(w.shape, d or w.dtype) for w, d in zip(weights, dtypes, strict=True)]

    def add(self, total: Tree, gradients: Tree, position: Any) -> Tree:
        """The accumulators after micro-batch number `position` (from 0) of a full update.

        Means are built from scaled summands, so that they do not overflow where a sum would.
        """
        if self.method is Reduction.SUM:
            return self.add_scaled(total, gradients, 1)
        if self.method is Reduction.MEAN:
            return self.add_scaled(total, gradients, 1 / self.steps)
        share = 1 / (position + 1)
        return self.add_scaled(jax.tree.map(lambda t: t * jnp.asarray(1 - share, t.dtype), total), gradients, share)

    def add_scaled(self, total: Tree, gradients: Tree, scale: Any) -> Tree:
        """The accumulators after gradients that count `scale` times."""

        def one(total: Any, gradient: Any) -> Any:
            gradient = gradient.astype(total.dtype)
            return total + gradient * jnp.asarray(scale, total.dtype)

        return jax.tree.map(one, total, gradients)

    def strength(self, replicas: int) -> int:
        """How often the mean gradient of its samples goes into a full update."""
        return replicas * (self.steps if self.method is Reduction.SUM else 1)


def floating(value: Any, whose: str = "`dtype`") -> str:
    """The name of a floating dtype."""
    import keras  # late: users name the methods of reduction before they load Keras

    try:
        name = str(keras.backend.standardize_dtype(value))
    except ValueError:
        name = str(value)
    if name not in ("float16", "bfloat16", "float32"):
        raise ValueError(
            f"{whose} is {name!r}, but gradients are added up in a floating dtype: give float16, bfloat16 or float32."
        )
    return name


def dtype_option(value: Any, option: str = "dtype") -> Any:
    """The dtype to accumulate in as a user gives it: None, a name, a type, or a function of a variable."""
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    return floating(value, f"`{option}`")


def check_divided(divided: Any, offloaded: Any) -> None:
    """Refuse a division of the optimizer's state over replicas that is to keep all of it on the device."""
    if divided and offloaded is False:
        raise ValueError(
            "`replicated_optimizer_state_sharding` is True and `offload_weight_update_variables` False. The state is "
            "divided where it is kept between updates: leave `offload_weight_update_variables` out."
        )
