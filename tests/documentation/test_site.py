"""The documentation site: built as `make docs-check` does, with every broken link an error."""

import importlib
import re
import subprocess
import sys
from types import ModuleType

import openipu

import pytest

import prose

LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every page by its address, and the folder of the site."""
    for tool in ("mkdocs", "mkdocstrings", "jupytext"):  # of the extra `docs`
        pytest.importorskip(tool)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=prose.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for tutorial in prose.TUTORIALS:
        assert (folder / "tutorials" / f"{tutorial.stem}.ipynb").exists()
    return {str(page.relative_to(folder)): page.read_text(encoding="utf-8") for page in folder.rglob("*.html")}


@pytest.mark.slow
def test_nothing_is_loaded_from_outside(pages):
    assert len(pages) > 60
    for name, html in pages.items():
        assert LOADED.findall(html) == [], name


@pytest.mark.slow
def test_tables_and_examples_are_shown(pages):
    assert "hand-written" in pages["index.html"]
    assert "OneFOneB" in pages["performance.html"]
    assert "set_pipelining_options" in pages["api/models.html"]
    assert pages["concepts.html"].count('class="concept"') == len(list((prose.ROOT / "docs" / "concepts").iterdir()))
    examples = "".join(html for name, html in pages.items() if name.startswith("api/"))
    assert "<blockquote>" not in examples, "an example that is not shown as code"


@pytest.mark.slow
def test_everything_public_is_in_the_reference(pages):
    exported = [getattr(openipu, name) for name in openipu.__all__]
    documented = {name[len("api/") : -len(".html")] for name in pages if name.startswith("api/openipu.")}
    assert {value.__name__ for value in exported if isinstance(value, ModuleType)} <= documented
    for name in documented:
        module = importlib.import_module(name)
        names = [one for one in module.__all__ if not isinstance(getattr(module, one), ModuleType)]
        html = pages[f"api/{name}.html"]
        assert [one for one in names if f'id="{name}.{one}"' not in html] == [], name
