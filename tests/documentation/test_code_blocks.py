"""The code in README and docs, run as it stands there, page by page, each in a process of its own."""

import subprocess
import sys

import pytest

import prose

COMMON = """
import logging
import numpy as np
import openipu as ipu
import keras
from keras.layers import Dense

rng = np.random.default_rng(0)
x, y = rng.normal(size=(160, 4)).astype("float32"), rng.normal(size=(160, 1)).astype("float32")
strategy = ipu.ipu_strategy.IPUStrategy()
"""
IMAGES = "x_train, y_train = rng.random((512, 784), 'float32'), rng.integers(0, 10, 512)\n"
SMALL_MODEL = """
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
"""
BATCHES = "dataset = batches = lambda: ((x[:16], y[:16]) for _ in range(4000))\n"
BEFORE = {
    "README.md": IMAGES + "y_train = np.eye(10)[y_train]\n",
    "docs/api.md": "",
    "docs/checkpoints.md": SMALL_MODEL,
    "docs/config.md": "",
    "docs/convolutions.md": "config = ipu.config.IPUConfig()\n",
    "docs/estimators.md": IMAGES + "test_input = lambda: [(x_train[:64], y_train[:64])]\n",
    "docs/feeds.md": BATCHES,
    "docs/layers.md": "config, blocks, x = ipu.config.IPUConfig(), [Dense(4), Dense(4)], keras.Input((4,))\n",
    "docs/operations.md": "inputs, table = keras.Input((16,)), rng.normal(size=(64, 512)).astype('float32')\n",
    "docs/pipelining.md": IMAGES + "batches = lambda: ((x_train[:8], y_train[:8]) for _ in range(200))\n",
    "docs/replication-ops.md": "",
    "docs/replication.md": "",
}
"""What the code of a page needs besides what it says itself."""
BETWEEN = {
    "def layer_calls": 'model = keras.Sequential([keras.Input((4,)), Dense(8, name="encoder"), Dense(1)])\n',
}
"""What code that begins so needs, when its page has used the names for something else before."""
WITHOUT = {
    "docs/estimators.md": {"hook = IPULoggingTensorHook": "it is the end of a model function"},
    "docs/feeds.md": {"model.set_asynchronous_callbacks(True)": "its arguments are left out"},
    "docs/hosts.md": {
        "# train.py": "it needs `openipu launch`: tests/public/test_several_instances.py",
        "strategy = ipu.distributed": "it needs `openipu launch`: tests/public/test_several_instances.py",
    },
    "docs/scripts.md": {
        "@tf.function": "it needs `openipu run`: tests/bridge/test_scripts.py",
        "class Model(tf.keras.Model)": "it needs `openipu run`: tests/bridge/test_model_steps.py",
    },
}
"""Code that cannot be run by itself: how it begins, and why."""
# Models whose layers are left out in a page get some.
ELIDED = ("keras.Sequential([...])", 'keras.Sequential([keras.layers.Dense(10, activation="softmax")])')
# A list of stages and a walk through assignments are written for models of a strategy's scope.
IN_SCOPE = {"docs/pipelining.md"}


def runnable(page):
    begins = tuple(WITHOUT.get(prose.name(page), ()))
    code = [block.text for block in prose.blocks(page, "python") if not (begins and block.text.startswith(begins))]
    before = [next((need for begin, need in BETWEEN.items() if piece.startswith(begin)), "") for piece in code]
    return [need + piece.replace(*ELIDED) for need, piece in zip(before, code, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", BEFORE)
def test_code_runs(name, tmp_path):
    code = runnable(prose.ROOT / name)
    assert code
    if name in IN_SCOPE:
        code = [f"with strategy.scope():\n    exec({piece!r}, globals())" for piece in code]
    script = tmp_path / "page.py"
    script.write_text("\n".join([COMMON, BEFORE[name], *code]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_page_with_code_is_run():
    pages = [page for page in prose.PAGES if page not in prose.TUTORIALS and page.name != "quickstart.md"]
    assert {prose.name(page) for page in pages if runnable(page)} == set(BEFORE)
    for name, begins in WITHOUT.items():
        code = [block.text for block in prose.blocks(prose.ROOT / name, "python")]
        assert all(any(piece.startswith(begin) for piece in code) for begin in begins), (
            "an exception that is not needed"
        )
