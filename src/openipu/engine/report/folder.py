"""A folder with a report: who is told of runs, and when the files are written."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from importlib import metadata
from pathlib import Path

from openipu.engine.devices.speed import measured_peak
from openipu.engine.facts import watcher
from openipu.engine.facts.calls import Recording, recordings
from openipu.engine.facts.recorder import RunRecorder
from openipu.engine.facts.values import FORMAT, Report, Versions
from openipu.settings.instances import INSTANCE

from . import files

log = logging.getLogger("openipu")

PAUSE = 1.0
"""How many seconds pass at least between the ends of two runs for which the files are written again."""


class FolderReport(Recording):
    """A recording whose facts are written to a folder: when a run ends, every few seconds meanwhile, and at the end.

    In all instances but the first, it is written to a folder inside this one.
    """

    def __init__(self, folder: Path, title: str = "") -> None:
        from openipu.engine.devices import group  # here, because it loads JAX

        super().__init__()
        instance = os.environ.get(INSTANCE) or str(group.index())  # the variable is gone once the group is joined
        self.folder = folder if instance == "0" else folder / f"instance-{instance}"
        self._title = title
        self._lock = threading.Lock()
        self._written = 0.0
        self._failed = False
        self.failure: str | None = None

    # --- all runs of the process

    def start(self) -> None:
        """Begin to record all runs of the process."""
        recordings.append(self)
        self._write_now_and_then(True)

    def stop(self, failure: str | None = None) -> None:
        """End the recording and write the report. `failure` says what ended it."""
        if self in recordings:
            recordings.remove(self)
        self._write_now_and_then(False)
        self.failure = failure or self.failure
        for run in self.runs:
            run.settle()
        self._measure()
        self.write()

    # --- what the recording is told

    def add(self, run: RunRecorder) -> None:
        """Take part in a run."""
        super().add(run)
        self._write_now_and_then(True)

    def changed(self) -> None:
        """A run has ended or failed."""
        self._measure()
        if self not in recordings:
            self._write_now_and_then(False)
            self.write()
        elif time.monotonic() - self._written > PAUSE:
            watcher.soon(self._write_meanwhile)  # what comes next need not wait

    def _write_meanwhile(self) -> None:
        if self in recordings:
            self.write()

    def _write_now_and_then(self, wanted: bool) -> None:
        if wanted and self.write not in watcher.periodic:
            watcher.start()
            watcher.periodic.append(self.write)
        elif not wanted and self.write in watcher.periodic:
            watcher.periodic.remove(self.write)

    def _measure(self) -> None:
        """Measure what the devices can do, for the runs whose operations are known."""
        for run in self.runs:
            if (wanted := run.wants_peak()) is None:
                continue
            try:
                run.peak = measured_peak(*wanted)
            except Exception as error:  # the run is worth more than this number
                run.warn(f"What the devices can do at best could not be measured: {error}")

    # --- files

    def report(self) -> Report:
        """What is known by now."""
        runs = tuple(run.facts() for run in self.runs)
        openipu, jax, keras = map(metadata.version, ("openipu", "jax", "keras"))
        versions = Versions(openipu, jax, keras, platform.python_version())
        ended = self not in recordings and all(run.ended for run in runs)
        title = self._title or ", ".join(dict.fromkeys(run.model for run in runs)) or "nothing was run"
        return Report(FORMAT, title, versions, time.time(), ended, self.failure, runs)

    def write(self) -> None:
        """Write all files. If that is not possible, the log says so once, and runs go on."""
        with self._lock:
            try:
                files.write(self.folder, self.report())
            except OSError as error:
                if not self._failed:
                    log.error("The report could not be written in %s: %s. The run goes on.", self.folder, error)
                self._failed = True
            self._written = time.monotonic()
