"""Checkpoints: the state of a training run on disk, complete or not there at all.

Orbax writes and reads the arrays. This module decides when to save, in which order files are written, and which
checkpoint can be trusted. The caller decides what a checkpoint contains (callbacks.py for `fit`).

[Note: complete or not there] A checkpoint is written into a temporary folder, together with a digest of every file,
and then renamed to its step. So a process killed at any moment leaves only complete checkpoints. If files are damaged
later, by a disk or a crash of the machine, a digest no longer matches, and an older checkpoint is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Tree

import jax
import numpy as np

log = logging.getLogger("openipu")

MANIFEST = "openipu.json"
"""The file with numbers, strings and the digest of every other file. Its first line is its own digest."""
_ARRAYS = "arrays"
_SAVING, _REMOVED = ".openipu-saving-", ".openipu-removed-"


class DamagedError(Exception):
    """The files of a checkpoint have changed since they were written."""


class Checkpoints:
    """The checkpoints in a folder, one per step. The newest `keep` are kept (None: all).

    One is due after `every_steps` steps or `every_seconds` seconds, whichever comes first, or always if neither is
    given. Saving does not hold up training: none is due while one is being written and another one waits, or before the
    time that writing the last one took, divided by `max_share`, has passed.

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
        if "://" in str(folder):
            raise ValueError(
                f"`folder` is {str(folder)!r}, a URL. Give a folder of this machine, or mount the storage."
            )
        self._keep = validate.count("keep", keep, optional=True)
        self._every_steps = validate.count("every_steps", every_steps, optional=True)
        self._every_seconds = validate.number("every_seconds", every_seconds, optional=True, above=0)
        self._last_step, self._last_time = 0, time.monotonic()
        self._max_share, self._seconds = validate.number("max_share", max_share, above=0, most=1), 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._saving: list[Future[None]] = []

    # --- saving

    def due(self, step: int) -> bool:
        """Whether it is time to save a checkpoint."""
        passed = time.monotonic() - self._last_time
        if sum(not saving.done() for saving in self._saving) > 1 or passed * self._max_share < self._seconds:
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
        named = _named(tree)
        arrays, values = _copies({k: v for k, v in named.items() if _is_array(v)}), {}
        for name, value in named.items():
            if not _is_array(value):
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
        self._saving.append(self._thread.submit(self._save, step, arrays, values))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written."""
        self._finish(left=0)

    def _finish(self, left: int) -> None:
        while len(self._saving) > left:
            self._saving.pop(0).result()

    def close(self) -> None:
        """Wait until everything is written, and end the background thread."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _save(self, step: int, arrays: dict[str, Any], values: dict[str, Any]) -> None:
        try:
            import orbax.checkpoint  # noqa: F401 - before the clock starts, because importing takes longer than writing

            on_host = {name: np.asarray(a) for name, a in arrays.items()}
            began = time.monotonic()
            _clean(self.folder)
            _write(self.folder, step, on_host, values)
            for old in self.all_steps()[: -self._keep] if self._keep else []:
                _remove(self.folder / str(old))
            self._seconds = time.monotonic() - began
        except Exception as error:
            # Whatever went wrong (a full disk, a missing folder), the run is worth more than this checkpoint.
            log.error(
                "Checkpoint %d could not be saved in %s: %s. Training continues; the newest checkpoint is %s.",
                step, self.folder, _first_line(error), self.latest(),
            )  # fmt: skip
            shutil.rmtree(self.folder / f"{_SAVING}{step}", ignore_errors=True)

    # --- reading

    def all_steps(self) -> list[int]:
        """The steps that have a checkpoint, in ascending order. Folders of the user do not count."""
        if not self.folder.is_dir():
            return []
        return sorted(
            int(path.name) for path in self.folder.iterdir() if path.name.isdecimal() and _is_checkpoint(path)
        )

    def latest(self) -> int | None:
        """The newest step that has a checkpoint."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def restore(self, like: dict[str, Tree], step: int | None = None) -> tuple[int, dict[str, Tree]]:
        """The step and contents of the newest intact checkpoint, or of that at `step`. Arrays become NumPy arrays.

        `like` says what to read. For each of its keys, it has a tree with the structure, shapes and dtypes that were
        saved, or None to get everything under that key as a flat dict. Damaged checkpoints are skipped with a warning.
        """
        self.wait()
        steps = self.all_steps()
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"There is no checkpoint of step {step} in {self.folder}. Available steps: {steps}."
            )
        for candidate in reversed(steps) if step is None else (step,):
            try:
                tree = _read(self.folder / str(candidate), like)
            except DamagedError as error:
                if step is not None:
                    raise ValueError(f"{error} Use another step. Available steps: {steps}.") from None
                warnings.warn(f"{error} It is skipped.", RuntimeWarning, stacklevel=2)
            else:
                self._last_step = candidate
                return candidate, tree
        raise FileNotFoundError(
            f"None of the {len(steps)} checkpoints in {self.folder} is intact. Remove the folder to start over."
            if steps
            else f"There is no checkpoint in {self.folder}."
        )


# --- trees -----------------------------------------------------------------------------------------------------------


def _named(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by name, such as `weights.0`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _copies(arrays: dict[str, Any]) -> dict[str, Any]:
    """Copies that nothing else can change. Arrays on a device are copied there, without waiting for their values."""
    on_device = {name: a for name, a in arrays.items() if isinstance(a, jax.Array)}
    host = {name: np.array(a) for name, a in arrays.items() if name not in on_device}
    copies: dict[str, Any] = jax.device_put(on_device, may_alias=False)
    return copies | host


def _like(saved: dict[str, Any], key: str, like: Tree, place: str) -> Tree:
    """The saved leaves under `key`, in the structure of `like`."""
    prefix = f"{key}."
    mine = {name: leaf for name, leaf in saved.items() if name == key or name.startswith(prefix)}
    if like is None:
        return {name.removeprefix(prefix): leaf for name, leaf in mine.items()}
    wanted = _named({key: like})
    for name in [*wanted, *mine]:
        a, b = (_describe(leaves.get(name)) for leaves in (wanted, mine))
        if a != b:
            raise ValueError(
                f"{place} does not match: `{name}` is {b} there and {a} here. Restore into the model, optimizer and "
                "data that it was saved from, or use another folder."
            )
    return jax.tree.unflatten(jax.tree.structure(like), [mine[name] for name in wanted])


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "missing"
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" if _is_array(leaf) else validate.a(leaf)


# --- files -----------------------------------------------------------------------------------------------------------


def _write(folder: Path, step: int, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> None:
    unfinished = folder / f"{_SAVING}{step}"
    unfinished.mkdir(parents=True)
    needed, free = sum(a.nbytes for a in arrays.values()), shutil.disk_usage(folder).free
    if needed > free:
        # Orbax would notice too, but with pages of tracebacks from its threads.
        raise OSError(f"{needed} bytes are needed, but only {free} are free on the disk")
    if arrays:
        with _checkpointer() as orbax:
            orbax.save(unfinished / _ARRAYS, arrays)
    record = json.dumps({"step": step, "values": values, "files": dict(_digests(unfinished))}, indent=1)
    (unfinished / MANIFEST).write_text(f"{_digest(record)}\n{record}", encoding="utf-8")
    final = folder / str(step)
    if _is_checkpoint(final):
        _remove(final)
    elif final.exists():
        raise OSError(f"{final} exists and is not a checkpoint; use another folder for checkpoints")
    unfinished.rename(final)


def _read(path: Path, like: dict[str, Tree]) -> dict[str, Tree]:
    saved: dict[str, Any] = _verified(path)["values"]
    if (path / _ARRAYS).exists():
        with _checkpointer() as orbax:
            saved |= orbax.restore(path / _ARRAYS)
    return {key: _like(saved, key, part, f"The checkpoint {path}") for key, part in like.items()}


def _verified(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises `DamagedError` if any file has changed since it was written."""
    try:
        digest, _, text = (path / MANIFEST).read_bytes().decode("utf-8").partition("\n")
        intact = digest == _digest(text)
    except (OSError, UnicodeDecodeError):
        intact = False
    if not intact:
        raise DamagedError(f"The checkpoint {path} is damaged ({MANIFEST}).")
    record: dict[str, Any] = json.loads(text)
    found = dict(_digests(path))
    for name in sorted(record["files"].keys() | found.keys()):
        if record["files"].get(name) != found.get(name):
            raise DamagedError(f"The checkpoint {path} is damaged ({name}).")
    return record


def _digests(path: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(path.rglob("*")):
        if file.is_file() and file != path / MANIFEST:
            with file.open("rb") as stream:
                yield file.relative_to(path).as_posix(), hashlib.file_digest(stream, "blake2b").hexdigest()[:32]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8")).hexdigest()[:32]


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _is_checkpoint(path: Path) -> bool:
    """Whether we wrote a folder, even if it was damaged later: users keep folders named 0, 1, 2, ... of their own."""
    return (path / MANIFEST).is_file() or (path / _ARRAYS / "_METADATA").is_file()


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that it is never there in part."""
    removed = path.rename(path.with_name(f"{_REMOVED}{path.name}-{time.monotonic_ns()}"))
    shutil.rmtree(removed, ignore_errors=True)


def _clean(folder: Path) -> None:
    """Remove what killed processes and failed saves left behind. A folder has only one writer at a time."""
    for pattern in (f"{_SAVING}*", f"{_REMOVED}*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
