"""The sections of a report about operations, memory, programs and feeds, made from facts that are known."""

from __future__ import annotations

from dataclasses import replace

from openipu.engine.facts.costs import Buffer, Buffers, Cost, Counted, Moment, Peak, Rewritten, TopOperation, named
from openipu.engine.facts.values import (
    FORMAT,
    MemoryUse,
    PipelineFacts,
    Place,
    ProgramFacts,
    Report,
    RunFacts,
    StageFacts,
    Timed,
    TimeParts,
    Versions,
)  # fmt: skip
from openipu.engine.report import cost_pictures, costs
from openipu.engine.report.page import page
from openipu.engine.report.summary import measures

import pytest

EVIL = "<script>alert(1)"
COSTS = (
    Cost("wide", "forward", 4000.0, 400.0),
    Cost("wide", "backward", 8000.0, 1000.0),
    Cost("end/inner", "forward", 100.0, 100.0),
    Cost("", "forward", 10.0, 40.0),
    Cost("sgd", "update", 90.0, 360.0),
)
BUFFERS = Buffers(
    {"weights": 100, "optimizer state": 200, "feeds": 50},
    (Moment(0, 0, 10), Moment(80, 40, 10), Moment(0, 40, 0)),
    (Buffer("state.trainable[0]", "weights", "", 100), Buffer("fusion.1", "activations", "wide", 80)),
)
COUNTED = Counted(
    12200.0, COSTS, (TopOperation("dot_general", "float32[8,3] x float32[3,5]", "wide", "forward", 3000.0, 1.0),),
    "float32", {},
)  # fmt: skip
PROGRAM = ProgramFacts(
    "net_train", 0.1, 0.1, 0.2, False, True, False, 1e3, MemoryUse(350, 310, 300, 150, None), 20, "HloModule net",
    BUFFERS, COUNTED, (Rewritten("wide", "forward", "float32[8,9,9,1] x float32[3,3,1,4]", "winograd, tiles of 4"),),
)  # fmt: skip
PEAK = Peak(2, "float32", 1e6, 1e5)
RUN = RunFacts(
    "fit", "net", Place("cpu", "cpu", 2, 1, 1000, 8, 1), (PROGRAM,), None, 2, 20, 320, 0.0, 10.0, TimeParts(device=8.0),
    4.0, 8.0, 1.0, Timed(10, 160, 1.0, True), (), (), (), (), (), True, None, PEAK,
)  # fmt: skip


def report(*runs: RunFacts) -> Report:
    return Report(FORMAT, "net", Versions("0", "0", "0", "0"), 0.0, True, None, runs)


def test_layers_add_up_and_many_of_them_become_one_row():
    rows = costs.layer_rows(RUN)
    assert [row.name for row in rows] == ["wide", "end/inner", "sgd", costs.OUTSIDE]
    assert rows[0].operations == (4000.0, 8000.0, 0.0)
    assert rows[0].intensity == 12000 / 1400
    assert sum(row.whole for row in rows) == COUNTED.operations
    many = tuple(Cost(f"layer{i}", "forward", 1.0 + i, 8.0) for i in range(200))
    program = replace(PROGRAM, counted=replace(COUNTED, costs=many, operations=sum(cost.operations for cost in many)))
    rows = costs.layer_rows(replace(RUN, programs=(program,)))
    assert (len(rows), rows[-1].name) == (costs.MOST_LAYERS + 1, f"{200 - costs.MOST_LAYERS} others")
    assert sum(row.whole for row in rows) == program.operations


def test_stages_have_the_costs_of_their_layers():
    stages = (StageFacts(0, ("wide",), 1), StageFacts(1, ("end",), 1))
    plan = PipelineFacts("Grouped", stages, 1, 2, 0.0, (1,), True, ())
    rows = costs.stage_rows(replace(RUN, pipeline=plan))
    assert [(row.name, row.whole) for row in rows] == [("stage 0", 12000.0), ("stage 1", 100.0), (costs.OUTSIDE, 100.0)]


