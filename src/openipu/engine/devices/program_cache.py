"""The persistent cache of compiled programs: what one process has compiled, later ones need not compile again.

`openipu.settings.cache_folder` decides where the cache is and how large it may grow. JAX does the caching.
"""

import importlib.util
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Final

from openipu.settings.cache_folder import UNLIMITED, Cache

MIN_COMPILE_SECONDS: Final = 0.1

_logger = logging.getLogger("openipu")

_enabled: Cache | None = None
_hits: list[int] = []


def enable(cache: Cache | None) -> None:
    """Make JAX use `cache`; None for no cache. A cache that the user has set up in JAX itself is left alone."""
    global _enabled
    import jax

    config: Any = jax.config
    present = config.jax_compilation_cache_dir
    if present and (_enabled is None or present != str(_enabled.folder)):
        return
    if cache == _enabled or (cache is not None and not _usable(cache.folder)):
        return
    _set_up(config, cache)
    _enabled = cache


def hits() -> int:
    """How many programs have come from a cache since the first call of this function."""
    if not _hits:
        import jax

        _hits.append(0)
        jax.monitoring.register_event_listener(_count_hit)
    return _hits[0]


def _count_hit(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits[0] += 1


def _set_up(config: Any, cache: Cache | None) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    config.update("jax_compilation_cache_dir", None if cache is None else str(cache.folder))
    if cache is not None:
        _repair(cache.folder)
        # JAX refuses to limit the size of a cache that it cannot lock.
        lockable = importlib.util.find_spec("filelock") is not None
        config.update("jax_compilation_cache_max_size", cache.max_bytes if lockable else UNLIMITED)
        config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    compilation_cache.reset_cache()  # JAX reads its settings only once


def _repair(folder: Path) -> None:
    """Delete entries that must not be loaded.

    Those that a killed process left half written: a single one would keep JAX from adding others. And those that
    somebody else could have written: an entry is code that runs in this process.
    """
    closed = not folder.stat().st_mode & 0o011  # then the permissions of what is inside do not matter
    for entry in folder.glob("*-cache"):
        whole = entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists()
        if not whole or not (_is_own(entry) if closed else _is_private(entry)):
            entry.unlink(missing_ok=True)


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _logger.warning(
            "Compiled programs are not kept, because %s cannot be written to (%s). Set OPENIPU_CACHE to another "
            "folder, or to off.", folder, error.strerror,
        )  # fmt: skip
        return False
    if not _is_private(folder):
        _logger.warning(
            "Compiled programs are not kept, because others could put programs into %s. Run `chmod go-w` on it as its "
            "owner, or set OPENIPU_CACHE to a folder of your own, or to off.", folder,
        )  # fmt: skip
        return False
    return True


def _is_private(path: Path) -> bool:
    """Whether a file or folder belongs to this user or to root, and nobody else can write to it."""
    return _is_own(path) and not path.stat().st_mode & 0o022


def _is_own(path: Path) -> bool:
    return not hasattr(os, "getuid") or path.stat().st_uid in (os.getuid(), 0)
