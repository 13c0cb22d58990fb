"""Where the output of all instances goes: the launcher's own output, line by line."""

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from .keeper import STARTED
from .lines import Lines, prefix, prefixed, without_noise

_KEPT_LINES: Final = 100


class Output:
    """Writes for all instances, one at a time. `failed` is called, once, with an error if that is not possible."""

    def __init__(self, failed: Callable[[OSError], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._broken = False

    def write(self, data: bytes, *, error: bool) -> None:
        """Write to the output, or the error output."""
        stream = sys.stderr if error else sys.stdout
        with self._lock:
            if stream is None or self._broken:  # closed
                return
            try:
                _write(stream.fileno(), data)
            except OSError as problem:
                self._broken = True
                self._failed(problem)

    def say(self, line: str) -> None:
        """Write a line of the launcher itself."""
        self.write(f"{line}\n".encode(), error=True)


class InstanceOutput:
    """The output of one instance, with its number before each line; as it is, if no other instance is shown."""

    def __init__(self, output: Output, index: int, count: int, only: int | None) -> None:
        self.shown = only is None or only == index
        self.started = False
        """Whether its keeper has come up."""
        self._last: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._output = output
        self._raw = only is not None
        self._prefix = prefix(index, count)
        self._lines = {False: Lines(), True: Lines()}
        self._before = b""

    @property
    def last(self) -> tuple[bytes, ...]:
        """The last lines of its error output."""
        return tuple(self._last)

    def feed(self, data: bytes, *, error: bool) -> None:
        """Take bytes that the instance has written."""
        if not error and not self.started:
            self._before += data
            before, mark, after = self._before.partition(STARTED)
            self.started = bool(mark)
            if not self.started:
                return
            data, self._before = before + after, b""
        self._pass_on(data, self._lines[error].feed(data), error)

    def end(self) -> None:
        """Pass on what is left, as the instance has ended."""
        self._pass_on(self._before, self._lines[False].feed(self._before), False)
        for error, lines in self._lines.items():
            self._pass_on(b"", [rest] if (rest := lines.end()) else [], error)

    def _pass_on(self, data: bytes, lines: list[bytes], error: bool) -> None:
        if error:
            self._last.extend(lines)
        if self.shown:
            self._output.write(without_noise(data) if self._raw else prefixed(lines, self._prefix), error=error)


def _write(file: int, data: bytes) -> None:
    """Write all bytes, without Python's buffers: they keep what could not be written, and try again at the end."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(file, left) :]
        except BlockingIOError:  # another program has changed how the terminal works
            select.select([], [file], [])
