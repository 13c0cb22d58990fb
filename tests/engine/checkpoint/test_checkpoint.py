"""Checkpoints are complete or not there, and training that goes on from one ends with the same bits."""

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time

import openipu as ipu
from openipu.engine.checkpoint import Checkpoints

import keras
import numpy as np
import pytest

import replication
import trainee
import zoo
from trees import equal

pytestmark = zoo.KERAS_WARNINGS
KILLS = int(os.environ.get("OPENIPU_KILLS", "10"))
X = np.random.default_rng(0).random((101, 6), np.float32)
Y = (X.sum(1) > 3).astype(np.int32)


# --- fit -------------------------------------------------------------------------------------------------------------


class Sequence(keras.utils.PyDataset):
    """Shuffles itself between epochs and draws random numbers while it is read."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(len(X))

    def __len__(self):
        return 13

    def __getitem__(self, i):
        rows = self.order[8 * i : 8 * i + 8]
        return X[rows] + np.random.random((len(rows), 1)).astype(np.float32), Y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def generator():
    while True:
        rows = np.random.randint(0, len(X), 8)
        yield X[rows], Y[rows]


def tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(101, seed=3).batch(8)


def grain_data():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(X, Y, strict=True))).seed(3).shuffle().batch(8)


def torch_data():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)


SOURCES = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8, "validation_split": 0.2},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 7, "shuffle": False},
    "in order": lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": False},
    "by batch": lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": "batch"},
    "epochs within a pass": lambda: {"x": X, "y": Y, "batch_size": 8, "steps_per_epoch": 4},
    "PyDataset": lambda: {"x": Sequence(), "shuffle": False},
    "tf.data": lambda: {"x": tf_data(), "shuffle": False},
    "grain": lambda: {"x": grain_data(), "shuffle": False},
    "torch": lambda: {"x": torch_data(), "shuffle": False},
}


class InterruptedRunError(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Draws random numbers, waits for each checkpoint, and ends the run before execution number `at`."""

    def __init__(self, checkpoint, at):
        super().__init__()
        self.checkpoint, self.at = checkpoint, at

    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002
        np.random.random()

    def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002
        self.checkpoint._checkpoints.wait()
        self.at -= 1
        if self.at < 0:
            raise InterruptedRunError


@pytest.fixture(scope="module", autouse=True)
def systems():
    replication.configure_all()


def network(replicas=1, sharded=False, **compiled):
    with replication.strategy(replicas).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3)])
        model.add(keras.layers.Dense(2))
    model.set_gradient_accumulation_options(replicated_optimizer_state_sharding=sharded)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile("adam", loss, metrics=["accuracy"], **({"steps_per_execution": 3} | compiled))
    return model


def weights(model):
    return [np.asarray(v.value) for v in (*model.weights, *model.optimizer.variables)]


def train(folder, data, at=1000, seed=1, callbacks=(), **settings):
    """What a run ends with, or None if it was interrupted."""
    keras.utils.set_random_seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    model = network(**settings)
    checkpoint = ipu.callbacks.Checkpoint(folder, max_share=1)
    try:
        history = model.fit(
            **data(), epochs=3, verbose=0, callbacks=[*callbacks, checkpoint, Interrupt(checkpoint, at)]
        )
    except InterruptedRunError:
        return None
    return history.history, history.epoch, weights(model), np.random.get_state()[1:3]


def check_resumes(folder, data, at, other_seed=77, **settings):
    """A run that was interrupted at those executions and always begun again ends like one that never was."""
    whole = train(folder / "whole", data, **settings)
    assert equal(train(folder / "whole", data, **settings), whole), "a finished run has nothing left to do"
    for i in at:
        shutil.rmtree(folder / "cut", ignore_errors=True)
        assert train(folder / "cut", data, i, **settings) is None
        # Another seed: everything that counts comes from the checkpoint.
        assert equal(train(folder / "cut", data, seed=other_seed, **settings), whole), i


@pytest.mark.parametrize("source", ["arrays", "generator"])
def test_fit_goes_on_in_the_middle_of_an_epoch(tmp_path, source):
    check_resumes(tmp_path, SOURCES[source], [5])


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_fit_goes_on_anywhere(tmp_path, source):
    executions = {"generator": 9, "epochs within a pass": 6, "arrays": 12}.get(source, 15)
    if source == "torch":
        pytest.importorskip(source)  # before the first run seeds it
    # TensorFlow mixes its global seed, which is not saved, into that of a dataset.
    check_resumes(tmp_path, SOURCES[source], range(1, executions, 3), other_seed=1 if source == "tf.data" else 77)


def test_fit_goes_on_with_replicas(tmp_path):
    check_resumes(tmp_path, SOURCES["arrays"], [2], replicas=2, sharded=True)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("replicas", [2, 4])
def test_fit_goes_on_anywhere_with_replicas(tmp_path, replicas, sharded):
    check_resumes(tmp_path, SOURCES["in order"], [1, 2], replicas=replicas, sharded=sharded, steps_per_execution=2)


