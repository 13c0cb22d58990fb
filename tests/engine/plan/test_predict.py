"""Predictions against counts by hand and against closed forms."""

from __future__ import annotations

from openipu.engine.plan.predict import predict, ring, table_costs
from openipu.engine.plan.search import Wanted, search, splits_of
from openipu.engine.plan.units import parse, rate
from openipu.engine.plan.values import Cut, Machine, Split, StageCounts
from openipu.engine.schedule.measures import Costs, StageCosts, total_time
from openipu.engine.schedule.schedules import by_name
from openipu.engine.schedule.table_arrays import compile_table

import pytest

from closed_forms import closed_form

EVEN = StageCounts(forward=10.0, backward=20.0, update=3.0, weights=400, slots=800, kept=64, received=32, returned=16)


def even(stages: int) -> Cut:
    return Cut((EVEN,) * stages, batch_size=8, batch_bytes=96)


def test_one_stage_by_hand():
    split = Split(replicas=4, stages=1, accumulation=2, schedule="")
    found = predict(even(1), split, Machine(4, speed=10.0, link=100.0))
    assert found.time.work == 2 * (10 + 20) / 10
    assert found.time.reduce == 600 / 100, "two turns of three steps around a ring of four, with a quarter each"
    assert found.time.update == 3 / 10
    assert found.time.total == pytest.approx(6 + 6 + 0.3)
    assert (found.samples, found.bubble, found.stage_bytes, found.replica_bytes) == (64, 0.0, 0, 600)
    assert found.throughput == pytest.approx(64 / 12.3)
    assert found.memory.total == 400 + 800 + 2 * 400 + 64 + 96


@pytest.mark.parametrize("name", ["Grouped", "Interleaved", "GPipe", "OneFOneB", "Sequential"])
def test_the_bubble_of_equal_stages_is_that_of_the_closed_form(name):
    found = predict(even(4), Split(1, 4, 16, name), Machine(4, speed=10.0))
    known = closed_form(by_name(name), 4, 16, costs=Costs(1.0, 2.0))
    assert found.bubble == pytest.approx(known.bubble)
    assert found.time.total == pytest.approx(known.time + 0.3)
    assert found.time.exchange == found.time.reduce == 0.0, "without --link, transfers take no time"


def test_transfers_of_a_pipeline_by_hand():
    found = predict(even(2), Split(2, 2, 4, "Grouped"), Machine(4, speed=10.0, link=10.0))
    arrays = compile_table(by_name("Grouped").table(2, 4))
    rounds = sum(len(arrays.exchanges[number]) for number in arrays.exchange)
    assert found.time.exchange == pytest.approx(rounds * 32 / 10)
    assert found.stage_bytes == 4 * (32 + 16)
    assert found.replica_bytes == ring(400, 2) == 400
    assert found.time.reduce == 40.0
    assert found.samples == 4 * 2 * 8
    kept = max(1, arrays.residual_slots) * 64 + (arrays.trash + 1 + arrays.rounds) * 32
    assert found.memory.activations == kept + 96
    assert predict(even(2), Split(2, 2, 4, "Grouped"), Machine(4, 10.0), shards=True).memory.optimizer == 400


@pytest.mark.parametrize("name", ["Grouped", "Interleaved", "GPipe", "OneFOneB", "Sequential"])
@pytest.mark.parametrize("stages", [2, 3])
def test_long_tables_take_what_short_ones_foretell(name, stages):
    costs = StageCosts((3.0, 1.0, 2.0)[:stages], (5.0, 9.0, 4.0)[:stages])
    count = 2 * stages * 12
    found = table_costs(name, costs, count)
    table = by_name(name).table(stages, count)
    arrays = compile_table(table)
    assert found.seconds == pytest.approx(total_time(table, costs))
    assert (found.rows, found.residuals) == (len(arrays.tick), arrays.residual_slots)
    assert found.mailbox == arrays.trash + 1


def test_splits_share_out_an_update_and_keep_the_rules_of_schedules():
    found = splits_of(8, 2, Wanted(micro_batches=16, schedule="Grouped"))
    assert found == [Split(4, 2, 4, "Grouped")]
    assert splits_of(8, 1, Wanted(16)) == [Split(8, 1, 2, "")]
    assert splits_of(8, 4, Wanted(6, schedule="1f1b")) == [Split(2, 4, 3, "OneFOneB")]
    assert splits_of(8, 4, Wanted(6, schedule="Grouped")) == []


def halves(stages: int) -> Cut:
    """A model of 60 operations and 1600 bytes, in equal parts."""
    part = StageCounts(20 / stages, 40 / stages, 0.0, 1600 // stages, 0, 0, 8 * (stages > 1), 8 * (stages > 1))
    return Cut((part,) * stages, 1, 0)


def test_replicas_are_best_until_memory_or_links_are_short():
    wanted = Wanted(micro_batches=8)
    assert search(Machine(4, 1.0), wanted, halves).best[0].split == Split(4, 1, 2, "")
    small = search(Machine(4, 1.0, memory=2800), wanted, halves).best
    assert {one.split.stages for one in small} == {2, 4}, "weights and twice the gradients take 4800 bytes in one piece"
    slow = search(Machine(4, 1.0, link=4.0), wanted, halves).best[0]
    assert slow.split.stages > 1, "2400 bytes of gradients take longer than boundaries of 8 bytes"


def test_what_cannot_be_met_is_an_error_with_the_numbers():
    with pytest.raises(ValueError, match=r"No split fits into --memory 100 B.*needs 1\.2\d* kB"):
        search(Machine(4, 1.0, memory=100), Wanted(8), halves)
    with pytest.raises(ValueError, match="--stages is 8, but --devices is 4"):
        search(Machine(4, 1.0), Wanted(8, stages=8), halves)
    with pytest.raises(ValueError, match=r"4 stages: an update has 6 micro-batches.*multiples of 8"):
        search(Machine(4, 1.0), Wanted(6, stages=4, schedule="Grouped"), halves)
    with pytest.raises(
        ValueError, match=r"\(up to 8\) in multiples of 4\. .* --effective-batch of 32 times the batch size"
    ):
        search(Machine(16, 1.0), Wanted(8, stages=2, schedule="Grouped"), halves)
    assert search(Machine(16, 1.0), Wanted(32, stages=2, schedule="Grouped"), halves).best

    def never(stages: int) -> Cut:
        raise ValueError(f"no {stages}")

    with pytest.raises(ValueError, match="1 stages: no 1 2 stages: no 2"):
        search(Machine(2, 1.0), Wanted(8), never)


def test_reasons_name_what_was_not_considered():
    def two_at_most(stages: int) -> Cut:
        if stages > 2:
            raise ValueError("it has 2 layers")
        return halves(stages)

    found = search(Machine(4, 1.0), Wanted(8), two_at_most)
    assert found.reasons == ("4 stages: it has 2 layers",)


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [("80GiB", "B", 80 * 2**30), ("50GB/s", "B/s", 50e9), ("300TFLOP/s", "FLOP/s", 3e14), ("1.5 kB", "B", 1500.0)],
)
def test_numbers_with_units(text, unit, number):
    assert parse("--x", text, unit) == number


@pytest.mark.parametrize("text", ["80", "GiB", "80GiB/s", "-1GiB", "0B", "80 apples"])
def test_other_words_are_no_numbers(text):
    with pytest.raises(ValueError, match=f"--memory {text} is not a positive number of B. Write it like 80GiB."):
        parse("--memory", text, "B")


def test_rates_are_short():
    assert [rate(value, "B") for value in (12.0, 1.5e9, 2e18)] == ["12 B", "1.5 GB", "2000 PB"]
