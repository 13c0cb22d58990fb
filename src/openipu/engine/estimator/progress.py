"""What a user sees of a run: log lines and TensorBoard event files."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openipu.engine.core.state import Logs
from openipu.engine.types import Array

import numpy as np

log = logging.getLogger("openipu")


FLUSH_SECONDS = 10
"""How long numbers may wait before a running TensorBoard sees them."""


class Summaries:
    """Scalars in a TensorBoard event file, which is created when the first one is written.

    If they cannot be written (for example because the disk is full), the log says so once and the run goes on without
    them. They are written in the calling thread: tensorboardX's own writer uses a thread of its own, which would die of
    such an error, and then waits for it forever.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._failed = False
        self._flushed = 0.0

    def prepare(self) -> None:
        """Import the slow modules that writing needs, so that this does not count as time of a step."""
        import tensorboardX  # noqa: F401

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write the values that are single numbers."""
        numbers = {name: float(v) for name, v in scalars.items() if np.ndim(v) == 0 and not isinstance(v, str)}
        if not numbers or self._failed:
            return
        try:
            self._write(step, numbers)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write everything to disk."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self._give_up(error)

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        now = time.time()
        events = [Event(wall_time=now, step=step, summary=scalar(name, value)) for name, value in numbers.items()]
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names. Nanoseconds tell apart two runs in the same second.
            name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{time.time_ns()}"
            self._writer = RecordWriter(str(self._folder / name))
            events.insert(0, Event(wall_time=now, file_version="brain.Event:2"))
        for event in events:
            self._writer.write(event.SerializeToString())
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def _give_up(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            log.error("Event files could not be written in %s: %s. The run goes on without them.", self._folder, error)
        self.close()


class NoSummaries(Summaries):
    """Summaries in an instance that leaves files to another one."""

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write nothing."""


class Progress:
    """Log lines and summaries of a training run. Losses are read one execution late, so that nothing waits for them."""

    def __init__(self, summaries: Summaries, begin: int, log_steps: int | None, summary_steps: int | None) -> None:
        self._summaries = summaries
        self._every = {"log": log_steps, "summary": summary_steps}
        self._last = dict.fromkeys(self._every, begin)
        self._clock = dict.fromkeys(self._every, time.monotonic())
        self._begin = begin
        self._waiting: tuple[int, Array] | None = None

    def note(self, step: int, loss: Array) -> None:
        """Take note of a launched execution that ends at `step`, and show the one before."""
        self._show()
        self._waiting = step, loss

    def close(self) -> None:
        """Show the last execution."""
        self._show(final=True)

    def _show(self, final: bool = False) -> None:
        if self._waiting is None:
            return
        (step, loss), self._waiting = self._waiting, None
        for kind, every in self._every.items():
            if every is None or not (step - self._last[kind] >= every or final or self._last[kind] == self._begin):
                continue
            value = float(loss)
            now = time.monotonic()
            seconds, self._clock[kind] = now - self._clock[kind], now
            rate = (step - self._last[kind]) / max(seconds, 1e-9)
            self._last[kind] = step
            if kind == "log":
                log.info("loss = %.6g, step = %d (%.3f sec, %.6g steps/sec)", value, step, seconds, rate)
            else:
                self._summaries.write(step, {"loss": value, "global_step/sec": rate})


def plain(logs: Logs) -> Logs:
    """Logs as Python numbers, or arrays for metrics with several values. Nested dicts are flattened."""
    flat: Logs = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            flat |= plain({f"{name}/{key}": part for key, part in value.items()})
        else:
            array = np.asarray(value)
            flat[name] = array.item() if array.ndim == 0 else array
    return flat


def line_of(logs: Logs) -> str:
    """Logs as a line of text."""
    return ", ".join(f"{name} = {value}" for name, value in logs.items() if name != "global_step")
