"""What `openipu launch` tells the processes that it starts: environment variables, and their values in one place.

Both sides use this module: the launcher writes the variables, and the library in each process reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

COORDINATOR: Final = "OPENIPU_COORDINATOR"
NUM_INSTANCES: Final = "OPENIPU_NUM_INSTANCES"
INSTANCE: Final = "OPENIPU_INSTANCE"
NUM_REPLICAS: Final = "OPENIPU_NUM_REPLICAS"
IPUS_PER_REPLICA: Final = "OPENIPU_IPUS_PER_REPLICA"
LAUNCH_TIMEOUT: Final = "OPENIPU_LAUNCH_TIMEOUT"
LOCAL_INSTANCE: Final = "OPENIPU_LOCAL_INSTANCE"
RESTARTS: Final = "OPENIPU_RESTARTS"

REQUIRED: Final = (COORDINATOR, NUM_INSTANCES, INSTANCE)
VARIABLES: Final = (*REQUIRED, NUM_REPLICAS, IPUS_PER_REPLICA, LOCAL_INSTANCE, LAUNCH_TIMEOUT, RESTARTS)
TIMEOUT_SECONDS: Final = 300


@dataclass(frozen=True, slots=True)
class Instance:
    """One of the processes that run a script together, and what it knows of the others."""

    index: int
    count: int
    replicas: int
    """Of all instances together."""
    devices_per_replica: int
    coordinator: str
    """Where the instances meet, as `host:port`. Instance 0 opens it."""
    timeout: int = TIMEOUT_SECONDS
    """How many seconds instances wait for each other at the start."""
    restarts: int = 0
    """How many times all instances were started again after a failure."""
    local_index: int = 0
    """Its number among the instances of its host. It decides which of the host's GPUs are its own."""

    def __post_init__(self) -> None:
        check_division(self.count, self.replicas, self.devices_per_replica)
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"There is no instance {self.index} of {self.count}. Instances have numbers from 0 to {self.count - 1}."
            )

    @property
    def local_devices(self) -> int:
        """The devices of this instance."""
        return self.replicas * self.devices_per_replica // self.count

    @property
    def local_replicas(self) -> int:
        """The replicas with devices in this instance. It is 1 if a replica spans several instances."""
        return max(1, self.replicas // self.count)

    def to_environment(self) -> dict[str, str]:
        """The variables for this process."""
        return {
            COORDINATOR: self.coordinator,
            NUM_INSTANCES: str(self.count),
            INSTANCE: str(self.index),
            NUM_REPLICAS: str(self.replicas),
            IPUS_PER_REPLICA: str(self.devices_per_replica),
            LAUNCH_TIMEOUT: str(self.timeout),
            RESTARTS: str(self.restarts),
            LOCAL_INSTANCE: str(self.local_index),
        }


def from_environment(environ: Mapping[str, str]) -> Instance | None:
    """The instance that this process is, or None if it was not started as one of several.

    Another launcher can set the variables as well. It has to give `REQUIRED`; the others have defaults.
    """
    given = {name: value for name in VARIABLES if (value := environ.get(name))}
    if not given:
        return None
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        raise ValueError(
            f"{next(iter(given))} is set, but {missing[0]} is not. Start the script with `openipu launch`, which sets "
            f"all of them, or unset {', '.join(given)} to run it alone."
        )
    count = _whole(given, NUM_INSTANCES, least=1)
    index = _whole(given, INSTANCE, least=0)
    if index >= count:
        raise ValueError(
            f"{INSTANCE} is {index}, but {NUM_INSTANCES} is {count}. Give each process its own number from 0 to "
            f"{count - 1}."
        )
    replicas = _whole(given, NUM_REPLICAS, least=1, default=count)
    devices_per_replica = _whole(given, IPUS_PER_REPLICA, least=1, default=1)
    try:
        check_division(count, replicas, devices_per_replica)
    except ValueError as error:
        raise ValueError(f"{NUM_REPLICAS}, {IPUS_PER_REPLICA} and {NUM_INSTANCES} do not match. {error}") from None
    return Instance(
        index,
        count,
        replicas,
        devices_per_replica,
        _address(given[COORDINATOR]),
        _whole(given, LAUNCH_TIMEOUT, least=1, default=TIMEOUT_SECONDS),
        _whole(given, RESTARTS, least=0, default=0),
        _whole(given, LOCAL_INSTANCE, least=0, default=index),
    )


def check_division(count: int, replicas: int, devices_per_replica: int) -> None:
    """Raise unless each instance can hold whole replicas, or each replica whole instances."""
    if _divides(count, replicas, devices_per_replica):
        return
    total = replicas * devices_per_replica
    fewer = (other for other in range(min(count, total), 0, -1) if _divides(other, replicas, devices_per_replica))
    more = (other for other in range(count + 1, total + 1) if _divides(other, replicas, devices_per_replica))
    instances = " or ".join(str(other) for other in (next(fewer), next(more, None)) if other)
    raise ValueError(
        f"{_counted(replicas, 'replica')} of {_counted(devices_per_replica, 'device')} cannot be dealt evenly to "
        f"{count} instances. Use {-(-replicas // count) * count} replicas, or {instances} instances."
    )


def _divides(count: int, replicas: int, devices_per_replica: int) -> bool:
    if count <= replicas:
        return replicas % count == 0
    return count % replicas == 0 and devices_per_replica % (count // replicas) == 0


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _whole(given: Mapping[str, str], name: str, *, least: int, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ValueError(f"{name} is {text!r}. Give a whole number of {least} or more.")
    return int(text)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{COORDINATOR} is {text!r}. Give a host and a port, for example 127.0.0.1:29500.")
    return text
