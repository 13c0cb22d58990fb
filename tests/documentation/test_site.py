"""The documentation site: built as `make docs-check` does, with every broken link an error."""

import re
import subprocess
import sys

import pytest

import prose

LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")
CANONICAL = re.compile(r"<link[^>]*rel=[\"']?canonical")


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_outside(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("jupytext")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=prose.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {str(page.relative_to(tmp_path)): page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert len(pages) > 60
    for name, html in pages.items():
        assert LOADED.findall(CANONICAL.sub("", html)) == [], name
    assert "IPUConfig" in pages["api/openipu.config.html"]
    assert "set_pipelining_options" in pages["api/models.html"]
    assert all("<blockquote>" not in html for name, html in pages.items() if name.startswith("api/")), "an example"
    assert "hand-written" in pages["index.html"]
    assert "OneFOneB" in pages["performance.html"]
    for tutorial in prose.TUTORIALS:
        assert (tmp_path / "tutorials" / f"{tutorial.stem}.ipynb").exists()
