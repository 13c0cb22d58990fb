"""Where compiled programs are kept between processes, and how much space they may take."""

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 2 << 30
UNLIMITED: Final = -1


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder for compiled programs. Beyond `max_bytes`, the least recently used ones are deleted."""

    folder: Path
    max_bytes: int = MAX_BYTES


def choose(executable_cache_path: Path | None = None) -> Cache | None:
    """The cache to use: the given folder, else the one in OPENIPU_CACHE, else a folder in the user's cache folder.

    None if OPENIPU_CACHE is "off". Nothing is deleted from a folder given by --executable_cache_path, as in the
    original: it may hold programs that were compiled in advance.
    """
    if executable_cache_path is not None:
        return Cache(executable_cache_path, UNLIMITED)
    asked = os.environ.get("OPENIPU_CACHE", "")
    if asked.lower() == "off":
        return None
    if asked:
        return Cache(expanded(asked, "OPENIPU_CACHE"))
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return Cache(base.expanduser() / "openipu" / "xla" / _machine())
    except RuntimeError:  # this user has no home folder
        return None


def expanded(path: str, name: str) -> Path:
    """A path from the variable or flag `name`, in which ~ means a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{name} is {path!r}, but there is no such home folder. Write the whole path.") from None


def _machine() -> str:
    """A name for this kind of processor: code compiled for one may crash on another with the same home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        description = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        description = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(description.encode()).hexdigest()[:8]}"
