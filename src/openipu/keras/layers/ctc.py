"""Connectionist temporal classification (CTC): labels of sequences without knowing where each label is."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Array
from openipu.keras._registered import registered
from openipu.ops import nn_ops

import keras


class _Ctc(keras.Layer):
    """What the layers share.

    Args:
        blank_index: The class that stands for no label.
        from_logits: Whether the data are any numbers, or logarithms of probabilities.
        **kwargs: Arguments of every Keras layer.
    """

    def __init__(self, blank_index: int = 0, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blank_index = validate.count("blank_index", blank_index, least=None)
        self.from_logits = validate.flag("from_logits", from_logits)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal layer."""
        return {**super().get_config(), "blank_index": self.blank_index, "from_logits": self.from_logits}


@registered
class CTCLoss(_Ctc):
    """The CTC loss of each sample, as a layer: a model with this output is compiled with the loss `lambda _, y: y`.

    >>> labels, lengths = np.array([[1, 2]]), (np.array([2]), np.array([3]))
    >>> logits = 5.0 * np.eye(3)[[1, 0, 2]][:, None]  # three time steps of one sample: label 1, blank, label 2
    >>> print(ipu.keras.layers.CTCLoss(from_logits=True)(labels, logits, *lengths).round(2))
    [0.03]

    Args:
        blank_index: The class that stands for no label.
        from_logits: Whether the data are any numbers, or logarithms of probabilities.
        **kwargs: Arguments of every Keras layer.
    """

    def call(self, labels: Array, data: Array, label_length: Array, data_length: Array) -> Array:
        """The losses, of shape (batch,).

        Args:
            labels: Whole numbers of shape (batch, longest label).
            data: Of shape (longest time, batch, classes).
            label_length: How many labels each sample has, of shape (batch,).
            data_length: How many time steps each sample has, of shape (batch,).
        """
        loss = nn_ops.ctc_loss_v2 if self.from_logits else nn_ops.ctc_loss_with_log_probs
        return loss(labels, data, label_length, data_length, self.blank_index)

    def compute_output_spec(
        self,
        labels: keras.KerasTensor,
        data: keras.KerasTensor,
        label_length: keras.KerasTensor,  # noqa: ARG002
        data_length: keras.KerasTensor,  # noqa: ARG002
    ) -> keras.KerasTensor:
        """One number for each sample. The batch size need not be known, so nothing is computed for it."""
        return keras.KerasTensor((labels.shape[0],), data.dtype)


@registered
class CTCInferenceLayer(_Ctc):
    """The most probable sequences of labels, as `ipu.nn_ops.ctc_beam_search_decoder` finds them.

    >>> logits = 5.0 * np.eye(3)[[1, 0, 2]][:, None]  # three time steps of one sample: label 1, blank, label 2
    >>> scores, lengths, labels = ipu.keras.layers.CTCInferenceLayer(from_logits=True)(logits, np.array([3]))
    >>> print(labels)
    [[[1 2 0]]]

    Args:
        blank_index: The class that stands for no label.
        beam_width: How many sequences are followed.
        top_paths: How many of them are returned.
        from_logits: Whether the data are any numbers, or logarithms of probabilities.
        **kwargs: Arguments of every Keras layer.
    """

    def __init__(
        self,
        blank_index: int = 0,
        beam_width: int = 100,
        top_paths: int = 1,
        from_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(blank_index, from_logits, **kwargs)
        self.beam_width = validate.count("beam_width", beam_width)
        self.top_paths = validate.count("top_paths", top_paths, most=self.beam_width)

    def decoded(self, data: Array, data_length: Array) -> tuple[Array, Array, Array]:
        """Negative logarithms of probabilities, lengths, and labels followed by blanks."""
        find = nn_ops.ctc_beam_search_decoder if self.from_logits else nn_ops.ctc_beam_search_decoder_with_log_probs
        return find(data, data_length, self.beam_width, self.top_paths, self.blank_index)

    def call(self, data: Array, data_length: Array) -> Any:
        """Negative logarithms of probabilities, lengths, and labels followed by blanks.

        Args:
            data: Of shape (longest time, batch, classes).
            data_length: How many time steps each sample has, of shape (batch,).
        """
        return self.decoded(data, data_length)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal layer."""
        return {**super().get_config(), "beam_width": self.beam_width, "top_paths": self.top_paths}


@registered
class CTCPredictionsLayer(CTCInferenceLayer):
    """The most probable sequence of labels of each sample, followed by blanks, of shape (batch, longest time).

    The arguments are those of `CTCInferenceLayer`.

    >>> logits = 5.0 * np.eye(3)[[1, 0, 2]][:, None]  # three time steps of one sample: label 1, blank, label 2
    >>> print(ipu.keras.layers.CTCPredictionsLayer(from_logits=True)(logits, np.array([3])))
    [[1 2 0]]
    """

    def call(self, data: Array, data_length: Array) -> Any:
        """The labels.

        Args:
            data: Of shape (longest time, batch, classes).
            data_length: How many time steps each sample has, of shape (batch,).
        """
        _, _, labels = self.decoded(data, data_length)
        return labels[:, 0]
