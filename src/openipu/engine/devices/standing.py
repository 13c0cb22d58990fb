"""Where each process of a group stands, and whether all of them can go on.

The processes of a group do two things together, all in the same order: they send messages, and they launch programs on
the devices of all. If one of them does something else, the others wait for it, perhaps inside a program, where nothing
can be raised. So a process that has not moved for a while tells the others where it stands, and looks where they are.

[Note: what is certain] A standing is never taken back: "message 7 came after 3 programs" stays true. So a process that
has launched a fourth program, and has not sent its message 7, can never meet the other one, however long both wait. How
long something takes is no reason to give up.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import jax

LOOK_SECONDS: Final = 1.0
"""How often a process looks whether it has moved."""
_FOLDER: Final = "openipu/standing/"
_KEPT: Final = 16
"""The number of programs whose names are kept: more than can be under way at a time."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a process has come."""

    sent: int = 0
    """How many messages it has sent."""
    launched: int = 0
    """How many programs it has launched on the devices of all processes."""
    program: str = ""
    """The last of them."""
    before: int = 0
    """How many of them came before its last message."""
    at: str | None = None
    """What its last message was about, if it waits for the answers."""
    ended: int | None = None
    """Its exit code, if it is at the end of its script."""


_lock = threading.Lock()
_here = Standing()
_programs: deque[tuple[int, str]] = deque(maxlen=_KEPT)


def here() -> Standing:
    """Where this process stands."""
    return _here


def launching(program: str) -> None:
    """Note that this process launches a program on the devices of all processes."""
    global _here
    with _lock:
        _here = replace(_here, launched=_here.launched + 1, program=program)
        _programs.append((_here.launched, program))


def sending() -> int:
    """Note that this process sends a message. Returns its number, from 0."""
    global _here
    with _lock:
        _here = replace(_here, sent=_here.sent + 1, before=_here.launched)
        return _here.sent - 1


@contextlib.contextmanager
def waiting(at: str) -> Iterator[None]:
    """Until the block ends, this process waits for answers."""
    global _here
    with _lock:
        _here = replace(_here, at=at)
    try:
        yield
    finally:
        with _lock:
            _here = replace(_here, at=None)


def obstacle(own: Standing, programs: dict[int, str], other: Standing) -> str | None:
    """What the other process does so that this one cannot go on; None if it can. See [Note: what is certain]."""
    if programs.get(other.launched, other.program) != other.program:
        return f"runs {other.program!r}"
    if other.ended is not None and own.launched > other.launched:
        return "is at the end of its script"
    if other.at is not None and own.launched > other.before and own.sent < other.sent:
        return f"is at {other.at!r}"
    return None


def tell_end(client: Any, index: int, code: int) -> None:
    """Tell the others that this process has come to the end of its script."""
    client.key_value_set(_key(index, "end"), json.dumps(asdict(replace(_here, at=None, ended=code))))


def wait_for_end(client: Any, index: int, seconds: float) -> None:
    """Wait until another process has come to the end of its script. Raises JAX's error if it does not."""
    client.blocking_key_value_get(_key(index, "end"), max(1, int(1000 * seconds)))


def end_of(client: Any, index: int) -> int | None:
    """The exit code of a process that has come to the end of its script; None if it has not."""
    try:
        code: int = _read(client.key_value_try_get(_key(index, "end"))).ended or 0
    except jax.errors.JaxRuntimeError:  # there is no such key
        return None
    return code


class Watch(threading.Thread):
    """Looks at the others whenever this process has not moved, and calls `stuck` if it cannot go on.

    `leaves_it` says whether somebody else ends this process if another one has ended with an error.
    """

    def __init__(self, client: Any, index: int, leaves_it: bool, stuck: Callable[[str], object]) -> None:
        super().__init__(name="openipu-watch", daemon=True)
        self._client, self._index, self._leaves_it, self._stuck = client, index, leaves_it, stuck
        self._over = threading.Event()

    def run(self) -> None:
        """Called in the new thread."""
        before = told = None
        while not self._over.wait(LOOK_SECONDS):
            own = here()
            try:
                if own == before and own != told:
                    value = json.dumps(asdict(own))
                    self._client.key_value_set(_key(self._index, "now"), value, allow_overwrite=True)
                    told = own
                if own == before:
                    self._look(own)
            except jax.errors.JaxRuntimeError:  # the coordinator is gone, and JAX ends this process
                return
            before = own

    def end(self) -> None:
        """Stop looking."""
        self._over.set()
        self.join()

    def _look(self, own: Standing) -> None:
        with _lock:
            programs = dict(_programs)
        for index, other in self._others():
            found = None if other.ended and self._leaves_it else obstacle(own, programs, other)
            if found is not None and not self._over.is_set():
                self._stuck(
                    f"Instance {self._index} runs {own.program!r}, but instance {index} {found}. All instances must "
                    "make the same calls in the same order."
                )

    def _others(self) -> Iterator[tuple[int, Standing]]:
        for key, value in self._client.key_value_dir_get(_FOLDER):
            index = int(key.removeprefix(_FOLDER).partition("/")[0])
            if index != self._index:
                yield index, _read(value)


def show_main_thread(problem: str) -> None:
    """Show where the main thread is, as if it had raised an error. It may be inside a program and cannot raise one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    sys.stderr.write(f"Traceback (most recent call last):\n{stack}RuntimeError: {problem}\n")


def _key(index: int, what: str) -> str:
    return f"{_FOLDER}{index}/{what}"


def _read(text: str) -> Standing:
    return Standing(**json.loads(text))
