"""Batch callbacks that are called while an execution runs.

The program hands the logs of its steps to an outlet. It runs in a thread of its own, while the user's thread waits for
logs and calls the callbacks, in the order of steps. What the program has not told when it ends (a pipeline's steps, the
smaller last batch of a prediction) is told from its results.

[Note: looking at the model meanwhile] A callback that looks at the model has to wait for the end of the execution,
because only then its weights are there. The rest of the logs is kept meanwhile. Keras takes it for looking at the model
when a callback says `self.model`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from openipu.engine.data.slab import Slab
from openipu.engine.types import Tree

import jax
import numpy as np

from .outfeed_buffer import DeviceBuffer, VisitRate

Logs = dict[str, Any]
DEPTH = 128
"""Steps whose logs may wait on the device, and as many on the host, unless `buffer_depth` says otherwise."""


class StepLogs:
    """The logs of running executions."""

    def __init__(self, depth: int | None) -> None:
        self._depth = depth or DEPTH
        self._changed = threading.Condition()
        self._told: deque[tuple[int, tuple[np.ndarray, ...]]] = deque()
        self._bounded = self._listening = False
        self._pace = VisitRate(self._depth)
        self._structure: Any = None
        self._thread: _ExecutionThread | None = None
        self.error: BaseException | None = None
        """What a callback raised during the latest execution."""
        self.outlet = DeviceBuffer(self._receive, self._depth)

    def describe(self, element: Tree) -> None:
        """Remember what the logs look like; called while the program is traced."""
        self._structure = jax.tree.structure(element)

    def run(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        tell: Callable[[int, Tree], None],
        meanwhile: Callable[[], None],
    ) -> Any:
        """`call(*args)`, with `tell(batches done, logs)` for each step of it; gives what the call gives.

        An error in `tell` does not lose what the call gives: it is kept in `error`.
        """
        self.error = None
        self._told.clear()
        self._bounded = self._listening = True
        self._pace = VisitRate(self._depth)
        self._thread = thread = _ExecutionThread(call, args, self._changed)
        thread.start()
        try:
            meanwhile()
            while (told := self._next(thread)) is not None:
                done, leaves = told
                tell(done, jax.tree.unflatten(self._structure, leaves))
        except BaseException as error:
            self.error = error
        self._thread = None
        with self._changed:  # nothing must hold up the program
            self._listening = False
            self._changed.notify_all()
        thread.join()
        return thread.result()

    def finish(self) -> Any:
        """What the running execution gives, if one runs, as soon as it ends.

        See [Note: looking at the model meanwhile].
        """
        thread = self._thread
        if thread is None:
            return None
        with self._changed:
            self._bounded = False
            self._changed.notify_all()
        thread.join()
        return thread.result()

    def _next(self, thread: _ExecutionThread) -> tuple[int, tuple[np.ndarray, ...]] | None:
        with self._changed:
            while not self._told and not thread.ended:
                self._changed.wait()
            told = self._told.popleft() if self._told else None
            self._changed.notify_all()
            return told

    def _receive(self, replica: int, count: int, rows: list[np.ndarray]) -> int:
        del replica
        done, *logs = (a[:count] for a in rows)
        with self._changed:
            if self._listening:
                self._told.extend(zip(done.tolist(), zip(*logs, strict=True), strict=True))
            self._changed.notify_all()
            while self._listening and self._bounded and len(self._told) > self._depth:
                self._changed.wait()
        return self._pace.next(count)


class _ExecutionThread(threading.Thread):
    """A call in a thread of its own, whose result or error is kept."""

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], changed: threading.Condition) -> None:
        super().__init__(name="openipu-execution", daemon=True)
        self._call, self._args, self._changed = call, args, changed
        self._result: Any = None
        self._error: BaseException | None = None
        self.ended = False

    def run(self) -> None:
        try:
            self._result = jax.block_until_ready(self._call(*self._args))
        except BaseException as error:
            self._error = error
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class CallbackTeller:
    """Calls the batch callbacks of one slab, step by step.

    `began` and `ended` are the callbacks' `on_..._batch_begin` and `..._end`; `logs_of` turns what the program tells
    about a step, and the number of a batch in that step, into logs.
    """

    def __init__(
        self,
        live: StepLogs,
        slab: Slab,
        began: Callable[[int], None],
        ended: Callable[[int, Logs], None],
        logs_of: Callable[[Tree, int], Logs],
    ) -> None:
        self._live, self._slab, self._began, self._ended, self._logs_of = live, slab, began, ended, logs_of
        self._told = self._before = 0

    def launch(self, call: Callable[..., Any], args: tuple[Any, ...], meanwhile: Callable[[], None]) -> Any:
        """Run a program of this slab and tell its steps; a slab may take more than one."""
        self._before = self._told
        return self._live.run(call, args, self._tell, meanwhile)

    def rest(self, logs_of: Callable[[int], Logs]) -> None:
        """Tell the steps that no program has told; `logs_of` gives the logs by the number of the batch in the slab."""
        while self._told < self._slab.steps:
            self._one(logs_of(self._told))

    def _tell(self, done: int, told: Tree) -> None:
        first = self._told
        while self._told < self._before + done:
            self._one(self._logs_of(told, self._told - first))

    def _one(self, logs: Logs) -> None:
        step = self._slab.begin + self._told
        self._told += 1
        self._began(step)
        self._ended(step, logs)
