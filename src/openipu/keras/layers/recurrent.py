"""LSTM and GRU with the arguments of the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.accumulation import floating
from openipu.engine.types import Array, Tree
from openipu.keras._registered import registered

import keras
from jax.typing import DTypeLike
from keras import ops

from ._arguments import Seed, first_seed, no_effect, refuse, seed_of, set_state

Activation = Callable[[Array], Array]
Shape = Sequence[int | None]

_UNSUPPORTED: dict[str, object] = {
    "use_bias": True,
    "kernel_regularizer": None,
    "recurrent_regularizer": None,
    "bias_regularizer": None,
    "activity_regularizer": None,
    "kernel_constraint": None,
    "recurrent_constraint": None,
    "bias_constraint": None,
    "recurrent_dropout": 0.0,
    "go_backwards": False,
    "unroll": False,
}
"""What the original does not have, with the only values that can be given."""


@registered
class Orthogonal(keras.initializers.Orthogonal):
    """`keras.initializers.Orthogonal` for weights of any precision: JAX finds orthogonal matrices in float32 only."""

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> Any:
        """A new weight."""
        return ops.cast(super().__call__(shape, "float32"), dtype or keras.config.floatx())


class _Recurrent(keras.layers.RNN):
    """What `PopnnLSTM` and `PopnnGRU` add to Keras' layers: arguments, and sequences whose first axis is time."""

    keras_name: str
    """The layer of Keras that this one extends."""

    def __init__(
        self,
        units: int,
        activation: str | Activation | None = "tanh",
        recurrent_activation: str | Activation | None = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        recurrent_initializer: str | keras.initializers.Initializer = "orthogonal",
        bias_initializer: str | keras.initializers.Initializer = "zeros",
        *,
        dropout: float = 0.0,
        dropout_seed: Seed = None,
        implementation: int = 2,
        partials_dtype: DTypeLike = "float32",
        seed: int | None = None,
        time_major: bool = False,
        options: Mapping[str, Any] | None = None,
        options_bwd: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"use_bias": use_bias, **kwargs}
        refuse(self.keras_name, {name: (given.get(name, only), only) for name, only in _UNSUPPORTED.items()})
        seed = validate.count("seed", seed, optional=True, least=None)
        of_dropout = seed_of("dropout_seed", dropout_seed)
        if seed is not None and kernel_initializer == "glorot_uniform":
            kernel_initializer = keras.initializers.GlorotUniform(seed)
        if recurrent_initializer == "orthogonal":
            recurrent_initializer = Orthogonal()
        super().__init__(
            units, activation, recurrent_activation, use_bias, kernel_initializer, recurrent_initializer,
            bias_initializer, dropout=validate.number("dropout", dropout, least=0.0, below=1.0),
            seed=first_seed(of_dropout), **kwargs,
        )  # fmt: skip
        set_state(self.cell.seed_generator, of_dropout)
        self.seed, self.dropout_seed = seed, of_dropout
        self.implementation = validate.choice("implementation", implementation, (1, 2))
        self.time_major = validate.flag("time_major", time_major)
        self.partials_dtype = floating(partials_dtype, "`partials_dtype`", "sums are computed")
        self.options = validate.mapping("options", options, optional=True)
        self.options_bwd = validate.mapping("options_bwd", options_bwd, optional=True)
        no_effect({
            "partials_dtype": (self.partials_dtype != "float32", "XLA chooses how it adds up"),
            "options": (self.options, "XLA has no such options"),
            "options_bwd": (self.options_bwd, "XLA has no such options"),
        })  # fmt: skip

    def build(self, sequences_shape: Shape, initial_state_shape: Tree = None) -> None:
        """Make the weights."""
        super().build(self._swapped_shape(sequences_shape), initial_state_shape)

    def call(
        self, sequences: Array, initial_state: Tree = None, mask: Array | None = None, training: bool = False
    ) -> Tree:
        """The last output or all outputs, with the last state if it is asked for."""
        if not self.time_major:
            return super().call(sequences, initial_state=initial_state, mask=mask, training=training)
        mask = None if mask is None else ops.swapaxes(mask, 0, 1)
        found = super().call(ops.swapaxes(sequences, 0, 1), initial_state=initial_state, mask=mask, training=training)
        if not self.return_sequences:
            return found
        if not self.return_state:
            return ops.swapaxes(found, 0, 1)
        outputs, *state = found
        return ops.swapaxes(outputs, 0, 1), *state

    def compute_output_shape(self, sequences_shape: Shape, initial_state_shape: Tree = None) -> Tree:
        """The shapes of what `call` returns."""
        found = super().compute_output_shape(self._swapped_shape(sequences_shape), initial_state_shape)
        if not self.return_sequences:
            return found
        if not self.return_state:
            return self._swapped_shape(found)
        outputs, *state = found
        return self._swapped_shape(outputs), *state

    def _swapped_shape(self, shape: Shape) -> Shape:
        return (shape[1], shape[0], *shape[2:]) if self.time_major else shape

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal layer."""
        own = ("seed", "dropout_seed", "implementation", "time_major", "partials_dtype", "options", "options_bwd")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}


@registered
class PopnnLSTM(_Recurrent, keras.layers.LSTM):
    """`keras.layers.LSTM` with the arguments of the original.

    Those that an IPU does not have must be left as they are: biases are used; there are no regularizers, constraints,
    `recurrent_dropout`, `go_backwards` or `unroll`.

    >>> ipu.keras.layers.LSTM(16, return_sequences=True)(np.ones((2, 5, 4), "float32")).shape
    (2, 5, 16)

    Args:
        units: The size of the outputs.
        activation: The activation of outputs.
        recurrent_activation: The activation of gates.
        use_bias: True.
        kernel_initializer: Makes the weights of the inputs.
        recurrent_initializer: Makes the weights of the state.
        bias_initializer: Makes the biases.
        dropout: The part of the inputs that is dropped in training, the same one in each time step.
        dropout_seed: The seed of dropout: two whole numbers, or one.
        implementation: 1 or 2, which mean the same.
        partials_dtype: The dtype of partial sums on an IPU. It has no effect here.
        seed: The seed of the default `kernel_initializer`.
        time_major: Whether inputs, and outputs if there is one for each step, are (time, batch, features).
        options: Options of Poplar. They have no effect here.
        options_bwd: Options of Poplar. They have no effect here.
        **kwargs: Other arguments of the Keras layer: `return_sequences`, `return_state`, `stateful`, ...
    """

    keras_name = "LSTM"


@registered
class PopnnGRU(_Recurrent, keras.layers.GRU):
    """`keras.layers.GRU` with the arguments of `PopnnLSTM`, and `reset_after`, which is True by default.

    >>> ipu.keras.layers.GRU(16)(np.ones((2, 5, 4), "float32")).shape
    (2, 16)
    """

    keras_name = "GRU"
