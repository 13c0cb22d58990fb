"""Where the imports of a script go.

openipu selects the backend of Keras, so its import stands above everything that loads Keras. It is edited where it is,
if that is early enough, and otherwise moved. Imports that the edits need are added next to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from .edits import Edit
from .imports import NewStatement, edit_in_place, is_ours, loads_keras
from .lines import without_line, without_lines
from .script import Function, Script, dotted


@dataclass(slots=True)
class _Line:
    """A line of the script's own level: imports and nothing else, or something that may contain imports."""

    node: cst.CSTNode
    statements: list[NewStatement] = field(default_factory=list)
    above: list[str] = field(default_factory=list)
    """Lines to add above it."""
    below: list[str] = field(default_factory=list)
    """Lines to add below it."""
    moved: bool = False
    """Whether it is written elsewhere."""

    @property
    def is_import(self) -> bool:
        """Whether it is one import statement on a line of its own."""
        return isinstance(self.node, cst.SimpleStatementLine) and len(self.node.body) == len(self.statements) == 1

    def modules(self, script: Script) -> tuple[str, ...]:
        """The modules that it loads when the script starts."""
        return tuple(module for new in self.statements for module in new.modules(script))

    @property
    def is_dropped(self) -> bool:
        """Whether nothing is left of it."""
        return self.is_import and self.statements[0].lines == ()


def import_edits(
    script: Script, statements: Sequence[NewStatement], wanted: dict[str, str], local: frozenset[str]
) -> Iterator[Edit]:
    """All edits of imports. `wanted` are modules that the other edits need, with the names they use for them."""
    lines = _lines(script, statements)
    _place(script, lines, statements, wanted, local)
    at_start = {new.statement for line in lines for new in line.statements}
    again = {_import(module, name) for module, name in wanted.items()}
    for new in statements:
        if new.statement not in at_start and (edit := edit_in_place(script, _without(script, new, again))):
            yield edit
    seen: set[tuple[str, ...]] = set()
    for line in lines:
        yield from _edits(script, line, seen)


def _without(script: Script, new: NewStatement, again: set[str]) -> NewStatement:
    """An import in a function, less what the script now imports at its top: it would hide it in that function."""
    lines = (script.text(new.statement),) if new.lines is None else new.lines
    if again.isdisjoint(lines):
        return new
    return NewStatement(new.statement, tuple(line for line in lines if line not in again))


def _lines(script: Script, statements: Sequence[NewStatement]) -> list[_Line]:
    """The lines of the script's own level, with the imports that run when the script starts."""
    lines: dict[cst.CSTNode, _Line] = {node: _Line(node) for node in script.module.body}
    for new in statements:
        above = [new.statement, *script.above(new.statement)]
        if not any(isinstance(node, Function) for node in above):
            lines[above[-2]].statements.append(new)
    return list(lines.values())


def _place(
    script: Script,
    lines: list[_Line],
    statements: Sequence[NewStatement],
    wanted: dict[str, str],
    local: frozenset[str],
) -> None:
    """Decide what is moved and what is added where."""

    def has_ours(line: _Line) -> bool:
        return any(module.partition(".")[0] == "openipu" for module in line.modules(script))

    def loads(line: _Line) -> bool:
        return any(loads_keras(module, local) for module in line.modules(script))

    additions = {module: _import(module, name) for module, name in wanted.items()}
    ours = next((line for line in lines if has_ours(line) and line.is_import), None)
    anchor = next((line for line in lines if loads(line) or line.is_dropped or has_ours(line)), None)
    anchor = anchor or _after_the_head(lines)
    if anchor is None:
        return
    early = has_ours(anchor)  # also in a `try` or `if`
    in_functions = any(m.partition(".")[0] == "openipu" for new in statements for m in new.modules(script))
    if ours is not None and not early:
        anchor.above.append(_move(script, ours))
    if "openipu" in additions:
        anchor.above.append(additions["openipu"])
    home = ours if ours is not None and early else anchor
    place = _place_for_keras(lines, home, early) if "keras" in additions else None
    is_late = place is anchor.above if early else place is not None or any(map(loads, lines))
    if is_late and in_functions and ours is None and "openipu" not in additions:
        anchor.above.append("import openipu")
    if place is not None:
        place.append(additions["keras"])


def _place_for_keras(lines: list[_Line], home: _Line, has_ours: bool) -> list[str]:
    """Where to import Keras: in place of an import that goes away below openipu, or next to it."""
    if has_ours:
        dropped = next((line for line in lines[lines.index(home) :] if line.is_dropped), None)
        if dropped is not None:
            return dropped.above
        if home.is_import:
            return home.below
    return home.above


def _import(module: str, name: str) -> str:
    return f"import {module}" if module == name else f"import {module} as {name}"


def _after_the_head(lines: list[_Line]) -> _Line | None:
    """The first line that is not the docstring or an import from `__future__`."""
    for number, line in enumerate(lines):
        node = line.node
        if isinstance(node, cst.SimpleStatementLine):
            first = node.body[0]
            if number == 0 and isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString):
                continue
            if isinstance(first, cst.ImportFrom) and dotted(first.module) == "__future__":
                continue
        return line
    return None


def _move(script: Script, line: _Line) -> str:
    """Take openipu out of an import, and return the text that goes elsewhere: with its comment, if nothing stays."""
    (new,) = line.statements
    assert isinstance(line.node, cst.SimpleStatementLine)
    lines = new.lines or ()
    stays = tuple(one for one in lines if not is_ours(one))
    if stays:
        line.statements[0] = NewStatement(new.statement, stays)
        return script.module.default_newline.join(one for one in lines if is_ours(one))
    line.moved = True
    text, start = script.text(new.statement).encode(), script.start(new.statement)
    if edit := edit_in_place(script, new):
        text = text[: edit.start - start] + edit.text.encode() + text[edit.end - start :]
    comment = line.node.trailing_whitespace.comment
    return text.decode() if comment is None else f"{text.decode()}  {comment.value}"


def _edits(script: Script, line: _Line, seen: set[tuple[str, ...]]) -> Iterator[Edit]:
    """The edits of one line. An import that another line has made already is left out."""
    newline = script.module.default_newline
    above = newline.join(line.above)
    if not line.is_import:
        if above:
            start = script.start(_first(line.node))
            yield Edit(start, start, above + newline)
        yield from (edit for new in line.statements if (edit := edit_in_place(script, new)))
        return
    (new,) = line.statements
    assert isinstance(line.node, cst.SimpleStatementLine)
    again = new.lines is not None and not new.module_only and new.lines in seen
    if new.lines:
        seen.add(new.lines)
    start = script.start(line.node)
    if line.moved or line.is_dropped or again:
        if line.moved:  # with its comment
            yield without_lines(script, start, script.end(line.node.trailing_whitespace.comment or line.node))
        else:
            yield without_line(script, line.node, above)
        return
    if above:
        yield Edit(start, start, above + newline)
    if edit := edit_in_place(script, new):
        yield edit
    if line.below:
        end = script.end(line.node.trailing_whitespace.comment or line.node)
        yield Edit(end, end, "".join(newline + text for text in line.below))


def _first(node: cst.CSTNode) -> cst.CSTNode:
    """Where a statement begins: at its first decorator, if it has any."""
    decorators = getattr(node, "decorators", ())
    return decorators[0] if decorators else node
