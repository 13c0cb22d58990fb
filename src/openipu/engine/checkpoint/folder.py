"""The folder of a run: whether anything can be saved in it, and which process saves in it.

[Note: one writer] Two processes that save in one folder would remove each other's checkpoints. So the one that saves
holds a lock of the operating system, which ends with the process, however it ends. A second file says who holds it,
because the lock itself does not tell.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import filelock

log = logging.getLogger("openipu")

LOCK: Final = ".openipu-lock"
HOLDER: Final = ".openipu-holder"
_OVERHEAD: Final = 1 << 18
"""Bytes for everything but the arrays: Orbax' files and ours."""
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""How file systems say that they have no locks."""


class InUseError(RuntimeError):
    """Another run saves in the same folder."""


class FolderLock:
    """The right to save in a folder. One run has it at a time; a process that is killed loses it at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: filelock.BaseFileLock | None = None
        self.held = False

    def acquire(self) -> None:
        """Take the lock of a folder that exists. Raises `InUseError` if somebody else has it."""
        if self.held:
            raise InUseError(_in_use(self._folder))
        # Not 0: a file that its last holder has just removed takes a second attempt.
        self._lock = filelock.FileLock(self._folder / LOCK, timeout=0.2, thread_local=False)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            self._lock = None
            raise InUseError(_in_use(self._folder)) from None
        except OSError as error:
            self._lock = None
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s is on a file system without locks (%s). Make sure that no other process saves there.",
                self._folder, error.strerror,
            )  # fmt: skip
        self.held = True
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # then the others are told less
            (self._folder / HOLDER).write_text(json.dumps(holder), encoding="utf-8")

    def release(self) -> None:
        """Let others save in the folder, and leave no files behind."""
        if not self.held:
            return
        for file in (HOLDER, LOCK):
            with suppress(OSError):
                (self._folder / file).unlink()
        if self._lock is not None:
            self._lock.release()
        self._lock, self.held = None, False


def _in_use(folder: Path) -> str:
    holder = _holder(folder)
    return f"{folder} is in use: {holder} saves checkpoints there. Wait until it has ended, or use another folder."


def _holder(folder: Path) -> str:
    """Who saves in a folder, in words."""
    try:
        found = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        pid, host, since = found["pid"], found["host"], found["since"]
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
    if (pid, host) == (os.getpid(), socket.gethostname()):
        return f"another run of this process ({pid}), since {since},"
    return f"process {pid} on {host}, since {since},"


def prepare(folder: Path, size: int = 0) -> None:
    """Make a folder. Raises `OSError` if no checkpoint with arrays of so many bytes can be saved in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
    check_space(folder, size)


def check_space(folder: Path, size: int) -> None:
    """Raise `OSError` if the disk of a folder has no room for a checkpoint with arrays of so many bytes."""
    needed, free = size + _OVERHEAD, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, but only {free} are free on the disk")


def unusable(name: str, folder: Path, error: OSError) -> OSError:
    """The error for a folder in which nothing can be saved. `name` is what the user calls the folder."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "Make room on the disk, or give a folder on another one" if full else "Give a writable folder"
    return (OSError if full else PermissionError)(
        f"{name} is {str(folder)!r}, where nothing can be saved: {why(error)}. {remedy}."
    )


def why(error: Exception) -> str:
    """The reason for an error in one line, without the pages that Orbax adds."""
    text = str(error).strip()
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror} ({error.filename})"
    elif code := re.search(r"os_error_code='(\d+)'", text):
        text = os.strerror(int(code[1]))
    line = next(iter(text.splitlines()), "").rstrip(".") or type(error).__name__
    return line if len(line) <= 200 else f"{line[:197]}..."
