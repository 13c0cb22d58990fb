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
    """The script with all edits made. Insertions at the same place keep the order in which they are given."""
    content = source.encode()
    parts, end = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        assert end <= edit.start <= edit.end, f"{edit} overlaps with the edit before it"
        parts += [content[end : edit.start], edit.text.encode()]
        end = edit.end
    return b"".join([*parts, content[end:]]).decode()


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
