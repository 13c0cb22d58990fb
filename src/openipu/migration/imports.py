"""The import statements of a script: what each becomes, and where they go, because openipu has to be the first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import libcst as cst

from .edits import Edit, Remark
from .lines import indentation, without_line
from .names import new_name
from .script import Imported, Script, Statement, dotted, module_of
from .uses import Findings

_LOADERS: Final = re.compile(r"(?:ipu_tensorflow|keras|tensorflow|tf_keras|transformers)(?:_\w+)?$")
"""Packages that load Keras, so openipu has to be imported before them."""
_WITHOUT_SUCCESSOR: Final = {
    "horovod": "instances are started with `openipu launch` and train together under PopDistStrategy (docs/hosts.md)",
    "popart": "PopART programs cannot run here",
    "poptorch": "PyTorch programs cannot run here",
    "tensorflow_addons": "it needs Keras 2; Keras 3 has most of its layers and optimizers",
}


@dataclass(frozen=True, slots=True)
class NewStatement:
    """What becomes of an import statement: the lines in its place, or None if it stays as it is."""

    statement: Statement
    lines: tuple[str, ...] | None
    module_only: str = ""
    """The new module, if nothing but the module changes; then the names and their layout stay."""

    def modules(self, script: Script) -> tuple[str, ...]:
        """The modules that the new statement loads; relative ones begin with a dot."""
        lines = (script.text(self.statement),) if self.lines is None else self.lines
        return tuple(module for line in lines for module in _modules_of(line))


def _modules_of(line: str) -> tuple[str, ...]:
    if found := re.match(r"from\s+([\w.]+)", line):
        return (found[1],)
    return tuple(part.split()[0] for part in re.sub(r"\\\s", " ", line.removeprefix("import")).split(","))


def new_statements(script: Script, uses: Findings) -> Iterator[NewStatement]:
    """What becomes of each import statement."""
    imported: dict[Statement, list[Imported]] = {}
    for one in script.imports:
        imported.setdefault(one.statement, []).append(one)
    used = {use.imported for use in script.uses}
    for node in script.nodes():
        if not isinstance(node, Statement):
            continue
        if isinstance(node.names, cst.ImportStar):
            yield _star(script, node)
        else:
            yield _named(node, imported.get(node, []), used - uses.kept, uses.kept)


def is_ours(line: str) -> bool:
    """Whether an import statement imports openipu, or something of it."""
    return any(module.partition(".")[0] == "openipu" for module in _modules_of(line))


def _star(script: Script, statement: Statement) -> NewStatement:
    assert isinstance(statement, cst.ImportFrom)
    module = module_of(statement)
    verdict = new_name(module)
    if verdict is None or not verdict.new or verdict.new == module:
        return NewStatement(statement, None)
    line = script.text(statement).replace(module, verdict.new, 1)
    return NewStatement(statement, (line,), verdict.new)


def _named(
    statement: Statement, imported: Sequence[Imported], unused: set[Imported], kept: set[Imported]
) -> NewStatement:
    """`unused` are those whose uses were all replaced. An import that was never used stays."""
    forms = [_form(one, one in kept) for one in imported if one not in unused]
    old = [_line(*_parts(one)) for one in imported]
    if [_line(*form) for form in forms] == old:
        return NewStatement(statement, None)
    parents = {parent for parent, _, _ in forms}
    if isinstance(statement, cst.ImportFrom) and len(parents) == 1 and len(forms) == len(imported):
        parent = parents.pop()
        if parent and [form[1] for form in forms] == [dotted(one.alias.name) for one in imported]:
            line = f"from {parent} import ..."
            return NewStatement(statement, (line,), parent)
    grouped: dict[str, list[str]] = {}
    for parent, last, bound in forms:
        grouped.setdefault(parent or f"{last} {bound}", []).append(_alias(last, bound))
    lines = [
        f"from {parent} import {', '.join(dict.fromkeys(names))}" if " " not in parent else f"import {names[0]}"
        for parent, names in grouped.items()
    ]
    ours_first = sorted(lines, key=lambda line: not is_ours(line))
    return NewStatement(statement, tuple(ours_first))


def _parts(one: Imported) -> tuple[str, str, str]:
    """The module, name and bound name of an import as it is; no module for `import ...`."""
    if isinstance(one.statement, cst.ImportFrom):
        return module_of(one.statement), dotted(one.alias.name), one.bound
    return "", one.name, one.bound if one.alias.asname else one.name


def _form(one: Imported, is_used: bool) -> tuple[str, str, str]:
    """The module, name and bound name of an import as it will be."""
    verdict = new_name(one.binds)
    if verdict is None and (renamed := new_name(one.name)) is not None and renamed.new:
        # `import tensorflow.python.ipu`, which also binds `tensorflow`
        top = "tensorflow" if is_used else renamed.new.partition(".")[0]
        return "", top, top
    if verdict is None or not verdict.new or verdict.new == one.binds:
        return _parts(one)
    parent, _, last = verdict.new.rpartition(".")
    return parent, last, one.bound


def _alias(last: str, bound: str) -> str:
    return last if last == bound else f"{last} as {bound}"


def _line(parent: str, last: str, bound: str) -> str:
    return f"from {parent} import {_alias(last, bound)}" if parent else f"import {_alias(last, bound)}"


def import_remarks(script: Script) -> Iterator[Remark]:
    """Imports that need a person, unless their uses say so already."""
    used = {use.imported for use in script.uses}
    for one in script.imports:
        package = one.name.partition(".")[0]
        verdict = new_name(one.name)
        reason = _WITHOUT_SUCCESSOR.get(package) or (verdict.reason if verdict and one not in used else "")
        if reason:
            yield Remark(script.start(one.statement), f"{script.text(one.alias)}: {reason}")
    for node in script.nodes():
        if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
            module = module_of(node)
            verdict = new_name(module)
            if module == "tensorflow" or (verdict and verdict.reason):
                reason = (
                    verdict.reason if verdict else "which names are TensorFlow's cannot be seen; import them by name"
                )
                yield Remark(script.start(node), f"from {module} import *: {reason}")


def loads_keras(module: str, local: frozenset[str]) -> bool:
    """Whether importing a module may load Keras: TensorFlow does, and files next to the script may."""
    top = module.partition(".")[0]
    return not top or bool(_LOADERS.match(top)) or top in local


def edit_in_place(script: Script, new: NewStatement) -> Edit | None:
    """The edit of a statement that stays where it is."""
    statement = new.statement
    if new.lines is None:
        return None
    if new.module_only:
        assert isinstance(statement, cst.ImportFrom)
        assert statement.module is not None
        return Edit(script.start(statement.module), script.end(statement.module), new.module_only)
    line = script.parents[statement]
    assert isinstance(line, cst.SimpleStatementLine | cst.SimpleStatementSuite)
    if len(line.body) > 1 or isinstance(line, cst.SimpleStatementSuite):
        return _edit_among_others(script, line, statement, "; ".join(new.lines))
    block = script.parents[line]
    if not new.lines and len(getattr(block, "body", ())) > 1:
        assert isinstance(line, cst.SimpleStatementLine)
        return without_line(script, line)
    new_line = script.module.default_newline + indentation(script, statement)
    return Edit(script.start(statement), script.end(statement), new_line.join(new.lines) or "pass")


def _edit_among_others(
    script: Script, line: cst.SimpleStatementLine | cst.SimpleStatementSuite, statement: Statement, text: str
) -> Edit:
    """The edit of a statement that shares its line with others."""
    start, end, number = script.start(statement), script.end(statement), line.body.index(statement)
    if text or len(line.body) == 1:
        return Edit(start, end, text or "pass")
    if number + 1 < len(line.body):
        return Edit(start, script.start(line.body[number + 1]), "")
    return Edit(script.end(line.body[number - 1]), end, "")
