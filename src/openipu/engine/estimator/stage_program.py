"""`StagedModel` -> `ModelProgram`: the stages of a model_fn on the pipeline executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from openipu.engine.core.optimizer_chain import describe
from openipu.engine.core.options import Options
from openipu.engine.core.state import Logs, Outcome
from openipu.engine.core.update_rules import round_up
from openipu.engine.devices.placement import Placement
from openipu.engine.loop.arrays import rows_of
from openipu.engine.loop.loop import Result
from openipu.engine.pipeline.build.assemble import make_loop
from openipu.engine.pipeline.build.function_stages import functions_in_stages, gradient_check
from openipu.engine.types import Array, Tree

import jax
import keras
import numpy as np

from .model_steps import ModelProgram, at_least_1d, host_logs, joined, row_by_row, train_outcome
from .model_trace import current_trace
from .outbox import Outbox
from .runner import EstimatorRunner, Params
from .specs import ENGINE_MODE, check_metric_names
from .stage_specs import IPUPipelineEstimatorSpec
from .stage_trace import PipelineFn, StagedModel, discover_stages, functions_of


class StagedRunner(EstimatorRunner):
    """The machinery of a pipelined estimator. Only its programs differ: they are made of stages."""

    def _make_program(self, mode: str, batch: Tree, place: Placement, params: Params) -> ModelProgram:
        model_fn = PipelineFn(self._model_fn, mode, params, self.config)
        model, logged = discover_stages(model_fn, batch, place.replicas, self.config.tf_random_seed)
        spec: IPUPipelineEstimatorSpec = model.spec
        self._check_counts(spec)
        self._check_weights(model)
        options = Options(pipelining=spec.pipelining)
        if mode == "train":
            options = _with_optimizer(options, model.optimizer)
            self._check_training(model, options, place.replicas)
        return make_staged_program(model, place, options, self._outbox(model, logged, []), self._name)

    def _check_counts(self, spec: IPUPipelineEstimatorSpec) -> None:
        """Check the numbers of devices and micro-batches, before anything compiles."""
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
                f"{shards} the devices of a replica are 0 to {shards - 1}. Use only these numbers."
            )


def _with_optimizer(options: Options, optimizer: keras.optimizers.Optimizer) -> Options:
    declared = describe(optimizer)
    if declared.accumulation is not None:
        raise ValueError(
            f"The optimizer {optimizer.name!r} accumulates {declared.accumulation.steps} micro-batches, but in a "
            "pipeline `gradient_accumulation_count` sets that number. Give the optimizer that it wraps."
        )
    return options.with_optimizer(declared)


def make_staged_program(
    model: StagedModel, place: Placement, options: Options, outbox: Outbox, name: str
) -> ModelProgram:
    """The program of a model_fn in stages. It is compiled at its first launch."""
    mode, spec = ENGINE_MODE[model.mode], model.spec
    outcome, on_host = Outcome("all"), None
    metrics: Callable[[], list[Any]] = list
    if mode == "train":
        outcome, metrics = train_outcome(place.replicas, outbox)
        functions = functions_of(spec, metrics=partial(_counted, outbox))
        names = [name for name, _ in model.in_part("trainable")]
        outcome = replace(outcome, check=gradient_check(functions, model, names))
    elif mode == "test":
        functions = functions_of(spec, results=lambda outputs, *_: jax.tree.map(at_least_1d, outputs))
        on_host = partial(_on_host, spec.eval_metrics_fn)
    else:
        functions = functions_of(spec, results=_prediction)
    counters = [jax.ShapeDtypeStruct((), np.int32)] * model.counters
    variables = (
        [made.variable for _, made in model.in_part("trainable")],
        [*counters, *(made.variable for _, made in model.in_part("non_trainable"))],
    )
    staged = functions_in_stages(functions, model, variables, model.optimizer, place)
    loop, layout = make_loop(f"{name}_{mode}", outcome, staged, spec.pipelining, place)
    return ModelProgram(model, loop, layout, place, options, metrics, on_host)


def _counted(outbox: Outbox, metrics: list[Array], loss: Array, data: Tree) -> list[Array]:
    """The metrics after one more micro-batch: the mean loss, and the tensors that hooks log."""
    logged = [tensors for _, tensors in current_trace("A stage").logs]
    return outbox.put_with(metrics, loss, rows_of(data), logged)


def _prediction(outputs: list[Tree], _loss: None, data: Tree) -> Tree:
    if len(outputs) != 1:
        raise ValueError(
            f"The last stage returned {len(outputs)} tensors to predict. Return one tensor, or a dict of tensors."
        )
    return row_by_row(outputs[0], rows_of(data))


def _on_host(function: Callable[..., Logs], results: list[Result]) -> Logs:
    """The metrics that a user's function computes from the outputs of all micro-batches."""
    logs = host_logs("eval_metrics_fn", function(*joined(results)))
    check_metric_names(logs, ["global_step"])
    if "loss" not in logs:
        raise KeyError(f"`eval_metrics_fn` returned {', '.join(map(repr, logs)) or 'nothing'}. Return a 'loss' too.")
    return {name: np.mean(value) if name == "loss" else value for name, value in logs.items()}
