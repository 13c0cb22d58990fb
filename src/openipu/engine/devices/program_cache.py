"""The persistent cache of compiled programs: what one process has compiled, later ones need not compile again.

`openipu.settings.cache_folder` decides where the cache is and how large it may grow. JAX does the caching.
"""

import contextlib
import importlib.util
import logging
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from openipu.settings.cache_folder import UNLIMITED, Cache

MIN_COMPILE_SECONDS: Final = 0.1

_ZSTANDARD: Final = b"\x28\xb5\x2f\xfd"
"""The first bytes of what zstandard has compressed."""

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


def is_on() -> bool:
    """Whether JAX keeps compiled programs: here, or where the user has told it to."""
    import jax

    config: Any = jax.config
    return bool(config.jax_compilation_cache_dir)


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
        _repair(cache)
        # JAX refuses to limit the size of a cache that it cannot lock.
        lockable = importlib.util.find_spec("filelock") is not None
        config.update("jax_compilation_cache_max_size", cache.max_bytes if lockable else UNLIMITED)
        config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    compilation_cache.reset_cache()  # JAX reads its settings only once


def _repair(cache: Cache) -> None:
    """Delete entries that must not be loaded, so that JAX writes them again.

    Those that somebody else could have written: an entry is code that runs in this process. And those that are
    damaged, by a full disk or because a process was killed: JAX would warn about them in every process, and never
    replace them. Only entries that are new since the last check are read.
    """
    closed = not cache.folder.stat().st_mode & 0o011  # then the permissions of what is inside do not matter
    last_check = _begin_check(cache.folder)
    foreign = 0
    for entry in cache.folder.glob("*-cache"):
        used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")  # JAX's note of when it was last used
        with contextlib.suppress(OSError):  # other processes delete entries, too
            changed = entry.stat().st_mtime_ns
            incomplete = cache.max_bytes != UNLIMITED and not used.exists()
            new = incomplete or changed >= last_check
            if not (_is_own(entry) if closed else is_private(entry)):
                entry.unlink()
                foreign += 1
            elif new and not _is_intact(entry):
                entry.unlink()
            elif incomplete:
                # Without it, JAX could add nothing to a cache of limited size.
                used.write_bytes(changed.to_bytes(8, "little"))
    if foreign:
        _logger.warning(
            "Others could have written some of the compiled programs in %s. These were removed (%d), and are compiled "
            "again.%s", cache.folder, foreign, "" if closed else " Run `chmod 700` on the folder to keep others out.",
        )  # fmt: skip


def _begin_check(folder: Path) -> int:
    """When entries were last checked, in nanoseconds. The time of this check is noted for the next one."""
    marker = folder / ".openipu-checked"
    last = marker.stat().st_mtime_ns if marker.exists() else 0
    marker.touch()
    return last


def _is_intact(entry: Path) -> bool:
    """Whether an entry can be decompressed, which is the first thing that JAX does with it."""
    content = entry.read_bytes()
    decompress = _zstandard() if content.startswith(_ZSTANDARD) else zlib.decompress
    if decompress is None:
        return True  # it has another name than the entries that this process uses
    try:
        decompress(content)
    except Exception as error:  # each library has its own
        _logger.info("%s is damaged (%s). The program is compiled again.", entry, error)
        return False
    return True


def _zstandard() -> Callable[[bytes], bytes] | None:
    """What decompresses the format that JAX prefers to zlib's, if it is installed."""
    for name in ("compression.zstd", "zstandard"):
        with contextlib.suppress(ImportError):
            decompress: Callable[[bytes], bytes] = importlib.import_module(name).decompress
            return decompress
    return None


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
    if not is_private(folder):
        _logger.warning(
            "Compiled programs are not kept, because others could put programs into %s. Run `chmod go-w` on it as its "
            "owner, or set OPENIPU_CACHE to a folder of your own, or to off.", folder,
        )  # fmt: skip
        return False
    return True


def is_private(path: Path) -> bool:
    """Whether a file or folder belongs to this user or to root, and nobody else can write to it."""
    return _is_own(path) and not path.stat().st_mode & 0o022


def _is_own(path: Path) -> bool:
    return not hasattr(os, "getuid") or path.stat().st_uid in (os.getuid(), 0)
