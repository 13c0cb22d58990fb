"""IPUConfig and what belongs to it: which devices to use, and how programs are compiled for them.

>>> config = IPUConfig()
>>> config.auto_select_ipus = 4
>>> config.configure_ipu_system()
"""

from openipu.config.enums import (
    DeviceConnectionType,
    ExecutionProfileType,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
)
from openipu.config.environment import running_on_ipu_model
from openipu.config.option import Option
from openipu.config.options import OPTIONS
from openipu.config.system import configure_ipu_system, get_ipu_config, reset_ipu_configuration
from openipu.config.tree import AttributeMetadata, IPUConfig

__all__ = [
    "OPTIONS",
    "AttributeMetadata",
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUConfig",
    "MergeRemoteBuffersBehaviour",
    "Option",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "StochasticRoundingBehaviour",
    "configure_ipu_system",
    "get_ipu_config",
    "reset_ipu_configuration",
    "running_on_ipu_model",
]
