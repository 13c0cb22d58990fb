"""Driving a loop from the host: what happens in which order, and what is kept in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

from openipu.engine.data.slab import Slab
from openipu.engine.devices import launching
from openipu.engine.loop.driver import Launched, launches
from openipu.engine.loop.loop import Result

import pytest


class Host:
    """Slabs that are built, launches that give their number, and a record of both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.events: list[str] = []
        self._count = count
        monkeypatch.setattr(launching.jax, "block_until_ready", self._waited)

    def slabs(self) -> Iterator[Slab]:
        for number in range(self._count):
            self.events.append(f"build {number}")
            yield Slab(number, 1, None, None)

    def execute(self, slab: Slab, _meanwhile: Callable[[], None]) -> list[Result]:
        self.events.append(f"launch {slab.begin}")
        return [Result(slab.begin, 1, False)]

    def _waited(self, value: object) -> None:
        if value is not None:
            self.events.append(f"wait {value}")


def test_the_next_slab_is_built_while_one_runs_and_two_executions_are_under_way(monkeypatch):
    host = Host(monkeypatch, 3)
    for launched in launches(host.slabs(), host.execute):
        host.events.append(f"tell {launched.slab.begin}")
    assert host.events == [
        "build 0", "launch 0", "build 1", "tell 0",
        "launch 1", "build 2", "wait 0", "tell 1",
        "launch 2", "wait 1", "tell 2",
    ]  # fmt: skip


def test_the_last_launch_is_known(monkeypatch):
    host = Host(monkeypatch, 3)
    assert [launched.last for launched in launches(host.slabs(), host.execute)] == [False, False, True]


def test_several_slabs_can_be_kept_ready(monkeypatch):
    host = Host(monkeypatch, 5)
    run = launches(host.slabs(), host.execute, depth=3)
    next(run)
    assert host.events == ["build 0", "launch 0", "build 1", "build 2", "build 3"]


def test_nothing_is_launched_before_it_is_asked_for(monkeypatch):
    host = Host(monkeypatch, 3)
    run = launches(host.slabs(), host.execute)
    assert host.events == []
    next(run)
    assert "launch 1" not in host.events


def test_who_waits_for_an_execution_builds_the_next_slab_meanwhile(monkeypatch):
    host = Host(monkeypatch, 2)

    def execute(slab: Slab, meanwhile: Callable[[], None]) -> list[Result]:
        results = host.execute(slab, meanwhile)
        meanwhile()
        host.events.append(f"end {slab.begin}")
        return results

    list(launches(host.slabs(), execute))
    assert host.events == ["build 0", "launch 0", "build 1", "end 0", "launch 1", "end 1", "wait 0"]


def test_an_error_in_the_data_comes_after_what_was_before_it(monkeypatch):
    host = Host(monkeypatch, 2)

    def broken() -> Iterator[Slab]:
        yield from host.slabs()
        raise OSError("no more")

    seen: list[Launched] = []
    with pytest.raises(OSError, match="no more"):
        seen.extend(launches(broken(), host.execute))
    assert host.events[-1] == "wait 0", "both were launched"


class Tracked:
    """Stands for the arrays of a slab."""


def test_a_slab_is_dropped_as_soon_as_the_next_one_is_launched(monkeypatch):
    host = Host(monkeypatch, 0)
    alive: list[weakref.ref[Tracked]] = []

    def slabs() -> Iterator[Slab]:
        for number in range(4):
            assert sum(ref() is not None for ref in alive) <= 1, "only the slab that runs"
            body = Tracked()
            alive.append(weakref.ref(body))
            yield Slab(number, 1, body, None)
            del body

    gc.disable()
    try:
        for launched in launches(slabs(), host.execute):
            del launched
    finally:
        gc.enable()
    assert len(alive) == 4
