"""The arrays that a program follows, checked by following them with tokens instead of tensors."""

from collections import Counter

from openipu.engine.schedule import table_arrays
from openipu.engine.schedule.table_arrays import NONE, compile_table
from openipu.schedules import (
    Action,
    GPipe,
    Grouped,
    Interleaved,
    Kind,
    OneFOneB,
    ScheduleError,
    Sequential,
    Table,
    backward,
    forward,
    journey,
    live,
)

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tables import names, tables


def run_arrays(table, compiled):
    """Follow the arrays with tokens instead of tensors, and give the actions that ran, each with what it found."""
    devices = len(table.cells)
    mailbox = np.full((devices, compiled.trash + 1), "empty", object)
    residuals = np.full((devices, compiled.residual_slots), "empty", object)
    ran = {}

    def work(part, kind, order, row, outbox):
        for stage in order:
            if part.micro_batch[row, stage] == NONE:
                continue
            action = Action(stage, kind, int(part.micro_batch[row, stage]))
            device, at = compiled.devices[stage], (row, stage)
            found = {}
            if part.input[at] != NONE:
                found["input"] = mailbox[device, part.input[at]]
            if part.gradient[at] != NONE:
                found["gradient"] = mailbox[device, part.gradient[at]]
            if part.residual[at] != NONE and kind is Kind.BACKWARD:
                found["residual"] = residuals[device, part.residual[at]]
            assert action not in ran
            ran[action] = found
            if part.residual[at] != NONE and kind is Kind.FORWARD:
                residuals[device, part.residual[at]] = action
            if part.outbox[at] != NONE:
                assert outbox[device, part.outbox[at]] == "nothing", "two results in one place"
                outbox[device, part.outbox[at]] = action
            if part.local[at] != NONE:
                mailbox[device, part.local[at]] = action

    stages = range(len(compiled.devices))
    for row in range(len(compiled.tick)):
        outbox = np.full((devices, compiled.rounds), "nothing", object)
        work(compiled.forward, Kind.FORWARD, stages, row, outbox)
        if compiled.backward is not None:
            work(compiled.backward, Kind.BACKWARD, reversed(stages), row, outbox)
        for turn, permutation in enumerate(compiled.exchanges[compiled.exchange[row]]):
            received = np.full(devices, "nothing", object)
            for source, target in permutation:
                received[target] = outbox[source, turn]
            for device in range(devices):
                slot = compiled.receive[row, turn, device]
                assert (received[device] == "nothing") == (slot == compiled.trash), "only computed values are kept"
                mailbox[device, slot] = received[device]
    return ran


def expected_finds(table):
    last = table.stages - 1
    for action in (part for m in range(table.micro_batches) for part in journey(table.stages, m, table.training)):
        stage, m = action.stage, action.micro_batch
        found = {"input": forward(stage - 1, m)} if stage else {}
        if action.kind is Kind.BACKWARD:
            found["residual"] = forward(stage, m)
            if stage < last:
                found["gradient"] = backward(stage + 1, m)
        yield action, found


@given(tables())
@settings(max_examples=150)
def test_every_action_finds_exactly_the_values_that_it_needs(table):
    assert run_arrays(table, compile_table(table)) == dict(expected_finds(table))


@st.composite
def random_tables(draw):
    """Tables that nobody would write: anything at any tick that the rules allow."""
    stages, micro_batches = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    training = draw(st.booleans())
    devices = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    at, busy = {}, set()
    for m in draw(st.permutations(range(micro_batches))):
        tick = draw(st.integers(0, 8))
        for action in journey(stages, m, training):
            tick += draw(st.integers(1, 3))
            while (action.stage, action.kind, tick) in busy:
                tick += 1
            at[action] = tick
            busy.add((action.stage, action.kind, tick))
    return Table.at(at, devices, training, one_at_a_time=False)


@given(random_tables())
@settings(max_examples=200)
def test_arrays_of_any_valid_table_are_right(table):
    compiled = compile_table(table)
    assert run_arrays(table, compiled) == dict(expected_finds(table))
    # No device sends or receives twice in a round.
    for exchange in compiled.exchanges:
        for permutation in exchange:
            sources, targets = zip(*permutation, strict=True)
            assert len(set(sources)) == len(sources)
            assert len(set(targets)) == len(targets)
    assert [table_tick for table_tick, column in enumerate(table.columns()) if any(column)] == compiled.tick.tolist()


def test_values_used_in_the_tick_in_which_they_are_made():
    table = Table.parse(["F0:0,F1:0,B1:0,B0:0 - F0:1,F1:1,B1:1,B0:1"], [0, 0], one_at_a_time=False)
    compiled = compile_table(table)
    assert compiled.tick.tolist() == [0, 2]
    assert compiled.rounds == 0
    assert run_arrays(table, compiled) == dict(expected_finds(table))


@given(tables(shared=False, training=True))
def test_residual_slots_are_as_few_as_live_micro_batches(table):
    # [Note: forwards first] in table_arrays.py: the extra slot of Grouped.
    extra = 0 if table.one_at_a_time else 1
    assert compile_table(table).residual_depth == tuple(held + extra for held in live(table))


@pytest.mark.parametrize(
    ("schedule", "depth"),
    [
        (Grouped(), (1, 7, 5, 2)),
        (Interleaved(), (1, 4, 3, 1)),
        (Sequential(), (1, 2, 2, 1)),
        (GPipe(), (1, 17, 17, 16)),
        (OneFOneB(), (1, 5, 4, 2)),
    ],
    ids=names,
)
def test_mailboxes_are_small(schedule, depth):
    assert compile_table(schedule.table(4, 16)).mailbox_depth == depth
    assert compile_table(schedule.table(4, 16, training=False)).mailbox_depth == (0, 1, 1, 1)


def test_no_action_writes_where_it_reads():
    compiled = compile_table(Sequential().table(3, 2, [0, 0, 0], training=False))
    assert compiled.mailbox_depth == (2,)
    reads, writes = compiled.forward.input[:, 1], compiled.forward.local[:, 1]
    assert all(reads[reads != NONE] != writes[reads != NONE])


@pytest.mark.parametrize(
    ("schedule", "exchanges"),
    [(Grouped(), 3), (Interleaved(), 2), (Sequential(), 2), (GPipe(), 2), (OneFOneB(), 3)],
    ids=names,
)
def test_there_are_few_exchanges(schedule, exchanges):
    for stages in (4, 8):
        compiled = compile_table(schedule.table(stages, 4 * stages))
        assert len(compiled.exchanges) - 1 <= exchanges
        assert compiled.rounds == (2 if isinstance(schedule, Grouped) else 1)


def test_arrays_of_a_small_table():
    compiled = compile_table(Grouped().table(2, 4))
    assert compiled.forward.micro_batch.T.tolist() == [[0, 1, 2, 3, -1, -1, -1], [-1, 0, 1, 2, 3, -1, -1]]
    assert compiled.backward.micro_batch.T.tolist() == [[-1, -1, -1, 0, 1, 2, 3], [-1, -1, 0, 1, 2, 3, -1]]
    assert compiled.backward.residual.T.tolist() == [[-1, -1, -1, 0, 1, 2, 3], [-1, -1, 0, 1, 0, 1, -1]]
    assert compiled.residual_slots == 4
    assert compiled.forward.input.T.tolist()[0] == [NONE] * 7
    assert compiled.backward.gradient.T.tolist()[1] == [NONE] * 7


def test_a_table_that_breaks_a_rule_is_not_compiled():
    with pytest.raises(ScheduleError, match="never ran"):
        compile_table(Table.parse(["F0:0 -", "- F1:0"], [0, 1]))


def test_rounds_are_an_edge_colouring():
    links = Counter({(0, 1): 2, (1, 2): 1, (0, 2): 1, (2, 0): 3, (1, 0): 1, (3, 3): 1})
    rounds = table_arrays._rounds(links)
    assert len(rounds) == 4
    assert Counter(link for permutation in rounds for link in permutation) == links
