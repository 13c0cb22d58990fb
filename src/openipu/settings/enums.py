"""The enums that options of IPUConfig take their values from."""

from enum import Enum


class DeviceConnectionType(Enum):
    """When the devices are attached.

    ALWAYS: By `configure_ipu_system`, so that a missing device is reported there.
    ON_DEMAND: When a program first needs them.
    PRE_COMPILE: Programs are compiled into the executable cache but not run; their results are zeros.
    NEVER: Programs are compiled but never run.

    >>> config = ipu.config.IPUConfig()
    >>> config.device_connection.type = ipu.config.DeviceConnectionType.ON_DEMAND
    """

    ALWAYS = 0
    ON_DEMAND = 1
    PRE_COMPILE = 2
    NEVER = 3


class SelectionOrder(Enum):
    """The order in which devices are used, seen as a grid with two columns: 0 and 1, 2 and 3, ...

    AUTO: OpenIPU decides; it takes ZIGZAG.
    ZIGZAG: Row by row, as XLA numbers them: 0, 1, 2, 3, 4, 5, 6, 7.
    SNAKE: Row by row in alternating directions, so that successive devices are neighbours: 0, 1, 3, 2, 4, 5, 7, 6.
    HOOF: Down one column and up the other, so that the first and last are neighbours too: 0, 2, 4, 6, 7, 5, 3, 1.

    >>> config = ipu.config.IPUConfig()
    >>> config.selection_order = ipu.config.SelectionOrder.SNAKE
    """

    AUTO = 0
    ZIGZAG = 1
    SNAKE = 2
    HOOF = 3


class StochasticRoundingBehaviour(Enum):
    """Where float16 results are rounded up or down at random instead of to the nearest value.

    >>> config = ipu.config.IPUConfig()
    >>> config.floating_point_behaviour.esr = ipu.config.StochasticRoundingBehaviour.OFF
    """

    OFF = 0
    ON = 1
    REPLICA_IDENTICAL_ONLY = 2

    @classmethod
    def from_bool(cls, value: bool) -> "StochasticRoundingBehaviour":
        """ON for True and OFF for False."""
        return cls.ON if value else cls.OFF


class MergeRemoteBuffersBehaviour(Enum):
    """Whether buffers of the same shape in remote memory are merged.

    >>> config = ipu.config.IPUConfig()
    >>> config.optimizations.merge_remote_buffers = ipu.config.MergeRemoteBuffersBehaviour.MERGE
    """

    NO_MERGING = 0
    MERGE = 1
    IF_BENEFICIAL = 2


class SchedulingAlgorithm(Enum):
    """How the compiler orders the operations of a program.

    >>> config = ipu.config.IPUConfig()
    >>> config.scheduling.algorithm = ipu.config.SchedulingAlgorithm.CLUSTERING
    """

    CHOOSE_BEST = 0
    CLUSTERING = 1
    POST_ORDER = 2
    LOOK_AHEAD = 3
    SHORTEST_PATH = 4


class ExecutionProfileType(Enum):
    """How detailed a profile is. No option uses it; scripts written for older releases import it.

    >>> ipu.config.ExecutionProfileType.NO_PROFILE.value
    0
    """

    NO_PROFILE = 0
    DEVICE_PROFILE = 1
    IPU_PROFILE = 2
    TILE_PROFILE = 3
