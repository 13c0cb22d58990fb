"""Where the time of a run goes, on a clock of our own; and lists that stay short."""

from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise

from openipu.engine.facts.bounded import Ends, Sampled
from openipu.engine.facts.timeline import Timeline

import pytest


def test_time_in_which_devices_compute_is_theirs_and_the_rest_is_the_hosts():
    line = Timeline()
    whole = line.begin("call", 0.0)
    feed = line.begin("feed", 1.0)
    line.end(feed, 3.0)  # the devices wait for data: 2
    execution = line.launch(3.0)
    callbacks = line.begin("callbacks", 4.0)
    line.finish(execution, 6.0)
    line.end(callbacks, 9.0)  # 2 while the devices compute, 3 while they wait
    line.end(whole, 10.0)
    parts = line.passed(10.0)
    assert (parts.device, parts.feed, parts.callbacks, parts.other) == (3.0, 2.0, 3.0, 2.0)
    assert sum(astuple(parts)) == 10.0
    assert (line.host["callbacks"], line.device_seconds) == (5.0, 3.0)


def test_executions_that_were_launched_early_begin_when_the_devices_are_free():
    line = Timeline()
    whole = line.begin("call", 0.0)
    first, second = line.launch(0.0), line.launch(1.0)
    line.finish(first, 4.0)
    line.finish(second, 6.0)
    line.end(whole, 8.0)
    assert (second.start, second.end) == (4.0, 6.0)
    assert (line.device_seconds, line.passed(8.0).device, line.passed(8.0).other) == (6.0, 6.0, 2.0)


def test_what_is_running_counts_until_now():
    line = Timeline()
    line.begin("call", 0.0)
    line.launch(1.0)
    assert (line.passed(5.0).device, line.passed(7.0).device) == (4.0, 6.0)


def test_what_ctrl_c_has_kept_from_ending_ends_with_what_is_around_it():
    line = Timeline()
    whole = line.begin("call", 0.0)
    outer = line.begin("feed", 1.0)
    line.begin("callbacks", 2.0)
    line.end(outer, 4.0)
    line.end(whole, 5.0)
    parts = line.passed(6.0)
    assert (parts.feed, parts.callbacks, parts.other) == (1.0, 2.0, 2.0), "nothing passes after the end"


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100, 1001])
def test_a_sample_is_spread_over_the_series_and_has_its_ends(count):
    sampled: Sampled[int] = Sampled(8)
    for number in range(count):
        sampled.add(number)
    items = sampled.items()
    assert len(items) <= 10
    if count:
        assert (items[0], items[-1]) == (0, count - 1)
        gaps = {b - a for a, b in pairwise(items[:-1])}
        assert len(gaps) <= 1


def test_the_ends_of_a_series():
    ends: Ends[int] = Ends(3)
    for number in range(10):
        ends.add(number)
    assert ends.items() == (0, 1, 2, 7, 8, 9)