def test_the_share_of_the_peak_is_that_of_all_devices():
    by_name = {measure.name: measure.value for measure in measures(RUN)}
    assert by_name["share of the measured peak"] == pytest.approx(2 * 12200 * 10 / 1.0 / 1e6)
    assert "share of the measured peak" not in {measure.name for measure in measures(replace(RUN, peak=None))}


def test_layers_are_drawn_at_what_the_limits_allow():
    drawn = cost_pictures.roofline(RUN)
    assert "wide, forward: 4,000 FLOPs, 400 B, 10 FLOPs per byte, at most 0.001 GFLOP/s" in drawn, "under the flat line"
    assert "end/inner, forward: 100 FLOPs, 100 B, 1 FLOPs per byte, at most 0.0001 GFLOP/s" in drawn, "on the slope"
    assert drawn.count('class="mark"') == len(COSTS)
    assert "the whole step, measured: 0.000244 GFLOP/s" in drawn
    assert cost_pictures.roofline(replace(RUN, peak=None)) == ""


def test_the_parts_of_the_memory_add_up_to_what_xla_needs():
    assert dict(costs.memory_rows(PROGRAM)) == {
        "weights": 100, "optimizer state": 200, "feeds": 50, "activations": 80, "gradients": 40, "temporary": 30,
        "results": 10,
    }  # fmt: skip
    assert dict(costs.memory_rows(replace(PROGRAM, buffers=None))) == {
        "arguments": 350, "results": 310, "temporary": 150
    }  # fmt: skip
    drawn = cost_pictures.memory_over_time(BUFFERS, 1000)
    assert "activations: at most 80 B" in drawn
    assert 'aria-label="Memory of one device over a program: 480 B at most, of which 350 B stay"' in drawn


def test_weights_get_the_names_of_their_layers():
    largest = named(BUFFERS, {"trainable[0]": "wide"}).largest
    assert [buffer.layer for buffer in largest] == ["wide", "wide"]
    other = replace(BUFFERS, largest=(Buffer("state.non_trainable[0]", "other variables", "", 4),))
    assert named(other, {"trainable[0]": "wide"}).largest[0].layer == ""


def test_who_waits_for_whom():
    assert [(key, rate) for key, _, rate in costs.feed_rates(RUN)] == [("feed", 80.0), ("device", 40.0)]
    assert "2 times as fast as the devices take them" in costs.feed_words(RUN)
    assert "and wait for it" in costs.feed_words(replace(RUN, feed_seconds=16.0))
    assert costs.feed_rates(replace(RUN, samples=0)) == []


def test_the_page_has_all_sections_and_names_from_users_are_text():
    counted = replace(
        COUNTED,
        costs=tuple(replace(cost, layer=EVIL) for cost in COSTS),
        top=tuple(replace(top, layer=EVIL, shapes=EVIL) for top in COUNTED.top),
    )
    program = replace(
        PROGRAM, name=EVIL, hlo=EVIL, counted=counted,
        buffers=replace(BUFFERS, largest=(Buffer(EVIL, "weights", EVIL, 1),)),
        rewritten=(Rewritten(EVIL, "forward", EVIL, EVIL),),
    )  # fmt: skip
    text = page(report(replace(RUN, programs=(program,))))
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 10
    for words in ("<h3>Compute</h3>", "<h3>Memory</h3>", "roofline", "computed in another form", "as XLA compiled it"):
        assert words in text


def test_texts_are_shown_once_and_a_page_stays_under_5_megabytes():
    again = report(RUN, RUN)
    assert costs.texts_of(again) == [["HloModule net"], [None]]
    assert "its text is shown above" in page(again)
    programs = [replace(PROGRAM, hlo=f"{i}" + '"' * 39_000) for i in range(100)]
    layers = tuple(Cost(f"a_rather_long_layer_name_{i}", "backward", 1.0 + i, 8.0) for i in range(2000))
    runs = [
        replace(RUN, programs=(replace(program, counted=replace(COUNTED, costs=layers)),)) for program in programs[:64]
    ]
    assert 1 <= sum(text is not None for texts in costs.texts_of(report(*runs)) for text in texts) < 64
    assert len(page(report(*runs)).encode()) < 5_000_000
