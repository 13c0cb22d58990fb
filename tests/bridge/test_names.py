"""Every module and name of OpenIPU under the names that scripts import."""

import functools
import importlib
import os
import subprocess
import sys
from typing import Any

import openipu

import keras
import numpy as np
import pytest

from reference_names import EVERY

tf: Any = None  # conftest.py puts TensorFlow here
ALIASES = {
    "tensorflow.python.ipu": "openipu",
    "tensorflow.ipu": "openipu",
    "tensorflow.estimator": "openipu.estimator",
    "tensorflow.keras.ipu": "openipu.keras",
    "keras.ipu": "openipu.keras",
    "ipu_tensorflow_addons.keras": "openipu.keras",
    "popdist": "openipu.popdist",
    "popdist.tensorflow": "openipu.popdist.tensorflow",
    "keras.optimizer_v2.adam": "keras.optimizers",
    "keras.optimizer_v2.gradient_descent": "keras.optimizers",
    "keras.optimizer_v2.optimizer_v2": "keras.optimizers",
    "keras.optimizer_v2.learning_rate_schedule": "keras.optimizers.schedules",
}


@pytest.mark.parametrize("prefix", ["tensorflow.python.ipu", "tensorflow.ipu"])
@pytest.mark.parametrize("name", [name for name in openipu.__all__ if name not in openipu._FUNCTIONS])
def test_every_module_is_openipus(prefix, name):
    module = importlib.import_module(f"{prefix}.{name}")
    assert module is getattr(openipu, name)
    assert module.__name__.startswith("openipu.")
    for public in getattr(module, "__all__", ()):
        namespace: dict[str, object] = {}
        exec(f"from {prefix}.{name} import {public}", namespace)
        assert namespace[public] is getattr(module, public)


@pytest.mark.parametrize(("module", "name"), EVERY)
def test_every_name_of_the_original_can_be_imported(module, name):
    namespace: dict[str, object] = {}
    exec(f"from tensorflow.python.ipu{module and f'.{module}'} import {name}", namespace)
    assert namespace[name] is functools.reduce(getattr, f"{module}.{name}".lstrip(".").split("."), openipu)


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_its_module(alias):
    assert importlib.import_module(alias) is importlib.import_module(ALIASES[alias])


def test_all_import_forms_give_the_same_module():
    namespace: dict[str, object] = {}
    exec(
        "from tensorflow.python import ipu as a\n"
        "import tensorflow.python.ipu as b\n"
        "from tensorflow import ipu as c\n"
        "from tensorflow.python.ipu.ipu_strategy import IPUStrategy\n"
        "from tensorflow.python.ipu import ipu_strategy",
        namespace,
    )
    assert all(namespace[name] is openipu for name in "abc")
    assert namespace["IPUStrategy"] is openipu.ipu_strategy.IPUStrategy


def test_keras_has_the_extensions_wherever_it_is_imported_from():
    from tensorflow import keras as one
    from tensorflow.keras import ipu as two

    assert tf.keras.ipu is one.ipu is two is keras.ipu is openipu.keras
    assert tf.keras.layers.Dense is keras.layers.Dense
    assert tf.optimizers.SGD is keras.optimizers.SGD
    assert tf.losses.SparseCategoricalCrossentropy is keras.losses.SparseCategoricalCrossentropy


def test_addons_and_popdist():
    import ipu_tensorflow_addons.keras as addons
    import popdist
    import popdist.tensorflow

    assert addons is openipu.keras
    assert popdist.getNumInstances() == 1
    assert popdist.tensorflow is openipu.popdist.tensorflow


def test_a_module_that_is_not_there_is_named_with_the_remedy():
    with pytest.raises(ModuleNotFoundError, match=r"OpenIPU has no `openipu.nonsense`.*docs/scripts.md"):
        importlib.import_module("tensorflow.python.ipu.nonsense")


def test_modules_keep_their_own_names():
    importlib.import_module("tensorflow.python.ipu.config")
    assert openipu.config.__spec__.name == "openipu.config"
    assert openipu.__spec__.name == "openipu"


# --- idioms of Keras 2


def test_the_older_name_of_steps_per_execution():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", experimental_steps_per_execution=8)
    assert model.steps_per_execution == 8


def test_learning_rates_and_their_decay():
    optimizer = tf.keras.optimizers.SGD(lr=0.5, decay=0.1)
    weight = keras.Variable(np.zeros(1, np.float32))
    steps = []
    for _ in range(3):
        before = np.asarray(weight.value)
        optimizer.apply_gradients([(np.ones(1, np.float32), weight)])
        steps.append(float((before - weight.value)[0]))
    np.testing.assert_allclose(steps, [0.5, 0.5 / 1.1, 0.5 / 1.2], rtol=1e-6)
    plain = tf.keras.optimizers.Adam(lr=0.25)
    assert float(plain.lr) == 0.25
    plain.lr = 0.125
    assert float(plain.learning_rate) == 0.125
    with pytest.raises(ValueError, match="Give one of them"):
        tf.keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5), decay=0.1)
    with pytest.raises(ValueError, match="not recognized"):
        tf.keras.optimizers.SGD(learning=0.1)


