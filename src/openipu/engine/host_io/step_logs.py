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
from openipu.engine.devices.launching import before_waiting
from openipu.engine.facts.calls import doing
from openipu.engine.interrupts import LISTEN, Task, interruptible, leave, let_through, uninterrupted
from openipu.engine.types import Tree

import jax
import numpy as np

from .outfeed_buffer import DeviceBuffer, VisitRate

DEPTH = 128
"""The number of steps whose logs may wait on the device, and again on the host, unless `buffer_depth` is set."""


class StillRunning(BaseException):
    """Ctrl-C was pressed a second time, while an execution was still running. It goes on in the background."""

    def __init__(self, execution: Task[Any], pressed: BaseException) -> None:
        super().__init__()
        self.execution, self.pressed = execution, pressed


class StepLogs:
    """The logs of running executions, step by step."""

    def __init__(self, depth: int | None) -> None:
        self._depth = depth or DEPTH
        self._changed = threading.Condition()
        self._told: deque[tuple[int, tuple[np.ndarray, ...]]] = deque()
        self._bounded = self._listening = False
        self._pace = VisitRate(self._depth)
        self._structure: Any = None
        self._ended = True
        self._execution: Task[Any] | None = None
        self.error: BaseException | None = None
        """What a callback raised, if anything. From then on, no callback is called until this is None again."""
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
        result of the call is not lost. Ctrl-C, which the caller holds back, is such an error. If it is pressed again
        while the program still runs, this raises `StillRunning`.
        """
        self._told.clear()
        self._bounded = self._listening = True
        self._pace = VisitRate(self._depth)
        self._ended = False
        self._execution = execution = Task(lambda: self._run(call, args), "openipu-execution")
        execution.start()
        if self.error is None:
            try:
                self._tell_all(tell, meanwhile)
            except BaseException as error:
                self.error = error
        self._execution = None
        with self._changed:  # from here on, the program never waits
            self._listening = False
            self._changed.notify_all()
        try:
            execution.wait()
        except BaseException as error:
            leave(execution)
            raise StillRunning(execution, error) from None
        return execution.result()

    def _tell_all(self, tell: Callable[[int, Tree], None], meanwhile: Callable[[], None]) -> None:
        with before_waiting(self._keep_all):
            with interruptible():
                meanwhile()
            while (told := self._next()) is not None:
                done, leaves = told
                with doing("callbacks"), interruptible():
                    tell(done, jax.tree.unflatten(self._structure, leaves))

    def finish(self) -> Any:
        """Wait for the running execution, if there is one, and return its result.

        See [Note: looking at the model meanwhile].
        """
        execution = self._execution
        if execution is None:
            return None
        self._keep_all()
        return execution.result()

    def _keep_all(self) -> None:
        """Keep all further logs, so that the program does not wait for callbacks."""
        with uninterrupted(), self._changed:
            self._bounded = False
            self._changed.notify_all()

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the program, in its own thread."""
        try:
            return jax.block_until_ready(call(*args))
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> tuple[int, tuple[np.ndarray, ...]] | None:
        """The next logs, or None when the execution has ended and there are none left. Ctrl-C is let through."""
        while True:
            with self._changed:
                if not self._told and not self._ended:
                    self._changed.wait(LISTEN)
                if self._told or self._ended:
                    told = self._told.popleft() if self._told else None
                    self._changed.notify_all()
                    return told
            let_through()

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
