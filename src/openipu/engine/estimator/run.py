"""One call of an estimator's train, evaluate or predict: what happens around each launch.

Who does what: the engine's feed cuts the data into slabs and its loop launches them. This module calls the hooks and
counts the steps. While training, it also delivers results and saves checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from openipu.engine.checkpoint import Checkpoints
from openipu.engine.core.state import Logs, State
from openipu.engine.core.state_layout import ReplicaLayout
from openipu.engine.data.feed import Feed
from openipu.engine.data.slab import Slab
from openipu.engine.devices import group
from openipu.engine.devices.launching import Wait
from openipu.engine.facts.calls import current, doing
from openipu.engine.facts.recorder import RunRecorder
from openipu.engine.interrupts import interruptible
from openipu.engine.loop.driver import launches
from openipu.engine.loop.loop import Result

import jax
import numpy as np

from . import saved_state as saving
from .hooks import CheckpointSaverListener, Hooks, SessionRunHook
from .model_steps import ModelProgram
from .model_trace import OtherVariablesError
from .outbox import steps_first
from .progress import NoSummaries, Progress, Summaries
from .run_settings import RunSettings
from .saved_state import Saved
from .specs import IPUEstimatorSpec

log = logging.getLogger("openipu")


class Run:
    """One call of `train`, `evaluate` or `predict`: its state, and what happens around each launch."""

    def __init__(
        self,
        program: ModelProgram,
        start: Saved,
        hooks: Sequence[SessionRunHook],
        feed: Feed,
        model_dir: Path,
        config: RunSettings,
    ) -> None:
        self.program, self._model_dir, self._config = program, model_dir, config
        self.global_step, self.steps = start.global_step, 0
        self._state: State = saving.restored(program, start, f"the checkpoint in {model_dir}")
        self.hooks = Hooks([*hooks, *program.model.spec.hooks])
        self._feed = feed
        self._shapes: list[str] | None = None  # the arrays of the first batch

    @property
    def mode(self) -> str:
        """The mode in which model_fn was called: "train", "eval" or "infer"."""
        return self.program.model.mode

    def launched(self) -> Iterator[list[Result]]:
        """Yield the results of each launch, and call the hooks around it."""
        reported = self._config.ipu_run_config.compile_summary and self.program.place.speaks
        run = current() if reported else None
        self.hooks.begin(self.global_step)
        for number, launched in enumerate(launches(self._feed.epoch(), self._execute)):
            self._count(launched.slab)
            results = launched.results
            del launched  # it keeps the slab alive, and the next slab needs its memory
            self.hooks.context.global_step = self.global_step
            if run is not None and number == 0:  # the time of a step is measured from here
                Wait()(self._state)
                run.look()
            yield results
            self.hooks.after_run(self.global_step, _fetches(results))
            if self._stops():
                break
        Wait()(self._state)
        self.hooks.end()
        if run is not None:
            self._write_report(run)

    def _stops(self) -> bool:
        """Whether a hook has asked to stop, in any instance of those that run together."""
        return self.program.place.any_of("the end of an execution", self.hooks.context.stop_requested)

    def _execute(self, slab: Slab, _meanwhile: Callable[[], None]) -> list[Result]:
        self.hooks.before_run()
        self._shapes = self._shapes or _shapes(slab)
        try:
            results, self._state = self.program.loop.execute(self._state, self._feed.source.resident, slab)
        except OtherVariablesError as error:
            if _shapes(slab) == self._shapes:
                raise
            raise _shapes_differ(self._shapes, slab) from error
        return results

    def _write_report(self, run: RunRecorder) -> None:
        """Write the facts about a run next to its checkpoints."""
        run.settle()
        run.count_operations()
        path = self._model_dir / f"{'predict' if self.mode == 'infer' else self.mode}_report.txt"
        try:
            self._model_dir.mkdir(parents=True, exist_ok=True)
            path.write_text(run.facts().text(), encoding="utf-8")
        except OSError as error:
            log.error("%s could not be written: %s.", path, error)

    def _count(self, slab: Slab) -> None:
        self.steps += -(-slab.steps // self.program.place.replicas.count)


class Training(Run):
    """A call of `train`."""

    def __init__(
        self,
        program: ModelProgram,
        start: Saved,
        hooks: Sequence[SessionRunHook],
        feed: Feed,
        model_dir: Path,
        config: RunSettings,
        checkpoints: Checkpoints,
        listeners: Sequence[CheckpointSaverListener],
        target: int,
    ) -> None:
        super().__init__(program, start, hooks, feed, model_dir, config)
        self._listeners, self._target = listeners, target
        self._batches, self._examples, self._batch_size = start.batches, start.examples, start.batch_size
        self._own_batches = start.own(program.place).batches
        self._saved_at: int | None = None
        self._checkpoints = checkpoints

    def run(self) -> None:
        """Train on all batches."""
        config, speaks = self._config, self.program.place.speaks
        summaries = Summaries(self._model_dir) if speaks else NoSummaries(self._model_dir)
        log_steps, summary_steps = (config.log_step_count_steps, config.save_summary_steps) if speaks else (None, None)
        if summary_steps is not None:
            summaries.prepare()
        progress = Progress(summaries, self.global_step, log_steps, summary_steps)
        periodic = config.save_checkpoints_steps is not None or config.save_checkpoints_secs is not None
        try:
            with interruptible():
                for listener in self._listeners:
                    listener.begin()
            for results in self.launched():
                with doing("callbacks"), interruptible():
                    self._deliver(results, summaries)
                progress.note(self.global_step, _fetches(results)["loss"])
                if periodic and self._is_due():
                    with doing("checkpoint"):
                        self._save()
            progress.close()
            if self.global_step < self._target and not self.hooks.context.stop_requested:
                log.info("The data ended at step %d of %d.", self.global_step, self._target)
            with doing("checkpoint"):
                self._save(wait=True)
            with interruptible():
                for listener in self._listeners:
                    listener.end(self.hooks.context, self.global_step)
        finally:
            summaries.close()
            self._checkpoints.close()

    def _is_due(self) -> bool:
        """Whether it is time for a checkpoint. Instance 0 decides, because clocks differ."""
        due = self._checkpoints.due(self.global_step)
        return bool(self.program.place.of_first("whether a checkpoint is due", due))

    def _count(self, slab: Slab) -> None:
        super()._count(slab)
        self.global_step += -(-slab.steps // self.program.place.replicas.count)
        self._batches += slab.steps
        self._own_batches += slab.steps if slab.own is None else slab.own
        self._examples += slab.samples
        if slab.has_tail and isinstance(self.program.layout, ReplicaLayout):
            # The program has counted a smaller last batch as a step of its own. Programs with stages do not.
            step, *rest = self._state.non_trainable
            counted = jax.device_put(np.int32(self.global_step), step.sharding)
            self._state = self._state._replace(non_trainable=[counted, *rest])

    def _deliver(self, results: list[Result], summaries: Summaries) -> None:
        """Pass the tensors that left the program to the hooks and the `host_call` that asked for them."""
        model = self.program.model
        sent = results[-1].value
        count, tensors = sent["count"], sent["tensors"]
        for hook, logged in zip(model.log_hooks, tensors[: len(model.log_hooks)], strict=True):
            hook.receive(count, logged)
        if model.spec.host_call is not None:
            _call_host(model.spec, steps_first(count, tensors[-1], False), self.global_step, summaries)

    def _save(self, wait: bool = False) -> None:
        step = self.global_step
        if self._saved_at == step:
            if wait:
                self._checkpoints.wait()
            return
        for listener in self._listeners:
            listener.before_save(self.hooks.context, step)
        saved = saving.snapshot(self.program, self._state, step, self._batches)
        place, parts = self.program.place, ()
        if place.own_data:
            parts = tuple(group.exchange("the position in the data", self._own_batches))
        tree = replace(saved, examples=self._examples, batch_size=self._batch_size, parts=parts).tree()
        if place.speaks:
            self._checkpoints.save(step, tree, wait=wait or bool(self._listeners))
        self._saved_at = step
        for listener in self._listeners:
            if listener.after_save(self.hooks.context, step):
                self.hooks.context.request_stop()


def _shapes(slab: Slab) -> list[str]:
    """The shapes of a batch's arrays, with N for the number of examples."""
    leaves, ahead = (jax.tree.leaves(slab.tail), 1) if slab.body is None else (jax.tree.leaves(slab.body), 3)
    return [f"({', '.join(map(str, ('N', *leaf.shape[ahead:])))})" for leaf in leaves]


def _shapes_differ(shapes: list[str], slab: Slab) -> ValueError:
    return ValueError(
        f"input_fn first yielded batches of shape {', '.join(shapes)} and now of {', '.join(_shapes(slab))}, for which "
        "model_fn makes different weights. Give all batches the same shape, except for the number of examples N: pad "
        "or crop them in input_fn."
    )


def _fetches(results: list[Result]) -> Logs:
    """What hooks can ask for after an execution. Its last launch reports on all of it."""
    value = results[-1].value
    return {"loss": value["loss"]} if isinstance(value, dict) and "loss" in value else {}


def _call_host(spec: IPUEstimatorSpec, tensors: list[Any], step: int, summaries: Summaries) -> None:
    """Call the function of a spec's `host_call`. If it returns a dict, its numbers go into the event file."""
    assert spec.host_call is not None
    value = spec.host_call[0](*tensors)
    if isinstance(value, dict):
        summaries.write(step, value)
    elif value is not None and not hasattr(value, "shape") and not isinstance(value, int | float):
        raise TypeError(
            f"The function of `host_call` returned a {type(value).__name__}. Return None, an array, or a dict of "
            "numbers for TensorBoard."
        )
