"""When a checkpoint is saved, and which one is read.

The caller decides what a checkpoint contains (callbacks.py for `fit`, estimator/saved_state.py for estimators).
"""

from __future__ import annotations

import logging
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from openipu import _validate as validate
from openipu.engine.facts.calls import current
from openipu.engine.facts.recorder import RunRecorder
from openipu.engine.types import Tree

import numpy as np

from . import files
from .files import DamagedError
from .folder import FolderLock, prepare, why
from .quiet_orbax import orbax_checkpoint

log = logging.getLogger("openipu")

_RETRY_SECONDS: Final = 10.0
"""How long none is due after one could not be saved. A full disk would fill the log, too."""


class Checkpoints:
    """The checkpoints in a folder, one per step. The newest `keep` are kept (None: all).

    One is due after `every_steps` steps or `every_seconds` seconds, whichever comes first, or always if neither is
    given. Saving does not hold up training: none is due while one is being written and another one waits, or before the
    time that writing the last one took, divided by `max_share`, has passed. Nobody else can save in the folder from
    `open`, or the first save, until `close`.

    >>> checkpoints = Checkpoints("run", keep=3, every_steps=1000)
    >>> checkpoints.save(1000, {"weights": weights, "step": 1000})
    >>> step, tree = checkpoints.restore({"weights": weights, "step": 0})
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int | None = 5,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        max_share: float = 1.0,
    ) -> None:
        self.folder = validate.path("folder", folder).absolute()
        self._keep = validate.count("keep", keep, optional=True)
        self._every_steps = validate.count("every_steps", every_steps, optional=True)
        self._every_seconds = validate.number("every_seconds", every_seconds, optional=True, above=0)
        self._last_step, self._last_time = 0, time.monotonic()
        self._max_share, self._seconds = validate.number("max_share", max_share, above=0, most=1), 0.0
        self._lock, self._retry_time = FolderLock(self.folder), self._last_time
        self._damaged: set[int] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._saving: list[Future[None]] = []

    # --- saving

    def open(self, size: int = 0) -> None:
        """Take the folder for a run whose state has `size` bytes, and make it if it does not exist.

        Raises `InUseError` if another run saves there, and `OSError` if nothing can be saved there.
        """
        prepare(self.folder, size)
        self._lock.acquire()

    def due(self, step: int) -> bool:
        """Whether it is time to save a checkpoint."""
        passed = time.monotonic() - self._last_time
        if sum(not saving.done() for saving in self._saving) > 1 or passed * self._max_share < self._seconds:
            return False
        if time.monotonic() < self._retry_time:
            return False
        if self._every_steps is None and self._every_seconds is None:
            return True
        enough = self._every_steps is not None and step - self._last_step >= self._every_steps
        return enough or (self._every_seconds is not None and passed >= self._every_seconds)

    def save(self, step: int, tree: Tree, *, wait: bool = False) -> None:
        """Save `tree`, a dict of dicts, lists, arrays, numbers and strings, in the background.

        The arrays may be changed or donated right after the call. A save that fails is reported in the log. Older
        checkpoints stay, and training continues.
        """
        step = validate.count("step", step, least=0)
        named = files.named(tree)
        arrays, values = files.copies_of({k: v for k, v in named.items() if files.is_array(v)}), {}
        for name, value in named.items():
            if not files.is_array(value):
                if not isinstance(value, (bool, int, float, str)):
                    raise ValueError(
                        f"`{name}` is a {type(value).__name__}, which a checkpoint cannot hold. Give arrays, numbers "
                        "and strings, in dicts and lists."
                    )
                values[name] = value
        # One is being written and one waits, so memory holds at most two copies of the state.
        self._finish(left=1)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="openipu-checkpoint")
        self._last_step, self._last_time = step, time.monotonic()
        self._saving.append(self._thread.submit(self._save, step, arrays, values, current()))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written."""
        self._finish(left=0)

    def _finish(self, left: int) -> None:
        while len(self._saving) > left:
            self._saving.pop(0).result()

    def close(self) -> None:
        """Wait until everything is written, end the background thread, and let others save in the folder."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._lock.release()

    def _save(self, step: int, arrays: dict[str, Any], values: dict[str, Any], run: RunRecorder | None) -> None:
        try:
            orbax_checkpoint()  # before the clock starts, because importing takes longer than writing
            on_host = {name: np.asarray(a) for name, a in arrays.items()}
            began = time.monotonic()
            if not self._lock.held:
                self.open()
            files.clean(self.folder)
            files.write(self.folder, step, on_host, values)
            self._damaged.discard(step)
            self._remove_old()
            self._seconds = time.monotonic() - began
            if run is not None:
                run.saved(step, self._seconds, sum(a.nbytes for a in on_host.values()))
        except Exception as error:
            # Whatever went wrong (a full disk, a missing folder), the run is worth more than this checkpoint.
            self._retry_time = time.monotonic() + _RETRY_SECONDS
            with suppress(OSError):
                if self._lock.held:
                    files.clean(self.folder)
            log.error(
                "Checkpoint %d could not be saved in %s: %s. Training continues; the newest checkpoint is %s.",
                step, self.folder, why(error), self.latest(),
            )  # fmt: skip

    def _remove_old(self) -> None:
        """Remove the oldest checkpoints. Damaged ones do not count, or they would displace good ones."""
        intact = [step for step in self.all_steps() if step not in self._damaged]
        steps = [step for step in intact if files.has_manifest(self.folder / str(step))]
        for old in steps[: -self._keep] if self._keep else []:
            files.remove(self.folder / str(old))

    # --- reading

    def all_steps(self) -> list[int]:
        """The steps that have a checkpoint, in ascending order. Folders of the user do not count."""
        try:
            found = [path for path in self.folder.iterdir() if path.name.isdecimal() and files.is_checkpoint(path)]
        except OSError:  # there is no folder, or none that this user can look into
            return []
        return sorted(int(path.name) for path in found)

    def latest(self) -> int | None:
        """The newest step that has a checkpoint."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def restore(self, like: files.Like, step: int | None = None) -> tuple[int, dict[str, Tree]]:
        """The step and contents of the newest intact checkpoint, or of that at `step`. Arrays become NumPy arrays.

        `like` says what to read. For each of its keys, it has a tree with the structure, shapes and dtypes that were
        saved, or None to get everything under that key as a flat dict. If that depends on the checkpoint, `like` is a
        function. Damaged checkpoints are skipped with a warning.
        """
        self.wait()
        steps = self.all_steps()
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"There is no checkpoint of step {step} in {self.folder}. Available steps: {steps}."
            )
        for candidate in reversed(steps) if step is None else (step,):
            try:
                tree = files.read(self.folder / str(candidate), like)
            except DamagedError as error:
                self._damaged.add(candidate)
                if step is not None:
                    raise ValueError(f"{error} Use another step. Available steps: {steps}.") from None
                warnings.warn(f"{error} It is skipped.", RuntimeWarning, stacklevel=2)
            else:
                self._last_step = candidate
                return candidate, tree
        raise FileNotFoundError(
            f"No checkpoint in {self.folder} is intact (of steps {steps}). Use another folder to start over."
            if steps
            else f"There is no checkpoint in {self.folder}."
        )
