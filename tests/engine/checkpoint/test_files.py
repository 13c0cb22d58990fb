"""The files of checkpoints: complete or not there, what is damaged is named, and what is not ours is left alone."""

import logging
import re
import resource
import time
from pathlib import Path

import openipu as ipu
from openipu.engine.checkpoint import MANIFEST, Checkpoints
from openipu.engine.checkpoint.folder import HOLDER, LOCK

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from trees import equal

pytestmark = zoo.KERAS_WARNINGS
STATE = {"weights": [np.arange(6.0).reshape(2, 3), np.ones(2, np.int8)], "step": 7, "rate": 0.1, "name": "größer"}


@pytest.fixture
def checkpoints(tmp_path):
    """An empty folder `run`."""
    made = Checkpoints(tmp_path / "run")
    yield made
    made.close()


def test_what_is_saved_comes_back(checkpoints):
    assert checkpoints.latest() is None
    tree = STATE | {"half": jnp.arange(3, dtype="bfloat16"), "many": {"a": np.float32(2.5), "b": [True, "x"]}}
    checkpoints.save(12, tree, wait=True)
    step, restored = checkpoints.restore(tree)
    assert step == checkpoints.latest() == 12
    assert equal(restored, tree)
    assert type(restored["step"]) is int
    assert Checkpoints(checkpoints.folder).restore({"many": None})[1] == {"many": {"a": 2.5, "b.0": True, "b.1": "x"}}


def test_a_save_holds_the_values_of_its_moment(checkpoints):
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    host, device = np.ones(1000), jnp.ones(1000)
    checkpoints.save(1, {"host": host, "device": device})
    host += 1
    assert float(double(device)[0]) == 2
    restored = checkpoints.restore({"host": host, "device": jnp.ones(1000)})[1]
    assert restored["host"].max() == restored["device"].max() == 1


def test_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 100, 9):
        checkpoints.save(step, {"step": step})
    checkpoints.close()
    assert checkpoints.all_steps() == [10, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "100"]
    assert checkpoints.restore({"step": 0}) == (100, {"step": 100})
    assert checkpoints.restore({"step": 0}, step=10) == (10, {"step": 10})


def test_when_one_is_due(tmp_path):
    by_steps = Checkpoints(tmp_path / "a", every_steps=10)
    assert [by_steps.due(step) for step in (9, 10)] == [False, True]
    by_steps.save(13, STATE, wait=True)
    assert [by_steps.due(step) for step in (22, 23)] == [False, True]
    again = Checkpoints(tmp_path / "a", every_steps=10)
    again.restore(STATE)
    assert [again.due(step) for step in (22, 23)] == [False, True]
    by_time = Checkpoints(tmp_path / "b", every_seconds=0.05)
    assert not by_time.due(1000)
    time.sleep(0.06)
    assert by_time.due(1)
    cheap = Checkpoints(tmp_path / "c", max_share=1e-6)
    assert cheap.due(0)
    cheap.save(1, STATE, wait=True)
    assert not cheap.due(2), "writing would take more than a millionth of the time"
    for one in (by_steps, again, by_time, cheap):
        one.close()


