"""One instance at work: its keeper as a child process, and a thread that follows it."""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Final

from openipu.settings.instances import Instance

from .job import Job, kept
from .output import InstanceOutput, Output

_LOOK_SECONDS: Final = 0.5
"""How often to look whether an instance has ended that left its output to something outside its process group."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an instance has ended, after all of its output."""

    index: int
    code: int
    """128 + n if signal n has ended it."""
    started: bool
    last: tuple[bytes, ...]
    """The last lines of its error output."""
    shown: bool
    """Whether they were shown when they came."""


class Process:
    """A running instance. `ended` is called in another thread when it has ended."""

    def __init__(self, job: Job, instance: Instance, output: Output, ended: Callable[[Ended], None]) -> None:
        self._index = instance.index
        self._output = InstanceOutput(output, instance.index, job.instances, job.only_output_from)
        self._ended = ended
        words, environment = kept(job, instance)
        # In a session of its own, so that Ctrl-C in the terminal reaches the launcher only, which passes it on.
        self._process = subprocess.Popen(
            words, env=environment, bufsize=0, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        threading.Thread(target=self._follow, daemon=True).start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the instance and all that it has started."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(_pipe(self._process.stdin).fileno(), bytes([number]))

    def abandon(self) -> None:
        """End the keeper itself, which ends the instance. For a machine that does not answer."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipes to an instance that has ended."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            _pipe(stream).close()

    def _follow(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(_pipe(self._process.stdout), selectors.EVENT_READ, False)
            selector.register(_pipe(self._process.stderr), selectors.EVENT_READ, True)
            while selector.get_map():
                over = self._process.poll() is not None
                ready = selector.select(0 if over else _LOOK_SECONDS)
                if over and not ready:
                    break
                for key, _ in ready:
                    if data := os.read(key.fd, 1 << 16):
                        self._output.feed(data, error=key.data)
                    else:
                        selector.unregister(key.fileobj)
        code = exit_code(self._process)
        self._output.end()
        self._ended(Ended(self._index, code, self._output.started, self._output.last, self._output.shown))


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that ends, as shells report it: 128 + n if signal n has ended it."""
    code = process.wait()
    return code if code >= 0 else 128 - code


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "the keeper was started with pipes"
    return stream
