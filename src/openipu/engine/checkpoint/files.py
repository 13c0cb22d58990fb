"""One checkpoint: its files, their digests, and the tree it holds.

Orbax writes and reads the arrays.

[Note: complete or not there] A checkpoint is written into a temporary folder, together with a digest of every file,
and then renamed to its step. So a process killed at any moment leaves only complete checkpoints. If files are damaged
later, by a disk or a crash of the machine, a digest no longer matches, and an older checkpoint is used.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from openipu import _validate as validate
from openipu.engine.types import Tree

import jax
import numpy as np

from .folder import check_space, why
from .quiet_orbax import orbax_checkpoint, quiet_orbax

MANIFEST = "openipu.json"
"""The file with numbers, strings and the digest of every other file. Its first line is its own digest."""
_ARRAYS = "arrays"
Like = dict[str, Tree] | Callable[[dict[str, Any], str], dict[str, Tree]]
"""What to read, or a function that says so, given the numbers and strings of a checkpoint and its name in errors."""
_SAVING, _REMOVED = ".openipu-saving-", ".openipu-removed-"


class DamagedError(Exception):
    """The files of a checkpoint have changed since they were written."""


# --- trees -----------------------------------------------------------------------------------------------------------


def named(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by name, such as `weights.0`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def is_array(leaf: object) -> bool:
    """Whether Orbax saves a leaf; others are in the manifest."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def copies_of(arrays: dict[str, Any]) -> dict[str, Any]:
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
    wanted = named({key: like})
    for name in [*wanted, *mine]:
        a, b = (_describe(leaves.get(name)) for leaves in (wanted, mine))
        if a != b:
            raise ValueError(
                f"{place} does not match: `{name}` is {b} in the checkpoint and {a} here. Restore into the model, "
                "optimizer and data that it was saved from, or use another folder."
            )
    return jax.tree.unflatten(jax.tree.structure(like), [mine[name] for name in wanted])


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "missing"
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" if is_array(leaf) else validate.a(leaf)


# --- files -----------------------------------------------------------------------------------------------------------


def write(folder: Path, step: int, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> None:
    """Write the checkpoint of a step into a folder, in place of any that is there."""
    unfinished = folder / f"{_SAVING}{step}"
    unfinished.mkdir(parents=True)
    check_space(folder, sum(a.nbytes for a in arrays.values()))
    if arrays:
        with _checkpointer() as orbax:
            orbax.save(unfinished / _ARRAYS, arrays)
    record = json.dumps({"step": step, "values": values, "files": dict(_digests(unfinished))}, indent=1)
    (unfinished / MANIFEST).write_text(f"{_digest(record)}\n{record}", encoding="utf-8")
    final = folder / str(step)
    if has_manifest(final):
        remove(final)
    elif final.exists():
        raise OSError(f"{final} exists and is not a checkpoint; use another folder for checkpoints")
    unfinished.rename(final)


def read(path: Path, like: Like) -> dict[str, Tree]:
    """The parts of a checkpoint that `like` names. Raises `DamagedError` if it is not as it was written."""
    saved, place = dict(_verified(path)), f"The checkpoint {path}"
    wanted = like(saved, place) if callable(like) else like
    if (path / _ARRAYS).exists():
        try:
            with _checkpointer() as orbax:
                saved |= orbax.restore(path / _ARRAYS)
        except Exception as error:  # Orbax raises all kinds
            raise DamagedError(f"Orbax cannot read the arrays of the checkpoint {path} ({why(error)}).") from error
    return {key: _like(saved, key, part, place) for key, part in wanted.items()}


def _verified(path: Path) -> dict[str, Any]:
    """The values in the manifest. Raises `DamagedError` if it is not a manifest, or if any file has changed."""
    try:
        digest, _, text = (path / MANIFEST).read_bytes().decode("utf-8").partition("\n")
        record = json.loads(text) if digest == _digest(text) else None
    except (OSError, ValueError):
        record = None
    if not _is_manifest(record):
        raise DamagedError(f"The checkpoint {path} is damaged ({MANIFEST}).")
    if str(record["step"]) != path.name:
        raise DamagedError(f"The checkpoint {path} was written as that of step {record['step']}, and then renamed.")
    found = dict(_digests(path))
    for name in sorted(record["files"].keys() | found.keys()):
        if record["files"].get(name) != found.get(name):
            raise DamagedError(f"The checkpoint {path} is damaged ({name}).")
    values: dict[str, Any] = record["values"]
    return values


def _is_manifest(record: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value has the form of the manifests that `write` makes."""
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and isinstance(record.get("files"), dict)
        and isinstance(record.get("values"), dict)
        and all(isinstance(value, (bool, int, float, str)) for value in record["values"].values())
    )


def _digests(path: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(path.rglob("*")):
        if file.is_file() and file != path / MANIFEST:
            with file.open("rb") as stream:
                yield file.relative_to(path).as_posix(), hashlib.file_digest(stream, "blake2b").hexdigest()[:32]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8")).hexdigest()[:32]


@contextmanager
def _checkpointer() -> Iterator[Any]:
    """What reads and writes arrays."""
    with quiet_orbax():
        ocp = orbax_checkpoint()
        # In a group of processes, each one that reads or writes does so by itself.
        here = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(here, {here}, f"openipu-{here}")
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as orbax:
            yield orbax


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or what is left of one: users keep folders named 0, 1, 2, ... of their own."""
    return has_manifest(path) or (path / _ARRAYS / "_METADATA").is_file()


def has_manifest(path: Path) -> bool:
    """Whether we wrote a folder for certain. Only such a folder is ever replaced or removed."""
    return (path / MANIFEST).is_file()


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that it is never there in part."""
    removed = path.rename(path.with_name(f"{_REMOVED}{path.name}-{time.monotonic_ns()}"))
    shutil.rmtree(removed, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what killed processes and failed saves left behind. A folder has only one writer at a time."""
    for pattern in (f"{_SAVING}*", f"{_REMOVED}*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def refuse_foreign(name: str, folder: Path) -> None:
    """Raise if a folder has checkpoints of TensorFlow. `name` is what the user calls the folder."""
    files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for found in (file.removesuffix(".index") for file in files if file.endswith(".index")):
        if any(file.startswith(f"{found}.data-") for file in files):
            raise ValueError(
                f"{name} is {str(folder)!r}, which has a checkpoint of TensorFlow ({found}), but none of OpenIPU. Give "
                "another folder to start over. To start from those weights, read them with `tf.train.load_checkpoint` "
                "and use them as initial values."
            )
