"""`openipu migrate`: shows or makes the edits that turn scripts for TensorFlow and the IPU into native ones.

Edits go to the output, as a diff that `patch` understands; everything else goes where errors go.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from .terminal import make_console

if TYPE_CHECKING:
    from openipu.migration.migrate import Migration

_STYLES: Final = {"+++": "bold", "---": "bold", "@@": "cyan", "+": "green", "-": "red"}
ALL_DONE: Final = 0
NEEDS_A_PERSON: Final = 1
FAILED: Final = 2


@dataclass(slots=True)
class _Count:
    """What happened so far."""

    scripts: int = 0
    edited: int = 0
    notes: int = 0
    failed: int = 0


def run(paths: list[Path], write: bool) -> int:
    """Migrate scripts, and return the exit code. Raises `ValueError` for what concerns all of them."""
    if util.find_spec("libcst") is None:
        raise ValueError("`openipu migrate` needs LibCST, which is not installed. Run: pip install 'openipu[migrate]'")
    from openipu.migration.files import find_scripts

    scripts = list(find_scripts(paths))
    if not scripts:
        raise ValueError(f"There are no Python files in {', '.join(map(str, paths))}. Name a script or another folder.")
    output, messages, count = make_console(), make_console(stderr=True), _Count()
    for path in scripts:
        _one(path, write, output, messages, count)
    messages.print(_summary(count, write), soft_wrap=True, markup=False)
    if count.failed:
        return FAILED
    return NEEDS_A_PERSON if count.notes else ALL_DONE


def _one(path: Path, write: bool, output: Console, messages: Console, count: _Count) -> None:
    """Migrate one script. What goes wrong with it does not concern the others."""
    from openipu.migration import files
    from openipu.migration.migrate import migrate

    count.scripts += 1
    try:
        file = files.read(path)
        result = migrate(file.text, files.modules_beside(path))
        backup = files.write(file, result.new) if write and result.changes else None
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        messages.print(f"{path}: {reason}", style="red", soft_wrap=True, markup=False)
        count.failed += 1
        return
    count.edited += result.changes
    count.notes += len(result.notes)
    if backup is not None:
        messages.print(f"{path}: edited; the original is {backup}", soft_wrap=True, markup=False)
    elif result.changes:
        for line in diff(result, str(path)):
            output.print(_coloured(line), soft_wrap=True, end="")
    for note in result.notes:
        number = note.new_line if write else note.line
        messages.print(f"{path}:{number}: {note.reason}", soft_wrap=True, markup=False)


def diff(result: Migration, name: str) -> Iterator[str]:
    """The edits as lines of a unified diff. Each line keeps the line end that it has."""
    old, new = lines_of(result.old), lines_of(result.new)
    for line in difflib.unified_diff(old, new, name, name):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def lines_of(text: str) -> list[str]:
    """The lines of a text as `patch` counts them, with their line ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _coloured(line: str) -> Text:
    return Text(line, style=next((style for start, style in _STYLES.items() if line.startswith(start)), ""))


def _summary(count: _Count, write: bool) -> str:
    """One sentence about everything."""
    if count.scripts == 1 and not (count.edited or count.notes or count.failed):
        return "Nothing to do: the script is native already."
    parts = [f"{_number(count.edited, 'script')} of {count.scripts} {'edited' if write else 'to edit'}"]
    if count.notes:
        parts.append(f"{_number(count.notes, 'place')} left for you")
    if count.failed:
        parts.append(f"{count.failed} failed")
    hint = " Make the edits with --write." if count.edited and not write else ""
    return f"{', '.join(parts)}.{hint}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
