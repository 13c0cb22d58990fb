"""The layers of `ipu.keras.layers`: Keras layers with the names, defaults and rules of the original.

They work in any Keras model, under a strategy or not, and are saved with it.
"""

from typing import Any

from openipu._unavailable import unavailable

from .ctc import CTCInferenceLayer, CTCLoss, CTCPredictionsLayer
from .dense import SerialDense
from .identity import AssumeEqualAcrossReplicas, RecomputationCheckpoint
from .lookup import Dropout, Embedding
from .normalization import GroupNormalization, InstanceNormalization, LayerNormalization
from .recurrent import PopnnGRU, PopnnLSTM

GRU = PopnnGRU
LSTM = PopnnLSTM
GroupNorm = GroupNormalization
InstanceNorm = InstanceNormalization
LayerNorm = LayerNormalization

__all__ = [
    "GRU",
    "LSTM",
    "AssumeEqualAcrossReplicas",
    "CTCInferenceLayer",
    "CTCLoss",
    "CTCPredictionsLayer",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "GroupNormalization",
    "InstanceNorm",
    "InstanceNormalization",
    "LayerNorm",
    "LayerNormalization",
    "PopnnGRU",
    "PopnnLSTM",
    "RecomputationCheckpoint",
    "SerialDense",
]


def __getattr__(name: str) -> Any:
    return unavailable("keras.layers", name)
