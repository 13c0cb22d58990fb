"""Edits of whole lines."""

from __future__ import annotations

import re
from typing import Final

import libcst as cst

from .edits import Edit
from .script import Script

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_EMPTY_LINE: Final = re.compile(rb"[ \t]*(?:\r\n|\n|\r)")
_EMPTY_LINE_BEFORE: Final = re.compile(rb"(?:\n|\r)[ \t]*(?:\r\n|\n|\r)$")
_PRAGMA: Final = re.compile(r"#\s*(?:noqa|type:|pylint:|isort:|pyright:|nosec)")


def line_start(script: Script, byte: int) -> int:
    """Where the line of a byte begins."""
    content = script.content
    return max(content.rfind(b"\n", 0, byte), content.rfind(b"\r", 0, byte)) + 1


def indentation(script: Script, node: cst.CSTNode) -> str:
    """What is to the left of a node in its line."""
    start = script.start(node)
    return script.content[line_start(script, start) : start].decode()


def without_lines(script: Script, start: int, end: int) -> Edit:
    """Remove the lines from one byte to another, and one of the empty lines if there are some on both sides."""
    content = script.content
    start = line_start(script, start)
    found = _LINE_END.search(content, end)
    end = found.end() if found else len(content)
    after = _EMPTY_LINE.match(content, end)
    if after is not None and _EMPTY_LINE_BEFORE.search(content[:start]):
        end = after.end()
    return Edit(start, end, "")


def without_line(script: Script, line: cst.SimpleStatementLine | cst.Decorator, instead: str = "") -> Edit:
    """Remove a line, or write others in its place. A comment stays, unless it was for a checker of code."""
    start, end = script.start(line), script.end(line)
    comment = line.trailing_whitespace.comment
    if comment is not None and not _PRAGMA.match(comment.value):
        return Edit(start, end, instead) if instead else Edit(start, script.start(comment), "")
    end = script.end(comment) if comment is not None else end
    return Edit(start, end, instead) if instead else without_lines(script, start, end)
