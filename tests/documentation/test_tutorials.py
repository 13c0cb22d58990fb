"""Every tutorial, run as a notebook, on a few stand-in digits. The tools are those of the extra `docs`."""

import importlib
import json
import os
import subprocess
import sys

import pytest

import prose


@pytest.mark.slow
@pytest.mark.parametrize("page", prose.TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs(page, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("jupytext")
    result = tmp_path / "result.ipynb"
    command = [sys.executable, prose.ROOT / "docs" / "site" / "notebooks.py", page, result]
    environment = {**os.environ, "OPENIPU_TUTORIAL_IMAGES": "1000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell for cell in json.loads(result.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert any(cell["outputs"] for cell in cells)


@pytest.mark.parametrize("page", prose.TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_is_on_the_site_and_small_if_asked(page):
    code = page.read_text(encoding="utf-8")
    assert f"tutorials/{page.stem}.md" in (prose.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert 'os.environ.get("OPENIPU_TUTORIAL_IMAGES"' in code


def test_what_cells_draw_is_beside_the_page(monkeypatch):
    for tool in ("jupytext", "nbclient", "nbconvert"):
        pytest.importorskip(tool)
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.syspath_prepend(prose.ROOT / "docs" / "site")
    drawn = '<svg xmlns="http://www.w3.org/2000/svg" aria-label="Two stages"/>'
    output = nbformat.v4.new_output("display_data", {"image/svg+xml": drawn})
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("draw()", outputs=[output])]
    page = importlib.import_module("notebooks").as_page(nbformat.v4.new_notebook(cells=cells), "drawing")
    assert page.pictures == {"drawing_1_0.svg": drawn.encode()}
    assert "![Two stages](drawing_1_0.svg)" in page.markdown
