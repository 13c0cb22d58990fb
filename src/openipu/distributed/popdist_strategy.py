"""`PopDistStrategy`: one model on the devices of all instances, on one machine or many."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from openipu import _validate as validate
from openipu.config import IPUConfig
from openipu.engine.devices import group, systems
from openipu.ipu_strategy import IPUStrategyV1
from openipu.popdist.tensorflow import set_ipu_config
from openipu.settings.frozen import Settings

__all__ = ["PopDistStrategy"]


class PopDistStrategy(IPUStrategyV1):
    """Runs the Keras models that are created inside its scope on the devices of all instances.

    >>> strategy = ipu.distributed.popdist_strategy.PopDistStrategy()
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])

    Start the script with `openipu launch`, or with Slurm, Open MPI or Kubernetes. All instances run the same script.
    The variables of instance 0 become those of all, and gradients are averaged over all replicas.

    Args:
        ipu_device: Which system of the configuration to use: "/device:IPU:N" is entry N of `auto_select_ipus`.
        add_ipu_cross_replica_reductions: Must be True. For instances that train apart, use `IPUStrategy`.
        enable_dataset_iterators: Ignored: feeds can read any iterable.
        enable_keras_extensions: If False, models created in the scope stay plain Keras.
        shard: Who divides the data. With "off", each instance reads its own part, for example
            `dataset.shard(popdist.getNumInstances(), popdist.getInstanceIndex())`. With "auto", all instances are given
            the same data, and each takes its batches by position, so that the order of all samples is that of a single
            process.
    """

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        add_ipu_cross_replica_reductions: bool = True,
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
        shard: Literal["off", "auto"] = "off",
    ) -> None:
        group.join()
        super().__init__(
            ipu_device,
            enable_dataset_iterators=enable_dataset_iterators,
            enable_keras_extensions=enable_keras_extensions,
        )
        if not validate.flag("add_ipu_cross_replica_reductions", add_ipu_cross_replica_reductions):
            raise ValueError(
                "`add_ipu_cross_replica_reductions=False` would let replicas train apart. Use `IPUStrategy` for that."
            )
        if shard not in ("off", "auto"):
            raise ValueError(f'`shard` is {shard!r}. Give "off" or "auto".')
        self._shard = shard

    @property
    def system(self) -> systems.System:
        """The devices of all instances under the current configuration."""
        return super().system.of_all_processes(self.own_data)

    @property
    def own_data(self) -> bool:
        """Whether each instance reads its own part of the data."""
        return self._shard == "off"

    @contextlib.contextmanager
    def scope(self) -> Iterator[PopDistStrategy]:
        """Use this strategy for models that are created until the `with` block ends."""
        self.check_configuration()
        with super().scope():
            yield self

    def check_configuration(self) -> None:
        """Raise an error unless all instances have the same configuration."""
        if group.count() > 1:
            system = super().system
            facts = {"devices": len(system.devices), "platform": system.platform, **_facts(system.settings)}
            group.agree("the configuration", facts, "Give all instances the same one.")

    @property
    def shared(self) -> bool:
        """Whether all instances train this strategy's models together."""
        return True

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas all instances have together."""
        instance = group.instance()
        return len(self.system.devices) // (instance.devices_per_replica if instance else 1)

    def update_ipu_config(self, config: IPUConfig) -> None:
        """Tell a configuration about the instances, as the original does."""
        set_ipu_config(config, configure_device=False)


def _facts(settings: Settings) -> dict[str, Any]:
    """What a configuration says, in types that JSON has. Folders may differ between hosts."""
    local = ("process", "dump_folder", "executable_cache")
    return {f.name: str(getattr(settings, f.name)) for f in dataclasses.fields(settings) if f.name not in local}
