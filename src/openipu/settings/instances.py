"""One of the processes that run a script together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COORDINATOR = "OPENIPU_COORDINATOR"


@dataclass(frozen=True, slots=True)
class Instance:
    """One of the processes that run a script together."""

    index: int
    count: int
    replicas: int | None
    devices_per_replica: int
    coordinator: str
    timeout: float = 300
    restarts: int = 0


def from_environment(environ: Mapping[str, str]) -> Instance | None:
    """The instance that a launcher describes in the environment."""
    if "OPENIPU_COORDINATOR" not in environ:
        return None
    count = int(environ["OPENIPU_NUM_INSTANCES"])
    return Instance(
        int(environ["OPENIPU_INSTANCE"]),
        count,
        int(environ.get("OPENIPU_NUM_REPLICAS", count)),
        int(environ.get("OPENIPU_IPUS_PER_REPLICA", "1")),
        environ["OPENIPU_COORDINATOR"],
        float(environ.get("OPENIPU_LAUNCH_TIMEOUT", "300")),
        int(environ.get("OPENIPU_RESTARTS", "0")),
    )
