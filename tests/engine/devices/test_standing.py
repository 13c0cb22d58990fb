"""Whether processes that do things together can go on."""

import time
from collections.abc import Iterator
from typing import Any

from openipu.engine.devices import standing
from openipu.engine.devices.standing import Standing, Watch, obstacle
from openipu.launcher import ports

import jaxlib._jax  # noqa: TID251 - JAX has no public way to send messages between processes
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


@pytest.fixture(name="client")
def fixture_client() -> Iterator[Any]:
    """JAX's messages, for a group of one process."""
    with ports.hold("127.0.0.1") as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        service = jaxlib._jax.get_distributed_runtime_service(address, 1)
        client = jaxlib._jax.get_distributed_runtime_client(address, 0)
        client.connect()
        yield client
        client.shutdown()
        service.shutdown()


@pytest.mark.parametrize(("code", "launcher", "told"), [(0, True, True), (3, True, False), (3, False, True)])
def test_the_end_of_another_process(
    client: Any, code: int, launcher: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it has ended with an error, a launcher ends the others. They must not come before it."""
    monkeypatch.setattr(standing, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(standing, "_here", Standing(launched=2, program="train"))
    assert standing.end_of(client, 1) is None
    standing.tell_end(client, 1, code)
    assert standing.end_of(client, 1) == code
    monkeypatch.setattr(standing, "_here", OWN)
    found: list[str] = []
    watch = Watch(client, 0, launcher, found.append)
    watch.start()
    client.blocking_key_value_get("openipu/standing/0/now", 60_000)  # it is about to look
    time.sleep(0.2)
    watch.end()
    assert bool(found) == told
    assert all("but instance 1 is at the end of its script" in problem for problem in found)
