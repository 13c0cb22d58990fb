"""The state of a model while executions run."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

from openipu.engine.core.differing import mention_differing
from openipu.engine.core.model_state import assign, unshared, values_of, variables_of
from openipu.engine.core.state import Mode, State
from openipu.engine.core.state_layout import ReplicaLayout, StateLayout
from openipu.engine.devices import group
from openipu.engine.devices.launching import is_ready
from openipu.engine.devices.transfer import local
from openipu.engine.facts.calls import doing
from openipu.engine.host_io.step_logs import StillRunning
from openipu.engine.interrupts import Task, leave, uninterrupted, wait_until
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.types import Array

import jax
import keras

log = logging.getLogger("openipu")


class StateInFlight:
    """The state of a model while executions run. It is taken from the variables, and put back when they are looked at.

    An execution uses up the buffers of the state that it is given, so from `run` to `sync` the variables are empty.
    Keras' callbacks call `model.jax_state_sync()` before they look at the model, and that calls `sync`.

    If several processes run the model together, they put its state on the devices together. So if callbacks may look at
    the model in some processes only (`alone`), the others do as these have done.
    """

    def __init__(self, model: keras.Model, mode: Mode, spread: StateLayout, alone: bool = False) -> None:
        self._model, self._mode, self._spread, self._alone = model, mode, spread, alone
        self._state: State | None = None
        self._counted: tuple[list[Array], list[Array]] = [], []
        self._shown: State | None = None
        self._owners: State | None = None
        self._running: Task[tuple[Any, State]] | None = None

    def run(self, execute: Callable[..., tuple[Any, State]], *args: Any) -> Any:
        """Call `execute(state, *args)`. Keeps the state that it returns, or the old one if it raises.

        Ctrl-C waits meanwhile, except where `execute` lets it through.
        """
        with uninterrupted():
            if self._alone and group.any_of("the start of an execution", self._state is None):
                self.sync()
            state: State | None = self._take()
            try:
                result, state = execute(state, *args)
            except StillRunning as error:
                self._running, state = error.execution, self._shown
                raise error.pressed from None
            finally:
                # If `show` was called meanwhile, the variables have the state and may have changed it.
                self._state = None if state is self._shown else state
                self._shown = None
        if self.together:
            self.sync()
        return result

    @property
    def together(self) -> bool:
        """Whether all processes look at the model after each program, because only together they can."""
        return self._alone and self._spread.joint

    def show(self, state: State) -> None:
        """Put the state that `run` is about to keep into the variables, for a callback that looks at them before."""
        if state is not self._shown:
            self._state = self._shown = state
            self.sync()

    def latest(self, state: State) -> State:
        """`state`; but if it was shown, it is taken out of the variables again, with what has changed there."""
        if state is not self._shown:
            return state
        self._shown = None
        return self._take()

    def sync(self) -> None:
        """Put the state back into the model's variables."""
        if self._state is None:
            return
        with uninterrupted(), doing("state"):
            owners, spread = self._owners or variables_of(self._model, self._mode), self._state
            assign(owners, self._spread.gather(spread))
            if isinstance(self._spread, ReplicaLayout):
                mention_differing(owners.non_trainable, spread.non_trainable)
            self._counted = [v.value for v in owners.metrics], spread.metrics
            self._state = self._owners = None

    def finish(self, in_background: Callable[[Task[None]], object]) -> None:
        """Wait for the running executions, and put the state back into the model's variables.

        If Ctrl-C is pressed meanwhile, or has already ended the wait for an execution, both are done by a task that is
        passed to `in_background`.
        """
        with uninterrupted():
            waited = False
            try:
                if self._running is None:
                    self._wait()
                    waited = True
            finally:
                if not waited:
                    task = Task(self._finish_late, "openipu-state")
                    task.start()
                    leave(task)
                    in_background(task)
            if waited and not self._is_lost():
                self.sync()

    def _is_lost(self) -> bool:
        """Whether the state has gone into a program that could not return it, because an exception came in between.

        That of Ctrl-C waits, but the handler of another signal may raise one anywhere. It must leave undisturbed.
        """
        leaves = [leaf for leaf in jax.tree.leaves(self._state) if isinstance(leaf, jax.Array)]
        if not any(leaf.is_deleted() for leaf in leaves):
            return False
        log.error(
            "The values of the model %r are lost: an exception came while a program was launched.", self._model.name
        )
        self._state = self._owners = None
        return True

    def _finish_late(self) -> None:
        if self._running is not None:
            _, self._state = self._running.result()
        self._wait()
        self.sync()

    def _wait(self) -> None:
        """Wait for the running executions. Ctrl-C is let through."""
        leaves = jax.tree.leaves(self._state)
        wait_until(lambda: is_ready([*leaves[:1], *leaves[-1:]]))

    def snapshot(self) -> State:
        """The current state as plain arrays, except that metrics stay as each replica has counted them."""
        if self._state is None:
            values = values_of(variables_of(self._model, self._mode))
            return values._replace(metrics=self._own_metrics(values) or values.metrics)
        gathered = self._spread.gather(self._state._replace(metrics=[]))
        return gathered._replace(metrics=local(self._state.metrics))

    def load(self, state: State) -> None:
        """Continue from a `snapshot`, possibly on another number of replicas."""
        owners = variables_of(self._model, self._mode)
        assign(owners, state)
        several = bool(state.metrics) and state.metrics[0].ndim > len(owners.metrics[0].shape)
        self._counted = [v.value for v in owners.metrics], self._spread.own_metrics(state.metrics) if several else []
        self._state = None

    def _own_metrics(self, values: State) -> list[Array]:
        """The metrics of each replica, or nothing if the variables have changed since the last `sync` or `load`."""
        joined, counted = self._counted
        return counted if all(map(operator.is_, values.metrics, joined)) else []

    def _take(self) -> State:
        """The current state, taken out of the model."""
        if self._state is None:
            with doing("state"):
                self._state = self._taken_out()
        state, self._state = self._state, None
        return state

    def _taken_out(self) -> State:
        # Kept, because a callback may change which variables are trainable.
        self._owners = owners = variables_of(self._model, self._mode)
        values = values_of(owners)
        state = self._spread.spread(unshared(values, self._model))
        own = self._own_metrics(values)
        if own:
            state = state._replace(metrics=own)
        for part in owners:
            keras_api.drop_values(part)
        return state
