"""What needs a person is listed, with its line and what to do."""

from __future__ import annotations

from openipu.migration.exports import exists

import pytest

from migrated import rewritten

NAMES = {
    "ipu.serving.export_keras(m, 'x')": "model.export",
    "ipu.custom_ops.precompiled_user_op([x])": "keras.ops or JAX",
    "ipu.utils.set_matmul_options(o)": "ipu.config.IPUConfig",
    "ipu.keras.Sequential([])": "inside of strategy.scope()",
    "ipu.horovod.init()": "PopDistStrategy",
    "ipu.nonsense": "OpenIPU has no such name",
    "tf.keras.backend.get_session()": "keras.ops",
    "tf.keras.nonsense": "Keras 3 has no such name",
    "tf.keras.preprocessing.image.ImageDataGenerator()": "RandomFlip",
    "tf.keras.optimizers.SGD(decay=1e-3)": "InverseTimeDecay",
    "tf.keras.layers.Dense(3, batch_input_shape=(1, 2))": "keras.Input(batch_shape=...)",
    "tf.estimator.DNNClassifier()": "IPUEstimator",
    "tf.compat.v1.metrics.accuracy(a, b, weights)": "keras.metrics.Accuracy()",
    "tf.compat.v1.metrics.auc(a, b)": "keras.metrics.Accuracy()",
    "tf.compat.v1.train.AdamOptimizer()": "its defaults differ",
    "tf.compat.v1.Session()": "strategy.run",
    "tf.compat.v1.train.get_global_step()": "ipu.estimator.get_global_step",
    "tf.compat.v1.train.exponential_decay(1, s, 2, 3)": "keras.optimizers.schedules",
    "tf.compat.v1.layers.dense(x, 3)": "keras.layers.Dense(64)(x)",
    "tf.compat.v1.losses.mean_squared_error(a, b)": "keras.losses",
    "tf.compat.v1.variable_scope('a')": "leave it out",
    "tf.compat.v1.trainable_variables()": "layer.kernel",
    "tf.compat.v1.logging.set_verbosity(3)": "logging.getLogger('openipu')",
    "tf.compat.v1.nn.dropout(x, 0.5)": "TensorFlow 1",
    "tf.group(a, b)": "ipu.estimator.group",
    "tf.distribute.get_strategy()": "ipu.ipu_strategy",
    "tf.train.Checkpoint()": "ipu.callbacks.Checkpoint",
    "tf.saved_model.save(m, 'x')": "model.save",
    "tf.Variable(1)": "keras.Variable",
    "model.save_weights('x')": ".weights.h5",
    "model.fit(x, workers=3)": "PyDataset",
    "model.fit_generator(generator=x)": "first argument",
    "strategy.experimental_distribute_dataset(d)": "IPUInfeedQueue",
    "strategy.run(f).numpy()": "numpy.asarray",
}


@pytest.mark.parametrize(("code", "reason"), NAMES.items(), ids=NAMES)
def test_a_note_says_where_and_what_to_do(code, reason):
    if code.startswith("ipu.") and exists(code.partition("(")[0].replace("ipu", "openipu", 1)):
        pytest.skip("OpenIPU has it by now")
    result = rewritten(f"import tensorflow as tf\nfrom tensorflow.python import ipu\n\n{code}\nprint(tf.data, ipu)\n")
    (note,) = result.notes
    assert note.line == 4
    assert result.new.splitlines()[note.new_line - 1].endswith(code.replace("tf.keras", "keras").partition(".")[2])
    assert reason in note.reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("from tensorflow import *", "import them by name"),
        ("from tensorflow.python.ipu.nonsense import *", "OpenIPU has no such name"),
        ("from tensorflow.python.ipu import serving", "model.export"),
        ("import tensorflow_addons as tfa", "Keras 3 has most"),
        ("import horovod.tensorflow as hvd", "openipu launch"),
    ],
)
def test_imports_without_a_successor_stay(code, reason):
    result = rewritten(f"{code}\n")
    assert result.new == f"{code}\n"
    (note,) = result.notes
    assert note.line == 1
    assert reason in note.reason


def test_only_what_has_no_successor_stays():
    result = rewritten("from tensorflow.python.ipu import serving, utils\nserving.export_keras, utils\n")
    assert result.new.splitlines()[:2] == ["from openipu import utils", "from tensorflow.python.ipu import serving"]
