"""`StagedModel` -> `ModelProgram`: a model_fn in stages on the pipeline executor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from openipu.engine.core.optimizer_chain import describe
from openipu.engine.core.options import Options
from openipu.engine.core.state import Outcome
from openipu.engine.core.update_rules import round_up
from openipu.engine.devices.placement import Placement
from openipu.engine.loop.arrays import rows_of
from openipu.engine.loop.loop import Result
from openipu.engine.pipeline.build.assemble import make_loop
from openipu.engine.pipeline.build.function_stages import functions_in_stages
from openipu.engine.types import Tree

import jax
import numpy as np

from .model_steps import ModelProgram, at_least_1d, host_logs, joined, row_by_row, train_outcome
from .model_trace import current_trace
from .outbox import Outbox
from .runner import EstimatorRunner, Logs
from .specs import ENGINE_MODE, check_metric_names
from .stage_specs import IPUPipelineEstimatorSpec
from .stage_trace import PipelineFn, StagedModel, discover_stages, functions_of


class StagedRunner(EstimatorRunner):
    """The machinery of a pipelined estimator: programs are made of stages, all else is the same."""

    def _make_program(self, mode: str, batch: Tree, where: Placement, params: Logs) -> ModelProgram:
        model_fn = PipelineFn(self._model_fn, mode, params, self.config)
        plan, logged = discover_stages(model_fn, batch, where.replicas, self.config.tf_random_seed)
        spec: IPUPipelineEstimatorSpec = plan.spec
        self._check_counts(spec)
        self._check_weights(plan)
        options = Options(pipelining=spec.pipelining)
        if mode == "train":
            options = _with_optimizer(options, plan.optimizer)
            self._check_training(plan, options, where.replicas)
        return make_staged_program(plan, where, options, self._outbox(plan, logged, []), self._name)

    def _check_counts(self, spec: IPUPipelineEstimatorSpec) -> None:
        """The rules about devices and micro-batches, before anything compiles."""
        devices, count = spec.pipelining.devices, spec.pipelining.updates.steps
        if self.iterations < count or self.iterations % count:
            raise ValueError(
                f"`iterations_per_loop` is {self.iterations} micro-batches, which is not a multiple of "
                f"`gradient_accumulation_count`, {count}. Give {round_up(self.iterations, count)}, for example."
            )
        needed, shards = len(set(devices)), self.config.ipu_run_config.num_shards
        if not shards / 2 < needed <= shards:
            raise ValueError(
                f"This pipeline requires {needed} devices, but `IPURunConfig.num_shards` is {shards}. Set it to "
                f"{needed}, or change `device_mapping`."
            )
        if max(devices) >= shards:
            raise ValueError(
                f"`device_mapping` {list(devices)} uses device {max(devices)}, but with `num_shards` = "
                f"{shards} the devices of a replica are 0 to {shards - 1}. Number them from 0."
            )


def _with_optimizer(options: Options, optimizer: Any) -> Options:
    plan = describe(optimizer)
    if plan.accumulation is not None:
        raise ValueError(
            f"The optimizer {optimizer.name!r} accumulates {plan.accumulation.steps} micro-batches, but in a pipeline "
            "`gradient_accumulation_count` says how many. Give the optimizer inside it."
        )
    return options.with_optimizer(plan)


def make_staged_program(
    plan: StagedModel, place: Placement, options: Options, outbox: Outbox, name: str
) -> ModelProgram:
    """Everything but the compilation, which happens at the first launch."""
    mode, spec = ENGINE_MODE[plan.mode], plan.spec
    outcome, on_host = Outcome("all"), None
    metrics: Callable[[], list[Any]] = list
    if mode == "train":
        outcome, metrics = train_outcome(place.replicas, outbox)
        functions = functions_of(spec, metrics=partial(_counted, outbox))
    elif mode == "test":
        functions = functions_of(spec, results=lambda outputs, *_: jax.tree.map(at_least_1d, outputs))
        on_host = partial(_on_host, spec.eval_metrics_fn)
    else:
        functions = functions_of(spec, results=_prediction)
    counters = [jax.ShapeDtypeStruct((), np.int32)] * plan.counters
    variables = (
        [made.variable for _, made in plan.in_part("trainable")],
        [*counters, *(made.variable for _, made in plan.in_part("non_trainable"))],
    )
    staged = functions_in_stages(functions, plan, variables, plan.optimizer, place)
    loop, spread = make_loop(f"{name}_{mode}", outcome, staged, spec.pipelining, place)
    return ModelProgram(plan, loop, spread, place, options, metrics, on_host)


def _counted(outbox: Outbox, metrics: list[Any], loss: Any, data: Tree) -> list[Any]:
    """The metrics after a micro-batch: its loss, and what hooks log of it."""
    logged = [tensors for _, tensors in current_trace("A stage").logs]
    return outbox.put_with(metrics, loss, rows_of(data), logged)


def _prediction(outputs: list[Any], _loss: None, data: Tree) -> Tree:
    if len(outputs) != 1:
        raise ValueError(
            f"The last stage returned {len(outputs)} tensors to predict. Return one, or a dict of them by name."
        )
    return row_by_row(outputs[0], rows_of(data))


def _on_host(function: Any, results: list[Result]) -> Logs:
    """The metrics of a user's function over the outputs of all micro-batches."""
    logs = host_logs("eval_metrics_fn", function(*joined(results)))
    check_metric_names(logs, ["global_step"])
    if "loss" not in logs:
        raise KeyError(f"`eval_metrics_fn` returned {', '.join(map(repr, logs)) or 'nothing'}. Return a 'loss' too.")
    return {name: np.mean(value) if name == "loss" else value for name, value in logs.items()}
