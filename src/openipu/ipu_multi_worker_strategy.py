"""`IPUMultiWorkerStrategyV1`: the strategy for several workers that came before `PopDistStrategy`."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate
from openipu.distributed.popdist_strategy import PopDistStrategy
from openipu.engine.devices import group

__all__ = ["IPUMultiWorkerStrategyV1"]


class IPUMultiWorkerStrategyV1(PopDistStrategy):
    """`PopDistStrategy` for workers that a cluster resolver lists. New scripts use `PopDistStrategy`.

    >>> strategy = ipu.ipu_multi_worker_strategy.IPUMultiWorkerStrategyV1()
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])

    Args:
        cluster_resolver: Has `cluster_spec()` with the addresses of all workers and `task_id` with the number of this
            one, as `tf.distribute.cluster_resolver.TFConfigClusterResolver` does. Under `openipu launch` it may be
            None. The address of the first worker is where the workers meet.
        ipu_device: Which system of the configuration to use.
        variables_on_host: Has no effect: variables live on the host between executions anyway.
    """

    def __init__(
        self, cluster_resolver: Any = None, ipu_device: str = "/device:IPU:0", variables_on_host: bool = False
    ) -> None:
        if validate.flag("variables_on_host", variables_on_host):
            validate.no_effect({"variables_on_host": "variables live on the host between executions anyway"})
        if cluster_resolver is not None and group.instance() is None:
            workers = list(cluster_resolver.cluster_spec().as_dict().get("worker", ()))
            if not workers:
                raise ValueError("The cluster has no job `worker`. List the addresses of all workers under that name.")
            group.join_cluster(workers, validate.count("task_id", cluster_resolver.task_id, least=0))
        super().__init__(ipu_device)