def test_an_optimizers_own_apply_gradients_is_called_by_programs():
    class Doubled(tf.keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, name=None):
            return super().apply_gradients([(2 * gradient, weight) for gradient, weight in grads_and_vars], name)

    weight = keras.Variable(np.zeros(1, np.float32))
    for optimizer, step in ((Doubled(0.5), 1.0), (tf.keras.optimizers.SGD(0.5), 0.5)):
        optimizer.build([weight])
        (new,), state = optimizer.stateless_apply([v.value for v in optimizer.variables], [np.ones(1)], [weight.value])
        assert float(new[0]) == -step
        assert int(state[0]) == 1
        assert float(weight.value[0]) == 0


def test_shapes_names_and_batches():
    model = tf.keras.Sequential([tf.keras.layers.Input(shape=(80)), tf.keras.layers.Dense(3, name="last")])
    assert model.input_shape == (None, 80)
    assert model.weights[0].name.endswith("last/kernel:0")
    assert model.weights[0].path.endswith("last/kernel")
    assert model.predict_on_batch(np.ones((2, 80), np.float32)).shape == (2, 3)
    assert not any(":0" in path for path in model.to_json().split('"'))


def test_seeds_of_tensorflow_decide_about_weights():
    def weights() -> np.ndarray:
        tf.random.set_seed(3)
        layer = keras.layers.Dense(4)
        layer.build((None, 4))
        return np.asarray(layer.kernel.value)

    state = np.random.get_state()[1].copy()
    np.testing.assert_array_equal(weights(), weights())
    np.testing.assert_array_equal(state, np.random.get_state()[1])


# --- datasets


def test_datasets_come_from_files(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENIPU_DATA", str(tmp_path))
    images, labels = np.zeros((60_000, 28, 28), np.uint8), np.ones(60_000, np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images[:10_000], y_test=labels[:10_000])
    words = np.array([[1, 5, 9], [2, 3]], dtype=object)
    np.savez(tmp_path / "imdb.npz", x_train=words, y_train=[0, 1], x_test=words, y_test=[1, 0])
    for module in (keras.datasets, tf.keras.datasets, importlib.import_module("tensorflow.keras.datasets")):
        (x, y), (x_test, _) = module.mnist.load_data()
        assert x.shape == (60_000, 28, 28)
        assert y.dtype == np.uint8
        assert len(x_test) == 10_000
        (x, _), _ = module.imdb.load_data(num_words=6)
        assert max(max(row) for row in x) < 6


def test_everything_can_be_put_back():
    from openipu import tensorflow as bridge

    weight = keras.Variable(np.zeros(1))
    bridge.uninstall()
    try:
        assert not bridge.installed()
        assert weight.name == weight.path
        assert not hasattr(tf, "ipu")
        assert not hasattr(keras, "ipu")
        with pytest.raises(ValueError, match="not recognized"):
            keras.optimizers.SGD(lr=0.1)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("tensorflow.python.ipu")
    finally:
        bridge.install()
    assert tf.ipu is openipu


# --- the command


def test_without_tensorflow_there_is_one_sentence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'tensorflow' else find(name, *rest)\n"
        f"from openipu.cli import app; app(['run', {str(script)!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.strip() == (
        "Error: Scripts for TensorFlow need TensorFlow itself, which is not installed. Install it with "
        '`pip install "openipu[tensorflow]"`.'
    )


@pytest.mark.slow  # test_scripts.py has a quick one
@pytest.mark.parametrize("command", [["-m", "openipu", "run"], ["-m", "openipu.run"]])
def test_the_command_runs_a_script_with_its_arguments(command, tmp_path):
    (tmp_path / "beside.py").write_text("from tensorflow.python import ipu\nname = ipu.__name__")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__': print(beside.name, sys.argv[1:])")
    result = subprocess.run(
        [sys.executable, *command, str(script), "--epochs", "3", "-x"],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "openipu ['--epochs', '3', '-x']\n"), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "openipu", "run"], ["-m", "openipu.run"]])
def test_a_script_is_the_main_module_with_few_functions_around_it(command, tmp_path):
    """TensorFlow goes through the whole stack at each operation."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pickle, sys, traceback\n"
        "class Kept: pass\n"
        "assert type(pickle.loads(pickle.dumps(Kept()))) is Kept\n"
        "assert sys.modules['__main__'].__file__ == __file__ == sys.argv[0] and __spec__ is None\n"
        "print(len(traceback.extract_stack()))\n"
    )
    result = subprocess.run(
        [sys.executable, *command, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        ("1 / 0", 1, "ZeroDivisionError"),
        ("1 /", 1, "SyntaxError"),
        ("raise SystemExit(3)", 3, ""),
    ],
)
def test_a_script_that_fails_ends_as_under_python(line, code, word, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import tensorflow as tf\n{line}\n")
    result = subprocess.run(
        [sys.executable, "-m", "openipu", "run", str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == code
    assert word in result.stderr
    assert "\u2502" not in result.stderr, "no frames around lines of the traceback"
    if word:
        place = "" if word == "SyntaxError" else ", in <module>"
        assert f'script.py", line 2{place}\n    {line}' in result.stderr


def test_a_script_that_is_not_there():
    result = subprocess.run(
        [sys.executable, "-m", "openipu", "run", "nothing.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "There is no script nothing.py" in result.stderr
