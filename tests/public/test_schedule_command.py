"""Pictures of schedules, and `openipu schedule` on the command line."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

from openipu.schedules import (
    GPipe,
    Grouped,
    svg,
)

import pytest
from hypothesis import given, settings

from tables import tables

# Pictures and the command line


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@given(tables())
@settings(max_examples=20)
def test_a_picture_shows_every_action_once_and_none_overlap(table):
    root = ET.fromstring(svg(table, "A <title> & more"))
    space = {"s": "http://www.w3.org/2000/svg"}
    shown = {}
    for group in root.iterfind("s:g[s:title]", space):
        box = group.find("s:rect", space)
        shown[group.find("s:title", space).text] = (
            float(box.get("y")),
            float(box.get("x")),
            float(box.get("x")) + float(box.get("width")),
        )
    assert set(shown) == {f"{action}, tick {tick}" for tick, _, action in table.actions()}
    boxes = sorted(shown.values())
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(boxes))
    assert max(box[2] for box in boxes) < float(root.get("width"))


def test_a_picture_of_a_long_table_numbers_some_ticks():
    root = ET.fromstring(svg(GPipe().table(2, 400)))
    labels = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "s"]
    assert labels == [str(tick) for tick in range(0, 802, 10)]


def test_the_pictures_in_the_documentation_are_current(repository):
    assert (repository / "docs" / "schedule-grouped.svg").read_text() == svg(Grouped().table(4, 8), "Grouped")
    assert (repository / "docs" / "schedule-two-stages.svg").read_text() == svg(Grouped().table(2, 4), "Grouped")


def test_the_command_prints_the_table_and_its_costs(tmp_path):
    picture = tmp_path / "grouped.svg"
    result = command(
        "-m", "openipu", "schedule", "Grouped", "--stages", "2", "--micro-batches", "4", "--svg", str(picture)
    )
    assert result.returncode == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[:3] == str(Grouped().table(2, 4)).splitlines()
    assert "7 ticks, time 15 (a forward takes 1, a backward 2), bubble 20.0 %" in lines
    assert [line.split() for line in lines[-4:-2]] == [["0", "0", "80", "%", "3", "2"], ["1", "1", "80", "%", "1", "0"]]
    assert "\x1b" not in result.stdout, "no colours in a pipe"
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert picture.read_text() == svg(Grouped().table(2, 4), "Grouped")


def test_the_command_takes_devices_and_inference():
    program = "import sys; from openipu.cli import app; app(['schedule', *sys.argv[1:]])"
    sizes = ("--stages", "4", "--micro-batches", "4", "--devices", "0,1,1,0", "--inference")
    result = command("-c", program, "interleaved", *sizes, FORCE_COLOR="1", TERM="xterm-256color")
    assert result.returncode == 0, result.stderr
    assert "\x1b[38;5;117mF0:0\x1b[0m" in result.stdout
    assert "stash" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gruped",), "Error: There is no schedule 'gruped'"),
        (("grouped", "--stages", "4", "--micro-batches", "12"), "Use 8 or 16"),
        (("gpipe", "--devices", "0,x"), "Error: --devices 0,x is not a list of devices."),
        (("gpipe", "--devices", "0,1,2"), "3 devices are given for 2 stages: [0, 1, 2]"),
        (("gpipe", "--svg", "no/such/folder/picture.svg"), "No such file or directory: 'no/such/folder/picture.svg'"),
        (("interleaved", "--devices", "0,0"), "some of the 2 stages share one: [0, 0]"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    result = command("-m", "openipu", "schedule", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_loads_nothing_heavy():
    code = (
        "import sys; from openipu.cli.schedule import Options, run; run(Options('Grouped', 2, 4, None, True, None));"
        "print([name for name in ('keras', 'jax', 'numpy', 'tensorflow') if name in sys.modules])"
    )
    result = command("-c", code)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr
