"""Every tutorial, run as a notebook, on a few stand-in digits. The tools are those of the extra `docs`."""

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
