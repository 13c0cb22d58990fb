"""Which names OpenIPU and Keras have, read from their source, so that neither has to be loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path


@cache
def exists(name: str) -> bool:
    """Whether a dotted name, such as `keras.layers.Dense`, is a module or a public name of a module.

    Attributes of classes and functions are not looked at: `keras.Model.anything` exists if `keras.Model` does.
    """
    parent, _, last = name.rpartition(".")
    if _file(name) is not None:
        return True
    if not parent:
        return False
    if _file(parent) is None:
        return exists(parent)
    return last in public_names(parent)


@cache
def public_names(module: str) -> frozenset[str]:
    """The public names of a module: those in `__all__`, or else all that do not begin with an underscore."""
    file = _file(module)
    if file is None:
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    listed = {name for statement in tree.body for name in _listed(statement)}
    if listed:
        return frozenset(listed)
    bound = {name for statement in tree.body for name in _bound(statement)}
    return frozenset(name for name in bound if not name.startswith("_"))


def _listed(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets
    ):
        yield from ast.literal_eval(statement.value)


def _bound(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
        case ast.FunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Assign():
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


@cache
def _file(module: str) -> Path | None:
    """The source of a module, or None. `openipu.pipelining_ops` is in `openipu.ops`, as for those who import it."""
    top, *rest = module.split(".")
    root = _root(top)
    if root is None or any(part.startswith("_") for part in rest):
        return None
    folders = [root.joinpath(*rest)]
    if top == "openipu" and len(rest) == 1 and rest[0] in public_names("openipu"):
        folders.append(root / "ops" / rest[0])
    for folder in folders:
        for file in (folder / "__init__.py", folder.with_suffix(".py") if rest else folder / "__init__.py"):
            if file.is_file():
                return file
    return None


@cache
def _root(package: str) -> Path | None:
    spec = util.find_spec(package)
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None
