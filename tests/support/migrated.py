"""Scripts through `migrate`, with what must hold for every result."""

from __future__ import annotations

import textwrap

from openipu.migration.migrate import Migration, migrate


def rewritten(before: str, local: frozenset[str] = frozenset()) -> Migration:
    """Migrate a script whose lines may be indented. The result is valid, and migrating it again changes nothing."""
    result = migrate(text(before), local)
    compile(result.new, "script", "exec")
    again = migrate(result.new, local)
    assert again.new == result.new, "migrating twice is migrating once"
    assert [note.line for note in again.notes] == [note.new_line for note in result.notes]
    return result


def text(code: str) -> str:
    """A script without the indentation that it has in a test."""
    return textwrap.dedent(code).lstrip("\n")
