"""Schedules as tables: their ticks, their costs, and the rules they obey."""

import dataclasses

from openipu.engine.schedule import actions, schedules
from openipu.schedules import (
    Costs,
    GPipe,
    Grouped,
    Interleaved,
    OneFOneB,
    ScheduleError,
    Sequential,
    Table,
    by_name,
    forward,
    live,
    live_on_devices,
    measure,
    render,
    stash,
    validate,
)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closed_forms import closed_form
from tables import BUILT_IN, names, rows, tables

# Ticks


def test_grouped_has_the_ticks_of_the_original():
    assert rows(Grouped().table(2, 4)) == [
        "F0:0 F0:1 F0:2 B0:0,F0:3 B0:1 B0:2 B0:3",
        "- F1:0 B1:0,F1:1 B1:1,F1:2 B1:2,F1:3 B1:3 -",
    ]


def test_interleaved_has_the_ticks_of_the_original():
    assert rows(Interleaved().table(2, 4)) == [
        "F0:0 - F0:1 B0:0 F0:2 B0:1 F0:3 B0:2 - B0:3",
        "- F1:0 B1:0 F1:1 B1:1 F1:2 B1:2 F1:3 B1:3 -",
    ]


def test_sequential_runs_one_micro_batch_after_the_other():
    assert rows(Sequential().table(2, 2)) == ["F0:0 - - B0:0 F0:1 - - B0:1", "- F1:0 B1:0 - - F1:1 B1:1 -"]


def test_gpipe_runs_all_forwards_first():
    assert rows(GPipe().table(3, 2)) == [
        "F0:0 F0:1 - - - - B0:0 B0:1",
        "- F1:0 F1:1 - - B1:0 B1:1 -",
        "- - F2:0 F2:1 B2:0 B2:1 - -",
    ]


def test_one_f_one_b_alternates_after_its_first_forwards():
    assert rows(OneFOneB().table(3, 4)) == [
        "F0:0 F0:1 F0:2 - - B0:0 F0:3 B0:1 - B0:2 - B0:3",
        "- F1:0 F1:1 - B1:0 F1:2 B1:1 F1:3 B1:2 - B1:3 -",
        "- - F2:0 B2:0 F2:1 B2:1 F2:2 B2:2 F2:3 B2:3 - -",
    ]


@pytest.mark.parametrize("schedule", [Grouped(), Interleaved(), GPipe(), OneFOneB()], ids=names)
def test_inference_streams_through(schedule):
    assert rows(schedule.table(2, 4, training=False)) == ["F0:0 F0:1 F0:2 F0:3 -", "- F1:0 F1:1 F1:2 F1:3"]


def letters(table):
    """Four letters per tick: the parts a, b, c, d of the journeys of the four micro-batches under way, oldest first."""
    text = ""
    for tick, column in enumerate(table.columns()):
        running = {action.micro_batch: actions.position(action, table.stages) for cell in column for action in cell}
        oldest = min(max(tick - 3, 0), table.micro_batches - 4)
        text += "".join("abcd"[running[m]] if m in running else "." for m in range(oldest, oldest + 4))
    return text


@pytest.mark.parametrize(("stages", "training"), [(2, True), (4, False)])
def test_grouped_ramps_up_and_down_as_the_original(stages, training):
    text = letters(Grouped().table(stages, 8, training=training))
    # The original's last tick of the ramp-down is one in which nothing runs.
    assert text + "...." == "a...ba..cba.dcba" + 4 * "dcba" + ".dcb..dc...d...."


def test_stages_that_share_a_device_are_run_in_one_tick_by_grouped():
    assert rows(Grouped().table(4, 4, [0, 1, 1, 0], training=False)) == [
        "F0:0 F0:1 F0:2 F3:0,F0:3 F3:1 F3:2 F3:3",
        "- F1:0 F2:0,F1:1 F2:1,F1:2 F2:2,F1:3 F2:3 -",
    ]


def test_the_oldest_micro_batch_goes_first_where_stages_share_a_device():
    assert rows(GPipe().table(4, 4, [0, 1, 1, 0])) == [
        "F0:0 F0:1 F0:2 F3:0 F0:3 F3:1 - F3:2 - F3:3 B3:0 B3:1 B3:2 B0:0 B3:3 B0:1 - B0:2 - B0:3",
        "- F1:0 F2:0 F1:1 F2:1 F1:2 F2:2 F1:3 F2:3 - - B2:0 B1:0 B2:1 B1:1 B2:2 B1:2 B2:3 B1:3 -",
    ]
    assert rows(OneFOneB().table(4, 2, [0, 1, 0, 1])) == [
        "F0:0 F0:1 F2:0 F2:1 - B2:0 - B0:0 B2:1 - B0:1",
        "- F1:0 F1:1 F3:0 B3:0 F3:1 B1:0 B3:1 - B1:1 -",
    ]


