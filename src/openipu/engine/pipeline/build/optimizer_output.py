"""What the `optimizer_function` of a pipeline of functions returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Array

import jax
import keras


class OptimizerFunctionOutput:
    """The loss to minimize and the optimizer that does so, as the `optimizer_function` of a pipeline returns them.

    >>> optimizer = keras.optimizers.SGD(0.01)
    >>> def optimizer_function(loss):
    ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    Args:
        opt: A Keras optimizer, or one of `ipu.optimizers`.
        loss: The loss of one micro-batch: a tensor without axes.
        compute_gradients_args: Must be empty, because JAX computes the gradients.
        compute_gradients_kwargs: Must be empty as well.
        apply_gradients_args: Has no effect: Keras' optimizers take nothing but gradients and variables.
        apply_gradients_kwargs: Has no effect either.
        variables: The variables to train; by default all trainable ones that the stages use.
        tape: Accepted for scripts that pass one. There are no gradient tapes here.
        gradient_capture_context: Accepted for scripts that pass one. Gradients are not captured here.
        captured_gradient_outfeed: Where captured gradients go; needs `tape` or `gradient_capture_context`.
    """

    def __init__(
        self,
        opt: keras.optimizers.Optimizer,
        loss: Array | keras.KerasTensor,
        compute_gradients_args: tuple[Any, ...] | None = None,
        compute_gradients_kwargs: dict[str, Any] | None = None,
        apply_gradients_args: tuple[Any, ...] | None = None,
        apply_gradients_kwargs: dict[str, Any] | None = None,
        variables: Sequence[keras.Variable] | None = None,
        tape: object = None,
        gradient_capture_context: object = None,
        captured_gradient_outfeed: object = None,
    ) -> None:
        self.opt = validate.instance("opt", opt, keras.optimizers.Optimizer)
        if not isinstance(loss, jax.Array | keras.KerasTensor):
            raise TypeError(f"`loss` is {validate.a(loss)}. Give a tensor.")
        self.loss = loss
        self.compute_gradients_args = _tuple("compute_gradients_args", compute_gradients_args)
        self.compute_gradients_kwargs = validate.mapping(
            "compute_gradients_kwargs", compute_gradients_kwargs, optional=True
        )
        self.apply_gradients_args = _tuple("apply_gradients_args", apply_gradients_args)
        self.apply_gradients_kwargs = validate.mapping("apply_gradients_kwargs", apply_gradients_kwargs, optional=True)
        if self.compute_gradients_args or self.compute_gradients_kwargs:
            raise ValueError(
                "`compute_gradients_args` and `compute_gradients_kwargs` do not work with a Keras optimizer. Leave "
                "them out; `variables` says what to train."
            )
        if variables is not None and tape is not None:
            raise ValueError("`variables` and `tape` both say what to train. Give `variables` only.")
        if tape is not None and gradient_capture_context is not None:
            raise ValueError("`tape` and `gradient_capture_context` exclude each other. Give neither.")
        if captured_gradient_outfeed is not None and tape is None and gradient_capture_context is None:
            raise ValueError(
                "`captured_gradient_outfeed` needs a `tape` or a `gradient_capture_context` that captures gradients. "
                "Leave it out."
            )
        self.variables = None if variables is None else list(variables)
        self.tape, self.gradient_capture_context = tape, gradient_capture_context
        self.captured_gradient_outfeed = captured_gradient_outfeed
        self._say_what_is_ignored()

    def _say_what_is_ignored(self) -> None:
        gradients, taken = "JAX computes gradients by itself", "Keras' optimizers take only gradients and variables"
        reasons = {
            "apply_gradients_args": taken,
            "apply_gradients_kwargs": taken,
            "tape": gradients,
            "gradient_capture_context": gradients,
            "captured_gradient_outfeed": gradients,
        }
        given = {name: getattr(self, name) for name in reasons}
        validate.no_effect({name: reasons[name] for name, value in given.items() if value not in (None, (), {})})


def _tuple(name: str, value: tuple[Any, ...] | None) -> tuple[Any, ...]:
    return validate.instance(name, value, tuple, optional=True) or ()
