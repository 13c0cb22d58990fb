"""The quick start, as a newcomer follows it: its files and commands are taken from the page."""

import os
import re
import shlex
import subprocess
import sys

from openipu import _stand_in_data

import numpy as np
import pytest

import prose

PAGE = prose.ROOT / "docs" / "quickstart.md"
SETTING_UP = {"make demo", "source .venv/bin/activate"}
"""These need a package index. The demo itself is run by test_cli.py."""


def lines():
    blocks = prose.blocks(PAGE, "console")
    return [line.removeprefix("$ ") for block in blocks for line in block.text.splitlines() if line.startswith("$ ")]


def test_the_page_has_three_screens():
    text = prose.text(PAGE)
    assert re.findall(r"^## (\d)\. ", text, re.MULTILINE) == ["1", "2", "3"]
    assert set(lines()) > SETTING_UP


def test_the_demo_is_what_the_page_says(repository):
    dry = subprocess.run(["make", "-n", "demo"], cwd=repository, capture_output=True, text=True, check=True)
    assert "bin/openipu mnist" in dry.stdout


@pytest.mark.slow
def test_a_newcomer_gets_through(tmp_path):
    parts = {"train": _stand_in_data.digits("train", 1000), "test": _stand_in_data.digits("test", 200)}
    arrays = {f"{name}_{part}": array for part, pair in parts.items() for name, array in zip("xy", pair, strict=True)}
    np.savez(tmp_path / "mnist.npz", **arrays)
    for block in prose.blocks(PAGE, "python"):
        title = re.match(r"# (\w+\.py)\n", block.text)
        assert title, "code in the quick start begins with the name of its file"
        (tmp_path / title[1]).write_text(block.text, encoding="utf-8")
    environment = {**os.environ, "OPENIPU_DATA": str(tmp_path), "HOME": str(tmp_path)}
    programs = {"python": [sys.executable], "openipu": [sys.executable, "-m", "openipu"]}
    output = {}
    for line in lines():
        if line in SETTING_UP:
            continue
        program, *words = shlex.split(line)
        command = [*programs[program], *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}:\n{done.stderr[-3000:]}"
        output[line] = done.stdout
    assert re.search(r"^Test accuracy: 0\.\d+$", output["python train.py"], re.MULTILINE)
    assert "2 stages" in output["python pipeline.py"]
    assert (tmp_path / "out" / "report.html").exists()
