"""What must not happen to a model while it runs is refused, and the run goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest

from replication import configure, configure_all, strategy
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(-1, keepdims=True)


@pytest.fixture(autouse=True, scope="module")
def systems() -> None:
    configure_all()


def make_model(replicas: int = 1) -> Any:
    with strategy(replicas).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(1)], name="mine")
    model.compile("adam", "mse", steps_per_execution=2)
    return model


class During(keras.callbacks.Callback):
    """Calls a function once, in the middle of an epoch, and keeps what it raises."""

    def __init__(self, call: Callable[[], Any], elsewhere: bool) -> None:
        super().__init__()
        self.call, self.elsewhere = call, elsewhere
        self.errors: list[BaseException] = []
        self.done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del logs
        if batch == 3:
            if self.elsewhere:
                thread = threading.Thread(target=self._run)
                thread.start()
                thread.join()
            else:
                self._run()

    def _run(self) -> None:
        try:
            self.call()
            self.done += 1
        except BaseException as error:
            self.errors.append(error)


def updates(model: Any) -> int:
    return int(model.optimizer.iterations.numpy())


CALLS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X[:4], Y[:4]),
    "test_on_batch": lambda model: model.test_on_batch(X[:4], Y[:4]),
    "predict_on_batch": lambda model: model.predict_on_batch(X[:4]),
    "compile": lambda model: model.compile("sgd", "mse"),
    "set_*_options": lambda model: model.set_replication_options("SUM"),
}


@pytest.mark.parametrize("live", [False, True])
def test_a_model_is_busy_for_other_threads(live: bool) -> None:
    model = make_model()
    model.set_asynchronous_callbacks(live)
    for call, use in CALLS.items():
        before, during = updates(model) if model.optimizer.built else 0, During(lambda use=use: use(model), True)
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[during])
        [error] = during.errors
        assert isinstance(error, RuntimeError)
        wanted = (
            f"The model 'mine' is busy: `fit` of the model 'mine' in the thread 'MainThread' has not ended, so `{call}`"
        )
        assert str(error).startswith(wanted)
        assert updates(model) == before + 8
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def test_reading_the_weights_from_another_thread_says_where_they_are() -> None:
    model = make_model()
    during = During(model.get_weights, True)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[during])
    [error] = during.errors
    assert "in a running program" in str(error)
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize("call", [name for name in CALLS if name != "compile"])
def test_callbacks_may_use_the_model(call: str) -> None:
    model = make_model()
    during = During(lambda: CALLS[call](model), False)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[during])
    assert (during.done, during.errors) == (1, [])


def test_compile_in_the_middle_of_an_epoch() -> None:
    model, reference = make_model(), make_model()
    reference.set_weights(model.get_weights())
    optimizer = model.optimizer
    during = During(lambda: CALLS["compile"](model), False)
    for each, callbacks in ((model, [during]), (reference, [])):
        each.fit(X, Y, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks)
    [error] = during.errors
    assert "in the middle of `fit` of the model 'mine'" in str(error)
    assert model.optimizer is optimizer
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.compile("sgd", "mse")
    assert model.optimizer is not optimizer


def test_compile_between_epochs_and_at_the_end() -> None:
    model = make_model()

    class Again(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            with pytest.raises(RuntimeError, match="in the middle of `fit`"):
                self.model.compile("sgd", "mse")

        def on_train_end(self, logs: Any = None) -> None:
            del logs
            self.model.compile("sgd", "mse")

    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[Again()])
    assert isinstance(model.optimizer, keras.optimizers.SGD)


def test_freezing_a_layer_in_a_callback_loses_nothing() -> None:
    model = make_model()
    frozen = model.layers[0]
    before = frozen.get_weights()

    def freeze() -> None:
        frozen.trainable = False

    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[During(freeze, False)])
    model.fit(X[:16], Y[:16], batch_size=4, verbose=0)
    assert not np.array_equal(frozen.get_weights()[0], before[0])


@pytest.fixture
def _configured_again() -> Iterator[None]:
    yield
    configure_all()


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("change", [lambda: configure(4), ipu.config.reset_ipu_configuration])
@pytest.mark.usefixtures("_configured_again")
def test_configuring_while_a_model_runs(elsewhere: bool, change: Callable[[], None]) -> None:
    model = make_model(2)
    during = During(change, elsewhere)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[during])
    where = " in the thread 'MainThread'" if elsewhere else ""
    for error in during.errors:
        assert str(error).startswith(
            f"The devices cannot be configured while `fit` of the model 'mine'{where} is running."
        )
    assert len(during.errors) == 2
    assert updates(model) == 8
    assert np.isfinite(model.evaluate(X, Y, verbose=0))
    change()  # now it can be


def test_the_same_configuration_again_is_no_change() -> None:
    model = make_model(2)
    during = During(configure_all, False)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[during])
    assert during.done == 1


FORKED = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import openipu as ipu
    import keras
    import numpy as np

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    if "before" in sys.argv:
        pid = os.fork()
    config.configure_ipu_system()
    if "after" in sys.argv:
        pid = os.fork()
    code = 0
    try:
        with ipu.ipu_strategy.IPUStrategy().scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        if "model" in sys.argv:
            pid = os.fork()
        model.fit(np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32"), batch_size=2, verbose=0)
    except RuntimeError as error:
        assert "spawn" in str(error), error
        code = 7
    if pid == 0:
        os._exit(code)
    assert code == 0
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


SLOW = [pytest.param("before", 0, marks=pytest.mark.slow), pytest.param("after", 7, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("moment", "code"), [("model", 7), *SLOW])
def test_a_forked_process_says_what_to_do(moment: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "forked.py"
    script.write_text(textwrap.dedent(FORKED))
    done = subprocess.run([sys.executable, script, moment], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"child {code}\n", done.stderr