def test_what_does_not_fit_is_named(checkpoints):
    checkpoints.save(3, STATE, wait=True)
    for like, words in (
        (
            {"weights": [np.zeros((2, 4)), STATE["weights"][1]]},
            "`weights.0` is float64[2, 3] in the checkpoint and float64[2, 4]",
        ),
        ({"weights": STATE["weights"][:1]}, "`weights.1` is int8[2] in the checkpoint and missing here"),
        ({"step": 0, "other": 1}, "`other` is missing in the checkpoint and an int here"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            checkpoints.restore(like)


def test_wrong_arguments_are_refused(checkpoints, tmp_path):
    for arguments in ({"keep": 0}, {"every_steps": -1}, {"every_seconds": 0}, {"max_share": 2}):
        with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` is"):
            Checkpoints(tmp_path, **arguments)
    with pytest.raises(ValueError, match="`step` is -1"):
        checkpoints.save(-1, STATE)
    with pytest.raises(ValueError, match=re.escape("`a.0` is a set, which a checkpoint cannot hold")):
        checkpoints.save(1, {"a": [{1}]})
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in"):
        checkpoints.restore(STATE)
    checkpoints.save(1, STATE)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 2 .* Available steps: \[1\]"):
        checkpoints.restore(STATE, step=2)


def damage(folder, every):
    """Each way to damage a checkpoint: a flipped bit in every so many bytes of every file, cut files, lost files."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content, name = path.read_bytes(), path.relative_to(folder)
        for at in {*range(0, len(content), every), len(content) - 1}:
            flipped = bytearray(content)
            flipped[at] ^= 1 << (at % 8)
            path.write_bytes(flipped)
            yield f"byte {at} of {name}"
        for length in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:length])
            yield f"{length} bytes of {name}"
        path.unlink()
        yield f"without {name}"
        path.write_bytes(content)


@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_named_and_passed_over(checkpoints, every):
    checkpoints.save(1, STATE)
    checkpoints.save(2, STATE | {"step": 8}, wait=True)
    newest = checkpoints.folder / "2"
    for what in damage(newest, every):
        with pytest.warns(RuntimeWarning, match=f"The checkpoint {newest} is damaged .* It is skipped"):
            assert checkpoints.restore({"step": 0}) == (1, {"step": 7}), what
    assert checkpoints.restore(STATE)[0] == 2, "all is well again"
    (newest / MANIFEST).unlink()
    with pytest.raises(ValueError, match="damaged"):
        checkpoints.restore(STATE, step=2)
    (checkpoints.folder / "1" / MANIFEST).unlink()
    with pytest.warns(RuntimeWarning), pytest.raises(FileNotFoundError, match=r"is intact \(of steps \[1, 2\]\)"):
        checkpoints.restore(STATE)
    (newest / MANIFEST).touch()
    checkpoints.save(2, STATE, wait=True)
    assert checkpoints.restore(STATE)[0] == 2, "a damaged one is replaced"


def test_a_full_disk_leaves_the_last_checkpoint(checkpoints, caplog):
    big = {"a": np.random.default_rng(0).random(1 << 18)}
    checkpoints.save(1, big, wait=True)
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        with caplog.at_level(logging.ERROR, "openipu"):
            checkpoints.save(2, big, wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    [message] = [r.getMessage() for r in caplog.records if r.name == "openipu"]
    assert "Checkpoint 2 could not be saved" in message
    assert "Training continues; the newest checkpoint is 1." in message
    assert {path.name for path in checkpoints.folder.iterdir()} == {LOCK, HOLDER, "1"}
    assert checkpoints.restore(big)[0] == 1
    checkpoints.save(3, big, wait=True)
    assert checkpoints.restore(big)[0] == 3


def test_what_a_killed_process_left_is_removed(tmp_path):
    for name in (".openipu-saving-7", ".openipu-removed-3-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.txt").touch()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    checkpoints.save(7, STATE, wait=True)
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "mine.txt"]


def test_folders_of_the_user_are_left_alone(tmp_path, caplog):
    own = ["saving-7", "removed-3-1", *map(str, range(10))]
    for name in own:
        (tmp_path / name).mkdir()
        (tmp_path / name / "picture.png").touch()
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.all_steps() == []
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in"):
        checkpoints.restore(STATE)
    for step in (11, 12, 3):
        checkpoints.save(step, STATE, wait=True)
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*own, "12"])
    assert all((tmp_path / name / "picture.png").exists() for name in own)
    assert "3 exists and is not a checkpoint" in caplog.text


def test_checkpoints_that_others_wrote_with_orbax_are_left_alone(tmp_path, caplog):
    for name in ("1", "2"):
        (tmp_path / name / "arrays").mkdir(parents=True)
        (tmp_path / name / "arrays" / "_METADATA").touch()
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (2, 3, 4):
        checkpoints.save(step, STATE, wait=True)
    checkpoints.close()
    assert "2 exists and is not a checkpoint" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "4"]


@pytest.mark.parametrize("folder", ["", "gs://bucket/run", "s3://bucket", Path("gs://bucket/run"), Path("s3://bucket")])
def test_places_that_are_no_folder_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`dir` is"):
        ipu.callbacks.Checkpoint(folder)
    assert list(tmp_path.iterdir()) == []


def test_how_the_program_logs_stays_as_it_is(checkpoints, monkeypatch):
    """Orbax logs through absl, which gives the root logger a handler if it has none."""
    monkeypatch.setattr(logging.root, "handlers", [])
    checkpoints.save(1, STATE, wait=True)
    assert checkpoints.restore(STATE)[0] == 1
    assert logging.root.handlers == []
