"""Reports on runs: what was planned, compiled and measured.

>>> with ipu.report("out"):
...     history = model.fit(x, y, batch_size=8, verbose=0)

writes `out/report.html` (a page to read), `out/report.json` (the same facts) and `out/trace.json` (for Perfetto).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from openipu import _validate as validate
from openipu.engine.facts.calls import words
from openipu.engine.report.folder import FolderReport

__all__ = ["VARIABLE", "report", "start"]

VARIABLE: Final = "OPENIPU_REPORT"
"""The environment variable that names a folder for a report on everything that a process runs."""

_started: dict[Path, FolderReport] = {}


@contextlib.contextmanager
def report(dir: str | Path, title: str = "") -> Iterator[Path]:
    """Report on everything that runs until the block ends, in all threads.

    The files are written when a run ends, every few seconds meanwhile, and at the end, even if the block fails. While
    nothing is reported, nothing is measured.

    >>> with ipu.report("out", title="My first report") as folder:
    ...     history = model.fit(x, y, batch_size=8, verbose=0)
    >>> sorted(path.name for path in folder.iterdir())
    ['report.html', 'report.json', 'trace.json']

    Args:
        dir: The folder for `report.html`, `report.json` and `trace.json`. It is made if it does not exist; files of
            an earlier report are replaced.
        title: The heading of the page; by default the names of the models.

    Yields:
        The folder.
    """
    wanted = FolderReport(validate.path("dir", dir), title)
    wanted.folder.mkdir(parents=True, exist_ok=True)
    wanted.start()
    failure: str | None = None
    try:
        yield wanted.folder
    except BaseException as error:
        failure = words(error)
        raise
    finally:
        wanted.stop(failure)


def start(dir: str | Path) -> None:
    """Report on everything that this process runs from now on, until it ends. Does nothing if that folder is in use."""
    folder = validate.path("dir", dir).absolute()
    if folder not in _started:
        _started[folder] = FolderReport(folder)
        _started[folder].start()


@atexit.register
def _stop() -> None:
    """Write the reports of this process when it ends. Processes that ran nothing leave no files."""
    error = getattr(sys, "last_value", None)  # what Python has printed as the end of the program, if anything
    for wanted in _started.values():
        if wanted.runs:
            wanted.stop(None if error is None else words(error))


def _from_environment() -> None:
    folder = os.environ.get(VARIABLE)
    if folder:
        start(Path(folder).expanduser())


_from_environment()