def test_a_run_moves_between_devices(tmp_path):
    """1 device, then 2, then 4 with divided optimizer state, then 1: one global batch of 8, cut in different ways."""

    def data(replicas):
        return lambda: {"x": X[:96], "y": Y[:96], "batch_size": 8 // replicas}

    whole = train(tmp_path / "whole", data(1))
    for replicas, sharded, at in ((1, False, 1), (2, False, 1), (4, True, 2), (1, False, 1000)):
        end = train(tmp_path / "moved", data(replicas), at, replicas=replicas, sharded=sharded)
    np.testing.assert_allclose(end[0]["accuracy"], whole[0]["accuracy"], rtol=1e-5)
    for a, b in zip(end[2], whole[2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    model = network(replicas=2)
    assert ipu.callbacks.Checkpoint(tmp_path / "moved").load_weights(model) > 36
    assert equal([np.asarray(v.value) for v in model.trainable_weights], end[2][: len(model.trainable_weights)])


@pytest.mark.parametrize("data", ["tf.data", "grain"])
@pytest.mark.parametrize("built", [False, True], ids=["new model", "built model"])
@pytest.mark.parametrize("again", [False, True], ids=["another new model", "the same model"])
def test_a_seeded_dataset_goes_on_whether_or_not_a_batch_is_read_to_build_the_model(tmp_path, built, again, data):
    """Each opening of a seeded dataset draws another order."""

    def fit(folder, model, at=1000, epochs=3):
        checkpoint = ipu.callbacks.Checkpoint(tmp_path / folder, max_share=1)
        with contextlib.suppress(InterruptedRunError):
            return model.fit(
                **SOURCES[data](), epochs=epochs, verbose=0, callbacks=[checkpoint, Interrupt(checkpoint, at)]
            ).history

    def made():
        keras.utils.set_random_seed(1)
        model = network()
        if built:
            model.fit(X, Y, batch_size=8, steps_per_epoch=1, verbose=0)
        return model

    whole = fit("whole", made())
    for at in (2, 7):
        model = made()
        assert fit(f"cut {at}", model, at) is None
        assert fit(f"cut {at}", model if again else network()) == whole
    model = made()
    for epochs in (1, 3):
        parts = fit("parts", model, epochs=epochs)
    assert parts == whole


def test_callbacks_go_on_counting(tmp_path):
    def data():
        return {"x": X, "y": Y, "batch_size": 32}

    def plateau():
        return keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=10.0, min_lr=0)

    def decay():
        return keras.callbacks.LearningRateScheduler(lambda _, rate: 0.9 * rate)

    whole = train(tmp_path / "whole", data, callbacks=[plateau(), decay()])
    assert train(tmp_path / "cut", data, 5, callbacks=[plateau(), decay()]) is None
    end = train(tmp_path / "cut", data, callbacks=[plateau(), decay()])
    assert whole[0]["learning_rate"][2] < 0.6 * whole[0]["learning_rate"][0], "the rate fell"
    assert equal(end, whole)


def test_a_run_of_several_fits(tmp_path, caplog):
    """Whatever `initial_epoch` says, a fit goes on from the newest checkpoint, which is always the one last saved."""

    def fit(folder, seed=1, model=None, **epochs):
        keras.utils.set_random_seed(seed)
        model, checkpoint = model or network(), ipu.callbacks.Checkpoint(tmp_path / folder, keep=None, max_share=1)
        history = model.fit(X, Y, 8, verbose=0, validation_split=0.2, callbacks=[checkpoint], **epochs)
        return model, (history.history, history.epoch, weights(model))

    _, whole = fit("whole", epochs=4)
    model, _ = fit("parts", epochs=2)
    fit("parts", 2, model, epochs=3, initial_epoch=2)
    assert Checkpoints(tmp_path / "parts").latest() == 3 * 10
    parts, end = fit("parts", 3, epochs=4, initial_epoch=3)
    assert equal(end, whole)
    assert end[1] == [0, 1, 2, 3]
    assert "nothing is left to train" not in caplog.text
    assert equal(fit("parts", 4, epochs=4, initial_epoch=3)[1], whole), "the same fit has nothing left to do"
    assert "The newest checkpoint has all 4 epochs: nothing is left to train" in caplog.text
    model = network()
    assert ipu.callbacks.Checkpoint(tmp_path / "parts").load_weights(model) == 4 * 10
    assert equal(model.get_weights(), parts.get_weights())
    notice = "The newest checkpoint is in epoch 4, and `epochs` is 1: nothing is left to train"
    assert notice not in caplog.text
    assert equal(fit("parts", 5, epochs=1)[1], whole), "nothing is taken back"
    assert notice in caplog.text
    with pytest.raises(ValueError, match=r"`initial_epoch` is 5, but .* in epoch 3 .* Give at most 4 to resume"):
        fit("parts", epochs=9, initial_epoch=5)
    _, late = fit("late", epochs=4, initial_epoch=2)
    assert late[1] == [2, 3]
    assert equal(fit("late", 6, epochs=4, initial_epoch=2)[1], late)


def test_every_n_executions(tmp_path):
    folder = tmp_path / "run"
    checkpoint = ipu.callbacks.Checkpoint(folder, every_n_executions=5, keep=None, max_share=1)
    network().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[checkpoint, Interrupt(checkpoint, 100)])
    assert Checkpoints(folder).all_steps() == [13, 26]
    checkpoint = ipu.callbacks.Checkpoint(folder, every_n_executions=2, keep=3, max_share=1)
    history = network().fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[checkpoint])
    assert Checkpoints(folder).all_steps()[-1] == 39, "the last execution is saved whatever n is"
    assert history.epoch == [0, 1, 2]


