"""`tf.train.Checkpoint` and files of weights with models of a strategy."""

from __future__ import annotations

from typing import Any

import openipu  # noqa: F401 - puts Keras on JAX

import keras
import numpy as np
import pytest

import zoo
from replication import configure_all, strategy

pytestmark = zoo.KERAS_WARNINGS
tf: Any = None  # conftest.py puts TensorFlow here
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    configure_all()


def make(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    with strategy(1).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def values(*owners: Any) -> list[np.ndarray]:
    return [np.asarray(v.value) for owner in owners for v in owner.variables]


def check_equal(one: keras.Model, other: keras.Model) -> None:
    for a, b in zip(values(one, one.optimizer), values(other, other.optimizer), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_checkpoint_restores_model_optimizer_and_step(tmp_path):
    model, step = make(1), tf.Variable(1)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=step)
    assert checkpoint.model is model
    first = checkpoint.write(str(tmp_path / "first"))
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2)
    for _ in range(3):
        model.fit(X, X[:, :3], 8, verbose=0)
        checkpoint.step.assign_add(1)
        manager.save()
    assert manager.latest_checkpoint == tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-3")
    assert [path.rpartition("-")[2] for path in manager.checkpoints] == ["2", "3"]
    other, again = make(2), tf.Variable(0)
    copy = tf.train.Checkpoint(model=other, optimizer=other.optimizer, step=again)
    copy.read(first).assert_consumed()
    assert int(again) == 1
    copy.restore(manager.latest_checkpoint).assert_consumed()
    assert int(again) == 4
    check_equal(model, other)
    # Both go on in the same way, dropout included.
    histories = [m.fit(X, X[:, :3], 8, shuffle=False, verbose=0).history for m in (model, other)]
    assert histories[0] == histories[1]


def test_a_compiled_model_is_saved_with_its_optimizer(tmp_path):
    model, other = make(1), make(2)
    model.fit(X, X[:, :3], 8, verbose=0)
    path = tf.train.Checkpoint(net=model).write(str(tmp_path / "once"))
    tf.train.Checkpoint(net=other).read(path).assert_consumed()
    check_equal(model, other)
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any("net/optimizer/" in name for name in names)


def test_a_checkpoint_without_objects_of_keras_is_tensorflows(tmp_path):
    step = tf.Variable(5)
    path = tf.train.Checkpoint(step=step).save(str(tmp_path / "steps"))
    step.assign(0)
    tf.train.Checkpoint(step=step).restore(path)
    assert int(step) == 5


def test_what_cannot_be_restored_is_refused_with_the_remedy(tmp_path):
    model = make(1)
    path = tf.train.Checkpoint(model=model, rate=keras.Variable(2.0)).save(str(tmp_path / "all"))
    with pytest.raises(ValueError, match="Call it on a batch"):
        tf.train.Checkpoint(model=keras.Sequential([keras.layers.Dense(3)])).restore(path)
    with pytest.raises(ValueError, match=r"call `optimizer.build\(variables\)` first"):
        tf.train.Checkpoint(optimizer=keras.optimizers.Adam()).restore(path)
    with pytest.raises(TypeError, match=r"tf.train.Checkpoint\(model=model\)"):
        tf.train.Checkpoint(model)
    wider = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(5)])
    with pytest.raises(ValueError, match="shape"):
        tf.train.Checkpoint(model=wider).restore(path)
    rate = keras.Variable(0.0)
    tf.train.Checkpoint(rate=rate).restore(path).expect_partial()
    assert float(rate.value) == 2


@pytest.mark.parametrize("name", ["folder/weights", "folder/cp-0001.ckpt", "plain.weights.h5"])
def test_files_of_weights_have_any_name(name, tmp_path):
    model, other = make(1), make(2)
    model.save_weights(str(tmp_path / name))
    other.load_weights(tmp_path / name).expect_partial()
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    if name.startswith("folder"):
        latest = tf.train.latest_checkpoint(str(tmp_path / "folder"))
        assert latest == str(tmp_path / f"{name}.weights.h5")
        make(3).load_weights(latest)


def test_checkpoints_of_a_callback_have_any_name(tmp_path):
    callback = keras.callbacks.ModelCheckpoint(str(tmp_path / "cp-{epoch:02d}.ckpt"), save_weights_only=True)
    make(1).fit(X, X[:, :3], 8, epochs=2, verbose=0, callbacks=[callback])
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "cp-02.ckpt.weights.h5")
