"""Whether processes that do things together can go on."""

import threading

from openipu.engine.devices import standing
from openipu.engine.devices.standing import Standing, Watch, obstacle

import pytest

OWN = Standing(sent=5, launched=3, program="train", before=2)
PROGRAMS = {1: "spread", 2: "train", 3: "train"}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (OWN, None),
        (Standing(sent=5, launched=2, program="train", before=2), None),  # it may still launch the third
        (Standing(sent=9, launched=7, program="test", before=7), None),  # it is ahead, and its own watch looks
        (Standing(sent=5, launched=2, program="train", before=2, at="the end"), None),  # this one has sent it, too
        (Standing(sent=6, launched=3, program="train", before=3, at="the end"), None),  # this one may still send it
        (Standing(sent=6, launched=2, program="train", before=2, at="the end"), "is at 'the end'"),
        (Standing(sent=6, launched=2, program="train", before=2), None),  # it has got its answers
        (Standing(sent=5, launched=3, program="gather", before=2), "runs 'gather'"),
        (Standing(sent=5, launched=2, program="gather", before=2), "runs 'gather'"),
        (Standing(sent=5, launched=2, program="train", before=2, ended=0), "is at the end of its script"),
        (Standing(sent=8, launched=3, program="train", before=3, ended=0), None),
    ],
)
def test_what_keeps_a_process_from_going_on(other: Standing, found: str | None) -> None:
    assert obstacle(OWN, PROGRAMS, other) == found


class Store:
    """The messages of a group in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


@pytest.mark.parametrize(("code", "launcher", "told"), [(0, True, True), (3, True, False), (3, False, True)])
def test_the_end_of_another_process(code: int, launcher: bool, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it has ended with an error, a launcher ends the others. They must not come before it."""
    monkeypatch.setattr(standing, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(standing, "_here", Standing(launched=2, program="train"))
    store, found, looked = Store(), [], threading.Event()
    standing.tell_end(store, 1, code)
    monkeypatch.setattr(standing, "_here", OWN)
    watch = Watch(store, 0, launcher, found.append)
    watch.start()
    while len(store.values) < 2:  # it has told where this process is, so it is about to look
        looked.wait(0.01)
    looked.wait(0.1)
    watch.end()
    assert bool(found) == told
    assert all("but instance 1 is at the end of its script" in problem for problem in found)
