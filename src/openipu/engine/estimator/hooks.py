"""User code that runs between executions: hooks modelled on `tf.estimator.SessionRunHook`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from openipu import _validate as validate
from openipu.engine.facts.calls import doing
from openipu.engine.host_io.outfeed_buffer import IPUOutfeedMode
from openipu.engine.interrupts import interruptible
from openipu.engine.types import Array, Tree

import jax

from .model_trace import current_trace
from .outbox import steps_first
from .specs import LogOp

log = logging.getLogger("openipu")


@dataclass(frozen=True, slots=True)
class SessionRunArgs:
    """What a hook's `before_run` asks for: "loss" or "global_step", or a list or dict of these names.

    >>> class Losses(ipu.estimator.SessionRunHook):
    ...     def before_run(self, run_context):
    ...         return ipu.estimator.SessionRunArgs("loss")
    ...
    ...     def after_run(self, run_context, run_values):
    ...         print(np.shape(run_values.results))
    >>> _ = estimator.train(input_fn, steps=2, hooks=[Losses()])
    ()
    ()
    """

    fetches: Tree


@dataclass(frozen=True, slots=True)
class SessionRunValues:
    """The results of an execution, in the structure that was asked for. Reading an array waits until it is computed.

    >>> ipu.estimator.SessionRunValues(results={"loss": 0.5}).results["loss"]
    0.5
    """

    results: Tree


class SessionRunContext:
    """How far a run has come, and a way to end it after the current execution.

    >>> class Enough(ipu.estimator.SessionRunHook):
    ...     def after_run(self, run_context, run_values):
    ...         if run_context.global_step >= 3:
    ...             run_context.request_stop()
    ...
    ...     def end(self, session):
    ...         print(f"ended at step {session.global_step}")
    >>> _ = estimator.train(input_fn, steps=8, hooks=[Enough()])
    ended at step 3
    """

    def __init__(self) -> None:
        self.global_step = 0
        self.stop_requested = False
        self.session: Any = self

    def request_stop(self) -> None:
        """End the run after this execution."""
        self.stop_requested = True


class SessionRunHook:
    """Code that runs around executions. Override the methods you need.

    An execution is `iterations_per_loop` steps. `session` has `global_step` and `request_stop()`.

    >>> class Beginning(ipu.estimator.SessionRunHook):
    ...     def after_create_session(self, session, coord):
    ...         print(f"training begins at step {session.global_step}")
    >>> _ = estimator.train(input_fn, steps=2, hooks=[Beginning()])
    training begins at step 0
    """

    def begin(self) -> None:
        """Called once, before anything else."""

    def after_create_session(self, session: SessionRunContext, coord: None) -> None:
        """Called once, when the state is ready."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each execution. May return a request for what `after_run` should receive."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each launch. The execution may still be running; reading a result waits for it."""

    def end(self, session: SessionRunContext) -> None:
        """Called once, after the last execution."""


class CheckpointSaverListener:
    """Code that runs whenever a checkpoint is saved. Override the methods you need.

    >>> class Told(ipu.estimator.CheckpointSaverListener):
    ...     def after_save(self, session, global_step_value):
    ...         print(f"saved at step {global_step_value}")
    >>> _ = estimator.train(input_fn, steps=2, saving_listeners=[Told()])
    saved at step 2
    """

    def begin(self) -> None:
        """Called once, before training."""

    def before_save(self, session: SessionRunContext, global_step_value: int) -> None:
        """Called before a checkpoint is saved."""

    def after_save(self, session: SessionRunContext, global_step_value: int) -> bool | None:
        """Called after a checkpoint was saved. Return True to end the training."""

    def end(self, session: SessionRunContext, global_step_value: int) -> None:
        """Called once, after training."""


class IPULoggingTensorHook(SessionRunHook):
    """Logs tensors that model_fn computes inside the device loop.

    >>> def model_fn(features, labels, mode):
    ...     loss = keras.ops.mean((keras.layers.Dense(1)(features)[:, 0] - labels) ** 2)
    ...     hook = ipu.estimator.IPULoggingTensorHook(every_n_secs=3)
    ...     train_op = ipu.estimator.group(keras.optimizers.SGD(0.01).minimize(loss), hook.log({"loss": loss}))
    ...     return ipu.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])
    >>> estimator = ipu.estimator.IPUEstimator(model_fn, "logged").train(input_fn, steps=2)

    Args:
        every_n_iter: The number of executions between two log lines.
        every_n_secs: Or the minimum number of seconds between them. Tensors are logged only after executions.
        at_end: Log once more when the run ends.
        formatter: Returns the text for a dict of arrays. By default all of them are printed as `name = value`.
        logging_mode: LAST logs the tensors of the last step of the execution, ALL those of all steps, stacked. With
            several replicas, the next axis of the arrays is the replica.
    """

    LoggingMode = IPUOutfeedMode

    def __init__(
        self,
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
        logging_mode: IPUOutfeedMode = IPUOutfeedMode.LAST,
    ) -> None:
        if (every_n_iter is None) == (every_n_secs is None):
            raise ValueError(
                f"`every_n_iter` is {every_n_iter!r} and `every_n_secs` is {every_n_secs!r}. Give exactly one of them."
            )
        self._every_n_iter = validate.count("every_n_iter", every_n_iter, optional=True)
        self._every_n_secs = validate.number("every_n_secs", every_n_secs, optional=True, above=0)
        self._at_end = validate.flag("at_end", at_end)
        self._formatter = validate.function("formatter", formatter, optional=True) or _format
        mode = validate.member("logging_mode", logging_mode, IPUOutfeedMode, by_name=False)
        self.all_steps = mode is IPUOutfeedMode.ALL
        self._called = False
        self._latest: Callable[[], Any] | None = None
        self._executions, self._time = 0, -float("inf")

    def log(self, tensors: Tree) -> LogOp:
        """Log a tensor, a list of tensors or a dict of them. Call this once, in model_fn."""
        trace = current_trace("`IPULoggingTensorHook.log`")
        if any(hook is self for hook, _ in trace.logs):
            raise RuntimeError(
                "`log` was called twice on one hook. Pass all tensors in one call, or make a second hook."
            )
        named = _named(tensors)
        for name, tensor in named.items():
            if not isinstance(tensor, jax.Array):
                raise TypeError(f"{name!r} is a {type(tensor).__name__}. Log tensors that model_fn computes.")
        trace.logs.append((self, named))
        self._called = True
        return LogOp(self)

    # --- called by the engine

    def after_create_session(self, session: SessionRunContext, coord: None) -> None:
        """Raise if there is nothing to log."""
        del session, coord
        if not self._called:
            raise RuntimeError("An IPULoggingTensorHook has nothing to log. Call its `log(tensors)` in model_fn.")
        self._executions, self._time = 0, time.monotonic()

    def receive(self, count: Array, tensors: Tree) -> None:
        """Take the tensors of an execution. They are fetched from the device only when it is time to log."""
        self._latest = lambda: steps_first(count, tensors, self.all_steps)
        self._executions += 1
        now = time.monotonic()
        if self._every_n_iter is not None:
            due = self._executions % self._every_n_iter == 0
        else:
            due = self._every_n_secs is not None and now - self._time >= self._every_n_secs
        if due:
            self._time = now
            self._log_latest()

    def end(self, session: SessionRunContext) -> None:
        """With `at_end`, log the last tensors."""
        del session
        if self._at_end:
            self._log_latest()

    def _log_latest(self) -> None:
        if self._latest is not None:
            log.info("%s", self._formatter(self._latest()))
            self._latest = None


def _format(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _named(tensors: Tree) -> dict[str, Any]:
    if isinstance(tensors, dict):
        return dict(tensors)
    if isinstance(tensors, list | tuple):
        return {f"tensor_{number}": tensor for number, tensor in enumerate(tensors)}
    return {"tensor": tensors}


class Hooks:
    """The hooks of one run, called in order."""

    def __init__(self, hooks: Sequence[SessionRunHook]) -> None:
        for position, hook in enumerate(hooks):
            validate.instance(f"hooks[{position}]", hook, SessionRunHook)
        self._hooks = list({id(hook): hook for hook in hooks}.values())
        self.context = SessionRunContext()
        self._asked: list[SessionRunArgs | None] = []

    def begin(self, global_step: int) -> None:
        """Call the hooks before the first execution."""
        self.context.global_step = global_step
        with _calling():
            for hook in self._hooks:
                hook.begin()
            for hook in self._hooks:
                hook.after_create_session(self.context, None)

    def before_run(self) -> None:
        """Call the hooks before an execution."""
        with _calling():
            self._asked = [hook.before_run(self.context) for hook in self._hooks]

    def after_run(self, global_step: int, values: dict[str, Any]) -> None:
        """Call the hooks after a launch."""
        values = {"global_step": global_step, **values}
        for hook, asked in zip(self._hooks, self._asked, strict=True):
            results = None if asked is None else jax.tree.map(lambda name: _fetch(values, name), asked.fetches)
            with _calling():
                hook.after_run(self.context, SessionRunValues(results))

    def end(self) -> None:
        """Call the hooks after the last execution."""
        with _calling():
            for hook in self._hooks:
                hook.end(self.context)


_calls = threading.local()


def in_hook() -> bool:
    """Whether a hook is being called in this thread."""
    hook: bool = getattr(_calls, "hook", False)
    return hook


@contextlib.contextmanager
def _calling() -> Iterator[None]:
    """While hooks are called."""
    before, _calls.hook = in_hook(), True
    try:
        with doing("callbacks"), interruptible():
            yield
    finally:
        _calls.hook = before


def _fetch(values: dict[str, Any], name: str) -> Any:
    if name not in values:
        raise ValueError(
            f"A hook asks for {name!r}, but an execution returns only {', '.join(map(repr, values))}. Ask for one of "
            "these in `SessionRunArgs`."
        )
    return values[name]
