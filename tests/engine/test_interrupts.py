"""Ctrl-C is held back and let through as the regions say."""

# ruff: noqa: PT012 - what is tested is the order of several statements in a block that raises
from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

from openipu.engine import interrupts
from openipu.engine.interrupts import (
    Task,
    in_thread,
    interruptible,
    interruptibly,
    let_through,
    uninterrupted,
    wait_until,
)

import pytest


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    """As in a terminal; a process in the background may ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupts._presses.regions == []
    assert interrupts._presses.held is None
    signal.signal(signal.SIGINT, before)


def press() -> None:
    interrupts._presses.last = float("-inf")  # not the same press as the one before
    signal.raise_signal(signal.SIGINT)


def test_a_press_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted(), uninterrupted():
        press()
        done.append(1)
    assert done == [1]


def test_a_press_is_let_through_where_the_users_code_runs() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with interruptible():
            press()
            done.append(1)
        done.append(2)
    assert done == []


def test_a_press_that_waits_is_let_through_at_the_next_place() -> None:
    done = []
    with uninterrupted():
        press()
        with pytest.raises(KeyboardInterrupt), interruptible():
            done.append(1)
        press()
        with pytest.raises(KeyboardInterrupt):
            let_through()
        let_through()
        press()
        with pytest.raises(KeyboardInterrupt):
            next(interruptibly(iter([1])))
    assert done == []


def test_what_users_code_calls_is_held_back_again() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted(), interruptible():
        with uninterrupted():
            press()
            done.append(1)
        done.append(2)
    assert done == [1]


def test_the_exception_is_not_disturbed_on_its_way_out() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        try:
            with interruptible():
                try:
                    press()
                finally:
                    press()
                    done.append(1)
        finally:
            press()
            done.append(2)
    assert done == [1, 2]


@pytest.mark.parametrize(("seconds", "twice"), [(0.0, True), (10.0, False)])
def test_a_second_press_is_let_through_when_patience_ends(seconds: float, twice: bool) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted(seconds):
        press()
        press()
        done.append(1)
    assert (done == []) is twice


def test_two_signals_at_once_are_one_press() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted(0):
        press()
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done == [1]


def test_another_error_comes_with_the_press() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        press()
        raise ArithmeticError("mine")
    assert isinstance(caught.value.__context__, ArithmeticError)


def test_a_handler_that_does_not_raise_is_called_later() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    with uninterrupted():
        press()
        assert heard == []
    assert heard == [signal.SIGINT]
    signal.signal(signal.SIGINT, before)


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted(), interruptible():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, before)
    found = []

    def work() -> None:
        with uninterrupted(), interruptible():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_waiting_hears_a_press() -> None:
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        wait_until(lambda: False)


def test_a_call_in_a_thread_hears_a_press_at_once_and_goes_on() -> None:
    began, ended = time.monotonic(), threading.Event()

    def call() -> None:
        time.sleep(0.6)
        ended.set()

    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        in_thread(call, "mine")
    assert time.monotonic() - began < 0.5
    assert ended.wait(5)


def test_a_call_in_a_thread_returns_and_raises() -> None:
    assert in_thread(lambda: 3, "mine") == 3
    with pytest.raises(ArithmeticError, match="mine"):
        in_thread(lambda: (_ for _ in ()).throw(ArithmeticError("mine")), "mine")
    task = Task(lambda: 4, "mine")
    task.start()
    task.wait()
    assert task.ended
    assert task.result() == 4
