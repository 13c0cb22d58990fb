"""The public wrappers around optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from openipu import _validate as validate
from openipu.engine.core.accumulation import Accumulation, Reduction, check_divided, dtype_option
from openipu.engine.core.wrapped_optimizer import Declared, IpuOptimizer, chain
from openipu.engine.types import Array, DTypeOption
from openipu.ops.cross_replica_ops import cross_replica_mean

import jax.numpy as jnp
import keras

OptimizerLike: TypeAlias = keras.optimizers.Optimizer | str | dict[str, Any]
"""An optimizer, its name, or its config."""

_registered = keras.saving.register_keras_serializable(package="openipu")


@_registered
class CrossReplicaOptimizer(IpuOptimizer):
    """Applies the mean of the gradients of all replicas instead of their sum.

    With one replica, and for models created outside a strategy's scope, it does the same as the inner optimizer.

    >>> model.compile(ipu.optimizers.CrossReplicaOptimizer("sgd"), "mse", steps_per_execution=2)
    >>> history = model.fit(x, y, batch_size=8, verbose=0)

    Args:
        opt: Any Keras optimizer: an instance, a name, or a config.
        name: The name of this wrapper.
    """

    def __init__(self, opt: OptimizerLike, name: str = "CrossReplicaOptimizer") -> None:
        super().__init__(opt, name)

    @property
    def declared(self) -> Declared:
        """Says that gradients are averaged over replicas."""
        return super().declared | Declared(replica_reduction="mean")

    def prepare(self, gradients: Sequence[Any], weights: Sequence[Any], scale: Array | float) -> list[Any]:
        """The gradients, averaged over replicas."""
        return super().prepare(cross_replica_mean(list(gradients)), weights, scale)


@_registered
class GradientAccumulationOptimizerV2(IpuOptimizer):
    """Applies the accumulated gradients of `num_mini_batches` micro-batches in one update.

    The micro-batches run one after another inside the program of a model that was created in a strategy's scope;
    `steps_per_execution` must be a multiple of their number. Each replica accumulates its own micro-batches; then the
    gradients are reduced over replicas, once per update.

    >>> optimizer = ipu.optimizers.GradientAccumulationOptimizerV2("sgd", num_mini_batches=2, reduction_method="mean")
    >>> model.compile(optimizer, "mse", steps_per_execution=2)
    >>> history = model.fit(x, y, batch_size=8, verbose=0)  # one update of 2 micro-batches on 2 replicas

    Args:
        opt: Any Keras optimizer: an instance, a name, or a config.
        num_mini_batches: Micro-batches per update and replica.
        offload_weight_update_variables: Whether the optimizer's state lives in host memory between updates; None leaves
            it to the engine.
        replicated_optimizer_state_sharding: Whether each replica keeps only its share of the optimizer's state.
        dtype: The dtype of accumulated gradients, or a function that returns it for a weight; None for the dtype of
            each weight.
        reduction_method: SUM, MEAN or RUNNING_MEAN: a member of `GradientAccumulationReductionMethod` or its name.
        name: The name of this wrapper.
    """

    accumulation: Accumulation

    def __init__(
        self,
        opt: OptimizerLike,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: DTypeOption = None,
        reduction_method: Reduction | str = Reduction.SUM,
        name: str = "GradientAccumulationOptimizerV2",
    ) -> None:
        steps = validate.count("num_mini_batches", num_mini_batches)
        method = validate.member("reduction_method", reduction_method, Reduction)
        super().__init__(opt, name)
        for inner in chain(self.inner_optimizer):
            if isinstance(inner, GradientAccumulationOptimizerV2):
                raise ValueError(
                    f"An optimizer that accumulates {inner.accumulation.steps} micro-batches is inside one that "
                    f"accumulates {steps}. Wrap the optimizer once, with the number of micro-batches per update."
                )
        self.accumulation = Accumulation(steps, method, dtype_option(dtype))
        self.offload_weight_update_variables = validate.flag(
            "offload_weight_update_variables", offload_weight_update_variables, optional=True
        )
        self.replicated_optimizer_state_sharding = validate.flag(
            "replicated_optimizer_state_sharding", replicated_optimizer_state_sharding
        )
        check_divided(self.replicated_optimizer_state_sharding, self.offload_weight_update_variables)

    @property
    def declared(self) -> Declared:
        """Says how many micro-batches an update takes, and where the optimizer's state is kept."""
        own = Declared(
            self.accumulation,
            shard_state=self.replicated_optimizer_state_sharding,
            offload=self.offload_weight_update_variables,
        )
        return own | super().declared

    def prepare(self, gradients: Sequence[Any], weights: Sequence[Any], scale: Array | float) -> list[Any]:
        """Raise unless there is nothing to accumulate: a single `apply` cannot wait for other micro-batches."""
        if self.accumulation.steps > 1:
            raise RuntimeError(
                f"{self.name!r} accumulates {self.accumulation.steps} micro-batches per update inside the program of a "
                "strategy, but the gradients of one micro-batch were applied outside of such a program. Create the "
                "model inside `strategy.scope()`, and without its own `train_step`."
            )
        return super().prepare(gradients, weights, scale)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to create the same optimizer again."""
        if callable(self.accumulation.dtype):
            raise ValueError(
                f"The `dtype` of {self.name!r} is the function {self.accumulation.dtype!r}, which cannot be saved. "
                "Give a dtype, or pass the function to `model.set_gradient_accumulation_options`."
            )
        return {
            **super().get_config(),
            "num_mini_batches": self.accumulation.steps,
            "offload_weight_update_variables": self.offload_weight_update_variables,
            "replicated_optimizer_state_sharding": self.replicated_optimizer_state_sharding,
            "dtype": self.accumulation.dtype,
            "reduction_method": self.accumulation.method.name,
        }


@_registered
class CrossReplicaGradientAccumulationOptimizerV2(GradientAccumulationOptimizerV2, CrossReplicaOptimizer):
    """Accumulates micro-batches on each replica, and applies the mean over replicas once per update.

    The arguments are as for `GradientAccumulationOptimizerV2`.

    >>> optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2("sgd", num_mini_batches=2)
    >>> model.compile(optimizer, "mse", steps_per_execution=2)
    """

    def __init__(
        self,
        opt: OptimizerLike,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: DTypeOption = None,
        reduction_method: Reduction | str = Reduction.SUM,
        name: str = "CrossReplicaGradientAccumulationOptimizerV2",
    ) -> None:
        super().__init__(
            opt,
            num_mini_batches,
            offload_weight_update_variables,
            replicated_optimizer_state_sharding,
            dtype,
            reduction_method,
            name,
        )


@_registered
class GradientAccumulationOptimizer(GradientAccumulationOptimizerV2):
    """The older form of `GradientAccumulationOptimizerV2`, which always sums over micro-batches.

    >>> optimizer = ipu.optimizers.GradientAccumulationOptimizer("sgd", num_mini_batches=2)
    >>> model.compile(optimizer, "mse", steps_per_execution=2)

    Args:
        opt: Any Keras optimizer: an instance, a name, or a config.
        num_mini_batches: Micro-batches per update and replica.
        verify_usage: Has no effect: executions are always checked to be a whole number of updates.
        name: The name of this wrapper.
    """

    def __init__(
        self,
        opt: OptimizerLike,
        num_mini_batches: int,
        verify_usage: bool = True,
        name: str = "GradientAccumulationOptimizer",
    ) -> None:
        super().__init__(opt, num_mini_batches, name=name)
        self.verify_usage = validate.flag("verify_usage", verify_usage)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to create the same optimizer again."""
        config = super().get_config()
        kept = {name: config[name] for name in ("opt", "num_mini_batches", "name")}
        return {**kept, "verify_usage": self.verify_usage}


