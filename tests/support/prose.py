"""The written pages of the repository, taken apart: links, headings, blocks of code, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
    *TUTORIALS,
]
PROGRAMS = ("make", "openipu", "python", "pip")
"""What a line begins with if it is a command that can be checked."""


@dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    language: str
    text: str


def name(page: Path) -> str:
    """How tests call a page."""
    return str(page.relative_to(ROOT))


@cache
def text(page: Path) -> str:
    """The Markdown of a page; of a tutorial, that of its cells of text."""
    whole = page.read_text(encoding="utf-8")
    if page.suffix != ".py":
        return whole
    cells = re.findall(r"^# %% \[markdown\]\n((?:#.*\n)+)", whole, re.MULTILINE)
    return "\n".join(re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in cells)


@cache
def tokens(page: Path) -> list[Token]:
    """What a page consists of, in order."""
    return MarkdownIt("commonmark").enable("table").parse(text(page))


def inline(page: Path, kind: str) -> Iterator[Token]:
    """Links (`link_open`), pictures (`image`) or pieces of code (`code_inline`) in the text of a page."""
    return (child for token in tokens(page) for child in token.children or () if child.type == kind)


def links(page: Path) -> list[str]:
    """The targets of all links and pictures."""
    found = [str(token.attrs["href"]) for token in inline(page, "link_open")]
    return [*found, *(str(token.attrs["src"]) for token in inline(page, "image"))]


@cache
def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as code hosts make them."""
    found = tokens(page)
    titles = [found[number + 1].content for number, token in enumerate(found) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of code of a page."""
    found = [Block(token.info.strip(), token.content) for token in tokens(page) if token.type == "fence"]
    return [block for block in found if language in (None, block.language)]


def commands(page: Path) -> list[list[str]]:
    """Every command of a page, as words: in blocks for the terminal, and in the text."""
    lines = [
        line.removeprefix("$ ")
        for block in blocks(page)
        if block.language in ("", "console")
        for line in block.text.splitlines()
        if block.language == "" or line.startswith("$ ")
    ]
    lines += [token.content for token in inline(page, "code_inline") if " " in token.content]
    words = [shlex.split(line, comments=True) for line in lines if line.split(" ")[0] in PROGRAMS and "'''" not in line]
    return [command for command in words if len(command) > 1]
