"""Values of all instances, combined on their hosts. All instances make the same calls in the same order."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate
from openipu.engine.devices import group
from openipu.engine.devices.transfer import of_all_processes

import jax
import numpy as np

__all__ = ["allgather", "allreduce", "broadcast"]


def allreduce(value: Any, reduce_op: object = "SUM", tensor_name: str | None = None) -> Any:
    """The sum or mean of the values of all instances.

    >>> print(ipu.distributed.allreduce(np.array([1.0, 2.0]), "MEAN"))  # of one instance
    [1. 2.]

    Args:
        value: An array or number, or a structure of them, with the same shapes in all instances.
        reduce_op: "SUM" or "MEAN", as a string or as a member of an enumeration such as `tf.distribute.ReduceOp`.
        tensor_name: Ignored: values are matched by the order of calls.
    """
    del tensor_name
    name = str(getattr(reduce_op, "name", reduce_op)).upper()
    if name not in ("SUM", "MEAN"):
        raise ValueError(f'`reduce_op` is {reduce_op!r}. Give "SUM" or "MEAN".')
    combine = np.sum if name == "SUM" else np.mean
    return jax.tree.map(lambda a: combine(a, axis=0, dtype=_result(a, name)), _of_all("allreduce", value))


def broadcast(value: Any, root_rank: int = 0, tensor_name: str | None = None) -> Any:
    """The value of instance `root_rank`, in all instances. Its structure and shapes are the same in all of them.

    >>> seed = ipu.distributed.broadcast(np.array(7))  # that of instance 0, in all instances
    >>> int(seed)
    7
    """
    del tensor_name
    root = validate.count("root_rank", root_rank, least=0)
    if root >= group.count():
        raise ValueError(f"`root_rank` is {root}, but there are {group.count()} instances, numbered from 0.")
    return jax.tree.map(lambda a: a[root], _of_all("broadcast", value))


def allgather(value: Any, tensor_name: str | None = None) -> Any:
    """The values of all instances, stacked along a new first axis.

    >>> ipu.distributed.allgather(np.array([1.0, 2.0])).shape  # (instances, 2)
    (1, 2)
    """
    del tensor_name
    return _of_all("allgather", value)


def _of_all(call: str, value: Any) -> Any:
    """The values of all instances, after a check that they have the same shapes."""
    leaves, structure = jax.tree.flatten(value)
    arrays = [np.asarray(leaf) for leaf in leaves]
    if group.count() == 1:
        return jax.tree.unflatten(structure, [a[None] for a in arrays])
    shapes = [f"{a.dtype.name}{list(a.shape)}" for a in arrays]
    facts = {f"The value given to `{call}`": f"{structure} of {', '.join(shapes)}"}
    group.agree(call, facts, "Give values of the same shapes.")
    return jax.tree.unflatten(structure, [of_all_processes(a) for a in arrays])


def _result(array: np.ndarray, name: str) -> np.dtype:
    return array.dtype if name == "SUM" or np.issubdtype(array.dtype, np.inexact) else np.dtype(np.float64)
