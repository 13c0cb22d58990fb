"""Where compiled programs are kept between processes, and how much room they may take."""

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
    """A folder for compiled programs. Beyond `max_bytes` those that were not used for longest are deleted."""

    folder: Path
    max_bytes: int = MAX_BYTES


def choose(executable_cache_path: Path | None = None) -> Cache | None:
    """Give the cache to use: the given folder, else what OPENIPU_CACHE says, else one in the user's cache folder.

    None when OPENIPU_CACHE is "off". A folder given as --executable_cache_path keeps everything, as in the original:
    it may hold programs that were compiled ahead on purpose.
    """
    if executable_cache_path is not None:
        return Cache(executable_cache_path, UNLIMITED)
    asked = os.environ.get("OPENIPU_CACHE", "")
    if asked.lower() == "off":
        return None
    if asked:
        return Cache(Path(asked).expanduser())
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Cache(Path(base).expanduser() / "openipu" / "xla" / _machine())


def _machine() -> str:
    """Name this kind of processor: code compiled for one may crash on another that shares the home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        description = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        description = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(description.encode()).hexdigest()[:8]}"
