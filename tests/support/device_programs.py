"""What tests of device programs share."""

from __future__ import annotations

from typing import Any

from openipu.engine.program.user_program import user_program

from replication import SYSTEMS

DEVICE = "/device:IPU:0"


def compiled(fn: Any, replicas: int = 1) -> int:
    """How many programs were compiled for a function."""
    return len(user_program(fn, SYSTEMS.index(replicas)).programs)
