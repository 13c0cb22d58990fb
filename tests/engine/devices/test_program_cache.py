"""The cache of compiled programs: where it is, who may write to it, and what happens to entries that are no good."""

import os
import zlib
from pathlib import Path

from openipu.config import IPUConfig, reset_ipu_configuration
from openipu.engine.devices import program_cache, systems
from openipu.settings import cache_folder

import jax
import pytest

from configuration import unconfigured  # noqa: F401 - a fixture of this module
from new_process import in_a_new_process

COMPILE = """
    import warnings
    warnings.filterwarnings("error", "Error (reading|writing) persistent")
    import jax, jax.numpy as jnp
    from openipu.engine.devices import program_cache, systems
    program_cache.MIN_COMPILE_SECONDS = 0  # however fast the machine is
    systems.system()
    body = lambda c, _: (jnp.sort(jnp.tanh(c @ c)), c.sum())
    jax.jit(lambda x: jax.lax.scan(body, x, None, length=9))(jnp.ones((30, 30)))
    print(jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size)
"""


def entries(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*-cache")}


def test_programs_are_kept_in_the_users_cache_folder(tmp_path: Path) -> None:
    environment = {"OPENIPU_CACHE": "", "XDG_CACHE_HOME": str(tmp_path)}
    folder, limit = in_a_new_process(COMPILE, tmp_path, **environment).split()
    assert Path(folder).parent == tmp_path / "openipu" / "xla"
    assert int(limit) == cache_folder.MAX_BYTES
    kept = entries(tmp_path)
    assert kept
    in_a_new_process(COMPILE, tmp_path, **environment)
    assert entries(tmp_path) == kept


def test_a_cache_that_the_user_gave_to_jax_is_left_alone(tmp_path: Path) -> None:
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "own"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "9",
    }
    folder, limit = in_a_new_process(COMPILE, tmp_path, **environment).split()
    assert (folder, limit) == (str(tmp_path / "own"), "-1")
    assert entries(tmp_path) == {}


def test_which_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENIPU_CACHE", "off")
    assert cache_folder.choose() is None
    assert cache_folder.choose(tmp_path) == cache_folder.Cache(tmp_path, cache_folder.UNLIMITED)
    monkeypatch.setenv("OPENIPU_CACHE", "~/programs")
    assert cache_folder.choose() == cache_folder.Cache(Path.home() / "programs", cache_folder.MAX_BYTES)


def test_turning_the_cache_on_and_off_in_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def folder() -> str | None:
        reset_ipu_configuration()
        IPUConfig().configure_ipu_system()
        systems.system()
        chosen: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        return chosen

    assert folder() == str(tmp_path / "cache")
    monkeypatch.setenv("TF_POPLAR_FLAGS", f"--executable_cache_path={tmp_path / 'given'}")
    assert folder() == str(tmp_path / "given")
    monkeypatch.delenv("TF_POPLAR_FLAGS")
    monkeypatch.setenv("OPENIPU_CACHE", "off")
    assert folder() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPENIPU_CACHE", str(tmp_path / "file" / "below"))
    assert folder() is None
    assert "cannot be written to" in caplog.text


def test_programs_in_a_given_folder_stay(tmp_path: Path) -> None:
    """Even if the folder is used later as one of limited size, for which JAX notes when each entry was last used."""
    environment = {"TF_POPLAR_FLAGS": f"--executable_cache_path={tmp_path / 'given'}"}
    _, limit = in_a_new_process(COMPILE, tmp_path, **environment).split()
    assert int(limit) == cache_folder.UNLIMITED
    kept = entries(tmp_path)
    assert kept
    in_a_new_process(COMPILE, tmp_path, **environment)
    assert entries(tmp_path) == kept
    program_cache._repair(cache_folder.Cache(tmp_path / "given"))
    assert entries(tmp_path) == kept
    assert {path.name.replace("-atime", "-cache") for path in (tmp_path / "given").glob("*-atime")} == set(kept)


