"""`set_ipu_config`, under the path that the original has."""

from __future__ import annotations

from openipu import _validate as validate
from openipu.config import IPUConfig
from openipu.engine.devices import group

from ._instance import getNumLocalReplicas, local_devices

__all__ = ["set_ipu_config"]


def set_ipu_config(config: IPUConfig, ipus_per_replica: int | None = None, configure_device: bool = True) -> None:
    """Set the devices of this instance's replicas in a configuration, and say which instance it is.

    >>> from openipu import popdist
    >>> config = ipu.config.IPUConfig()
    >>> popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
    >>> config.configure_ipu_system()

    Args:
        config: The configuration to change.
        ipus_per_replica: How many devices each replica has. The default is what the launcher was given.
        configure_device: Whether to set `auto_select_ipus`.
    """
    each = validate.count("ipus_per_replica", ipus_per_replica, optional=True)
    distribution = config.experimental.multi_replica_distribution
    distribution.process_count, distribution.process_index = group.count(), group.index()
    if validate.flag("configure_device", configure_device):
        config.auto_select_ipus = getNumLocalReplicas() * each if each else local_devices()
