"""The persistent cache of compiled programs: a program compiled once starts at once in every later process.

Responsible for: where the cache is and how large it may grow. JAX does the caching.
"""

import hashlib
import os
import platform
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 2 << 30
MIN_COMPILE_SECONDS: Final = 0.1

_enabled: Path | None = None


def folder(executable_cache: Path | None = None) -> Path | None:
    """Give the folder to cache in: the given one, else what OPENIPU_CACHE says, else one in the user's cache folder.

    None when OPENIPU_CACHE is "off".
    """
    if executable_cache is not None:
        return executable_cache
    asked = os.environ.get("OPENIPU_CACHE", "")
    if asked.lower() == "off":
        return None
    if asked:
        return Path(asked).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "openipu" / "xla" / _machine()


def _machine() -> str:
    """Name this kind of processor: code compiled for one may crash on another that shares the home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        description = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        description = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(description.encode()).hexdigest()[:8]}"