def test_damaged_entries_are_replaced(tmp_path: Path) -> None:
    """JAX alone would warn about each of them in every process, and never write them again."""
    in_a_new_process(COMPILE, tmp_path)
    folder = tmp_path / "cache"
    whole = sorted(folder.glob("*-cache"))
    assert len(whole) >= 2
    ways = (lambda c: c[: len(c) // 2], lambda c: b"garbage" + c, lambda _: b"", lambda c: c[:-20] + bytes(20))
    for i, entry in enumerate(whole):
        entry.write_bytes(ways[i % len(ways)](entry.read_bytes()))
    in_a_new_process(COMPILE, tmp_path)
    assert sorted(folder.glob("*-cache")) == whole
    replaced = entries(folder)
    for entry in whole:
        zlib.decompress(entry.read_bytes())
    in_a_new_process(COMPILE, tmp_path)
    assert entries(folder) == replaced


def test_only_what_is_new_is_checked(tmp_path: Path) -> None:
    """Reading 2 GiB of programs whenever a process starts would take longer than compiling."""
    old = planted(tmp_path, "old")
    program_cache._repair(cache_folder.Cache(tmp_path))
    old.write_bytes(b"damaged")
    os.utime(old, (0, 0))
    program_cache._repair(cache_folder.Cache(tmp_path))
    assert old.exists()
    old.touch()
    program_cache._repair(cache_folder.Cache(tmp_path))
    assert not old.exists()


def test_a_half_written_cache_entry_is_removed(tmp_path: Path) -> None:
    """A process killed while it writes an entry must not keep later ones from using the cache."""
    (tmp_path / "jit_f-00-cache").write_bytes(b"half")
    (tmp_path / "jit_g-00-cache").write_bytes(zlib.compress(b"whole"))
    (tmp_path / "jit_g-00-atime").write_bytes(b"12345678")
    program_cache._repair(cache_folder.Cache(tmp_path))
    assert sorted(p.name for p in tmp_path.glob("jit*")) == ["jit_g-00-atime", "jit_g-00-cache"]


def planted(folder: Path, name: str, mode: int = 0o600, owner: int | None = None) -> Path:
    """An entry of the cache, as it would be there after somebody wrote it."""
    (folder / f"{name}-atime").write_bytes(b"12345678")
    entry = folder / f"{name}-cache"
    entry.write_bytes(zlib.compress(b"code"))
    entry.chmod(mode)
    if owner is not None:
        os.chown(entry, owner, -1)
    return entry


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_cache_that_others_can_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    tmp_path.chmod(mode)
    assert not program_cache._usable(tmp_path)
    assert "others could put programs into" in caplog.text
    tmp_path.chmod(0o755)
    assert program_cache._usable(tmp_path)


def test_entries_that_others_could_have_written_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    mine, open_to_all = planted(tmp_path, "mine"), planted(tmp_path, "open", 0o666)
    program_cache._repair(cache_folder.Cache(tmp_path))
    assert mine.exists()
    assert not open_to_all.exists()
    assert caplog.messages == [
        f"Others could have written some of the compiled programs in {tmp_path}. These were removed (1), and are "
        "compiled again. Run `chmod 700` on the folder to keep others out."
    ]
    tmp_path.chmod(0o700)
    shared = planted(tmp_path, "shared", 0o664)  # what a umask of 002 makes
    program_cache._repair(cache_folder.Cache(tmp_path))
    assert shared.exists()


TWELVE, THIRTEEN = (
    f"""
    import jax, jax.numpy as jnp
    from openipu.engine.devices import program_cache, systems
    program_cache.MIN_COMPILE_SECONDS = 0
    systems.system()
    print(int(jax.jit(lambda x: x + {number})(jnp.int32(0))))
    """
    for number in (12, 13)
)


@pytest.mark.parametrize(("mode", "result"), [(0o666, "12"), (0o600, "13")])
def test_a_planted_program_runs_only_if_nobody_else_could_have_planted_it(
    tmp_path: Path, mode: int, result: str
) -> None:
    def made_by(script: str, folder: Path) -> Path:
        in_a_new_process(script, folder)
        [entry] = (folder / "cache").glob("jit__lambda*-cache")
        return entry

    mine, other = made_by(TWELVE, tmp_path / "mine"), made_by(THIRTEEN, tmp_path / "other")
    mine.parent.chmod(0o755)
    mine.write_bytes(other.read_bytes())
    mine.chmod(mode)
    assert in_a_new_process(TWELVE, tmp_path / "mine").split() == [result]


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o700)
    theirs = planted(tmp_path, "theirs", owner=12345)
    program_cache._repair(cache_folder.Cache(tmp_path))
    assert not theirs.exists()
    assert caplog.messages[-1].endswith("These were removed (1), and are compiled again.")  # the folder is closed
    os.chown(tmp_path, 12345, -1)
    assert not program_cache._usable(tmp_path)


def test_no_home_folder_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OPENIPU_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert cache_folder.choose() is None
