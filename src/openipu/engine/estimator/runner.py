"""train, evaluate and predict of an estimator: what is made, with which checkpoint, on which devices.

Who does what: model_trace.py and model_steps.py make a program of model_fn, inputs.py reads the data, saved_state.py
keeps the state and run.py goes through the launches. `EstimatorRunner` is what estimators have in common; one that
makes its programs in another way overrides `_make_program`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from openipu import _validate as validate
from openipu.engine.checkpoint import Checkpoints
from openipu.engine.core.optimizer_chain import describe
from openipu.engine.core.options import Options
from openipu.engine.core.replica_metrics import mention_metrics
from openipu.engine.core.update_rules import check_accumulation
from openipu.engine.core.wrapped_optimizer import chain
from openipu.engine.data.feed import Feed
from openipu.engine.data.make_feed import make_feed
from openipu.engine.devices import systems
from openipu.engine.devices.placement import Placement, placement_on
from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Tree

import jax
import numpy as np

from . import saved_state as saving
from .hooks import CheckpointSaverListener
from .inputs import InputBatches, InputContext, InputFn
from .model_steps import ModelProgram, make_program
from .model_trace import DiscoveredModel, ModelFn, check_same_weights, discover, metrics_of
from .outbox import Outbox
from .progress import Summaries
from .run import Run, Training
from .saved_state import FOLDER, Saved, check_writable
from .sharded_model import make_sharded_program

log = logging.getLogger("openipu")

Logs = dict[str, Any]


class EstimatorRunner:
    """The machinery of an estimator. `config` is a `RunConfig`; arguments have been checked.

    `configure` makes the `ipu_options` of a run configuration those of the process.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: Path,
        config: Any,
        params: Logs,
        configure: Callable[[Any], None],
        warm_start: Any = None,
    ) -> None:
        self._configure = configure
        self._model_fn, self.model_dir, self.config, self.params = model_fn, model_dir, config, params
        self._warm_start = warm_start
        self._programs: dict[Any, ModelProgram] = {}

    # --- what a subclass may do otherwise

    def program(self, mode: str, batch: Tree, where: Placement, params: Logs) -> ModelProgram:
        """The program for batches like this one, made when it is first asked for."""
        key = (mode, where, _spec(batch))
        self._programs = {k: program for k, program in self._programs.items() if k[1].generation == where.generation}
        if key not in self._programs:
            self._programs[key] = self._make_program(mode, batch, where, params)
        return self._programs[key]

    def _make_program(self, mode: str, batch: Tree, where: Placement, params: Logs) -> ModelProgram:
        model_fn = ModelFn(self._model_fn, mode, params, self.config)
        plan, (logged, tensors, _) = discover(
            model_fn, batch, where.replicas, self.config.tf_random_seed, where.replicas.each
        )
        self._check_weights(plan)
        options = Options()
        if mode == "train":
            options = options.with_optimizer(describe(plan.optimizer))
            self._check_training(plan, options, where.replicas)
            check_accumulation("iterations_per_loop", self.iterations, options.updates.steps)
        elif where.replicas.count > 1:
            mention_metrics("evaluation", list(metrics_of(plan.spec).values()))
        host = [tensors] if plan.spec.host_call and mode == "train" else []
        outbox = self._outbox(plan, logged, host)
        if where.replicas.each > 1:
            return make_sharded_program(plan, batch, where, options, outbox, self._name)
        return make_program(plan, where, options, outbox, self._name)

    def _check_weights(self, plan: DiscoveredModel) -> None:
        """Programs of all modes and shapes have the same weights."""
        for other in self._programs.values():
            check_same_weights(plan, other.plan)

    def _outbox(self, plan: DiscoveredModel, logged: list[Tree], host: list[Tree]) -> Outbox:
        """Room for the tensors that leave a training program, by their shapes: those of hooks, and of `host_call`."""
        every = (*(hook.all_steps for hook in plan.log_hooks), *(False for _ in host))
        return Outbox((*logged, *host), every, self.iterations)

    def _check_training(self, plan: DiscoveredModel, options: Options, replicas: Replicas) -> None:
        """The rules about a training program, before anything compiles."""
        if replicas.count > 1 and not options.average_replicas:
            raise ValueError(
                f"Training on {replicas.count} replicas needs an optimizer that reduces gradients over them, but "
                f"{plan.optimizer.name!r} does not. Wrap it in `openipu.optimizers.CrossReplicaOptimizer`."
            )
        if plan.spec.host_call is not None and self.iterations > 1:
            raise ValueError(
                f"`host_call` is run after each step, but `iterations_per_loop` is {self.iterations}, so the host sees "
                "only every execution. Set `iterations_per_loop` to 1, or use an `IPULoggingTensorHook`."
            )
        if any(getattr(o, "use_ema", False) and not o.ema_overwrite_frequency for o in chain(plan.optimizer)):
            validate.no_effect({"use_ema": "averages are only used where `ema_overwrite_frequency` is set"})

    # --- places

    @property
    def _name(self) -> str:
        return getattr(self._model_fn, "__name__", type(self._model_fn).__name__)

    @property
    def iterations(self) -> int:
        """Steps of one execution."""
        return int(self.config.ipu_run_config.iterations_per_loop)

    def place(self) -> Placement:
        """Where programs run. The system is configured if the run configuration says how."""
        ipu = self.config.ipu_run_config
        if ipu.ipu_options is not None:
            self._configure(ipu.ipu_options)
        system = systems.system(ipu.ordinal)
        wanted = ipu.num_replicas * ipu.num_shards
        if ipu.ipu_options is not None and len(system.devices) != wanted:
            raise ValueError(
                f"`IPURunConfig` asks for {wanted} devices ({ipu.num_replicas} replicas times {ipu.num_shards} "
                f"shards), but `ipu_options` configures {len(system.devices)}. Make them equal."
            )
        return dataclasses.replace(placement_on(system), replicas=Replicas(system.devices[:wanted], ipu.num_shards))

    def input_fn(self, function: Callable[..., Any], mode: str, params: Logs) -> InputFn:
        """A user's input_fn with what it may ask for."""
        context = InputContext(num_replicas_in_sync=self.config.ipu_run_config.num_replicas)
        given = {"mode": mode, "params": dict(params), "config": self.config, "input_context": context}
        return InputFn(function, given)

    # --- checkpoints

    def checkpoints(self) -> Checkpoints:
        """Those of this estimator, saved as its configuration says."""
        config = self.config
        return Checkpoints(
            self.model_dir / FOLDER,
            keep=config.keep_checkpoint_max,
            every_steps=config.save_checkpoints_steps,
            every_seconds=config.save_checkpoints_secs,
        )

    def saved(self, path: str | Path | None = None) -> Saved | None:
        """The newest checkpoint, or the one at `path`; None where there is none yet."""
        if path is None:
            return self._load(self.checkpoints())
        folder, step = saving.locate(path)
        return saving.load(Checkpoints(folder), step)

    def _load(self, checkpoints: Checkpoints) -> Saved | None:
        return None if checkpoints.latest() is None else saving.load(checkpoints)

    def _begin(self, program: ModelProgram, found: Saved | None) -> Saved:
        """What a run begins with: a checkpoint, or initial values, perhaps with weights from elsewhere."""
        if found is not None:
            return found
        begin = saving.fresh(program.plan)
        if self._warm_start is not None:
            folder, step = saving.locate(self._warm_start.ckpt_to_initialize_from)
            source = saving.load(Checkpoints(folder), step)
            begin = saving.warm(program.plan, begin, source, self._warm_start.patterns)
        elif program.plan.mode != "train":
            log.warning("There is no checkpoint in %s: the variables have their initial values.", self.model_dir)
        return begin

    # --- running

    def train(
        self,
        function: Callable[..., Any],
        params: Logs,
        hooks: list[Any],
        steps: int | None,
        max_steps: int | None,
        listeners: list[CheckpointSaverListener],
    ) -> None:
        """Train for `steps` more steps, or until there are `max_steps`."""
        where, checkpoints = self.place(), self.checkpoints()
        found = self._load(checkpoints)
        begin = found.global_step if found else 0
        target = begin + steps if steps is not None else max_steps or 0
        if begin >= target:
            log.info("Nothing to train: %d of %d steps are done.", begin, target)
            return
        check_writable(self.model_dir)
        executions = -(-(target - begin) // self.iterations)
        batches = executions * self.iterations * where.replicas.count
        elements, batch_size = resumed(self.input_fn(function, "train", params), found, batches)
        program = self.program("train", elements.first, where, params)
        start = dataclasses.replace(self._begin(program, found), batch_size=batch_size)
        feed = self._feed(program, elements)
        Training(program, start, hooks, feed, self.model_dir, self.config, checkpoints, listeners, target).run()

    def evaluate(
        self,
        function: Callable[..., Any],
        params: Logs,
        steps: int | None,
        hooks: list[Any],
        path: Any,
        name: str | None,
    ) -> Logs:
        """Loss, metrics and the global step of a checkpoint."""
        run = self._run("eval", function, params, hooks, path, steps)
        results = [result for results in run.launched() for result in results]
        if steps is not None and run.steps < steps:
            log.warning("The data ended after %d of %d steps of the evaluation.", run.steps, steps)
        on_host = run.program.on_host
        logs = _values(results[-1].value if on_host is None else on_host(results))
        logs["global_step"] = run.global_step
        log.info("Evaluation at step %d: %s", run.global_step, _line(logs))
        summaries = Summaries(self.model_dir / (f"eval_{name}" if name else "eval"))
        summaries.write(run.global_step, {k: v for k, v in logs.items() if k != "global_step"})
        summaries.close()
        return logs

    def predict(self, function: Callable[..., Any], params: Logs, hooks: list[Any], path: Any) -> Iterator[Tree]:
        """The predictions of one execution after the other, with the examples as first axis."""
        run = self._run("infer", function, params, hooks, path, None)
        for results in run.launched():
            for result in results:
                yield result.rows()

    def _run(
        self, mode: str, function: Callable[..., Any], params: Logs, hooks: list[Any], path: Any, steps: int | None
    ) -> Run:
        where, found = self.place(), self.saved(path)
        limit = None if steps is None else steps * where.replicas.count
        elements = InputBatches(self.input_fn(function, mode, params), 0, limit)
        program = self.program(mode, elements.first, where, params)
        start = self._begin(program, found)
        return Run(program, start, hooks, self._feed(program, elements), self.model_dir, self.config)

    def _feed(self, program: ModelProgram, elements: InputBatches) -> Feed:
        return make_feed(program.place, self.iterations, elements, accumulated=program.options.updates.steps)


def resumed(input_fn: InputFn, found: Saved | None, limit: int) -> tuple[InputBatches, int]:
    """The next `limit` batches of training data after those that a checkpoint has seen, and the size of a full one."""
    if found is None:
        elements = InputBatches(input_fn, 0, limit)
        return elements, elements.batch_size
    elements = InputBatches(input_fn, found.batches, limit)
    if elements.batch_size == found.batch_size:
        return elements, found.batch_size
    size = InputBatches(input_fn, 0, 1).batch_size  # where training goes on, there may be a smaller last batch
    if found.batch_size in (0, size):
        return elements, size
    skip, rest = divmod(found.examples, size)
    level, again = (logging.WARNING, f", so that {rest} are seen again") if rest else (logging.INFO, "")
    log.log(
        level, "The checkpoint has seen %d examples in batches of %d; with batches of %d, training goes on after %d "
        "batches%s.", found.examples, found.batch_size, size, skip, again,
    )  # fmt: skip
    return InputBatches(input_fn, skip, limit), size


def _values(logs: Logs) -> Logs:
    """Logs as Python numbers, or arrays where a metric has several; a metric's dict is spread out."""
    flat: Logs = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            flat |= _values({f"{name}/{key}": part for key, part in value.items()})
        else:
            array = np.asarray(value)
            flat[name] = array.item() if array.ndim == 0 else array
    return flat


def _line(logs: Logs) -> str:
    return ", ".join(f"{name} = {value}" for name, value in logs.items() if name != "global_step")


def _spec(batch: Tree) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def single_examples(blocks: Iterator[Tree], limit: int | None) -> Iterator[Tree]:
    """The examples of blocks of predictions, one by one."""
    rows = (
        jax.tree.map(lambda leaf, i=i: leaf[i], block)
        for block in blocks
        for i in range(len(jax.tree.leaves(block)[0]))
    )
    return itertools.islice(rows, limit)
