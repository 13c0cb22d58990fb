"""Output as lines with the number of their instance."""

import time
import timeit

from openipu.launcher.lines import Lines, prefix, prefixed, without_noise

import pytest
from hypothesis import given
from hypothesis import strategies as st


def cut(*pieces: bytes) -> list[bytes]:
    lines = Lines()
    found = [line for piece in pieces for line in lines.feed(piece)]
    return [*found, rest] if (rest := lines.end()) else found


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\nc"], [b"ab", b"c"]),
        ([b"a\n\nb\n"], [b"a", b"", b"b"]),
        ([b"a\r\n\r\nb\r\n"], [b"a", b"", b"b"]),
        ([b"a\r", b"\nb\n"], [b"a", b"b"]),
        ([b"\r10 %\r20 %", b"\r30 %\n"], [b"10 %", b"20 %", b"30 %"]),
        ([b"10 %\r"], [b"10 %"]),
        ([b"\xff\xfe\n"], [b"\xff\xfe"]),
        ([], []),
    ],
)
def test_where_lines_end(pieces, lines):
    assert cut(*pieces) == lines


def test_a_state_of_a_bar_is_shown_when_it_is_complete():
    lines = Lines()
    assert lines.feed(b"10 %\r20") == [b"10 %"]
    assert lines.feed(b" %\r") == [b"20 %"]


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n"]), max_size=12), st.data())
def test_it_does_not_matter_how_the_bytes_arrive(words, data):
    """Only that a line end may come in two halves is seen: it then ends one line, or none if the line is empty."""
    whole = b"".join(words)
    at = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    pieces = [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]

    def told(lines: list[bytes]) -> list[bytes]:
        return [line for line in lines if line]

    assert told(cut(*pieces)) == told(cut(whole))


def test_very_long_lines_do_not_pile_up():
    lines = Lines()
    assert sum(len(line) for _ in range(40) for line in lines.feed(b"x" * 10_000)) >= 300_000


def test_long_lines_take_no_longer_for_each_byte():
    def seconds(size: int) -> float:
        line = b"x" * size
        shown = timeit.repeat(lambda: without_noise(prefixed([line], b"")), timer=time.process_time, number=1, repeat=3)
        return min(shown)

    assert seconds(1 << 20) < 100 * seconds(1 << 15)


def test_prefixes_are_aligned():
    assert [prefix(index, 11) for index in (0, 9, 10)] == [b"[ 0] ", b"[ 9] ", b"[10] "]
    assert prefix(1, 10) == b"[1] "
    assert prefixed([b"a ", b"", b"b"], b"[0] ") == b"[0] a \n[0]\n[0] b\n"


GLOO = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


def test_what_gloo_says_is_not_shown() -> None:
    assert prefixed([b"a", GLOO, b"[Gloo] Rank " + GLOO, b"b"], b"[0] ") == b"[0] a\n[0] b\n"
    assert without_noise(b"a\n" + GLOO + b"\nb\n") == b"a\nb\n"
    assert without_noise(b"\r1/3 [====]") == b"\r1/3 [====]"
