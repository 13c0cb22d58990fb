"""`openipu plan`, from the script to the tables and pictures."""

from __future__ import annotations

import io
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from openipu.cli.plan import Options, ScriptError, run
from openipu.engine.fit import about_to_train
from openipu.engine.plan.page import schedule_of

import pytest
from rich.console import Console

SCRIPT = Path(__file__).parents[1] / "support" / "planned.py"


def planned(tmp_path: Path, *arguments: str, **options: object) -> tuple[str, object]:
    console = Console(record=True, width=200, color_system=None, file=io.StringIO())
    given = {"devices": 4, "speed": "1GFLOP/s", **options}
    try:
        plan = run(Options(SCRIPT, (*arguments, str(tmp_path / "trained")), **given), console)
    finally:
        assert not (tmp_path / "trained").exists(), "the script goes no further than its first `fit`"
        assert about_to_train.told == []
    return console.export_text(), plan


def test_the_best_splits_of_a_script(tmp_path):
    text, plan = planned(tmp_path, memory="1GiB", link="1GB/s", output=tmp_path / "plan.html")
    assert "<net>: micro-batches of 8 samples, effective batch 64" in text, "8 samples x 4 x 2 replicas"
    assert "1 GFLOP/s (given)" in text
    assert {one.split.stages for one in plan.best} == {1, 2, 4}
    assert all(one.split.replicas * one.split.accumulation == 8 for one in plan.best)
    times = [round(one.time.total, 9) for one in plan.best]
    assert times == sorted(times)
    page = (tmp_path / "plan.html").read_text()
    assert "&lt;net&gt; on 4 devices" in page
    assert "<net>" not in page
    assert "<title>forwards and backwards: " in page


def test_stages_and_schedule_can_be_given_and_a_picture_is_drawn(tmp_path):
    text, plan = planned(
        tmp_path, stages=2, schedule="OneFOneB", effective_batch=256, output=tmp_path / "plan.svg"
    )  # fmt: skip
    assert {(one.split.stages, one.split.schedule) for one in plan.best} == {(2, "OneFOneB")}
    assert plan.best[0].split.replicas == 2
    assert plan.best[0].split.accumulation == 256 // 8 // 2
    assert "effective batch 256" in text
    bars = list(ET.parse(tmp_path / "plan.svg").getroot().iter("{http://www.w3.org/2000/svg}title"))
    assert len(bars) >= 3


def test_the_schedule_of_the_best_split_has_the_bubble_of_its_prediction(tmp_path):
    _, plan = planned(tmp_path, stages=4, link="1MB/s", effective_batch=128)
    drawn = schedule_of(plan)
    assert drawn is not None
    assert f"bubble {100 * plan.best[0].bubble:.1f} % (predicted)" in drawn


def test_without_a_speed_one_is_measured_with_the_model(tmp_path):
    text, plan = planned(tmp_path, speed=None, stages=1)
    assert "(measured here with this model)" in text
    assert plan.machine.speed > 1e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "80"}, "--memory 80 is not a positive number of B. Write it like 80GiB."),
        ({"memory": "1kB"}, "No split fits into --memory 1 kB"),
        ({"stages": 8}, "--stages is 8, but --devices is 4"),
        ({"effective_batch": 12}, "--effective-batch is 12, which is not a multiple of the script's batch size of 8"),
        ({"schedule": "Groped"}, "Did you mean 'Grouped'?"),
        ({"output": Path("plan.png")}, "has to end in .html"),
        ({"stages": 4, "schedule": "Grouped", "effective_batch": 32}, "an update has 4 micro-batches"),
    ],
)
def test_what_cannot_be_met_is_an_error(tmp_path, options, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below
        planned(tmp_path, **options)
    assert message in str(error.value)


def test_a_script_without_a_fit_or_with_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="has ended without a `fit`"):
        planned(tmp_path, "early")
    with pytest.raises(ScriptError, match="has failed before its first `fit`") as error:
        planned(tmp_path, "wrong")
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "-m", "openipu", "plan", str(SCRIPT), "--devices", "4", "--speed", "1GFLOP/s"]
    done = subprocess.run(
        [*command, "--", str(tmp_path / "trained")], capture_output=True, text=True, timeout=120, check=True
    )
    assert "bytes per" in done.stdout
    assert max(map(len, done.stdout.splitlines()[3:])) <= 80
    wrong = subprocess.run([*command, "--", "wrong"], capture_output=True, text=True, timeout=120, check=False)
    assert wrong.returncode == 1
    assert "KeyError: 'a mistake of the script'" in wrong.stderr
    short = subprocess.run(
        [*command, "--memory", "1kB", "--", "x"], capture_output=True, text=True, timeout=120, check=False
    )
    assert short.returncode == 2
    assert "No split fits into" in short.stderr.replace("\n", "")