@pytest.mark.parametrize(
    ("devices", "overlap", "entries"),
    [
        ([0, 1, 2, 0], 2, [0, 2, 4, 6]),
        ([0, 1, 0], 1, [0, 3, 6, 9]),
        ([0, 1, 1, 0], 2, [0, 2, 4, 6]),
        ([0, 0, 1, 1], 2, [0, 2, 4, 6]),
        ([0, 1, 0, 1], 2, [0, 1, 4, 5]),
        ([0, 1, 2, 3], 4, [0, 1, 2, 3]),
        ([1, 1], 1, [0, 2, 4, 6]),
    ],
)
def test_interleaved_inference_enters_as_often_as_shared_devices_allow(devices, overlap, entries):
    assert Interleaved().overlap(len(devices), devices, training=False) == overlap
    table = Interleaved().table(len(devices), 4, devices, training=False)
    at = {action: tick for tick, _, action in validate(table).actions()}
    assert [at[forward(0, m)] for m in range(4)] == entries
    assert all(at[forward(s, m)] == entries[m] + s for s in range(len(devices)) for m in range(4))


def test_a_device_without_a_stage_is_a_row_of_its_own():
    table = Sequential().table(2, 1, [0, 2])
    assert rows(table) == ["F0:0 - - B0:0", "- - - -", "- F1:0 B1:0 -"]
    assert live_on_devices(validate(table)) == (1, 0, 1)


@given(tables())
def test_every_table_obeys_the_rules(table):
    assert validate(table) is table
    count = sum(1 for _ in table.actions())
    assert count == table.micro_batches * table.stages * (2 if table.training else 1)


@given(tables())
def test_micro_batches_keep_their_order_at_every_stage(table):
    seen = {}
    for _, _, action in table.actions():
        seen.setdefault((action.stage, action.kind), []).append(action.micro_batch)
    assert all(order == sorted(order) for order in seen.values())


