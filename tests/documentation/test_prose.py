"""What the pages say exists: links, names, files, commands, and tables of measurements."""

import ast
import importlib
import importlib.util
import re
import textwrap
import tomllib

from openipu.cli import app

import benchmarks.summary
import pytest
import typer.main

import prose

by_page = pytest.mark.parametrize("page", prose.PAGES, ids=prose.name)
NAME = re.compile(r"(?<![\w./-])(?:ipu|openipu)((?:\.[A-Za-z_]\w*)+)(?![\w/-])")
FILES = {"json"}
"""What follows the dot in names of files."""
FOR_THE_PROCESS = {"run", "tensorflow"}
"""Modules that change TensorFlow and Keras for the whole process when they are imported, so they are not."""
PATH = re.compile(r"(?:examples|tests|src|docs|benchmarks|mutants)/[\w./-]*")


@by_page
def test_links_lead_somewhere(page):
    for link in prose.links(page):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in prose.anchors(target), f"{prose.name(target)} has no heading for {link}"


@pytest.mark.parametrize("page", [page for page in prose.PAGES if page.parent.name != "results"], ids=prose.name)
def test_pages_begin_with_their_heading(page):
    """An edit that missed its place has left rows of a table above it more than once."""
    assert prose.text(page).lstrip().startswith("# ")


@by_page
def test_paths_exist(page):
    for token in prose.inline(page, "code_inline"):
        if PATH.fullmatch(token.content):
            assert (prose.ROOT / token.content).exists(), token.content


def resolve(dotted: str) -> None:
    """Fail unless `openipu` has this name."""
    found = importlib.import_module("openipu")
    for part in dotted.split(".")[1:]:
        if part in FOR_THE_PROCESS and found.__name__ == "openipu":
            assert importlib.util.find_spec(f"openipu.{part}")
            return
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{found.__name__}.{part}")


# The changelog also names what was removed.
@pytest.mark.parametrize("page", [page for page in prose.PAGES if page.name != "CHANGELOG.md"], ids=prose.name)
def test_names_exist(page):
    code = [token.content for token in prose.inline(page, "code_inline")]
    code += [block.text for block in prose.blocks(page, "python")]
    for dotted in {match[1] for piece in code for match in NAME.finditer(piece)}:
        if dotted.split(".")[1] not in FILES:
            resolve(dotted)


@by_page
def test_python_is_python(page):
    for block in prose.blocks(page, "python"):
        code = block.text
        try:
            ast.parse(code)
        except SyntaxError:  # a piece of a function
            ast.parse("def function():\n" + textwrap.indent(code, "    "))


def check_openipu(words: list[str]) -> None:
    """Fail unless the command and its options exist."""
    group = typer.main.get_command(app)
    if words[0].startswith("-"):
        assert words[0] in {option for parameter in group.params for option in parameter.opts} | {"--help"}
        return
    command = group.commands[words[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words[1:]:
        if word.endswith(".py") or (words[0] == "launch" and word == "openipu"):
            return  # what follows belongs to the script
        assert not word.startswith("--") or word.split("=")[0] in {*known, "--help"}, (
            f"openipu {words[0]} has no {word}"
        )


def check_python(words: list[str]) -> None:
    """Fail unless the script or the module exists, and the folder of a script knows its options."""
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
    elif words[0].startswith(("examples/", "benchmarks/", "docs/")):
        script = prose.ROOT / words[0]
        assert script.is_file(), words[0]
        source = "".join(path.read_text(encoding="utf-8") for path in script.parent.glob("*.py"))
        assert all(f'"{word}"' in source for word in words[1:] if word.startswith("--")), words


def targets() -> set[str]:
    """What `make` can make."""
    return set(re.findall(r"^([a-z-]+):", (prose.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@by_page
def test_commands_exist(page):
    for program, *words in prose.commands(page):
        if program == "openipu":
            check_openipu(words)
        elif program == "python":
            check_python(words)
        elif program == "make":
            assert {word for word in words if word.islower()} <= targets(), words


def test_the_schedule_in_the_page_is_what_the_command_prints():
    from typer.testing import CliRunner

    page = prose.ROOT / "docs" / "schedules.md"
    shown = next(block.text for block in prose.blocks(page) if block.text.startswith("$ openipu schedule"))
    command, _, output = shown.partition("\n")
    result = CliRunner().invoke(app, command.split()[2:], env={"COLUMNS": "120"})
    assert [line.rstrip() for line in result.output.splitlines()] == output.splitlines()


def test_readme_is_short():
    assert len((prose.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_supported_versions_are_those_of_the_package():
    project = tomllib.loads((prose.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = prose.text(prose.ROOT / "docs" / "reliability.md").partition("## Supported versions")[2].partition("##")[0]
    shown = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", table, re.MULTILINE))
    asked = ["python" + project["requires-python"], *project["dependencies"]]
    oldest = dict(line.split(">=") for line in asked if ">=" in line)
    assert shown == {name: oldest[name.lower()] for name in ("Python", "Keras", "JAX", "NumPy")}


def test_measured_tables_are_not_typed():
    results = prose.ROOT / "benchmarks" / "results"
    summary = (results / "summary.md").read_text(encoding="utf-8")
    assert summary == benchmarks.summary.table(), "Run `python -m benchmarks.summary`."
    assert summary in (prose.ROOT / "README.md").read_text(encoding="utf-8")
    measured = (results / "tutorial.md").read_text(encoding="utf-8").partition("\n\n")[2]
    assert measured.strip() in prose.text(prose.ROOT / "docs" / "tutorials" / "keras_step_by_step.py")


def test_launch_times_in_the_cifar10_tutorial_are_measured():
    page = prose.text(prose.ROOT / "docs" / "tutorials" / "cifar10_four_ways.py")
    for begin, name in (("two CPU cores, batches of 32", "cpu"), ("one H200, batches of 16", "h200")):
        results = (prose.ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
        table = results.partition("### cifar, batch ")[2].partition("###")[0]
        assert begin.endswith(table.split(maxsplit=1)[0])
        told = re.search(rf"^\| {begin} \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
        for steps, milliseconds in zip(("1", "epoch"), told.groups(), strict=True):
            measured = re.search(rf"^\| openipu \| {steps} \| (\d+) ", table, re.MULTILINE)
            assert float(milliseconds) == pytest.approx(int(measured[1]) / 1000, rel=0.2), f"{name}: {measured[0]}"


def test_every_name_of_the_original_in_the_table_exists():
    """Methods of models; other names are looked up by `test_names_exist`."""
    from openipu.keras.extensions import ModelExtension

    page = prose.ROOT / "docs" / "tutorials" / "from_ipu.py"
    methods = set(re.findall(r"`model\.(\w+)`", prose.text(page)))
    assert len(methods) > 10
    assert {method for method in methods if not hasattr(ModelExtension, method)} == set()
