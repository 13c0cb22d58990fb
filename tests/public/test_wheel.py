"""The wheel: built, installed into an empty environment, and used from there, without the repository."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import openipu

import pytest

PIP = ("-m", "pip", "--disable-pip-version-check")


def run(*command, cwd=None):
    """What a command prints. Nothing of this process, and nothing of the repository, can be imported by it."""
    hidden = ("PYTHONPATH", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    # The tool that builds the wheel comes from the same place as everything else.
    index = [sys.executable, *PIP, "download", "--quiet", "--no-deps", "--dest", folder, "hatchling"]
    if subprocess.run(index, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached, so nothing can be installed")
    source = Path(__file__).parents[2]
    run(sys.executable, *PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
    (built,) = folder.glob("openipu-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The commands of an environment that has the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", *PIP, "install", "--quiet", wheel, cwd=folder)
    return folder / "bin"


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel, repository):
    source = repository / "src"
    files = {
        str(path.relative_to(source))
        for path in (source / "openipu").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == files
    assert {"openipu/py.typed", "openipu/engine/report/templates/report.html"} <= inside


@pytest.mark.slow
def test_it_works_in_a_clean_environment(installed, tmp_path):
    command, python = installed / "openipu", installed / "python"
    assert run(command, "--version", cwd=tmp_path).split()[-1] == openipu.__version__
    about = json.loads(run(command, "info", "--json", cwd=tmp_path))
    assert about["OpenIPU"] == openipu.__version__
    assert about["Keras backend"] == "jax"
    assert "problem" not in about["devices"]
    where = run(python, "-c", "import openipu; print(openipu.__file__)", cwd=tmp_path)
    assert str(installed.parent) in where
    small = ("--samples", "300", "--epochs", "1", "--batch-size", "10", "--no-compare", "--profile", "out")
    assert "accuracy" in run(command, "mnist", *small, cwd=tmp_path)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "The tutorial CNN" in page
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
