"""The group of processes (instances) that run one script together, and the messages between them.

JAX carries compiled programs over processes: gloo between CPUs, NCCL between GPUs. It also has a service through which
processes find each other. This file joins that service, and sends the few things that hosts must agree on through its
key-value store. Messages are JSON, so nothing that arrives is ever executed.

[Note: loopback] JAX lets gloo listen at the address of the machine's name. Instances that were launched on one machine
need no network, so there we make gloo's part ourselves, on loopback. JAX has no option for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from openipu.engine.interrupts import let_through
from openipu.settings.instances import VARIABLES, Instance, from_environment

import jax
import jax.extend.backend

from . import leaving, standing

SLICE: Final = 1.0
"""Seconds between two looks at whether Ctrl-C was pressed while waiting for a message."""
HEARTBEAT_SECONDS: Final = 10
"""A process that is silent for this long is dead, and the others end."""
PATIENT_SECONDS: Final = 60
"""The same on one machine, where the launcher notices dead ones at once. One that was stopped may go on."""
SHUTDOWN_SECONDS: Final = 7 * 24 * 3600
"""How long a process at the end of its script waits for the others, one of which may still write files or evaluate."""
LOOPBACK: Final = "127.0.0.1"

T = TypeVar("T")

_jax: Any = jax
_joined: Instance | None = None
_launched = False


def instance() -> Instance | None:
    """This process as a member of a group. None if it runs alone."""
    return _joined


def launched() -> Instance | None:
    """This process as `openipu launch` has described it. None if it runs alone, or if a scheduler has started it."""
    return _joined if _launched else None


def index() -> int:
    """The number of this process in its group; 0 if it runs alone."""
    return _joined.index if _joined else 0


def count() -> int:
    """How many processes run together."""
    return _joined.count if _joined else 1


def on_one_machine() -> bool:
    """Whether a launcher has started all processes of the group on this machine."""
    return _joined is not None and _launched and _host(_joined) == LOOPBACK


def _host(member: Instance) -> str:
    """Where the group meets."""
    return member.coordinator.rpartition(":")[0]


def join() -> None:
    """Become a member of the group that a launcher or scheduler has started, if one has.

    Waits for all others. This must happen before JAX is used.
    """
    global _launched
    if _joined is not None:
        return
    launched = from_environment(os.environ)
    if launched is None:
        _join(_join_scheduled)
        return
    for name in VARIABLES:  # processes that this one starts, such as workers that read data, are no instances
        os.environ.pop(name, None)
    _launched = True
    _join(lambda: _join_launched(launched))


def join_cluster(workers: list[str], number: int) -> None:
    """Join a group whose members are known by their addresses. The first one is the coordinator."""
    _join(lambda: _join_launched(Instance(number, len(workers), len(workers), 1, workers[0])))


def _join(meet: Callable[[], Instance | None]) -> None:
    global _joined
    _jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, which is to end us
    _joined = meet()
    if on_one_machine():
        _share_programs()
    if count() > 1:
        leaving.prepare(_state().client, index(), count(), _launched)
        packages = {name: _version(name) for name in ("openipu", "jax", "jaxlib", "keras", "numpy")}
        agree("versions", {"python": platform.python_version(), **packages}, "Install the same versions on all hosts.")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _join_launched(launched: Instance) -> Instance:
    if launched.count == 1:
        return launched
    host, port = _host(launched), launched.coordinator.rpartition(":")[2]
    if host == LOOPBACK:
        jax.extend.backend.register_backend_factory("cpu", _cpu_on_loopback, fail_quietly=False)
    # JAX would end the process with a stack of C++ functions.
    alarm = threading.Timer(launched.timeout, _nobody_came, [launched])
    alarm.start()
    try:
        _jax.distributed.initialize(
            launched.coordinator,
            launched.count,
            launched.index,
            _own_gpus(launched),
            cluster_detection_method="deactivate",
            initialization_timeout=launched.timeout + 60,
            heartbeat_timeout_seconds=PATIENT_SECONDS if host == LOOPBACK and _launched else HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            coordinator_bind_address=launched.coordinator if host == LOOPBACK else f"[::]:{port}",
        )
    except RuntimeError as error:
        raise _too_late(error) from error
    finally:
        alarm.cancel()
    return launched


def _too_late(error: RuntimeError) -> RuntimeError:
    if "before any JAX calls" not in str(error):
        return error
    return RuntimeError(
        "JAX was used before the instances had found each other. Import openipu first in the script, and "
        "under a scheduler call `popdist.init()` next."
    )


def _nobody_came(launched: Instance) -> None:
    sys.stderr.write(
        f"Instance {launched.index} of {launched.count} waited {launched.timeout} s at {launched.coordinator}, but not "
        "all instances arrived. Check that all of them have started, or give a longer `--timeout`.\n"
    )
    sys.stderr.flush()
    os._exit(1)


def _join_scheduled() -> Instance | None:
    """Join the group of a scheduler that JAX knows: Slurm, Open MPI, Kubernetes. None if there is no such scheduler."""
    if not _is_scheduled():
        return None
    try:
        _jax.distributed.initialize(
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=SHUTDOWN_SECONDS
        )
    except RuntimeError as error:
        raise _too_late(error) from error
    state = _state()
    return Instance(state.process_id, state.num_processes, state.num_processes, 1, state.coordinator_address)


def _is_scheduled() -> bool:
    """Whether a scheduler that JAX knows has started this process. `initialize` tells it only before JAX is used."""
    from jax._src.clusters import ClusterEnv

    return any(not kind.opt_in_only_method and kind.is_env_present() for kind in ClusterEnv._cluster_types)


def _own_gpus(launched: Instance) -> list[int]:
    """The numbers of this instance's GPUs on its host, if it has any."""
    first = launched.local_index * launched.local_devices
    return list(range(first, first + launched.local_devices))


