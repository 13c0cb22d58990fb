"""Which instance of a script this process is, under the names of Graphcore's `popdist`.

>>> from openipu import popdist
>>> popdist.getInstanceIndex(), popdist.getNumInstances()
(0, 1)
"""

from . import tensorflow
from ._instance import (
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    init,
    isPopdistEnvSet,
)

__all__ = [
    "getInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "init",
    "isPopdistEnvSet",
    "tensorflow",
]
