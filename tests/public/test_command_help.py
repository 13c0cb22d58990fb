"""What the `openipu` command says about itself: examples in its help, and the completion of shells."""

import os
import re
import subprocess
import sys

from openipu.cli import app, options
from openipu.schedules import by_name

import pytest
import typer.main

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_examples_that_can_be_typed(name):
    examples = re.findall(r"^ *openipu (\S+)(.*)$", COMMANDS[name].help, re.MULTILINE)
    assert name in {command for command, _ in examples}
    for command, words in examples:
        own = words.split(".py")[0] if command in ("run", "launch") else words  # what follows belongs to the script
        known = {
            option for parameter in COMMANDS[command].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert set(re.findall(r"(?<!\S)--[\w-]+", own)) <= known


@pytest.fixture
def path(tmp_path):
    """A PATH with the command of this environment."""
    script = tmp_path / "openipu"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m openipu "$@"\n')
    script.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def test_bash_completes_commands_options_and_schedules(path):
    """The script that `--install-completion` installs, as bash calls it when somebody presses the tab key."""
    done = subprocess.run(
        ["bash", "-c", """
            eval "$(_OPENIPU_COMPLETE=source_bash openipu)"
            complete -p openipu
            press() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _openipu_completion openipu; echo "${COMPREPLY[@]}"; }
            press openipu sch
            press openipu mnist --steps
            press openipu schedule Gr
        """],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    function, *completed = done.stdout.splitlines()
    assert function.endswith("-F _openipu_completion openipu")
    assert completed == ["schedule", "--steps-per-execution", "Grouped"]
    assert done.stderr == ""


def test_every_schedule_is_completed():
    assert options.complete_schedule("") == list(options.SCHEDULES)
    assert options.complete_schedule("g") == ["Grouped", "GPipe"]
    assert [type(by_name(name)).__name__ for name in options.SCHEDULES] == list(options.SCHEDULES)
