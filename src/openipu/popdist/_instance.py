"""Which instance of a script this process is."""

from __future__ import annotations

from openipu.engine.devices import group, systems


def init() -> None:
    """Join the other instances. Call it before JAX is used; under `openipu launch` it has already happened.

    >>> from openipu import popdist
    >>> popdist.init()
    """
    group.join()


def isPopdistEnvSet() -> bool:  # noqa: N802 - the name of the original
    """Whether this process is one of several instances.

    >>> from openipu import popdist
    >>> popdist.isPopdistEnvSet()
    False
    """
    return group.instance() is not None


def getNumInstances() -> int:  # noqa: N802
    """How many instances run together.

    >>> from openipu import popdist
    >>> popdist.getNumInstances()
    1
    """
    return group.count()


def getInstanceIndex() -> int:  # noqa: N802
    """The number of this instance, from 0.

    >>> from openipu import popdist
    >>> first = popdist.getInstanceIndex() == 0
    """
    return group.index()


def getNumTotalReplicas() -> int:  # noqa: N802
    """How many replicas all instances have together.

    >>> from openipu import popdist
    >>> popdist.getNumTotalReplicas()
    2
    """
    return local_devices() * group.count() // getNumIpusPerReplica()


def getNumLocalReplicas() -> int:  # noqa: N802
    """How many replicas this instance has. It is 0 if each replica lies in several instances.

    >>> from openipu import popdist
    >>> popdist.getNumLocalReplicas()
    2
    """
    return local_devices() // getNumIpusPerReplica()


def getNumIpusPerReplica() -> int:  # noqa: N802
    """How many devices each replica has.

    >>> from openipu import popdist
    >>> popdist.getNumIpusPerReplica()
    1
    """
    instance = group.instance()
    return instance.devices_per_replica if instance else 1


def local_devices() -> int:
    """How many devices this instance has: as the launcher says, else as the configuration does."""
    launched = group.launched()
    if launched is not None:
        return launched.local_devices
    settings = systems.configured()
    return settings.device_count if settings else 1