def test_a_schedule_is_a_value():
    assert Grouped() == Grouped()
    assert len({*BUILT_IN, *BUILT_IN}) == 5
    assert Grouped().table(2, 4) == Grouped().table(2, 4, (0, 1))
    assert hash(Grouped().table(2, 4)) == hash(Grouped().table(2, 4))
    assert Grouped().table(2, 4) != Interleaved().table(2, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Grouped().table(2, 4).micro_batches = 3


# Costs


@given(
    st.sampled_from(BUILT_IN), st.integers(2, 7), st.integers(1, 6), st.booleans(), st.integers(1, 3), st.integers(0, 3)
)
def test_tables_have_the_measures_of_theory(schedule, stages, groups, training, once, more):
    multiple = schedules.micro_batch_multiple(schedule, range(stages), training)
    costs = Costs(once, once + more)
    table = schedule.table(stages, multiple * groups, training=training)
    expected = closed_form(schedule, stages, multiple * groups, training, costs)
    found = measure(table, costs)
    assert found.bubble == pytest.approx(expected.bubble)
    assert dataclasses.replace(found, bubble=0) == dataclasses.replace(expected, bubble=0)


@pytest.mark.parametrize(("schedule", "time"), list(zip(BUILT_IN, [105, 136, 384, 105, 136], strict=True)))
def test_time_of_four_stages_and_32_micro_batches(schedule, time):
    table = schedule.table(4, 32)
    assert measure(table).time == time
    assert measure(table).bubble == pytest.approx(1 - 96 / time)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_stash_depths_are_those_of_the_original(stages):
    n = 4 * stages
    assert stash(Grouped().table(stages, n)) == tuple(2 * (stages - 1 - s) for s in range(stages))
    assert stash(Interleaved().table(stages, n)) == tuple(stages - 1 - s for s in range(stages))
    assert stash(Sequential().table(stages, n)) == (0,) * stages


@given(tables(training=True))
def test_one_f_one_b_bounds_what_a_stage_holds(table):
    table = OneFOneB().table(table.stages, table.micro_batches, table.devices)
    assert all(held <= table.stages - stage for stage, held in enumerate(live(table)))


def test_what_a_device_holds_is_counted_over_its_stages():
    table = Grouped().table(4, 8, [0, 1, 1, 0])
    assert live(table) == (7, 5, 3, 1)
    assert live_on_devices(table) == (8, 8)


def test_there_is_no_closed_form_for_cheap_backwards_or_unknown_schedules():
    with pytest.raises(ValueError, match="A backward takes 1 and a forward 2"):
        closed_form(Grouped(), 2, 4, costs=Costs(2, 1))
    with pytest.raises(ValueError, match="No closed form is known for mine"):
        closed_form("mine", 2, 4)


# Writing one


@given(tables())
def test_a_table_can_be_read_back_from_its_text(table):
    again = Table.parse(rows(table), table.devices, table.training, table.one_at_a_time)
    assert again == table


def test_a_wide_table_goes_on_below():
    assert render(GPipe().table(2, 3), width=31) == [
        "tick      0     1     2",
        "device 0  F0:0  F0:1  F0:2",
        "device 1  -     F1:0  F1:1",
        "",
        "tick      3     4     5",
        "device 0  -     -     B0:0",
        "device 1  F1:2  B1:0  B1:1",
        "",
        "tick      6     7",
        "device 0  B0:1  B0:2",
        "device 1  B1:2  -",
    ]


# Rules


@pytest.mark.parametrize(
    ("table", "device", "tick", "message"),
    [
        (["F1:0 F0:0", "- -"], 0, 0, "F1:0 runs on a device without stage 1. Move it to device 1."),
        (["F2:0 F0:0", "- -"], 0, 0, "F2:0 is not part of 2 stages and 1 micro-batches."),
        (["F0:0,F0:1 -", "- F1:0"], 0, 0, "2 actions in one tick"),
        (["F0:0 F0:0", "- F1:0"], 0, 1, "F0:0 runs a second time; it already ran in tick 0."),
        (["F0:0 - - B0:0", "- F1:0 B1:0 B1:0"], 1, 3, "B1:0 runs a second time; it already ran in tick 2."),
        (["F0:0 - - B0:0", "F1:0 B1:0 - -"], 1, 0, "F1:0 uses the result of F0:0, which device 0 computes in tick 0"),
        (["F0:0 - B0:0 -", "- F1:0 B1:0 -"], 0, 2, "it is available from tick 3 on"),
        (["F0:0 - B0:0 -", "- F1:0 - B1:0"], 0, 2, "B0:0 uses the result of B1:0, which device 1 computes in tick 3"),
        (["F0:0 - - B0:0", "- B1:0 F1:0 -"], 1, 1, "B1:0 uses the result of F1:0, which device 1 computes in tick 2"),
        (["- - - B0:0", "- F1:0 B1:0 -"], 1, 1, "F1:0 uses the result of F0:0, which is never computed."),
        (["F0:0 - -", "- F1:0 B1:0"], 0, 2, "the table ends, but B0:0 never ran."),
        (["F0:0 F0:1 - B0:0", "- F1:0 B1:0 -"], 1, 3, "the table ends, but F1:1 never ran."),
    ],
)
def test_a_broken_rule_is_shown_in_the_table(table, device, tick, message):
    with pytest.raises(ScheduleError) as caught:
        validate(Table.parse(table, [0, 1]))
    first, *shown = str(caught.value).splitlines()
    assert first.startswith(f"Device {device}, tick {tick}: ")
    assert message in first
    assert (caught.value.device, caught.value.tick) == (device, tick)
    cell = table[device].split()[tick]
    assert shown[1 + device].split()[2 + tick] == f">{cell}<"


def test_a_stage_runs_one_forward_in_a_tick_even_where_devices_do_more():
    table = Table.parse(["F0:0,F0:1 -", "- F1:0,F1:1"], [0, 1], training=False, one_at_a_time=False)
    with pytest.raises(ScheduleError, match="stage 0 runs 2 forwards in one tick"):
        validate(table)


def test_a_backward_is_refused_without_training():
    with pytest.raises(ScheduleError, match="B1:0 is a backward, but nothing is trained"):
        validate(Table.parse(["F0:0 - -", "- F1:0 B1:0"], [0, 1], training=False))


def test_a_device_can_use_its_own_result_in_the_same_tick():
    assert validate(Table.parse(["F0:0,F1:0,B1:0,B0:0"], [0, 0], one_at_a_time=False)).ticks == 1
    with pytest.raises(ScheduleError, match="F0:0, which comes after it in the same cell"):
        validate(Table.parse(["F1:0,F0:0"], [0, 0], training=False, one_at_a_time=False))


def test_an_error_shows_only_the_ticks_around_it():
    broken = rows(GPipe().table(2, 40))
    broken[0] = broken[0].replace("B0:20", "B0:19")
    with pytest.raises(ScheduleError) as caught:
        validate(Table.parse(broken, [0, 1]))
    lines = str(caught.value).splitlines()
    assert ">B0:19<" in lines[2]
    assert lines[1].split()[1:] == [str(tick) for tick in range(caught.value.tick - 5, caught.value.tick + 6)]


@given(tables(), st.data())
@settings(max_examples=60)
def test_no_action_can_be_dropped_doubled_or_moved_before_what_it_needs(table, data):
    at = {action: tick for tick, _, action in table.actions()}
    victim = data.draw(st.sampled_from(sorted(at, key=repr)))
    missing = {action: tick for action, tick in at.items() if action != victim}
    if any(action.micro_batch == victim.micro_batch for action in missing):
        with pytest.raises(ScheduleError):
            # The size stays, only the action goes.
            validate(dataclasses.replace(_at(missing, table), micro_batches=table.micro_batches))
    for needed in actions.needs(victim, table.stages):
        if table.devices[needed.stage] != table.devices[victim.stage]:
            with pytest.raises(ScheduleError):
                validate(_at({**at, victim: at[needed]}, table))


def _at(ticks, table):
    # All devices may run several actions here, so that only the rule in question can be the one that is broken.
    return Table.at(ticks, table.devices, table.training, one_at_a_time=False)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((["F0:0 -", "-"], [0, 1]), r"The rows of a table have \[1, 2\] ticks"),
        ((["F0:0"], [0, 1]), r"A table of 1 rows cannot hold stages on the devices \[0, 1\]"),
        ((["F0-0"], [0]), "'F0-0' is not an action"),
        ((["X0:0"], [0]), "'X0:0' is not an action"),
    ],
)
def test_what_is_no_table_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        Table.parse(*table)


