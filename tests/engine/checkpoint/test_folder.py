"""The folder of a run: one process at a time, and told at once if nothing can be saved there."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import openipu as ipu
from openipu.engine.checkpoint import Checkpoints, InUseError
from openipu.engine.checkpoint import folder as folders
from openipu.engine.checkpoint.folder import HOLDER, LOCK

import keras
import numpy as np
import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS
X = np.random.default_rng(0).random((64, 6), np.float32)
HERE = socket.gethostname()


@pytest.fixture
def disk(tmp_path):
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("this user cannot mount a disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk, leave=0):
    """Take all but `leave` bytes of a disk."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "fill").write_bytes(bytes(free - leave))


def network(width=2):
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(width), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
    return model


def fit(folder, model=None, callbacks=(), epochs=1, **settings):
    checkpoint = ipu.callbacks.Checkpoint(folder, **({"max_share": 1} | settings))
    return (model or network()).fit(
        X, X[:, :1], batch_size=8, epochs=epochs, verbose=0, callbacks=[checkpoint, *callbacks]
    )


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# --- one process at a time -------------------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path):
    """A process that saves in the folder `run`, and has a process of its own."""
    script = f"""
        import os, sys, time
        from openipu.engine.checkpoint import Checkpoints
        checkpoints = Checkpoints({str(tmp_path / "run")!r})
        checkpoints.open()
        worker = os.fork()  # as a data loader does
        if worker == 0:
            os.closerange(0, 3)
            time.sleep(600)
        print(worker, flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker = int(process.stdout.readline())
    yield process
    os.kill(worker, signal.SIGKILL)
    process.kill()
    process.communicate()


def test_the_second_process_is_told_who_has_the_folder(tmp_path, other):
    run = tmp_path / "run"
    words = rf"{run} is in use: process {other.pid} on {re.escape(HERE)}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d, saves"
    with pytest.raises(InUseError, match=words):
        fit(run)
    assert Checkpoints(run).latest() is None, "reading is allowed"
    (run / HOLDER).write_text("damaged")
    with pytest.raises(InUseError, match=r"in use: another process saves checkpoints there. Wait until it has ended"):
        fit(run)
    other.send_signal(signal.SIGKILL)
    other.wait()
    fit(run)
    assert Checkpoints(run).latest() == 8


def test_one_run_at_a_time_in_one_process(tmp_path):
    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002
            fit(tmp_path)

    with pytest.raises(InUseError, match=f"another run of this process \\({os.getpid()}\\), since"):
        fit(tmp_path, callbacks=[Inner()])
    fit(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.isdecimal()] == [], "only checkpoints are left"


def test_the_folder_is_free_after_any_end(tmp_path):
    class FailsError(Exception):
        pass

    def fail(*_, **__):
        raise FailsError

    for moment in ("on_train_begin", "on_train_batch_end", "on_train_end"):
        model = network()
        with pytest.raises(FailsError):
            fit(tmp_path, model, callbacks=[keras.callbacks.LambdaCallback(**{moment: fail})])
        Checkpoints(tmp_path).open()  # and closed when it is forgotten
    with pytest.raises(ValueError, match="does not match"):
        fit(tmp_path, network(3))
    fit(tmp_path, network(), epochs=2)


# --- folders that cannot be used -------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_used_is_found_when_training_begins(tmp_path, disk, caplog):
    (tmp_path / "file").touch()
    fill(disk)
    executions = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, _: executions.append(batch))
    for folder, error, words in (
        (tmp_path / "file", PermissionError, "File exists .* Give a writable folder"),
        (tmp_path / "file" / "run", PermissionError, "Not a directory"),
        (Path("/proc/run"), PermissionError, "No such file or directory"),
        (disk, OSError, "No space left on device. Make room on the disk, or give a folder on another one."),
        (disk / "run", OSError, "No space left on device"),
    ):
        with pytest.raises(error, match=rf"`dir` is '{folder}', where nothing can be saved: .*{words}"):
            fit(folder, callbacks=[counting])
    (disk / "fill").unlink()
    fill(disk, 300_000)
    with pytest.raises(OSError, match=r"nothing can be saved: \d+ bytes are needed, but only \d+ are free"):
        fit(disk / "run", network(20_000), callbacks=[counting])
    assert executions == []
    assert messages(caplog) == []


def test_a_read_only_folder(disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(PermissionError, match="Read-only file system"):
        fit(disk / "run")


def test_training_without_checkpoints_if_asked(tmp_path, caplog):
    (tmp_path / "run").touch()
    history = fit(tmp_path / "run", required=False, every_n_executions=9)
    assert history.epoch == [0]
    assert f"Nothing can be saved in {tmp_path / 'run'}: File exists" in caplog.text
    [message] = messages(caplog)
    assert message.startswith(f"Checkpoint 8 could not be saved in {tmp_path / 'run'}: File exists")

    class MakesRoom(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):  # noqa: ARG002
            (tmp_path / "run").unlink()

    fit(tmp_path / "run", callbacks=[MakesRoom()], required=False)
    assert Checkpoints(tmp_path / "run").latest() == 8
    with pytest.raises(ValueError, match=r"`required` is 1\. Give True or False"):
        ipu.callbacks.Checkpoint(tmp_path, required=1)


# --- a disk that gets full -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overhead", [folders._OVERHEAD, 0])
def test_a_disk_that_gets_full_is_one_line(disk, caplog, capfd, monkeypatch, overhead):
    """Also if there seems to be room, as for a user whose quota is used up, and Orbax notices that there is none."""
    monkeypatch.setattr(folders, "_OVERHEAD", overhead)
    caplog.set_level(logging.ERROR)

    class Fills(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002
            self.checkpoint._checkpoints.wait()
            if epoch == 1:
                self.before = self.checkpoint._checkpoints.all_steps()
                fill(disk, 12_000)

    fills = Fills()
    fills.checkpoint = ipu.callbacks.Checkpoint(disk / "run", max_share=1)
    model = network()
    history = model.fit(X, X[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[fills.checkpoint, fills])
    assert history.epoch == [0, 1, 2]
    said = messages(caplog)
    assert len(said) == 2, "when the disk got full, and at the end; not in between, where it was just tried"
    for message in said:
        assert re.fullmatch(
            rf"Checkpoint \d+ could not be saved in {disk / 'run'}: "
            rf"(No space left on device( \(.*\))?|\d+ bytes are needed, but only \d+ are free on the disk)\. "
            rf"Training continues; the newest checkpoint is {fills.before[-1]}\.",
            message,
        )
    assert "Traceback" not in capfd.readouterr().err
    assert {path.name for path in (disk / "run").iterdir()} == {*map(str, fills.before)}
    (disk / "fill").unlink()
    fit(disk / "run", model, epochs=4)
    assert Checkpoints(disk / "run").latest() == 32


# --- what is not ours, or not as we wrote it -------------------------------------------------------------------------


def test_checkpoints_of_tensorflow_are_refused(tmp_path):
    for name in ("checkpoint", "model.ckpt-100.index", "model.ckpt-100.data-00000-of-00001"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"`dir` is .* has a checkpoint of TensorFlow \(model.ckpt-100\), but none of"):
        fit(tmp_path)
    assert not (tmp_path / LOCK).exists()
    Checkpoints(tmp_path).save(8, {"a": 1}, wait=True)
    with pytest.raises(ValueError, match="does not match"):
        fit(tmp_path)


def rewrite(path, change):
    """Change the record of a checkpoint, and give it a valid digest."""
    from openipu.engine.checkpoint.files import MANIFEST, _digest

    record = json.loads((path / MANIFEST).read_text().partition("\n")[2])
    text = change(record)
    text = text if isinstance(text, str) else json.dumps(record if text is None else text)
    (path / MANIFEST).write_text(f"{_digest(text)}\n{text}")


@pytest.mark.parametrize(
    "change",
    [
        lambda _: "no JSON",
        lambda _: [],
        lambda _: {},
        lambda r: {k: v for k, v in r.items() if k != "values"},
        lambda r: r | {"values": []},
        lambda r: r | {"values": {"fit.epoch": None}},
        lambda r: r | {"files": ["a"]},
        lambda r: r | {"files": {"arrays": 3}},
        lambda r: r | {"step": "16"},
        lambda r: r | {"step": 4},
    ],
)
def test_a_manifest_of_another_form_is_passed_over(tmp_path, change):
    checkpoints = Checkpoints(tmp_path)
    for step in (8, 16):
        checkpoints.save(step, {"a": np.arange(3), "b": step}, wait=True)
    rewrite(tmp_path / "16", change)
    with pytest.warns(RuntimeWarning, match=f"The checkpoint {tmp_path / '16'} .* It is skipped"):
        assert checkpoints.restore({"b": 0}) == (8, {"b": 8})
    checkpoints.close()


def test_damaged_checkpoints_do_not_displace_good_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (100, 200):
        checkpoints.save(step, {"a": step}, wait=True)
    checkpoints.close()
    (tmp_path / "200").rename(tmp_path / "300")
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.warns(RuntimeWarning, match="was written as that of step 200, and then renamed"):
        assert checkpoints.restore({"a": 0})[0] == 100
    checkpoints.save(150, {"a": 150}, wait=True)
    assert checkpoints.all_steps() == [150, 300]
    checkpoints.close()


def test_contents_that_do_not_fit_change_nothing(tmp_path):
    fit(tmp_path, epochs=1)
    wrong = {
        "fit.epoch": ("0", "`fit.epoch` is a str in the checkpoint and an int here"),
        "fit.position": ("{}", r"contents that `Checkpoint` does not write \(KeyError"),
        "fit.history": ('{"epoch": 3}', r"contents that `Checkpoint` does not write \(TypeError"),
        "fit.callbacks": ("no JSON", r"contents that `Checkpoint` does not write \(JSONDecodeError"),
    }
    good = json.loads((tmp_path / "8" / "openipu.json").read_text().partition("\n")[2])
    cases = [(name, value, words) for name, (value, words) in wrong.items()]
    cases += [(name, None, f"`{name}` is missing in the") for name in wrong]
    position = json.loads(good["values"]["fit.position"]) | {"done": "4"}
    cases.append(("fit.position", json.dumps(position), "a position has numbers of steps"))
    model = network()
    before = model.get_weights()
    for name, value, words in cases:
        values = {k: v for k, v in good["values"].items() if k != name} | ({} if value is None else {name: value})
        rewrite(tmp_path / "8", lambda record, values=values: record | {"values": values})
        with pytest.raises(ValueError, match=words):
            fit(tmp_path, model, epochs=2)
        assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True)), name
    rewrite(tmp_path / "8", lambda _: good)
    assert fit(tmp_path, model, epochs=2).epoch == [0, 1]


def test_metrics_of_other_shapes_are_refused(tmp_path):
    def compiled(thresholds):
        model = network()
        model.compile("sgd", "mse", metrics=[keras.metrics.TruePositives(thresholds)])
        return model

    fit(tmp_path, compiled([0.5]))
    with pytest.raises(ValueError, match=r"has a metric variable of shape \[1\], where .* has shape \[2\]"):
        fit(tmp_path, compiled([0.2, 0.8]), epochs=2)
