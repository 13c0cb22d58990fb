"""Several instances of a script that train one model."""

from . import host_collective_ops, popdist_strategy
from .host_collective_ops import allgather, allreduce, broadcast

__all__ = ["allgather", "allreduce", "broadcast", "host_collective_ops", "popdist_strategy"]
