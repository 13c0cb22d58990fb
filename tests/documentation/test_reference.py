"""The API reference: everything public has an example, and every example runs and prints what it says."""

import ast
import doctest
import importlib
import inspect
import re
import runpy
import warnings

import pytest

import prose
import zoo

pytestmark = zoo.KERAS_WARNINGS

PUBLIC = runpy.run_path(str(prose.ROOT / "docs" / "site" / "public_modules.py"))
MODULES, MODEL_METHODS = list(PUBLIC["public_modules"]()), PUBLIC["MODEL_METHODS"]
QUICK = {"openipu.config", "openipu.schedules"}
"""Modules whose examples run by default. Those of the others compile programs."""
WITHOUT_EXAMPLE = {
    "openipu.keras.extensions.ModelExtension.export": "it is Keras' own, and needs TensorFlow",
    "openipu.keras.extensions.ModelExtension.export_for_ipu_serving": "it only says what to do instead",
    "openipu.reports.start": "its report ends with the process",
    "openipu.scopes.outside_compilation_scope": "it only says what to do instead",
}


def members(module):
    """The classes and functions on the page of a module, by their full names."""
    values = {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    return {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}


def methods():
    """The docstrings of the methods of models. Some wrap Keras' own, and have its docstrings when they are imported."""
    module, _, name = MODEL_METHODS.rpartition(".")
    found = {}
    for cls in getattr(importlib.import_module(module), name).__mro__[:-1]:
        (tree,) = ast.parse(inspect.getsource(cls)).body
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        found |= {f"{MODEL_METHODS}.{node.name}": ast.get_docstring(node) or "" for node in functions}
    hidden = re.compile("|".join(PUBLIC["NOT_FOR_USERS"]))
    return {full: text for full, text in found.items() if not hidden.search(full.rpartition(".")[2])}


def examples(page):
    """The examples of a page that pages before it do not have, each with a namespace of its own."""
    parse = doctest.DocTestParser().get_doctest
    if page == MODEL_METHODS:
        return [parse(text, {}, name, None, 0) for name, text in methods().items()]
    before = [importlib.import_module(name) for name in MODULES[: MODULES.index(page)]]
    known = {id(value) for module in before for value in members(module).values()}
    module = importlib.import_module(page)
    new = {name: value for name, value in members(module).items() if id(value) not in known}
    finder = doctest.DocTestFinder()
    own = parse(module.__doc__ or "", {}, page, None, 0)
    return [own, *(test for name, value in new.items() for test in finder.find(value, name, globs={}))]


def prelude():
    """The code that the overview shows: what examples may use without making it."""
    blocks = prose.blocks(prose.ROOT / "docs" / "api.md", "python")
    return compile("\n".join(block.text for block in blocks), "api.md", "exec")


def test_everything_public_has_an_example():
    modules = [importlib.import_module(name) for name in MODULES]
    texts = {name: value.__doc__ or "" for module in modules for name, value in members(module).items()} | methods()
    assert len(texts) > 200
    assert {name for name, text in texts.items() if ">>> " not in text} == set(WITHOUT_EXAMPLE)


def pages():
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*MODULES, MODEL_METHODS)]


@pytest.mark.parametrize("page", pages())
def test_examples_run(page, tmp_path, monkeypatch):
    from openipu.datasets import StandInDataWarning

    code, said, runner = prelude(), [], doctest.DocTestRunner(verbose=False)
    for number, test in enumerate(test for test in examples(page) if test.examples):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        exec(code, test.globs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StandInDataWarning)
            runner.run(test, out=said.append)
    assert not said, "".join(said)