def _cpu_on_loopback() -> Any:
    """JAX's CPU client, whose collectives listen on loopback. See [Note: loopback]."""
    from jax._src import xla_bridge
    from jaxlib import _jax as xla

    return xla_bridge.make_cpu_client(xla.make_gloo_tcp_collectives(_state().client, hostname=LOOPBACK))


def _share_programs() -> None:
    """Give a program the same key in JAX's cache in all instances on this machine.

    JAX puts the devices as one process sees them into the key, so only instance 0, which writes the entries, would ever
    find one. There is no option for that.
    """
    from jax._src import cache_key

    def hash_devices(key: Any, devices: Any, *_: object) -> None:
        kinds = [device.device_kind for device in devices.flat]
        key.update(repr((platform.node(), kinds)).encode())

    keys: Any = cache_key
    keys._hash_accelerator_config = hash_devices


def _state() -> Any:
    """What JAX knows about the group. It has no public way to the messages."""
    from jax._src import distributed

    return distributed.global_state


# --- messages --------------------------------------------------------------------------------------------------------


def exchange(what: str, value: Any) -> list[Any]:
    """The values of all processes, in order. Every process calls this at the same point, which `what` describes."""
    if count() == 1:
        return [value]
    client, number = _state().client, _send(what, value)
    with standing.waiting(what):
        answers = [json.loads(_wait_for(client, _key(number, other), other, what)) for other in range(count())]
    # Whoever has sent this message has read all of the one before.
    if number:
        client.key_value_delete(_key(number - 1, index()))
    for other, (_, _, failure) in enumerate(answers):
        if failure is not None:
            raise RuntimeError(f"Instance {other} failed at {what!r}: {failure}")
    for other, (point, _, _) in enumerate(answers):
        if point != what:
            raise RuntimeError(
                f"Instance {index()} is at {what!r}, but instance {other} is at {point!r}. All instances must make the "
                "same calls in the same order."
            )
    return [answer for _, answer, _ in answers]


@contextlib.contextmanager
def failing_together(what: str) -> Iterator[None]:
    """Before an `exchange` for `what`: an error in the block is raised here, and told to all that come to it."""
    try:
        yield
    except Exception as error:
        if count() > 1:
            _send(what, None, f"{type(error).__name__}: {error}")
        raise


def _send(what: str, value: Any, failure: str | None = None) -> int:
    """Send a message to all processes. Returns its number."""
    number = standing.sending()
    _state().client.key_value_set(_key(number, index()), json.dumps([what, value, failure]))
    return number


def agree(what: str, facts: dict[str, Any], remedy: str) -> None:
    """Raise if any of the facts is not the same in all processes."""
    found = exchange(what, facts)
    for other, theirs in enumerate(found):
        for name in {**found[0], **theirs}:
            ours, its = (values.get(name, "missing") for values in (found[0], theirs))
            if ours != its:
                raise ValueError(f"{name} is {ours} in instance 0, but {its} in instance {other}. {remedy}")


def agree_on_bytes(what: str, name: str, parts: Iterable[bytes], remedy: str) -> None:
    """Raise if the bytes, which `name` describes, are not the same in all processes. Only their digest is sent."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    agree(what, {f"The digest of {name}": digest.hexdigest()}, remedy)


def of_first(what: str, value: Any) -> Any:
    """The value of instance 0."""
    return exchange(what, value if index() == 0 else None)[0]


def any_of(what: str, value: bool) -> bool:
    """Whether it is true in any process."""
    return any(exchange(what, bool(value)))


def first_then_others(what: str, make: Callable[[], T]) -> T:
    """Let instance 0 make something, and then each of the others."""
    if index() > 0:
        exchange(what, None)
        return make()
    try:
        return make()
    finally:
        exchange(what, None)


def _key(number: int, owner: int) -> str:
    return f"openipu/{number}/{owner}"


def _wait_for(client: Any, key: str, other: int, what: str) -> str:
    """The message of another process. Ctrl-C is let through while waiting.

    If the other one has ended with an error, the launcher ends this process, too, and nothing may come before that:
    the first instance that ends with an error is the one that it tells about.
    """
    began, ended = time.monotonic(), None
    while True:
        try:
            return str(client.blocking_key_value_get(key, int(1000 * SLICE)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                waited = time.monotonic() - began
                raise RuntimeError(
                    f"Instance {other} did not answer at {what!r} after {waited:.0f} s: {str(error).splitlines()[0]}"
                ) from error
        if ended is not None and not (ended and _launched):
            how = f"has ended with exit code {ended}" if ended else "is at the end of its script"
            raise RuntimeError(
                f"Instance {index()} is at {what!r}, but instance {other} {how}. All instances must make the same "
                "calls in the same order."
            )
        let_through()
        ended = standing.end_of(client, other)  # its message may have come before that, so look once more


# --- agreements without waiting --------------------------------------------------------------------------------------


def propose(what: str, number: int) -> None:
    """Propose a number to all processes, unless one has been proposed. It is there when this returns."""
    try:
        _state().client.key_value_set(f"openipu/{what}", str(number))
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise


def proposed(what: str) -> int | None:
    """The number that a process has proposed; None if none has. Does not wait."""
    try:
        return int(_state().client.key_value_try_get(f"openipu/{what}"))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def occasion() -> int:
    """A number that is the same in all processes, if they are at the same point, and larger at a later one."""
    return standing.here().sent