@_registered
class CrossReplicaGradientAccumulationOptimizer(GradientAccumulationOptimizer, CrossReplicaOptimizer):
    """The older form of `CrossReplicaGradientAccumulationOptimizerV2`.

    The arguments are as for `GradientAccumulationOptimizer`.

    >>> optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizer("sgd", num_mini_batches=2)
    >>> model.compile(optimizer, "mse", steps_per_execution=2)
    """

    def __init__(
        self,
        opt: OptimizerLike,
        num_mini_batches: int,
        verify_usage: bool = True,
        name: str = "CrossReplicaGradientAccumulationOptimizer",
    ) -> None:
        super().__init__(opt, num_mini_batches, verify_usage, name)


@_registered
class ShardedOptimizer(IpuOptimizer):
    """Updates each weight on its own device. All optimizers do so here, so it is the same as the inner optimizer.

    >>> model.compile(ipu.optimizers.ShardedOptimizer("sgd"), "mse", steps_per_execution=2)

    Args:
        optimizer: Any Keras optimizer: an instance, a name, or a config.
    """

    def __init__(self, optimizer: OptimizerLike, name: str = "ShardedOptimizer") -> None:
        super().__init__(optimizer, name)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to create the same optimizer again."""
        config = super().get_config()
        return {"optimizer": config["opt"], "name": config["name"]}


@_registered
class MapGradientOptimizer(IpuOptimizer):
    """Applies `gradient_mapping_function(gradient, weight)` in place of each gradient.

    The function gets the gradients of each micro-batch on each replica, before they are accumulated and reduced. They
    are not affected by loss scaling: the function gets the same gradients as without mixed precision.

    >>> def clipped(gradient, weight):
    ...     return keras.ops.clip(gradient, -1, 1)
    >>> model.compile(ipu.optimizers.MapGradientOptimizer("sgd", clipped), "mse", steps_per_execution=2)

    Args:
        wrapped_optimizer: Any Keras optimizer: an instance, a name, or a config.
        gradient_mapping_function: Returns an array of the gradient's shape. To save the model, it must be a function
            with a name; register it with `keras.saving.register_keras_serializable` so that the model can be loaded.
        name: The name of this wrapper.
    """

    def __init__(
        self,
        wrapped_optimizer: OptimizerLike,
        gradient_mapping_function: Callable[[Any, Any], Any],
        name: str = "MapGradientOptimizer",
    ) -> None:
        super().__init__(wrapped_optimizer, name)
        self.gradient_mapping_function = validate.function(
            "gradient_mapping_function", gradient_mapping_function, error=ValueError
        )

    maps_gradients = True

    def prepare(self, gradients: Sequence[Any], weights: Sequence[Any], scale: Array | float) -> list[Any]:
        """The mapped gradients."""
        return super().prepare(self.mapped(gradients, weights, scale), weights, scale)

    def mapped(
        self,
        gradients: Sequence[Any],
        weights: Sequence[Any],
        scale: Array | float = 1.0,
        *,
        keep_overflow: bool = False,
    ) -> list[Any]:
        """The mapped gradients, scaled by `scale` as `gradients` are; with `keep_overflow`, inf and nan stay."""
        return [
            None if g is None else self._map(g, w, scale, keep_overflow)
            for g, w in zip(gradients, weights, strict=True)
        ]

    def _map(self, gradient: Array, weight: keras.Variable | Array, scale: Array | float, keep_overflow: bool) -> Any:
        scaled = not (isinstance(scale, float) and scale == 1.0)
        new = keras.ops.convert_to_tensor(
            self.gradient_mapping_function(gradient / scale if scaled else gradient, weight)
        )
        if new.shape != gradient.shape:
            raise ValueError(
                f"The gradient mapping function of {self.name!r} returned shape {tuple(new.shape)} for a gradient of "
                f"shape {tuple(gradient.shape)}. Return an array of the same shape."
            )
        new = (new * scale if scaled else new).astype(gradient.dtype)
        return jnp.where(jnp.isfinite(gradient), new, gradient) if keep_overflow else new

    def get_config(self) -> dict[str, Any]:
        """Everything needed to create the same optimizer again."""
        function = self.gradient_mapping_function
        if getattr(function, "__name__", "<lambda>") == "<lambda>":
            raise ValueError(
                f"The gradient mapping function of {self.name!r} is {function!r}, which has no name to save it under. "
                "Define it with `def` and register it with `keras.saving.register_keras_serializable`."
            )
        return {
            "wrapped_optimizer": keras.optimizers.serialize(self.inner_optimizer),
            "gradient_mapping_function": keras.saving.serialize_keras_object(function),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> MapGradientOptimizer:
        """The optimizer that `get_config` describes."""
        function = keras.saving.deserialize_keras_object(config["gradient_mapping_function"], custom_objects)
        return cls(**{**config, "gradient_mapping_function": function})
