"""What the code base promises its readers: small files, short functions, and types that say something."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "openipu"
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
BARE_ANY = 0.10
"""The share of annotated arguments that may be `Any`."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def lines_of_code(function: Function) -> int:
    """The lines of a function's body, without its signature and docstring: those are documentation."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


def annotations(function: Function) -> list[ast.expr]:
    every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return [argument.annotation for argument in every if argument.annotation is not None]


def test_files_are_small() -> None:
    long = {str(path): len((SOURCE / path).read_text(encoding="utf-8").splitlines()) for path, _ in trees()}
    assert {path: count for path, count in long.items() if count > LONGEST_FILE} == {}


def test_functions_are_short() -> None:
    long = {
        f"{path}:{function.name}": lines_of_code(function)
        for path, tree in trees()
        for function in functions(tree)
        if lines_of_code(function) > LONGEST_FUNCTION
    }
    assert long == {}


def test_arguments_have_types_that_say_something() -> None:
    by_file = {
        str(path): [
            isinstance(annotation, ast.Name) and annotation.id == "Any"
            for function in functions(tree)
            for annotation in annotations(function)
        ]
        for path, tree in trees()
    }
    bare, every = sum(map(sum, by_file.values())), sum(map(len, by_file.values()))
    worst = sorted(by_file, key=lambda path: -sum(by_file[path]))[:10]
    assert bare <= BARE_ANY * every, f"{bare} of {every} arguments are Any; most of them in {', '.join(worst)}"


def test_every_folder_says_what_it_is_for() -> None:
    folders = [path for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE]
    assert [str(path) for path in folders if ast.get_docstring(ast.parse(path.read_text())) is None] == []
