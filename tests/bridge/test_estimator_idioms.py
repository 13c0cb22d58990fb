"""What scripts with estimators of TensorFlow 1 use besides layers: decays, sums of weights, hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest

tf: Any = None  # conftest.py puts TensorFlow here
X = np.random.default_rng(3).normal(size=(96, 6)).astype(np.float32)
Y = X[:, :1] + 0.5
DECAY = 0.02


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("exponential_decay", lambda step: (0.1, step, 10, 0.5)),
        ("exponential_decay", lambda step: (0.1, step, 10, 0.5, True)),
        ("natural_exp_decay", lambda step: (0.1, step, 10, 0.5)),
        ("inverse_time_decay", lambda step: (0.1, step, 10, 0.5, True)),
        ("polynomial_decay", lambda step: (0.1, step, 20, 0.01, 2.0)),
        ("polynomial_decay", lambda step: (0.1, step, 20, 0.01, 1.0, True)),
        ("cosine_decay", lambda step: (0.1, step, 20, 0.1)),
        ("piecewise_constant", lambda step: (step, [7, 15], [0.3, 0.2, 0.1])),
        ("piecewise_constant_decay", lambda step: (step, [7, 15], [0.3, 0.2, 0.1])),
    ],
)
def test_decays_are_tensorflows(name: str, arguments: Callable[[Any], tuple[Any, ...]]) -> None:
    from openipu.tensorflow.learning_rates import decayed

    steps = (0, 1, 7, 8, 15, 30)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        step = tf.compat.v1.placeholder(tf.int32, ())
        rate = getattr(tf.compat.v1.train, name)(*arguments(step))
        expected = [session.run(rate, {step: number}) for number in steps]
    original = getattr(tf.compat.v1.train, name)
    found = [float(decayed(name, original, *arguments(number))) for number in steps]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def tensorflow_model_fn(features, labels, mode, params):
    v1 = tf.compat.v1
    with v1.variable_scope("hidden"):
        x = v1.layers.dense(features, 4, activation=tf.nn.tanh, name="dense")
    y = v1.layers.dense(x, 1, name="out")
    loss = v1.losses.mean_squared_error(labels, y)
    loss += DECAY * tf.add_n([tf.nn.l2_loss(v) for v in v1.trainable_variables() if "kernel" in v.name])
    step = v1.train.get_or_create_global_step()
    rate = v1.train.exponential_decay(0.1, step, 3, 0.5)
    hook = ipu.ipu_session_run_hooks.IPULoggingTensorHook(every_n_iter=1, formatter=params["seen"].append)
    train_op = v1.train.MomentumOptimizer(rate, 0.9).minimize(loss, global_step=step)
    return v1.estimator.EstimatorSpec(
        mode, loss=loss, train_op=tf.group(train_op, hook.log({"rate": rate})), training_hooks=[hook]
    )


def keras_model_fn(features, labels, mode, params):
    del params
    hidden, out = keras.layers.Dense(4, "tanh", name="dense"), keras.layers.Dense(1, name="out")
    loss = keras.ops.mean(keras.ops.square(labels - out(hidden(features))))
    for layer in (hidden, out):
        loss += DECAY * keras.ops.sum(keras.ops.square(layer.kernel)) / 2
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    return ipu.estimator.EstimatorSpec(
        mode, loss=loss, train_op=keras.optimizers.SGD(schedule, momentum=0.9).minimize(loss)
    )


def trained(model_fn: Any, folder: Path, hooks: Any = None) -> tuple[Any, list[Any]]:
    """The weights after 12 steps, and what the model function has logged."""
    seen: list[Any] = []
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    settings = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=6, ipu_options=config)
    run = ipu.ipu_run_config.RunConfig(settings, model_dir=str(folder), tf_random_seed=1)
    made = ipu.ipu_estimator.IPUEstimator(model_fn, config=run, params={"seen": seen})
    made.train(lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat(), steps=12, hooks=hooks)
    names = [name for name in made.get_variable_names() if name.endswith(("kernel", "bias"))]
    ipu.config.reset_ipu_configuration()
    return [made.get_variable_value(name) for name in sorted(names)], seen


@pytest.mark.slow
def test_a_script_of_tensorflow_1_trains_as_its_keras_version_does(tmp_path: Path) -> None:
    class Steps(tf.compat.v1.train.SessionRunHook):
        def begin(self):
            self.step, self.seen = tf.compat.v1.train.get_global_step(), []

        def before_run(self, run_context):
            del run_context
            return tf.compat.v1.train.SessionRunArgs(self.step)

        def after_run(self, run_context, run_values):
            del run_context
            self.seen.append(int(run_values.results))

    steps = Steps()
    ours, seen = trained(tensorflow_model_fn, tmp_path / "tensorflow", [steps])
    expected, _ = trained(keras_model_fn, tmp_path / "keras")
    assert len(ours) == len(expected) == 4
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert steps.seen == [6, 12]
    np.testing.assert_allclose([values["rate"] for values in seen], [0.1 * 0.5 ** (n / 3) for n in (5, 11)], rtol=1e-5)


def test_summaries_in_a_model_fn_are_refused_with_the_remedy(tmp_path: Path) -> None:
    def model_fn(features, labels, mode, params):
        del params
        loss = tf.reduce_mean(tf.compat.v1.layers.dense(features, 1) - labels)
        tf.compat.v1.summary.scalar("loss", loss)
        return tf.estimator.EstimatorSpec(mode, loss=loss)

    with pytest.raises(NotImplementedError, match=r"`tf\.summary\.scalar` is not available.*IPULoggingTensorHook"):
        trained(model_fn, tmp_path)


def test_verbosity_is_that_of_our_logger_too(monkeypatch: pytest.MonkeyPatch) -> None:
    log, before = logging.getLogger("openipu"), tf.compat.v1.logging.get_verbosity()
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    assert log.level == logging.INFO
    assert log.handlers == tf.get_logger().handlers
    tf.compat.v1.logging.set_verbosity(before)


def test_names_of_tensorflow_1() -> None:
    import tensorflow.compat.v1 as v1

    assert v1 is tf.compat.v1, "TensorFlow has two modules of this name, and scripts import either"
    assert v1.estimator is ipu.estimator
    assert v1.train.SessionRunHook is ipu.estimator.SessionRunHook
    assert v1.train.get_global_step() is None, "outside of hooks and model functions, TensorFlow's own"
