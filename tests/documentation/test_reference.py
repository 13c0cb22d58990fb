"""The API reference: everything public has an example, and every example runs and prints what it says."""

import doctest
import importlib
import inspect
import itertools
import re
import runpy
import warnings
from types import ModuleType

import pytest

import prose

PUBLIC = runpy.run_path(str(prose.ROOT / "docs" / "site" / "public_modules.py"))
MODULES = [*PUBLIC["public_modules"](), PUBLIC["MODEL_METHODS"]]
QUICK = {"openipu.config", "openipu.schedules"}
"""Modules whose examples run by default. Those of the others compile programs."""
WITHOUT_EXAMPLE = {
    "openipu.keras.extensions.ModelExtension.export": "it is Keras' own, and needs TensorFlow",
    "openipu.keras.extensions.ModelExtension.export_for_ipu_serving": "it only says what to do instead",
    "openipu.reports.start": "its report ends with the process",
    "openipu.scopes.outside_compilation_scope": "it only says what to do instead",
}


def owner(name):
    """A public module, or the class with the methods of models."""
    if name != PUBLIC["MODEL_METHODS"]:
        return importlib.import_module(name)
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(module), cls)


def members(name):
    """What a page of the reference documents: classes and functions, by their full names."""
    found = owner(name)
    if isinstance(found, ModuleType):
        values = {one: getattr(found, one) for one in found.__all__}
    else:
        hidden = re.compile("|".join(PUBLIC["NOT_FOR_USERS"]))
        values = {one: getattr(found, one) for one in dir(found) if not hidden.search(one)}
    return {
        f"{name}.{one}": value for one, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)
    }


def examples(name):
    """The examples of a page that pages before it do not have, each with a namespace of its own."""
    finder = doctest.DocTestFinder()
    before = MODULES[: MODULES.index(name)]
    known = {id(value) for page in before for value in members(page).values()}
    new = {full: value for full, value in members(name).items() if id(value) not in known}
    found = [test for full, value in new.items() for test in finder.find(value, full, globs={})]
    text = owner(name).__doc__ or ""
    own = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    return [test for test in (own, *found) if test.examples]


def prelude():
    """The code that the overview shows: what examples may use without making it."""
    blocks = prose.blocks(prose.ROOT / "docs" / "api.md", "python")
    return compile("\n".join(block.text for block in blocks), "api.md", "exec")


def test_everything_public_has_an_example():
    documented = {full: value.__doc__ or "" for name in MODULES for full, value in members(name).items()}
    assert len(documented) > 200
    assert {full for full, text in documented.items() if ">>> " not in text} == set(WITHOUT_EXAMPLE)


def by_time():
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODULES]


@pytest.mark.parametrize("name", by_time())
def test_examples_run(name, tmp_path, monkeypatch):
    from openipu.datasets import StandInDataWarning

    code, said, runner = prelude(), [], doctest.DocTestRunner(verbose=False)
    for number, test in zip(itertools.count(), examples(name), strict=False):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        exec(code, test.globs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StandInDataWarning)
            runner.run(test, out=said.append)
    assert not said, "".join(said)
