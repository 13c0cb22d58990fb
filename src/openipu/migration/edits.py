"""Edits and remarks as values, and the one function that applies edits to a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replaces the bytes from `start` to `end` of a script (in UTF-8) with `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, order=True)
class Remark:
    """Something that needs a person: where it is in the script, in bytes, and why."""

    start: int
    reason: str


def apply(source: str, edits: Iterable[Edit]) -> str:
    """The script with all edits made, which are in the order of the text."""
    content = source.encode()
    parts, end = [], 0
    for edit in edits:
        assert end <= edit.start <= edit.end, f"{edit} overlaps with the edit before it"
        parts += [content[end : edit.start], edit.text.encode()]
        end = edit.end
    return b"".join([*parts, content[end:]]).decode()


def outermost(edits: Iterable[Edit]) -> list[Edit]:
    """Edits in the order of the text, without those in a piece that another edit replaces as a whole."""
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.start != edit.end, -edit.end)):
        if not kept or edit.end > kept[-1].end or edit.start == edit.end == kept[-1].end:
            kept.append(edit)
    return kept


def line_of(source: str, start: int) -> int:
    """The number of the line in which a byte of a script is, from 1."""
    before = source.encode()[:start].decode()
    return 1 + before.count("\n") + before.replace("\r\n", "\n").count("\r")


def moved_to(edits: Iterable[Edit], start: int) -> int:
    """Where a byte of the script is after the edits. A byte that is replaced is at the start of its replacement."""
    shift = 0
    for edit in edits:
        if edit.end <= start:
            shift += len(edit.text.encode()) - (edit.end - edit.start)
        elif edit.start < start:
            shift -= start - edit.start
    return start + shift
