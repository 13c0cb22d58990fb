"""The output of an instance as lines."""

import re
from collections.abc import Iterable
from typing import Final

_BREAK: Final = re.compile(rb"\r\n|\n|\r")
_NOISE: Final = re.compile(rb"(?m)^[^\n]*is connected to \d+ peer ranks\. Expected number [^\n]*\n?")
"""What gloo writes about each connection between processes. Without the anchor, long lines would take very long."""
_LONGEST: Final = 1 << 16
"""A line that is longer is passed on in pieces."""


class Lines:
    """Cuts bytes into lines.

    A carriage return ends a line, too: a progress bar becomes one line for each of its states, because the bars of
    several instances cannot all stay at the bottom of one terminal.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in these bytes, without their ends."""
        if self._after_return and data:
            data = data.removeprefix(b"\n")  # the other half of a line end
            self._after_return = False
        data = self._rest + data
        lines, start = [], 0
        for found in _BREAK.finditer(data):
            line = data[start : found.start()]
            if line or found[0] != b"\r":  # a bar often begins with a carriage return
                lines.append(line)
            start = found.end()
        self._after_return = data.endswith(b"\r")
        self._rest = data[start:]
        if len(self._rest) > _LONGEST:
            lines.append(self.end())
        return lines

    def end(self) -> bytes:
        """What is left without a line end."""
        rest, self._rest = self._rest, b""
        return rest


def prefixed(lines: Iterable[bytes], prefix: bytes) -> bytes:
    """Whole lines, each after the prefix."""
    shown = (line for line in lines if not _NOISE.search(line))
    return b"".join((prefix + line if line else prefix.rstrip()) + b"\n" for line in shown)


def without_noise(data: bytes) -> bytes:
    """Bytes without the lines that say nothing to users."""
    return _NOISE.sub(b"", data)


def prefix(index: int, count: int) -> bytes:
    """The mark of an instance: `[0] `, all of the same width."""
    return f"[{index:>{len(str(count - 1))}}] ".encode()