def test_what_cannot_go_on_says_why(tmp_path):
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"created outside its scope.*BackupAndRestore"):
        plain.fit(X, X[:, :2], verbose=0, callbacks=[ipu.callbacks.Checkpoint(tmp_path)])
    two = [ipu.callbacks.Checkpoint(tmp_path), ipu.callbacks.Checkpoint(tmp_path)]
    with pytest.raises(ValueError, match="given two `Checkpoint` callbacks"):
        network().fit(X, Y, verbose=0, callbacks=two)
    with pytest.raises(ValueError, match="`dir` is an int"):
        ipu.callbacks.Checkpoint(3)
    with pytest.raises(ValueError, match="`every_n_executions` is 0"):
        ipu.callbacks.Checkpoint(tmp_path, every_n_executions=0)
    # Resume a run of 8 rows per batch after 3 batches with 5 rows per batch, and with other metrics.
    assert train(tmp_path / "run", SOURCES["in order"], 1) is None
    for settings, words in (
        (
            {"metrics": []},
            "metric variable 3 is `accuracy/total` in the checkpoint and missing in the model. Compile the",
        ),
        (
            {"optimizer": "sgd"},
            "velocity)` in the checkpoint and `SGD (iteration, learning_rate)` in the model. Compile",
        ),
    ):
        model = network()
        model.compile(**({"optimizer": "adam", "loss": model.loss, "metrics": ["accuracy"]} | settings))
        with pytest.raises(ValueError, match=re.escape(words)):
            model.fit(X, Y, batch_size=8, verbose=0, callbacks=[ipu.callbacks.Checkpoint(tmp_path / "run")])
    with pytest.raises(ValueError, match=r"after 3 batches of 8 rows, which is in the middle of a batch of 5 rows"):
        network().fit(X, Y, batch_size=5, verbose=0, callbacks=[ipu.callbacks.Checkpoint(tmp_path / "run")])


# --- killed ----------------------------------------------------------------------------------------------------------


def start(folder, kind):
    """A run that has begun to train."""
    run = subprocess.Popen([sys.executable, trainee.__file__, str(folder), kind], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline().startswith("epoch ")
    return run


def end_of(run):
    """The last line that a run prints."""
    return run.communicate(timeout=300)[0].splitlines()[-1]


MANY = [pytest.param(kind, KILLS, seed, marks=pytest.mark.slow) for kind in trainee.KINDS for seed in (1, 2)]


@pytest.mark.parametrize(("kind", "kills", "seed"), [("plain", 2, 3), *MANY])
def test_a_killed_run_ends_with_the_same_bytes(tmp_path, kind, kills, seed):
    """Set OPENIPU_KILLS to the number of kills in each of the slow cases."""
    run, begin = start(tmp_path / "whole", kind), time.monotonic()
    whole, seconds = end_of(run), time.monotonic() - begin
    assert whole.startswith("ended ")
    # With seed 3 the two kills are after about a quarter and about half of the run.
    chance, folder, went_on = random.Random(seed), tmp_path / "killed", 0
    for _ in range(kills):
        run = start(folder, kind)
        time.sleep(chance.random() * seconds)
        run.kill()
        last = [line for line in run.communicate()[0].splitlines() if line.startswith("ended ")]
        if last:
            assert last == [whole]
            shutil.rmtree(folder)
        elif Checkpoints(folder).latest() is not None:
            went_on += 1
            Checkpoints(folder).restore({"fit": None})  # a damaged one would be a warning, which is an error here
    assert went_on, "some runs left a checkpoint"
    assert end_of(start(folder, kind)) == whole


def test_a_fit_inside_a_callback_leaves_the_outer_checkpoint_on(tmp_path):
    model = network()

    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            del logs
            if epoch == 0:
                model.fit(X, Y, batch_size=16, epochs=1, verbose=0)

    outer = ipu.callbacks.Checkpoint(tmp_path, max_share=1.0)
    model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=[outer, Inner()])
    assert max(Checkpoints(tmp_path).all_steps()) == 3 * 7
