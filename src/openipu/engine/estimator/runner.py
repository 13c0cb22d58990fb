"""An estimator's train, evaluate and predict: which program runs, from which checkpoint, on which devices.

Who does what: model_trace.py and model_steps.py turn model_fn into a program, inputs.py reads the data, saved_state.py
loads and saves the state, and run.py goes through the launches. `EstimatorRunner` is what all estimators share. A
subclass that makes its programs differently overrides `_make_program`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from openipu import _validate as validate
from openipu.engine.checkpoint import Checkpoints, refuse_foreign
from openipu.engine.core.optimizer_chain import describe
from openipu.engine.core.options import Options
from openipu.engine.core.replica_metrics import mention_metrics
from openipu.engine.core.state import Logs
from openipu.engine.core.update_rules import check_accumulation
from openipu.engine.core.wrapped_optimizer import chain
from openipu.engine.data.feed import Feed
from openipu.engine.data.make_feed import make_feed
from openipu.engine.devices import group, systems
from openipu.engine.devices.launching import Wait
from openipu.engine.devices.placement import Placement, placement_on
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.running import refuse_elsewhere, running
from openipu.engine.facts.calls import Recording, doing, recorded
from openipu.engine.interrupts import SHORT, interruptible, uninterrupted
from openipu.engine.report.folder import FolderReport
from openipu.engine.shapes import signature
from openipu.engine.types import Data, Tree

import jax

from . import saved_state as saving
from .hooks import CheckpointSaverListener, SessionRunHook
from .inputs import InputBatches, InputContext, InputFn, resumed
from .model_steps import ModelProgram, make_program
from .model_trace import DiscoveredModel, ModelFn, check_same_weights, discover, metrics_of
from .outbox import Outbox
from .progress import Summaries, line_of, plain
from .run import Run, Training
from .run_settings import RunSettings, WarmStart
from .saved_state import FOLDER, Saved
from .sharded_model import make_sharded_program

log = logging.getLogger("openipu")

Params = dict[str, Any]
"""What a user passes on to model_fn and input_fn."""
P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(method: Callable[Concatenate[EstimatorRunner, P], R]) -> Callable[Concatenate[EstimatorRunner, P], R]:
    """The method, during which other threads cannot use the estimator."""

    @functools.wraps(method)
    def call(self: EstimatorRunner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._using(method.__name__, self._recording()):
            return method(self, *args, **kwargs)

    return call


class EstimatorRunner:
    """The machinery of an estimator. Its arguments have been checked.

    `configure` applies the `ipu_options` of a run configuration to this process.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: Path,
        config: RunSettings,
        params: Params,
        configure: Callable[[Any], None],
        warm_start: WarmStart | None = None,
    ) -> None:
        self._configure = configure
        self._model_fn, self.model_dir, self.config, self.params = model_fn, model_dir, config, params
        self._warm_start = warm_start
        self._programs: dict[Any, ModelProgram] = {}
        self._report: FolderReport | None = None

    # --- programs

    def program(self, mode: str, batch: Tree, place: Placement, params: Params) -> ModelProgram:
        """The program for batches like this one. It is made once and then kept."""
        key = (mode, place, signature(batch))
        self._programs = {k: program for k, program in self._programs.items() if k[1].generation == place.generation}
        if key not in self._programs:
            with doing("plan"):
                self._programs[key] = self._make_program(mode, batch, place, params)
        return self._programs[key]

    def _make_program(self, mode: str, batch: Tree, place: Placement, params: Params) -> ModelProgram:
        model_fn = ModelFn(self._model_fn, mode, params, self.config)
        model, (logged, tensors, _) = discover(
            model_fn, batch, place.replicas, self.config.tf_random_seed, place.replicas.each
        )
        self._check_weights(model)
        options = Options()
        if mode == "train":
            options = options.with_optimizer(describe(model.optimizer))
            self._check_training(model, options, place.replicas)
            check_accumulation("iterations_per_loop", self.iterations, options.updates.steps, "`IPURunConfig`")
        elif place.replicas.count > 1:
            mention_metrics("evaluation", list(metrics_of(model.spec).values()))
        host = [tensors] if model.spec.host_call and mode == "train" else []
        outbox = self._outbox(model, logged, host)
        if place.replicas.each > 1:
            return make_sharded_program(model, batch, place, options, outbox, self._name)
        return make_program(model, place, options, outbox, self._name)

    def _check_weights(self, model: DiscoveredModel) -> None:
        """Raise if a program for another mode or shape has different weights."""
        for other in self._programs.values():
            check_same_weights(model, other.model)

    def _outbox(self, model: DiscoveredModel, logged: list[Tree], host: list[Tree]) -> Outbox:
        """Room for the tensors that leave a training program, by their shapes: those for hooks and for `host_call`."""
        every = (*(hook.all_steps for hook in model.log_hooks), *(False for _ in host))
        return Outbox((*logged, *host), every, self.iterations)

    def _check_training(self, model: DiscoveredModel, options: Options, replicas: Replicas) -> None:
        """Check the rules for training, before anything compiles."""
        if replicas.count > 1 and not (options.average_replicas or replicas.average):
            raise ValueError(
                f"Training on {replicas.count} replicas needs an optimizer that reduces gradients over them, but "
                f"{model.optimizer.name!r} does not. Wrap it in `openipu.optimizers.CrossReplicaOptimizer`."
            )
        if model.spec.host_call is not None and self.iterations > 1:
            raise ValueError(
                f"`host_call` runs after each step, but `iterations_per_loop` is {self.iterations}, so the host is "
                "reached only after that many steps. Set it to 1, or use an `IPULoggingTensorHook`."
            )
        if any(getattr(o, "use_ema", False) and not o.ema_overwrite_frequency for o in chain(model.optimizer)):
            validate.no_effect({"use_ema": "averages are used only if `ema_overwrite_frequency` is set"})

    # --- devices and data

    @property
    def _name(self) -> str:
        return getattr(self._model_fn, "__name__", type(self._model_fn).__name__)

    @property
    def iterations(self) -> int:
        """Steps of one execution."""
        return int(self.config.ipu_run_config.iterations_per_loop)

    def place(self, mode: str) -> Placement:
        """Where programs run. Configures the system first if the run configuration has `ipu_options`."""
        ipu = self.config.ipu_run_config
        if ipu.ipu_options is not None:
            self._configure(ipu.ipu_options)
        system = systems.system(ipu.ordinal)
        wanted = ipu.num_replicas * ipu.num_shards
        if ipu.ipu_options is not None and len(system.devices) != wanted:
            raise ValueError(
                f"`IPURunConfig` asks for {wanted} devices ({ipu.num_replicas} replicas times {ipu.num_shards} "
                f"shards), but `ipu_options` configures {len(system.devices)}. Make these numbers equal."
            )
        system = dataclasses.replace(system, devices=system.devices[:wanted])
        together = {"train": self.config.train_distribute, "eval": self.config.eval_distribute}.get(mode)
        if together is not None:
            together.check_configuration()
            system = system.of_all_processes(together.own_data)
        return placement_on(system, ipu.num_shards)

    def input_fn(self, input_fn: Callable[..., Data], mode: str, params: Params, place: Placement) -> InputFn:
        """A user's input_fn with the arguments that it can declare."""
        pipelines = (group.count(), group.index()) if place.own_data else (1, 0)
        context = InputContext(*pipelines, num_replicas_in_sync=place.replicas.count)
        given = {"mode": mode, "params": dict(params), "config": self.config, "input_context": context}
        return InputFn(input_fn, given)

    # --- checkpoints

    def checkpoints(self) -> Checkpoints:
        """This estimator's checkpoints, saved as often as its configuration says."""
        config = self.config
        return Checkpoints(
            self.model_dir / FOLDER,
            keep=config.keep_checkpoint_max,
            every_steps=config.save_checkpoints_steps,
            every_seconds=config.save_checkpoints_secs,
        )

    def saved(self, path: str | Path | None = None) -> Saved | None:
        """The newest checkpoint, or the one at `path`; None if there is no checkpoint yet."""
        if path is None:
            return self._load(self.checkpoints())
        return saving.load_from("`checkpoint_path`", path)

    def _load(self, checkpoints: Checkpoints) -> Saved | None:
        self._refuse_foreign(checkpoints)
        return None if checkpoints.latest() is None else saving.load(checkpoints)

    def _found(self, place: Placement, load: Callable[[], Saved | None]) -> Saved | None:
        """What `load` finds: in instance 0, if instances run together. So they need no disk in common."""
        if place.replicas.is_local:
            return load()
        return saving.of_first(load() if place.speaks else None)

    def _refuse_foreign(self, checkpoints: Checkpoints) -> None:
        if checkpoints.latest() is None:
            refuse_foreign("`model_dir`", self.model_dir)

    def _start(self, program: ModelProgram, found: Saved | None) -> Saved:
        """What a run starts from: the checkpoint `found`, or initial values, perhaps with warm-start weights."""
        if found is not None and found.variables:
            return found
        start = saving.fresh(program.model)
        if found is not None:  # another instance has read it, and has its values
            return dataclasses.replace(found, variables=start.variables, optimizer=start.optimizer)
        if self._warm_start is not None:
            source = saving.load_from("`ckpt_to_initialize_from`", self._warm_start.ckpt_to_initialize_from)
            start = saving.warm(program.model, start, source, self._warm_start.patterns)
        elif program.model.mode != "train":
            if self.config.train_distribute is not None and program.place.replicas.is_local and group.index() > 0:
                raise ValueError(
                    f"Instance {group.index()} finds no checkpoint in {self.model_dir}, because instance 0 writes "
                    "them. Give all instances a `model_dir` on a disk that they share, or use instance 0 for this."
                )
            log.warning("There is no checkpoint in %s, so all variables have their initial values.", self.model_dir)
        return start

    # --- running

    @_exclusive
    def train(
        self,
        input_fn: Callable[..., Data],
        params: Params,
        hooks: Sequence[SessionRunHook],
        steps: int | None,
        max_steps: int | None,
        listeners: Sequence[CheckpointSaverListener],
    ) -> None:
        """Train for `steps` more steps, or until the global step is `max_steps`."""
        place, checkpoints = self.place("train"), self.checkpoints()
        problem = None
        if place.speaks:
            self._refuse_foreign(checkpoints)
            problem = saving.open_for_run(checkpoints, self.model_dir)
        try:
            found = self._found(place, lambda: self._load(checkpoints))
            begin = found.global_step if found else 0
            target = begin + steps if steps is not None else max_steps or 0
            if begin >= target:
                log.info("There is nothing to train: %d of %d steps are done.", begin, target)
                return
            if problem is not None:
                raise problem
            executions = -(-(target - begin) // self.iterations)
            batches = executions * self.iterations * len(place.fed)
            with interruptible():
                opened = self.input_fn(input_fn, "train", params, place)
                data, batch_size = resumed(opened, found and found.own(place), batches)
            program = self.program("train", data.first, place, params)
            start = dataclasses.replace(self._start(program, found), batch_size=batch_size)
            if place.speaks:
                saving.check_room(checkpoints, self.model_dir, start)
            feed = self._feed(program, data)
            Training(program, start, hooks, feed, self.model_dir, self.config, checkpoints, listeners, target).run()
        finally:
            checkpoints.close()

    @_exclusive
    def evaluate(
        self,
        input_fn: Callable[..., Data],
        params: Params,
        steps: int | None,
        hooks: Sequence[SessionRunHook],
        path: Path | None,
        name: str | None,
    ) -> Logs:
        """The loss, the metrics and the global step of a checkpoint."""
        run = self._run("eval", input_fn, params, hooks, path, steps)
        results = [result for results in run.launched() for result in results]
        if steps is not None and run.steps < steps:
            log.warning("The data ended after %d of the %d steps of the evaluation.", run.steps, steps)
        on_host = run.program.on_host
        logs = plain(results[-1].value if on_host is None else on_host(results))
        logs["global_step"] = run.global_step
        if run.program.place.speaks:
            log.info("Evaluation at step %d: %s", run.global_step, line_of(logs))
            summaries = Summaries(self.model_dir / (f"eval_{name}" if name else "eval"))
            summaries.write(run.global_step, {k: v for k, v in logs.items() if k != "global_step"})
            summaries.close()
        return logs

    def predict(
        self, input_fn: Callable[..., Data], params: Params, hooks: Sequence[SessionRunHook], path: Path | None
    ) -> Iterator[Tree]:
        """Yield the predictions of each execution, with the example as first axis."""
        blocks = self._predictions(input_fn, params, hooks, path)
        block: list[Tree] = []
        recording = self._recording()
        try:
            while True:
                # The estimator is only in use while it computes, not while the user looks at the predictions.
                with self._using("predict", recording, together=True):
                    try:
                        block.append(next(blocks))
                    except StopIteration:
                        return
                yield block.pop()
        finally:
            if recording is not None:
                recording.changed()

    def _predictions(
        self, input_fn: Callable[..., Data], params: Params, hooks: Sequence[SessionRunHook], path: Path | None
    ) -> Iterator[Tree]:
        run = self._run("infer", input_fn, params, hooks, path, None)
        wait = Wait()
        for results in run.launched():
            for result in results:
                wait(result.value)
                yield result.rows()

    @contextlib.contextmanager
    def _using(self, call: str, recording: Recording | None, together: bool = False) -> Iterator[None]:
        """Until the block ends, `call` is running: other threads cannot use the estimator or configure devices.

        Ctrl-C is held back, except where it is let through. See engine/interrupts.py.
        """
        with uninterrupted(SHORT):
            refuse_elsewhere(self, call)
            self.place("infer")  # configures devices, which is no longer possible when the call is running
            with (
                running(self, call, f"the estimator of {self._name!r}"),
                recorded(call, self._name, together, also=recording),
            ):
                yield

    def _recording(self) -> Recording | None:
        """Who wants to know about a call, besides those who want to know about all runs of the process."""
        folder = self.config.report_dir
        if folder is None:
            return Recording() if self.config.ipu_run_config.compile_summary else None
        if self._report is None:
            self._report = FolderReport(folder, self._name)
        return self._report

    def _run(
        self,
        mode: str,
        input_fn: Callable[..., Data],
        params: Params,
        hooks: Sequence[SessionRunHook],
        path: Path | None,
        steps: int | None,
    ) -> Run:
        place = self.place(mode)
        found = self._found(place, lambda: self.saved(path))
        limit = None if steps is None else steps * len(place.fed)
        with interruptible():
            data = InputBatches(self.input_fn(input_fn, mode, params, place), 0, limit)
        program = self.program(mode, data.first, place, params)
        start = self._start(program, found)
        return Run(program, start, hooks, self._feed(program, data), self.model_dir, self.config)

    def _feed(self, program: ModelProgram, data: InputBatches) -> Feed:
        return make_feed(program.place, self.iterations, data, accumulated=program.options.updates.steps)


def single_examples(blocks: Iterator[Tree], limit: int | None) -> Iterator[Tree]:
    """The first `limit` examples of blocks of predictions, one by one."""
    rows = (
        jax.tree.map(lambda leaf, i=i: leaf[i], block)
        for block in blocks
        for i in range(len(jax.tree.leaves(block)[0]))
    )
    return itertools.islice(rows, limit)
