"""Where the commands print: terminals of any width, files, pipes, or nowhere at all."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

_NARROWEST: Final = 40
"""Tables need this many columns. A narrower terminal wraps the lines itself."""
_WIDEST: Final = 100_000
"""Tables in a file or a pipe are not wrapped, so that other programs can read them."""


def mend_environment() -> None:
    """Remove impossible sizes of terminals from the environment: with COLUMNS=0, nothing would be printed."""
    for name in ("COLUMNS", "LINES"):
        value = os.environ.get(name, "")
        if not (value.isascii() and value.isdigit() and int(value) > 0):
            os.environ.pop(name, None)
    if "COLUMNS" in os.environ:
        os.environ["COLUMNS"] = str(max(int(os.environ["COLUMNS"]), _NARROWEST))


def make_console(stderr: bool = False) -> Console:
    """A console for the output, or for errors. NO_COLOR switches off all escape sequences."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    if console.is_terminal:
        console.width = max(console.width, _NARROWEST)
    elif "COLUMNS" not in os.environ:
        console.width = _WIDEST
    return console


def fail(error: Exception, code: int) -> NoReturn:
    """End a command with an error of one line: it has the numbers and the remedy, and a traceback would hide it."""
    import typer
    from rich.markup import escape

    if isinstance(error, BrokenPipeError):  # whoever read the output has seen enough
        _forget_output()
        raise typer.Exit(1) from error
    # Lists in square brackets are part of the message.
    make_console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
    _forget_output()
    raise typer.Exit(code) from error


def _forget_output() -> None:
    """Drop output that cannot be written. Python would try again at its end, and fail with a code of its own."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
