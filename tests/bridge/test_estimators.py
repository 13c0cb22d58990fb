"""Model functions in the words of TensorFlow: the same programs and numbers as in our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openipu as ipu

import jax.numpy as jnp
import keras
import numpy as np
import pytest

tf: Any = None  # conftest.py puts TensorFlow here
X = np.random.default_rng(3).normal(size=(96, 6)).astype(np.float32)
Y = X[:, :3].argmax(1).astype(np.int32)


def input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=True).repeat()


def test_input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=True)


test_input_fn.__test__ = False  # type: ignore[attr-defined]


def tensorflow_model_fn(features, labels, mode, params):
    hidden = tf.compat.v1.layers.dense(features, 8, activation=tf.nn.relu)
    hidden = tf.compat.v1.layers.dropout(hidden, 0.25, training=mode == tf.estimator.ModeKeys.TRAIN)
    logits = tf.compat.v1.layers.dense(hidden, units=3)
    predictions = tf.argmax(input=logits, axis=-1, output_type=tf.int32)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"class": predictions})
    loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == tf.estimator.ModeKeys.TRAIN:
        step = tf.compat.v1.train.get_global_step()
        train_op = tf.compat.v1.train.AdamOptimizer(params["rate"], epsilon=1e-7).minimize(loss, global_step=step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
    value, update = tf.compat.v1.metrics.accuracy(labels=labels, predictions=predictions)
    return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": (value, update)})


def keras_model_fn(features, labels, mode, params):
    hidden = keras.layers.Dense(8, activation="relu")(features)
    hidden = keras.layers.Dropout(0.25)(hidden)
    logits = keras.layers.Dense(3)(hidden)
    if mode == "infer":
        return ipu.estimator.EstimatorSpec(mode, predictions={"class": jnp.argmax(logits, -1)})
    loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
    if mode == "train":
        return ipu.estimator.EstimatorSpec(
            mode, loss=loss, train_op=keras.optimizers.Adam(params["rate"], epsilon=1e-7).minimize(loss)
        )
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return ipu.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": (accuracy, labels, logits)})


def estimator(model_fn: object, folder: Path) -> ipu.ipu_estimator.IPUEstimator:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    settings = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=6, ipu_options=config)
    run = ipu.ipu_run_config.RunConfig(settings, model_dir=str(folder), tf_random_seed=1)
    return ipu.ipu_estimator.IPUEstimator(model_fn, config=run, params={"rate": 0.05})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ipu.ipu_estimator.IPUEstimator]]:
    found = []
    for model_fn in (tensorflow_model_fn, keras_model_fn):
        found.append(estimator(model_fn, tmp_path_factory.mktemp("model")))
        found[-1].train(input_fn, steps=12)
    yield found
    ipu.config.reset_ipu_configuration()


@pytest.mark.slow
def test_both_give_the_same_numbers(trained):
    one, other = (e.evaluate(test_input_fn) for e in trained)
    assert one.keys() == other.keys() == {"loss", "accuracy", "global_step"}
    assert one["global_step"] == other["global_step"] == 12
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)
    assert one["accuracy"] == pytest.approx(other["accuracy"])
    assert one["accuracy"] > 0.6


@pytest.mark.slow
def test_both_predict_the_same(trained):
    one, other = ([int(row["class"]) for row in e.predict(test_input_fn)] for e in trained)
    assert len(one) == len(X)
    assert one == other


def test_the_namespace_is_openipus():
    assert tf.estimator is ipu.estimator
    for name in (
        "ModeKeys",
        "EstimatorSpec",
        "RunConfig",
        "TrainSpec",
        "EvalSpec",
        "train_and_evaluate",
        "SessionRunHook",
    ):
        assert getattr(tf.estimator, name) is getattr(ipu.estimator, name)


def steps_of(name: str, *args: float, **kwargs: float) -> list[float]:
    """The values of a weight under TensorFlow 1's optimizer."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("w", initializer=1.0)
        train = getattr(tf.compat.v1.train, name)(*args, **kwargs).minimize(tf.sin(weight) * 3)
        session.run(tf.compat.v1.global_variables_initializer())
        return [session.run([train, weight]) and float(session.run(weight)) for _ in range(4)]


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("GradientDescentOptimizer", (0.1,), {}),
        ("MomentumOptimizer", (0.1, 0.9), {}),
        ("MomentumOptimizer", (0.1, 0.9), {"use_nesterov": True}),
        ("AdamOptimizer", (0.1,), {"beta1": 0.8}),
        ("AdagradOptimizer", (0.1,), {}),
        ("AdadeltaOptimizer", (1.0,), {"rho": 0.9}),
        ("FtrlOptimizer", (0.1,), {}),
        ("FtrlOptimizer", (0.1,), {"l1_regularization_strength": 0.05, "l2_regularization_strength": 0.2, "beta": 0.3}),
        ("FtrlOptimizer", (0.1, -0.7), {"l2_shrinkage_regularization_strength": 0.1}),
        ("RMSPropOptimizer", (0.1,), {}),
        ("RMSPropOptimizer", (0.1, 0.8, 0.5), {"centered": True, "epsilon": 1e-5}),
    ],
)
def test_optimizers_step_as_tensorflows_do(name, args, kwargs):
    from openipu.tensorflow.estimator import OPTIMIZERS

    expected = steps_of(name, *args, **kwargs)
    optimizer, weight = OPTIMIZERS[name](*args, **kwargs), keras.Variable(1.0)
    found = []
    for _ in range(4):
        optimizer.apply([3 * jnp.cos(weight.value)], [weight])
        found.append(float(weight.value))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_optimizer_that_differs_is_refused_with_the_remedy(tmp_path):
    def model_fn(features, labels, mode, params):
        loss = tf.reduce_mean(tf.compat.v1.layers.dense(features, 1)) + tf.reduce_mean(tf.cast(labels, tf.float32))
        optimizer = tf.compat.v1.train.ProximalAdagradOptimizer(params["rate"])
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    with pytest.raises(NotImplementedError, match=r"`ProximalAdagradOptimizer` is not.*tf\.keras\.optimizers"):
        estimator(model_fn, tmp_path).train(input_fn, steps=6)
