"""How long the actions of a pipeline take, each timed alone on its device.

The program that is timed has the ticks of the real one (ticks.py), but it follows rows that it is given: each of them
has a single action and no exchange, or an exchange and no action. So one more program is compiled, whatever the number
of stages, and actions take the time that they take in a run, with what they read and write. What devices cost each
other, such as cores or links that they share, is not in these times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from openipu.engine.core.state import State
from openipu.engine.devices.launching import in_turn
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import STAGE_AXIS
from openipu.engine.facts.values import MeasuredStages
from openipu.engine.loop.arrays import as_before, zeros
from openipu.engine.loop.compile import compile_program
from openipu.engine.loop.results import Kept
from openipu.engine.schedule.actions import Kind, Table
from openipu.engine.schedule.measures import StageCosts, bubble, total_time
from openipu.engine.schedule.table_arrays import NONE, ActionArrays, TableArrays
from openipu.engine.shapes import has_gradient
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .stage_layout import StageLayout
from .staged_execution import updated
from .table_rows import TableRow, rows_of
from .tick_state import Fixed, Flow, TickState
from .ticks import Pipeline
from .variable_store import numbered

ROWS = 8
"""How many rows of the table are repeated. They differ in micro-batch and slots."""
LEAST, MOST, LONG = 0.02, 4096, 0.1
"""Actions are repeated until they take `LEAST` seconds, at most `MOST` times. One that takes `LONG` is not repeated."""
REPEATS = 3
"""How often each time is taken. The shortest counts: other programs can only make it longer."""


@dataclass(frozen=True, slots=True)
class TimedStages:
    """The stages of a model, ready to be timed."""

    name: str
    place: Placement
    spread: StageLayout
    table: Table
    arrays: TableArrays
    pipeline: Callable[[State, Tree], tuple[Pipeline, Tree]]
    """The pipeline for the shapes of one device's state and of a micro-batch, and those of the last stage's results."""

    def measure(self, state: State, batch: Tree) -> MeasuredStages:
        """Compile the program and time everything. `state` and `batch` are shapes."""
        replicas, specs = self.place.replicas, self.spread.specs(state)
        where = jax.tree.map(lambda spec: NamedSharding(replicas.mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))
        values = jax.jit(lambda: jax.tree.map(_stand_in, state), out_shardings=where)()
        inputs = replicas.send(jax.tree.map(_stand_in, batch))
        idle = _rows(self.arrays, Kind.FORWARD, None)
        kept: list[tuple[int, ...]] = []
        program = compile_program(
            self.name, self.place, lambda: self._program(specs, kept), (values, inputs, idle, np.int32(0), np.int32(0)),
            donate=False, noted=False,
        )  # fmt: skip
        call = in_turn(None, replicas.devices, program.call, program.name)

        def seconds(rows: TableRow, updates: bool = False) -> float:
            def run(turns: int) -> None:
                counts = np.array((0, turns) if updates else (turns, 0), np.int32)
                jax.block_until_ready(call(values, inputs, rows, *counts))

            return per_turn(run)

        def of_all(kind: Kind) -> tuple[float, ...]:
            return tuple(seconds(_rows(self.arrays, kind, stage)) for stage in range(self.table.stages))

        training = self.table.training
        costs = StageCosts(
            of_all(Kind.FORWARD),
            of_all(Kind.BACKWARD) if training else (),
            seconds(idle) if self.arrays.rounds else 0.0,
        )
        return summed_up(self.table, costs, seconds(idle, updates=True) if training else 0.0, kept[0])

    def _program(self, specs: State, kept: list[tuple[int, ...]]) -> Callable[..., tuple[Any, ...]]:
        """Runs rows and then updates, as many as it is told. While it is traced, it notes what the stages keep."""
        spread = self.spread

        def run(state: State, batch: Tree, rows: TableRow, ticks: Array, updates: Array) -> tuple[Any, ...]:
            own = spread.own_part(state)
            pipeline, result = self.pipeline(own, batch)
            kept.append(tuple(sum(spec.bytes for spec in (*stage.kept, *stage.receives)) for stage in pipeline.stages))
            total = pipeline.weights.packing.zeros(dtype=pipeline.accumulation.dtype) if pipeline.training else {}
            carry = TickState(total, numbered(own.non_trainable), own.metrics, Kept(zeros(result), (), ()))
            count = self.table.micro_batches
            flow = Flow(lambda _: batch, count, count, 1.0, True, _keep, lambda cells, _m, _enqueued: cells)
            fixed = Fixed(lax.axis_index(STAGE_AXIS), numbered(own.trainable), spread.slots(own)[1], flow)
            done = pipeline.follow(
                lambda number: jax.tree.map(lambda a: a[number % ROWS], rows), ticks, fixed, carry, pipeline.boxes()
            )
            if spread.update is not None:
                own = lax.fori_loop(0, updates, lambda _, state: updated(spread, state, total), own)
            return done, own

        return jax.shard_map(
            run, mesh=self.place.replicas.mesh, in_specs=(specs, P(), P(), P(), P()), out_specs=P(), check_vma=False
        )


def per_turn(run: Callable[[int], None]) -> float:
    """The seconds of one turn, where `run(n)` takes n turns and the time of a launch."""

    def clock(turns: int) -> float:
        began = time.perf_counter()
        run(turns)
        return time.perf_counter() - began

    clock(1)
    once, turns = min(clock(1), clock(1)), 4
    if once > LONG:
        return once
    while True:
        times = [(clock(1), clock(1 + turns)) for _ in range(REPEATS)]
        more = min(several for _, several in times) - min(one for one, _ in times)
        if more >= LEAST or turns >= MOST:
            return max(0.0, more) / turns
        turns *= 4


def summed_up(table: Table, costs: StageCosts, update: float, kept: tuple[int, ...]) -> MeasuredStages:
    """What the times of single actions come down to."""
    return MeasuredStages(
        costs.forward, costs.backward, costs.exchange, update, kept, bubble(table, costs),
        total_time(table, costs) + update,
    )  # fmt: skip


def _rows(table: TableArrays, kind: Kind, stage: int | None) -> TableRow:
    """Rows of a table with nothing but one action in each or, if `stage` is None, with nothing but an exchange."""
    rows = rows_of(table)
    if stage is None:
        rounds = [len(exchange) for exchange in table.exchanges]
        found = np.nonzero(table.exchange == int(np.argmax(rounds)))[0]
    else:
        actions = table.forward if kind is Kind.FORWARD else table.backward
        assert actions is not None
        found = np.nonzero(actions.micro_batch[:, stage] != NONE)[0]
    at = np.resize(found, ROWS)
    exchange = rows.exchange[at] if stage is None else np.zeros(ROWS, np.int32)
    return TableRow(
        _alone(rows.forward, at, stage if kind is Kind.FORWARD else None),
        None if rows.backward is None else _alone(rows.backward, at, stage if kind is Kind.BACKWARD else None),
        exchange,
        None if rows.receive is None else rows.receive[at],
    )


def _alone(actions: ActionArrays, at: np.ndarray, stage: int | None) -> ActionArrays:
    """The rows `at`, in which only this stage has anything to do."""
    chosen = replace(actions, **{field.name: getattr(actions, field.name)[at] for field in fields(actions)})
    only = np.full_like(chosen.micro_batch, NONE)
    if stage is not None:
        only[:, stage] = chosen.micro_batch[:, stage]
    return replace(chosen, micro_batch=only)


def _keep(kept: Kept, _m: Array, result: Tree, _active: Array, _metrics: list[Array]) -> Kept:
    """Keep the results of the latest micro-batch, so that they are computed."""
    return kept._replace(results=as_before(result, kept.results))


def _stand_in(spec: jax.ShapeDtypeStruct) -> Array:
    """Small positive numbers, none of them so small that a processor takes longer for it; zeros for whole numbers."""
    if not has_gradient(spec):
        return jnp.zeros(spec.shape, spec.dtype)
    count = lax.broadcasted_iota(jnp.float32, spec.shape, len(spec.shape) - 1) if spec.shape else jnp.float32(1)
    return (0.05 * (1.5 + jnp.sin(count))).astype(spec.dtype)
