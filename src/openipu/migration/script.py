"""A script as a syntax tree that knows where its nodes are and what its names mean."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import libcst as cst
from libcst import metadata

Statement = cst.Import | cst.ImportFrom
_TOO_DEEP: Final = "its expressions are nested too deeply to be read"
Function = cst.FunctionDef | cst.Lambda


class SourceError(ValueError):
    """A text is not a script that this Python can read."""


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """One name that an import statement binds."""

    statement: Statement
    alias: cst.ImportAlias
    name: str
    """What is imported: `tensorflow.keras.layers`."""
    bound: str
    """The name in the script: `layers`. For `import tensorflow.keras` this is `tensorflow`."""
    at_top: bool
    """Whether the name is bound in the whole script, and not only in a function or class."""

    @property
    def binds(self) -> str:
        """What the bound name means in full: `tensorflow` for `import tensorflow.keras`."""
        plain = isinstance(self.statement, cst.Import) and self.alias.asname is None
        return self.bound if plain else self.name


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A dotted name in the script that begins with an imported one."""

    node: cst.CSTNode
    name: str
    """The name in full: `tensorflow.keras.layers.Dense`."""
    imported: Imported


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """A parsed script. Everything is in the order of the text."""

    content: bytes
    """The text in UTF-8, which all positions are in."""
    module: cst.Module
    spans: Mapping[cst.CSTNode, metadata.CodeSpan]
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    children: Mapping[cst.CSTNode, list[cst.CSTNode]]
    imports: tuple[Imported, ...]
    uses: tuple[Use, ...]
    taken: frozenset[str]
    """Names that are bound to something other than an import, anywhere in the script, or by an unknown `import *`."""
    names: Mapping[cst.CSTNode, str]
    """The full names of the nodes in `uses`."""

    def start(self, node: cst.CSTNode) -> int:
        """Where the code of a node begins, in bytes."""
        return self.spans[node].start

    def end(self, node: cst.CSTNode) -> int:
        """Where the code of a node ends, in bytes."""
        return self.spans[node].start + self.spans[node].length

    def text(self, node: cst.CSTNode) -> str:
        """The code of a node."""
        return self.content[self.start(node) : self.end(node)].decode()

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """All nodes that contain a node, from the inside out."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def nodes(self) -> Iterator[cst.CSTNode]:
        """All nodes, each before those in it."""
        return self.walk(self.module)

    def walk(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """A node and all nodes in it, in the order of the text."""
        stack = [node]
        while stack:
            yield (top := stack.pop())
            stack.extend(reversed(self.children.get(top, ())))


def parse(source: str) -> Script:
    """Read a script. Raises `SourceError` if it is not valid Python."""
    try:
        return _parse(source)
    except RecursionError:
        raise SourceError(_TOO_DEEP) from None


def _parse(source: str) -> Script:
    _check(source)
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise SourceError(f"LibCST cannot read line {error.raw_line}: {' '.join(error.message.split())}") from None
    if module.code != source:
        raise SourceError(
            "its layout could not be kept, because of its line ends or of a backslash at its beginning. Save it with "
            "the line ends of Unix or of Windows."
        )
    wrapper = metadata.MetadataWrapper(module, unsafe_skip_copy=True)
    spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
    parents = wrapper.resolve(metadata.ParentNodeProvider)
    scopes = {scope: None for scope in wrapper.resolve(metadata.ScopeProvider).values() if scope is not None}
    children: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for node, parent in parents.items():
        children.setdefault(parent, []).append(node)
    imports: dict[cst.CSTNode, Imported] = {}
    uses: dict[cst.CSTNode, Use] = {}
    taken = set()
    for scope in scopes:
        for assignment in scope.assignments:
            if isinstance(assignment, metadata.ImportAssignment):
                at_top = isinstance(scope, metadata.GlobalScope)
                imported = imports.setdefault(assignment.as_name, _imported(assignment, at_top))
                found = (_whole(access.node, parents) for access in assignment.references)
                uses |= {node: Use(node, _full_name(node, imported), imported) for node in found}
            elif not isinstance(assignment, metadata.BuiltinAssignment):
                taken.add(assignment.name)
        unknown = (access.node for access in scope.accesses if not access.referents)
        taken |= {dotted(node).partition(".")[0] for node in unknown}
    return Script(
        source.encode(), module, spans, parents, children,
        tuple(sorted(imports.values(), key=lambda imported: spans[imported.alias].start)),
        tuple(sorted(uses.values(), key=lambda use: spans[use.node].start)),
        frozenset(taken), {use.node: use.name for use in uses.values()},
    )  # fmt: skip


def _check(source: str) -> None:
    """Raise if this Python cannot read a script. LibCST would say less, and crash if it is nested too deeply."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in strings, which are not our concern
            ast.parse(source)
    except SyntaxError as error:
        where = f"line {error.lineno}" if error.lineno else "it"
        raise SourceError(f"{where} is not valid Python: {error.msg}") from None
    except ValueError as error:  # null bytes, in some versions of Python
        raise SourceError(f"it is not valid Python: {error}") from None
    except MemoryError:
        raise SourceError(_TOO_DEEP) from None


def dotted(node: cst.CSTNode | None) -> str:
    """The text of a dotted name, without blanks; empty if it is something else."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=value, attr=attr):
            before = dotted(value)
            return f"{before}.{attr.value}" if before else ""
    return ""


def module_of(statement: cst.ImportFrom) -> str:
    """The module of a `from` import, with the dots of a relative one."""
    return "." * len(statement.relative) + dotted(statement.module)


def _imported(assignment: metadata.ImportAssignment, at_top: bool) -> Imported:
    statement = assignment.node
    assert isinstance(statement, Statement)
    assert not isinstance(statement.names, cst.ImportStar)
    alias = next(a for a in statement.names if assignment.as_name in (a.name, a.asname and a.asname.name))
    name = dotted(alias.name)
    if isinstance(statement, cst.ImportFrom):
        name = f"{module_of(statement)}.{name}"
        return Imported(statement, alias, name, assignment.name, at_top)
    bound = dotted(alias.asname.name) if alias.asname else name.partition(".")[0]
    return Imported(statement, alias, name, bound, at_top)


def _whole(node: cst.CSTNode, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> cst.CSTNode:
    """The longest dotted name that begins with this one."""
    while isinstance(parent := parents.get(node), cst.Attribute) and parent.value is node:
        node = parent
    return node


def _full_name(node: cst.CSTNode, imported: Imported) -> str:
    text = dotted(node)
    if not text:  # a name in a string, as in the annotation "tf.Tensor"
        return imported.name
    return imported.binds + text[len(imported.bound) :]
