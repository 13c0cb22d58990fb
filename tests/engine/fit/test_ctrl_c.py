"""Ctrl-C at any moment of training loses nothing, and is heard soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openipu.engine.loop import loop
from openipu.engine.loop.loop import Loop

import jax
import keras
import numpy as np
import pytest

from presses import KINDS
from replication import configure_all, strategy
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS
PRESSES = int(os.environ.get("OPENIPU_PRESSES", "10"))
X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = X.sum(-1, keepdims=True)


@pytest.fixture(autouse=True, scope="module")
def systems() -> None:
    configure_all()


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    """As in a terminal; a process in the background may ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@keras.saving.register_keras_serializable("tests")
class Slow(keras.layers.Layer):
    """Takes a while, without changing anything."""

    def call(self, x: Any) -> Any:
        y = jax.lax.fori_loop(0, 7500, lambda _, m: jax.numpy.tanh(m @ m), jax.numpy.eye(64) + x[0, 0])
        return x + 0 * jax.lax.stop_gradient(y)[0, 0]


def make_model(live: bool = False, slow: bool = False, deep: int = 1) -> Any:
    with strategy(1).scope():
        hidden = [keras.layers.Dense(6, activation="relu") for _ in range(deep)]
        layers = [*([Slow()] if slow else []), *hidden, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.set_asynchronous_callbacks(live)
    model.compile("adam", "mse", steps_per_execution=12)
    return model


def updates(model: Any) -> int:
    return int(model.optimizer.iterations.numpy())


def alive(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def press_when(name: str, after: float, times: int = 1) -> threading.Event:
    """Press Ctrl-C as soon as a thread of this name is there, and so many times. Set the event to stop."""
    stop = threading.Event()

    def press() -> None:
        while not alive(name) and not stop.wait(0.002):
            pass
        for _ in range(times):
            if not stop.wait(after):
                os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    return stop


def press_after(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Press Ctrl-C whenever this method of a loop has ended."""
    real = getattr(Loop, method)

    def pressed(*args: Any) -> Any:
        result = real(*args)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Loop, method, pressed)


@pytest.mark.parametrize("live", [False, True])
def test_pressed_when_the_variables_are_empty(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    model = make_model(live)
    press_after(monkeypatch, "execute")
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    monkeypatch.undo()
    assert updates(model) == 12
    model.fit(X, Y, batch_size=4, verbose=0)
    assert updates(model) == 24


@pytest.mark.parametrize("call", ["train_on_batch", "test_on_batch"])
def test_pressed_during_a_single_batch(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    model = make_model()
    press_after(monkeypatch, "execute_one")
    with pytest.raises(KeyboardInterrupt):
        getattr(model, call)(X[:4], Y[:4])
    monkeypatch.undo()
    assert updates(model) == (call == "train_on_batch")
    assert np.isfinite(model.get_weights()[0]).all()


def test_pressed_while_compiling() -> None:
    model = make_model(deep=24)
    stop = press_when("openipu-compile", 0.05)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=4, verbose=0)
    compiling = alive("openipu-compile")
    stop.set()
    assert compiling, "it did not wait for the compiler"
    assert updates(model) == 0
    assert np.isfinite(model.get_weights()[0]).all()
    model.fit(X, Y, batch_size=4, verbose=0)
    assert updates(model) == 12


def test_a_second_press_leaves_a_long_execution() -> None:
    model = make_model(live=True, slow=True)
    model.train_on_batch(X[:4], Y[:4])
    stop = press_when("openipu-execution", 0.2, times=2)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=4, epochs=5, verbose=0)
    stop.set()
    assert alive("openipu-execution"), f"it has waited for the end: {time.monotonic() - began:.2f} s"
    with pytest.raises(RuntimeError, match="running program"):
        model.get_weights()
    model.predict(X[:4], verbose=0)
    assert updates(model) == 13, "the execution has ended and nothing is lost"
    model.fit(X, Y, batch_size=4, verbose=0)
    assert updates(model) == 25


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_many_presses_at_random_moments(kind: str, checkpoint: bool, repository: Path) -> None:
    """Set OPENIPU_PRESSES to the number of presses."""
    arguments = [kind, str(PRESSES), *(["checkpoint"] if checkpoint else [])]
    done = subprocess.run(
        [sys.executable, repository / "tests" / "support" / "presses.py", *arguments],
        capture_output=True, text=True, timeout=60 + 20 * PRESSES, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_exception_of_another_signal_is_not_disturbed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its handler raises when the program has taken the weights, but has not returned them yet."""
    model = make_model()

    def interrupted(_: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(loop, "local", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    try:
        with pytest.raises(SystemExit) as exited:
            model.fit(X, Y, 4, verbose=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert exited.value.code == 7
    assert f"The values of the model {model.name!r} are lost" in caplog.text
