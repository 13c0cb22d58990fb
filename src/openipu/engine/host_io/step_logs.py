"""Calls batch callbacks while an execution runs.

The program runs in a thread of its own and hands the logs of its steps to an outlet. The user's thread waits for these
logs and calls the callbacks, in the order of steps. Steps that the program does not report (those of a pipeline, the
smaller last batch of a prediction) are reported from its results when it has ended.

[Note: looking at the model meanwhile] A callback that looks at the model has to wait for the end of the execution,
because the weights are not available before. Until then, all further logs are kept. To Keras, using `self.model` in a
callback counts as looking at the model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from openipu.engine.core.state import Logs
from openipu.engine.data.slab import Slab
from openipu.engine.types import Tree

import jax
import numpy as np

from .outfeed_buffer import DeviceBuffer, VisitRate

DEPTH = 128
"""The number of steps whose logs may wait on the device, and again on the host, unless `buffer_depth` is set."""


class StepLogs:
    """The logs of running executions, step by step."""

    def __init__(self, depth: int | None) -> None:
        self._depth = depth or DEPTH
        self._changed = threading.Condition()
        self._told: deque[tuple[int, tuple[np.ndarray, ...]]] = deque()
        self._bounded = self._listening = False
        self._pace = VisitRate(self._depth)
        self._structure: Any = None
        self._thread: _ExecutionThread | None = None
        self.error: BaseException | None = None
        """What a callback raised during the latest execution, if anything."""
        self.outlet = DeviceBuffer(self._receive, self._depth)

    def describe(self, element: Tree) -> None:
        """Remember the structure of the logs. Called while the program is traced."""
        self._structure = jax.tree.structure(element)

    def run(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        tell: Callable[[int, Tree], None],
        meanwhile: Callable[[], None],
    ) -> Any:
        """Return `call(*args)`. Until it ends, `tell(batches done, logs)` is called for each step.

        `meanwhile` is called once, as soon as the call has started. An error in `tell` is kept in `error`, so that the
        result of the call is not lost.
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
        with self._changed:  # from here on, the program never waits
            self._listening = False
            self._changed.notify_all()
        thread.join()
        return thread.result()

    def finish(self) -> Any:
        """Wait for the running execution, if there is one, and return its result.

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
    """Runs a call in a thread of its own and keeps its result or error."""

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

    `began` and `ended` are the callbacks' `on_..._batch_begin` and `on_..._batch_end`. `logs_of` makes logs from what
    the program reports about a step and the index of a batch in that step.
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
        self._told = 0

    def launch(self, call: Callable[..., Any], args: tuple[Any, ...], meanwhile: Callable[[], None]) -> Any:
        """Run a program on this slab and call the callbacks for its steps. A slab may take more than one program."""
        return self._live.run(call, args, self._tell, meanwhile)

    def rest(self, logs_of: Callable[[int], Logs]) -> None:
        """Call the callbacks for steps that no program reported, with `logs_of(index of the batch in the slab)`."""
        while self._told < self._slab.steps:
            self._one(logs_of(self._told))

    def _tell(self, done: int, told: Tree) -> None:
        first = self._told
        while self._told < done:
            self._one(self._logs_of(told, self._told - first))

    def _one(self, logs: Logs) -> None:
        step = self._slab.begin + self._told
        self._told += 1
        self._began(step)
        self._ended(step, logs)
