"""One epoch of a model: what happens around each launch, with callbacks called after it or while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from openipu.engine.core.state import Logs, Mode
from openipu.engine.data.slab import Slab
from openipu.engine.data.sources import Source
from openipu.engine.devices import group
from openipu.engine.devices.launching import Wait
from openipu.engine.facts.calls import doing
from openipu.engine.host_io.step_logs import CallbackTeller, StepLogs
from openipu.engine.interrupts import interruptible
from openipu.engine.loop.driver import Launched
from openipu.engine.loop.loop import Loop, Result, concatenate
from openipu.engine.types import Tree

import jax
import keras

from .state_in_flight import StateInFlight


class Epoch:
    """An epoch whose callbacks are called once for each execution, after its launch."""

    def __init__(
        self, mode: Mode, loop: Loop, held: StateInFlight, source: Source, callbacks: keras.callbacks.CallbackList
    ) -> None:
        self._mode, self._loop, self._source = mode, loop, source
        self.held = held
        self._wait = Wait()
        self._began: Callable[[int], None] = getattr(callbacks, f"on_{mode}_batch_begin")
        self._ended: Callable[[int, Logs], None] = getattr(callbacks, f"on_{mode}_batch_end")

    def execute(self, slab: Slab, _meanwhile: Callable[[], None]) -> list[Result]:
        """Launch a slab on the model's state."""
        with doing("callbacks"), interruptible():
            self._began(slab.begin)
        results: list[Result] = self.held.run(self._loop.execute, self._source.resident, slab)
        return results

    def tell(self, launched: Launched) -> Tree:
        """Call the callbacks after a launch, and return its logs or outputs."""
        value = self._value(launched.results)
        with doing("callbacks"), interruptible():
            self._ended(launched.slab.end, {"outputs": value} if self._mode == "predict" else value)
        return value

    def sync(self) -> None:
        """Put the running state back into the model's variables."""
        self.held.sync()

    def _value(self, results: list[Result]) -> Tree:
        if self._mode == "predict":
            self._wait([result.value for result in results])
            return concatenate([result.rows() for result in results])
        return results[-1].value


class LiveEpoch(Epoch):
    """An epoch whose callbacks are called for each step, while its execution runs."""

    def __init__(
        self,
        mode: Mode,
        loop: Loop,
        held: StateInFlight,
        source: Source,
        callbacks: keras.callbacks.CallbackList,
        live: StepLogs,
    ) -> None:
        super().__init__(mode, loop, held, source, callbacks)
        self._live = live
        self._teller: CallbackTeller | None = None

    def execute(self, slab: Slab, meanwhile: Callable[[], None]) -> list[Result]:
        """Run a slab on the model's state and call the callbacks for its steps."""
        logs_of = _batch_outputs if self._mode == "predict" else lambda logs, _: logs
        self._live.error = None
        self._teller = CallbackTeller(self._live, slab, self._began, self._ended, logs_of)
        if group.count() > 1:  # before the launch, so that all processes do both in the same order
            with interruptible():
                meanwhile()
        launch = functools.partial(self._launch, self._teller, meanwhile)
        results: list[Result] = self.held.run(self._loop.execute, self._source.resident, slab, launch)
        if self._live.error is not None:
            raise self._live.error
        return results

    def _launch(
        self, teller: CallbackTeller, meanwhile: Callable[[], None], call: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Run a program of the slab. If it is the second one, callbacks may have changed the state meanwhile."""
        state, *rest = args
        result: tuple[Any, ...] = teller.launch(call, (self.held.latest(state), *rest), meanwhile)
        if self.held.together:  # a callback of another process may have looked at the model meanwhile
            self.held.show(result[1])
        return result

    def tell(self, launched: Launched) -> Tree:
        """Call the callbacks for the steps that are still missing, and return the launch's logs or outputs."""
        value, teller = self._value(launched.results), self._teller
        assert teller is not None
        self._teller = None  # it holds the slab
        predicts = self._mode == "predict"
        with doing("callbacks"), interruptible():
            teller.rest(functools.partial(_outputs_of, value, launched.slab) if predicts else lambda _: value)
        return value

    def sync(self) -> None:
        """Put the state back into the model's variables, after waiting for a running execution."""
        running = self._live.finish()
        if running is not None:
            self.held.show(running[1])
        super().sync()


def make_epoch(
    mode: Mode,
    loop: Loop,
    held: StateInFlight,
    source: Source,
    callbacks: keras.callbacks.CallbackList,
    live: StepLogs | None,
) -> Epoch:
    """An epoch that calls callbacks for each step if there is `live`, else for each execution."""
    if live is None:
        return Epoch(mode, loop, held, source, callbacks)
    return LiveEpoch(mode, loop, held, source, callbacks, live)


def _batch_outputs(outputs: Tree, replica: int) -> Logs:
    return {"outputs": jax.tree.map(lambda a: a[replica], outputs)}


def _outputs_of(rows: Tree, slab: Slab, batch: int) -> Logs:
    size = 0 if slab.body is None else jax.tree.leaves(slab.body)[0].shape[2]
    stop = (batch + 1) * size if batch < slab.count else None
    return {"outputs": jax.tree.map(lambda a: a[batch * size : stop], rows)}
