"""Tables whose stages take different times, as they are measured or predicted."""

from __future__ import annotations

from openipu.engine.schedule.measures import Costs, StageCosts, bubble, duration, durations, total_time
from openipu.engine.schedule.picture import svg
from openipu.engine.schedule.schedules import GPipe, micro_batch_multiple

import pytest

from closed_forms import closed_form
from tables import BUILT_IN, names


def test_a_tick_takes_as_long_as_its_slowest_device_and_the_exchange():
    table = GPipe().table(2, 2)  # F0:0 | F0:1 F1:0 | F1:1 | B1:0 | B0:0 B1:1 | B0:1
    costs = StageCosts((1.0, 2.0), (3.0, 4.0), 0.5)
    assert durations(table, costs) == [1.5, 2.5, 2.5, 4.5, 4.5, 3.5]
    assert total_time(table, costs) == 19.0
    assert bubble(table, costs) == pytest.approx(1 - 2 * (1 + 2 + 3 + 4) / (2 * 19.0))


@pytest.mark.parametrize("schedule", BUILT_IN, ids=names)
@pytest.mark.parametrize("stages", [2, 4])
def test_equal_stages_take_what_the_closed_form_says(schedule, stages):
    count = 2 * micro_batch_multiple(schedule, range(stages), True)
    table = schedule.table(stages, count)
    known = closed_form(schedule, stages, count, costs=Costs(3.0, 7.0))
    costs = StageCosts((3.0,) * stages, (7.0,) * stages)
    assert total_time(table, costs) == pytest.approx(known.time)
    assert bubble(table, costs) == pytest.approx(known.bubble)


def test_balance_is_the_mean_over_the_longest():
    assert StageCosts((1.0, 1.0), (2.0, 4.0)).balance() == (3 + 5) / (2 * 5)
    assert StageCosts((2.0, 2.0)).balance() == 1.0


def test_hovering_over_an_action_shows_its_time():
    picture = svg(GPipe().table(2, 2), "measured", StageCosts((1e-5, 2e-3), (3.0, 4e-5), 1e-6))
    for words in ("F0:1, tick 1, 10 µs", "F1:0, tick 1, 2 ms", "B0:0, tick 4, 3 s", "B1:1, tick 4, 40 µs"):
        assert f"<title>{words}</title>" in picture
    assert 'width="-' not in picture


def test_durations_in_words():
    assert [duration(seconds) for seconds in (2.5e-7, 1e-3, 0.9994, 12.0)] == ["0.25 µs", "1 ms", "999 ms", "12 s"]
