"""Operations for layers and training steps: those that replicas perform together, and others of the original.

They work for any number of devices: with one replica, a sum over replicas is just the value itself.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from openipu._unavailable import Unavailable, unavailable

if TYPE_CHECKING:
    from . import (
        all_to_all_op,
        control_flow_ops,
        cross_replica_ops,
        custom_ops,
        embedding_ops,
        functional_ops,
        image_ops,
        internal_ops,
        math_ops,
        nn_ops,
        pipelining_ops,
        rand_ops,
        reduce_scatter_op,
        replication_ops,
        statistics_ops,
        within_replica_ops,
    )

__all__ = [
    "all_to_all_op",
    "control_flow_ops",
    "cross_replica_ops",
    "custom_ops",
    "embedding_ops",
    "functional_ops",
    "image_ops",
    "internal_ops",
    "math_ops",
    "nn_ops",
    "pipelining_ops",
    "rand_ops",
    "reduce_scatter_op",
    "replication_ops",
    "statistics_ops",
    "within_replica_ops",
]


def __getattr__(name: str) -> ModuleType | Unavailable:
    """Load a module of operations on first use."""
    if name == "normalization_ops":  # it makes layers, so it is above this folder
        return importlib.import_module(f"openipu.{name}")
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    if name.endswith(("_op", "_ops", "_runtime")):
        return unavailable("", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, whether loaded yet or not."""
    return sorted({*globals(), *__all__})
