"""Operations that replicas perform together, for layers and training steps.

They work for any number of devices: with one replica, a sum over replicas is just the value itself.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        all_to_all_op,
        cross_replica_ops,
        pipelining_ops,
        reduce_scatter_op,
        replication_ops,
        within_replica_ops,
    )

__all__ = [
    "all_to_all_op",
    "cross_replica_ops",
    "pipelining_ops",
    "reduce_scatter_op",
    "replication_ops",
    "within_replica_ops",
]


def __getattr__(name: str) -> ModuleType:
    """Load a module of operations on first use."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, whether loaded yet or not."""
    return sorted({*globals(), *__all__})
