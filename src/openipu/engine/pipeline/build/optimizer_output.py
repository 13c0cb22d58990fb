"""What the `optimizer_function` of a pipeline of functions returns."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate

import jax
import keras


class OptimizerFunctionOutput:
    """What the `optimizer_function` of a training pipeline returns: the loss, and the optimizer that makes it small.

    Args:
        opt: A Keras optimizer, or one of `ipu.optimizers`.
        loss: The loss of one micro-batch: a tensor without axes.
        compute_gradients_args: Must be empty: JAX computes the gradients.
        compute_gradients_kwargs: Must be empty, too.
        apply_gradients_args: More arguments for the optimizer's `apply`.
        apply_gradients_kwargs: More keyword arguments for the optimizer's `apply`.
        variables: The variables to train; by default all trainable ones that the stages use.
        tape: Recorded gradients. There is no tape here; accepted for scripts that give one.
        gradient_capture_context: Captured gradients. There are none here; accepted for scripts that give it.
        captured_gradient_outfeed: Where captured gradients go; needs one of the two above.
    """

    def __init__(
        self,
        opt: Any,
        loss: Any,
        compute_gradients_args: tuple[Any, ...] | None = None,
        compute_gradients_kwargs: dict[str, Any] | None = None,
        apply_gradients_args: tuple[Any, ...] | None = None,
        apply_gradients_kwargs: dict[str, Any] | None = None,
        variables: Any = None,
        tape: Any = None,
        gradient_capture_context: Any = None,
        captured_gradient_outfeed: Any = None,
    ) -> None:
        if not isinstance(opt, keras.optimizers.Optimizer):
            raise TypeError(f"`opt` is {opt!r}. Give a Keras optimizer, or one of `ipu.optimizers`.")
        if not isinstance(loss, jax.Array | keras.KerasTensor):
            raise TypeError(f"`loss` is {loss!r}. Give a tensor.")
        self.opt, self.loss = opt, loss
        self.compute_gradients_args = _tuple("compute_gradients_args", compute_gradients_args)
        self.compute_gradients_kwargs = _keywords("compute_gradients_kwargs", compute_gradients_kwargs)
        self.apply_gradients_args = _tuple("apply_gradients_args", apply_gradients_args)
        self.apply_gradients_kwargs = _keywords("apply_gradients_kwargs", apply_gradients_kwargs)
        if self.compute_gradients_args or self.compute_gradients_kwargs:
            raise ValueError(
                "`compute_gradients_args` and `compute_gradients_kwargs` do not go with a Keras optimizer. Leave them "
                "out; `variables` says what to train."
            )
        if variables is not None and tape is not None:
            raise ValueError("`variables` and `tape` say the same thing in two ways. Give `variables`.")
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
        ignored = {
            "tape": tape,
            "gradient_capture_context": gradient_capture_context,
            "captured_gradient_outfeed": captured_gradient_outfeed,
        }
        validate.no_effect(
            {name: "JAX computes gradients by itself" for name, value in ignored.items() if value is not None}
        )


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, tuple):
        raise TypeError(f"`{name}` is {value!r}. Give a tuple.")
    return value or ()


def _keywords(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"`{name}` is {value!r}. Give a dictionary.")
    return dict(value or {})
