"""`WholeModel` -> `ModelProgram` on several devices per replica: model_fn is cut into stages by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.keras_steps import in_stages
from openipu.engine.core.options import Options
from openipu.engine.core.replicated_step import one_of_several
from openipu.engine.core.state import State
from openipu.engine.devices.placement import Placement
from openipu.engine.loop.execution import rows_of
from openipu.engine.pipeline.build.arguments import Arguments
from openipu.engine.pipeline.build.assemble import make_loop, mapped
from openipu.engine.pipeline.partition.program_cut import Cut, Given, Gives, Layer, Whole, choose, trace
from openipu.engine.pipeline.runtime.stage_function import specs_of
from openipu.engine.schedule.schedules import Sequential

import jax
import numpy as np

from .model_steps import Forward, ModelProgram, infer_step, on_host, train_forward, train_step
from .model_trace import WholeModel
from .outbox import Outbox
from .specs import ENGINE_MODE

log = logging.getLogger("openipu")

Tree = Any


def make_sharded_program(
    plan: WholeModel, batch: Tree, place: Placement, options: Options, outbox: Outbox, name: str
) -> ModelProgram:
    """Everything but the compilation. One micro-batch at a time goes through the devices of a replica."""
    mode, replicas = ENGINE_MODE[plan.mode], place.replicas
    if mode == "train":
        forward = train_forward(plan, outbox)
        step, metrics = train_step(in_stages, None, replicas, outbox)
    else:
        step, metrics = infer_step(plan, place)
        forward, step = _inferring(step.micro), replace(step, micro=in_stages)
    if options.offload_optimizer:
        validate.no_effect({"offload_weight_update_variables": "each device keeps the state of its own weights"})
    variables = (
        [made.variable for _, made in plan.in_part("trainable")],
        [
            *[jax.ShapeDtypeStruct((), np.int32)] * plan.counters,
            *(made.variable for _, made in plan.in_part("non_trainable")),
        ],
    )
    optimizer = list(plan.optimizer.variables) if plan.optimizer is not None else []
    weights, others, slots = ([_shape(v) for v in part] for part in (*variables, optimizer))
    active = jax.ShapeDtypeStruct((), bool)
    given = Given(weights, others, slots, active, specs_of(batch), jax.eval_shape(metrics))
    layers = _layers(plan)
    begins = choose(trace(_whole(forward, None), given), layers, replicas.each)
    cut = Cut(_whole(forward, place), given, plan.counters, layers, begins)
    used = _probed(cut, batch, place)
    log.info("model_fn is cut into %d parts, which begin with %s", replicas.each, _names(plan, layers, begins))
    asked = Arguments((), options.accumulation, Sequential(), tuple(range(replicas.each)), options.shard_optimizer)

    def stages(common: Any) -> Any:
        change = partial(mapped, plan.optimizer, common) if plan.optimizer is not None else None
        return cut.stages(batch, common, change)

    loop, spread = make_loop(f"{name}_{mode}", step, stages, used, variables, plan.optimizer, place, asked)
    return ModelProgram(plan, loop, spread, place, options, metrics, on_host(plan))


def _inferring(micro: Callable[..., Any]) -> Forward:
    def forward(state: State, batch: Tree) -> tuple[Any, State, Any]:
        new, _, result = micro(state, batch)
        return None, new, result

    return forward


def _whole(forward: Forward, place: Placement | None) -> Whole:
    """What a model_fn computes, on one of the replicas of `place`."""

    def whole(given: Given) -> Gives:
        state = State(given.weights, given.state, given.optimizer, given.metrics)
        if place is None or place.replicas.count == 1:
            loss, new, result = forward(state, given.batch)
        else:
            rows = rows_of(given.batch)
            with one_of_several(place.replicas, place.batch_norm_group, lambda: rows, given.active):
                loss, new, result = forward(state, given.batch)
        return Gives(loss, new.non_trainable, new.metrics, result)

    return whole


def _probed(cut: Cut, batch: Tree, place: Placement) -> Any:
    """The variables of each stage; the function is traced where the axes of replicas have names."""
    found: list[Any] = []

    def probe(batch: Tree) -> None:
        found.append(cut.used(batch))

    jax.eval_shape(place.replicas.program(probe, (None,), None), batch)
    return found[-1]


def _layers(plan: WholeModel) -> tuple[Layer, ...]:
    """The variables of each layer, by the names of the layers."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for kind, (part, first) in enumerate((("trainable", 0), ("non_trainable", plan.counters))):
        for number, (_, made) in enumerate(plan.in_part(part), first):
            found.setdefault(made.path.rpartition("/")[0] or made.path, ([], []))[kind].append(number)
    return tuple((tuple(weights), tuple(state)) for weights, state in found.values())


def _names(plan: WholeModel, layers: tuple[Layer, ...], begins: tuple[int, ...]) -> str:
    trained, others = plan.in_part("trainable"), plan.in_part("non_trainable")
    firsts = [(trained[w[0]] if w else others[s[0] - plan.counters])[0] for w, s in (layers[n] for n in begins)]
    return ", ".join(repr(name.rpartition("/")[0] or name) for name in firsts)


def _shape(variable: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)
