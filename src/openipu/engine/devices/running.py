"""Which calls are running, such as `fit` of a model: what must not happen while they do is refused.

The state of a model is in a program while the program runs, so a second thread that uses the model would find nothing.
Programs belong to devices, so the devices must not be configured anew either.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import jax

changing = threading.RLock()
"""Held while devices are configured. No call can begin meanwhile."""

_running: list[RunningCall] = []
_forked = False


@dataclass(frozen=True, slots=True, eq=False)
class RunningCall:
    """A call that is running."""

    owner: object
    """The model or estimator that it uses."""
    name: str
    """The name of the method."""
    of: str
    """The owner, in words."""
    thread: threading.Thread

    @property
    def is_here(self) -> bool:
        """Whether it is a call of this thread."""
        return self.thread is threading.current_thread()

    def __str__(self) -> str:
        where = "" if self.is_here else f" in the thread {self.thread.name!r}"
        return f"`{self.name}` of {self.of}{where}"


@contextlib.contextmanager
def running(owner: object, name: str, of: str) -> Iterator[None]:
    """Until the block ends, `name` of `owner` is running. Raises if another thread is using the owner.

    Calls of the same thread may be inside each other: callbacks may evaluate the model that is being trained.
    """
    check_not_forked()
    call = RunningCall(owner, name, of, threading.current_thread())
    with changing:
        refuse_elsewhere(owner, name)
        _running.append(call)
    try:
        yield
    finally:
        _running.remove(call)


def calls(owner: object = None) -> list[RunningCall]:
    """The calls that are running now, of all owners or of one."""
    return [call for call in list(_running) if owner is None or call.owner is owner]


def refuse_elsewhere(owner: object, name: str) -> None:
    """Raise if another thread is using `owner`."""
    others = [call for call in calls(owner) if not call.is_here]
    if others:
        raise RuntimeError(
            f"{_sentence(others[0].of)} is busy: {others[0]} has not ended, so `{name}` cannot be called. Wait for "
            "that thread, or use a copy in each thread."
        )


def refuse_new_devices() -> None:
    """Raise if anything is running, because it would lose its devices."""
    if _running:
        raise RuntimeError(
            f"The devices cannot be configured while {_running[-1]} is running. Configure them before it begins or "
            "after it has ended."
        )


def check_not_forked() -> None:
    """Raise in a process that was forked after JAX had started: JAX's threads are missing in it, so it would hang."""
    if _forked:
        raise RuntimeError(
            f"This process ({os.getpid()}) was forked from one in which JAX had already started, so nothing can run "
            'here. Start processes with `multiprocessing.get_context("spawn")`, or fork before devices are configured '
            "and models are made."
        )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


_started = False


def _before_fork() -> None:
    global _started
    _started = _jax_has_started()


def _in_child() -> None:
    global _forked
    _forked = _forked or _started
    _running.clear()


def _jax_has_started() -> bool:
    """Whether JAX has started its devices. It has no function that tells, but refuses to change their number then."""
    count: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", count + 2)  # at least 1, because -1 stands for no number
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