# Errors before anything runs


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "training", "multiple", "use"),
    [
        (Grouped(), 4, 12, True, 8, "Use 8 or 16 "),
        (Grouped(), 4, 3, True, 8, "Use 8 "),
        (Grouped(), 4, 6, False, 4, "Use 4 or 8 "),
        (Interleaved(), 3, 7, True, 3, "Use 6 or 9 "),
        (Interleaved(), 3, 2, False, 3, "Use 3 "),
    ],
)
def test_numbers_of_micro_batches_that_do_not_fit(schedule, stages, micro_batches, training, multiple, use):
    with pytest.raises(ValueError, match="needs a multiple of") as caught:
        schedule.table(stages, micro_batches, training=training)
    assert f"{names(schedule)} with {stages} stages" in str(caught.value)
    assert f"a multiple of {multiple} micro-batches, not {micro_batches}" in str(caught.value)
    assert use in str(caught.value)


@pytest.mark.parametrize("schedule", BUILT_IN, ids=names)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 4), "A pipeline has at least 2 stages, but this one has 1"),
        ((2.0, 4), "`stages` is 2.0. Give a whole number"),
        ((2, 0), "`micro_batches` is 0. Give a whole number of 1 or more"),
        ((2, True), "`micro_batches` is True"),
        ((2, -4), "`micro_batches` is -4"),
        ((2, 4, [0]), r"1 devices are given for 2 stages: \[0\]"),
        ((2, 4, [0, 1, 2]), r"3 devices are given for 2 stages: \[0, 1, 2\]"),
        ((2, 4, [0, -1]), r"`devices\[1\]` is -1. Give a whole number of 0 or more"),
        ((2, 4, [0, "1"]), r"`devices\[1\]` is '1'"),
    ],
)
def test_impossible_numbers(schedule, arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule.table(*arguments)


def test_interleaved_does_not_train_with_shared_devices():
    with pytest.raises(NotImplementedError, match=r"some of the 4 stages share one: \[0, 1, 1, 0\]"):
        Interleaved().table(4, 8, [0, 1, 1, 0])


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("Grouped", Grouped()),
        ("grouped", Grouped()),
        ("INTERLEAVED", Interleaved()),
        ("sequential", Sequential()),
        ("g_pipe", GPipe()),
        ("1F1B", OneFOneB()),
        ("one-f-one-b", OneFOneB()),
    ],
)
def test_schedules_by_name(name, schedule):
    assert by_name(name) == schedule


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gruped", "Did you mean 'Grouped'?"), ("interleave", "Did you mean 'Interleaved'?"), ("zz", "Use one of them")],
)
def test_an_unknown_name(name, hint):
    with pytest.raises(ValueError, match=f"There is no schedule '{name}'") as caught:
        by_name(name)
    assert hint in str(caught.value)
