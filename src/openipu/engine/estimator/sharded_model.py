"""`WholeModel` -> `ModelProgram` on several devices per replica: model_fn is cut into stages automatically."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.enqueued import refused
from openipu.engine.core.options import Options
from openipu.engine.core.pipelining import Pipelining
from openipu.engine.core.replicated_step import one_of_several
from openipu.engine.core.state import State
from openipu.engine.core.trainer import Forward
from openipu.engine.devices.placement import Placement
from openipu.engine.loop.arrays import rows_of
from openipu.engine.pipeline.build.assemble import ModelInStages, StageVariables, gradient_map, make_loop
from openipu.engine.pipeline.partition.program_cut import (
    Cut,
    FunctionInputs,
    FunctionOutputs,
    Layer,
    WholeFunction,
    choose,
    trace,
)
from openipu.engine.schedule.schedules import Sequential
from openipu.engine.shapes import specs_of
from openipu.engine.types import Array, Tree

import jax
import keras
import numpy as np

from .model_steps import ModelProgram, infer_step, on_host, train_forward, train_outcome
from .model_trace import WholeModel, rate_is_fixed
from .outbox import Outbox
from .specs import ENGINE_MODE

log = logging.getLogger("openipu")

_NO_OUTFEEDS = (
    "model_fn enqueues into an outfeed queue, but `num_shards` cuts it into parts. Use `IPULoggingTensorHook`, or run "
    "it on one device per replica."
)


def make_sharded_program(
    model: WholeModel, batch: Tree, place: Placement, options: Options, outbox: Outbox, name: str
) -> ModelProgram:
    """A program in which one micro-batch at a time passes through the devices of a replica.

    It is compiled at its first launch.
    """
    mode, replicas = ENGINE_MODE[model.mode], place.replicas
    if mode == "train":
        forward = _with_fixed_rate(train_forward(model, outbox))
        outcome, metrics = train_outcome(replicas, outbox)
    else:
        step, metrics = infer_step(model, place)
        forward, outcome = _inferring(step.micro), step.outcome
    if options.updates.offload_optimizer:
        validate.no_effect({"offload_weight_update_variables": "each device keeps the state of its own weights"})
    variables = (
        [made.variable for _, made in model.in_part("trainable")],
        [
            *[jax.ShapeDtypeStruct((), np.int32)] * model.counters,
            *(made.variable for _, made in model.in_part("non_trainable")),
        ],
    )
    optimizer = list(model.optimizer.variables) if model.optimizer is not None else []
    weights, others, slots = ([_shape(v) for v in part] for part in (*variables, optimizer))
    active = jax.ShapeDtypeStruct((), bool)
    shapes = FunctionInputs(weights, others, slots, active, specs_of(batch), jax.eval_shape(metrics))
    layers = _layers(model)
    begins = choose(trace(_whole(forward, None), shapes), layers, replicas.each)
    cut = Cut(_whole(forward, place), shapes, model.counters, layers, begins)
    used_weights, used_state = _probed(cut, batch, place)
    log.info("model_fn is cut into %d parts, which begin with %s", replicas.each, _names(model, layers, begins))
    staged = ModelInStages(
        StageVariables(variables[0], used_weights),
        StageVariables(variables[1], used_state),
        model.optimizer,
        lambda common: cut.stages(batch, common, gradient_map(model.optimizer, common)),
    )
    pipelining = Pipelining(Sequential(), updates=options.updates).for_stages(replicas.each, mode == "train")
    loop, layout = make_loop(f"{name}_{mode}", outcome, staged, pipelining, place)
    return ModelProgram(model, loop, layout, place, options, metrics, on_host(model))


def _with_fixed_rate(forward: Forward) -> Forward:
    def checked(state: State, batch: Tree) -> tuple[Any, State, Tree]:
        loss, new, rates = forward(state, batch)
        if rates:
            raise rate_is_fixed("with `num_shards`")
        return loss, new, ()

    return checked


def _inferring(micro: Callable[..., tuple[State, list[Array], Tree]]) -> Forward:
    """The forward pass of a step without training: there is no loss to differentiate."""

    def forward(state: State, batch: Tree) -> tuple[None, State, Tree]:
        new, _, result = micro(state, batch)
        return None, new, result

    return forward


def _whole(forward: Forward, place: Placement | None) -> WholeFunction:
    """Everything that model_fn computes, on one of the replicas of `place`."""

    def whole(inputs: FunctionInputs) -> FunctionOutputs:
        state = State(inputs.weights, inputs.state, inputs.optimizer, inputs.metrics)
        with refused(_NO_OUTFEEDS):
            if place is None or place.replicas.count == 1:
                loss, new, result = forward(state, inputs.batch)
            else:
                rows = rows_of(inputs.batch)
                with one_of_several(place.replicas, place.batch_norm_group, lambda: rows, inputs.active):
                    loss, new, result = forward(state, inputs.batch)
        return FunctionOutputs(loss, new.non_trainable, new.metrics, result)

    return whole


def _probed(cut: Cut, batch: Tree, place: Placement) -> Any:
    """The variables that each stage uses, found by tracing inside a program, where the replica axes have names."""
    found: list[Any] = []

    def probe(batch: Tree) -> None:
        found.append(cut.used(batch))

    jax.eval_shape(place.replicas.program(probe, (None,), None), batch)
    return found[-1]


def _layers(model: WholeModel) -> tuple[Layer, ...]:
    """The numbers of each layer's variables. Variables belong to the same layer if their paths do."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for kind, (part, first) in enumerate((("trainable", 0), ("non_trainable", model.counters))):
        for number, (_, made) in enumerate(model.in_part(part), first):
            found.setdefault(made.path.rpartition("/")[0] or made.path, ([], []))[kind].append(number)
    return tuple((tuple(weights), tuple(state)) for weights, state in found.values())


def _names(model: WholeModel, layers: tuple[Layer, ...], begins: tuple[int, ...]) -> str:
    """The names of the layers with which the parts begin."""
    trained, others = model.in_part("trainable"), model.in_part("non_trainable")
    firsts = [(trained[w[0]] if w else others[s[0] - model.counters])[0] for w, s in (layers[n] for n in begins)]
    return ", ".join(repr(name.rpartition("/")[0] or name) for name in firsts)


def _shape(variable: keras.Variable | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype)
