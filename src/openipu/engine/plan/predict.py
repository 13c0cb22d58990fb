"""A cut, a split and a machine -> a prediction. Pure functions over frozen values.

The time of an action is its counted operations divided by the speed of a device. The ticks, the bubble and the slots
in memory are read off the very table that a run would follow. Between ticks, each device sends a boundary in each round
of the exchange; after the last one, gradients go around a ring of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from openipu.engine.schedule.measures import StageCosts, durations
from openipu.engine.schedule.schedules import by_name, micro_batch_multiple
from openipu.engine.schedule.table_arrays import compile_table

from .values import Cut, Machine, MemoryPlan, Prediction, Split, TimePlan

LONG = 4
"""A table for more than this many micro-batches per stage is not made: what it takes follows from shorter ones."""


@dataclass(frozen=True, slots=True)
class TableCosts:
    """What a table takes."""

    seconds: float
    """Without exchanges."""
    rows: float
    """Ticks in which something runs."""
    rounds: float
    """Transfers that each device makes, one after the other."""
    mailbox: float
    """Slots for what arrives."""
    residuals: float
    """Slots for what is kept between forward and backward."""
    outbox: float

    def continued(self, other: TableCosts, steps: float) -> TableCosts:
        """These costs plus `steps` times what `other` takes more."""

        def on(a: float, b: float) -> float:
            return a + steps * (b - a)

        return TableCosts(
            on(self.seconds, other.seconds), on(self.rows, other.rows), on(self.rounds, other.rounds),
            on(self.mailbox, other.mailbox), on(self.residuals, other.residuals), on(self.outbox, other.outbox),
        )  # fmt: skip


def multiple_of(schedule: str, stages: int) -> int:
    """The number of micro-batches has to be a multiple of this."""
    return micro_batch_multiple(by_name(schedule), range(stages), True)


@cache
def table_costs(schedule: str, costs: StageCosts, micro_batches: int) -> TableCosts:
    """What an update of so many micro-batches takes. All schedules repeat themselves, so long tables are not made."""
    stages = len(costs.forward)
    group = multiple_of(schedule, stages)
    short = group * -(-LONG * stages // group)
    if micro_batches <= short + group:
        return _of_table(schedule, costs, micro_batches)
    before, after = (_of_table(schedule, costs, count) for count in (short, short + group))
    return before.continued(after, (micro_batches - short) / group)


@cache
def _of_table(schedule: str, costs: StageCosts, micro_batches: int) -> TableCosts:
    table = by_name(schedule).table(len(costs.forward), micro_batches)
    arrays = compile_table(table)
    rounds = [len(rounds) for rounds in arrays.exchanges]
    return TableCosts(
        sum(durations(table, costs)), len(arrays.tick), sum(rounds[number] for number in arrays.exchange),
        arrays.trash + 1, max(1, arrays.residual_slots), arrays.rounds,
    )  # fmt: skip


def predict(cut: Cut, split: Split, machine: Machine, shards: bool = False) -> Prediction:
    """What is to be expected of a split. `shards` says that replicas divide the optimizer's state."""
    stages, speed, count = cut.stages, machine.speed, split.accumulation
    work = count * sum(stage.forward + stage.backward for stage in stages) / speed / len(stages)
    update = max(stage.update for stage in stages) / speed / (split.replicas if shards else 1)
    replica_bytes = ring(cut.most("weights"), split.replicas)
    if split.stages == 1:
        time = TimePlan(work, 0.0, 0.0, machine.transfer(replica_bytes), update)
        return Prediction(
            split, time, memory(cut, split, None, shards), count * split.replicas * cut.batch_size, 0.0, 0,
            replica_bytes,
        )  # fmt: skip
    costs = StageCosts(
        tuple(s.forward / speed for s in stages), tuple(s.backward / speed for s in stages), source="predicted"
    )
    table = table_costs(split.schedule, costs, count)
    exchange = table.rounds * machine.transfer(cut.boundary)
    time = TimePlan(work, table.seconds - work, exchange, machine.transfer(replica_bytes), update)
    links = [count * (stage.received + stage.returned) for stage in stages]
    return Prediction(
        split, time, memory(cut, split, table, shards), count * split.replicas * cut.batch_size,
        1 - work / (table.seconds + exchange), max(links), replica_bytes,
    )  # fmt: skip


def ring(size: int, replicas: int) -> int:
    """The bytes that each device sends to add up `size` bytes over replicas: two turns around a ring."""
    return round(2 * (replicas - 1) / replicas * size)


def memory(cut: Cut, split: Split, table: TableCosts | None, shards: bool) -> MemoryPlan:
    """The bytes of each device. Gradients count twice where those of a micro-batch are added to a sum."""
    weights, slots = cut.most("weights"), cut.most("slots")
    summed = split.accumulation > 1 or split.stages > 1
    if table is None:
        activations = cut.most("kept")
    else:
        activations = round(table.residuals * cut.most("kept") + (table.mailbox + table.outbox) * cut.boundary)
    optimizer = -(-slots // split.replicas) if shards else slots
    return MemoryPlan(weights, optimizer, weights * (2 if summed else 1), activations + cut.batch_bytes)
