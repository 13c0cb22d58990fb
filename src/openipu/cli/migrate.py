"""`openipu migrate`: shows or makes the edits that turn scripts for TensorFlow and the IPU into native ones.

Edits go to the output, as a diff that `patch` understands; everything else goes where errors go.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.text import Text

from .terminal import make_console

if TYPE_CHECKING:
    from openipu.migration.files import SourceFile
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
        _show(file, result, output)
    for note in result.notes:
        number = note.new_line if write else note.line
        messages.print(f"{path}:{number}: {note.reason}", soft_wrap=True, markup=False)


def _show(file: SourceFile, result: Migration, output: Console) -> None:
    """Print the edits: in colour on a terminal, elsewhere in the bytes of the file, so that `patch` can use them."""
    for line in diff(file.encode(result.old), file.encode(result.new), os.fsencode(file.path)):
        if output.is_terminal:
            output.print(_coloured(line.decode(file.encoding, "replace")), soft_wrap=True, end="")
        else:
            typer.echo(line, nl=False)


def diff(old: bytes, new: bytes, name: bytes) -> Iterator[bytes]:
    """The edits as lines of a unified diff. Each line keeps the line end that it has."""
    before, after = (re.findall(rb"[^\n]*\n|[^\n]+", text) for text in (old, new))
    for line in difflib.diff_bytes(difflib.unified_diff, before, after, name, name):
        yield line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"


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
