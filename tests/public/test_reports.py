"""The ways to ask for a report, and `openipu report`."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openipu as ipu
from openipu.cli import report as command
from openipu.engine.facts.values import Report
from openipu.engine.report import files
from openipu.ipu_run_config import IPURunConfig, RunConfig
from openipu.settings.frozen import report_folder, without_effect

import keras
import numpy as np
import pytest
from rich.console import Console

SCRIPT = Path(__file__).parents[1] / "support" / "reported.py"


def start(end: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), end],
        env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(folder: Path, found: Callable[[Report], bool]) -> Report:
    """The first report in a folder of which `found` is true. Every one on the way there is whole."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (folder / files.JSON).exists() and found(report := files.read(folder)):
            return report
        time.sleep(0.05)
    raise AssertionError("there was no such report")


def assert_whole(folder: Path, words: str) -> None:
    """All files of the report are complete, and the page says these words."""
    files.read(folder)
    json.loads((folder / files.TRACE).read_text())
    page = (folder / files.PAGE).read_text()
    assert page.endswith("</html>")
    assert words in page


def test_an_environment_variable_asks_for_a_report_on_a_script(tmp_path):
    with start("error", OPENIPU_REPORT=str(tmp_path / "out")) as process:
        _, said = process.communicate(timeout=120)
    assert "RuntimeError: no more" in said
    report = files.read(tmp_path / "out")
    assert (report.failure, report.ended) == ("RuntimeError: no more", True)
    assert_whole(tmp_path / "out", "RuntimeError: no more")
    [run] = report.runs
    assert (run.name, run.failure, run.launches) == ("fit", "RuntimeError: no more", 4)


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_from_outside_leaves_what_was_known(tmp_path, way):
    engine = json.dumps({"autoReport.directory": str(tmp_path / "out")})
    with start("wait", POPLAR_ENGINE_OPTIONS=engine) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for(tmp_path / "out", lambda report: report.runs[0].launches == 4)
        process.send_signal(way)
        process.communicate(timeout=60)
    report = files.read(tmp_path / "out")
    [run] = report.runs
    assert run.launches == 4
    if way == signal.SIGINT:
        assert (run.failure, report.ended) == ("KeyboardInterrupt: Ctrl-C was pressed", True)
    else:
        assert (run.ended, report.ended) == (False, False)
    assert_whole(tmp_path / "out", "Ctrl-C was pressed" if way == signal.SIGINT else "it was killed")


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({}, None),
        ({"autoReport.directory": "out"}, Path("out")),
        ({"autoReport.all": "true"}, Path()),
        ({"autoReport.all": "false", "autoReport.directory": "out"}, None),
        ({"autoReport.outputExecutionProfile": "true", "autoReport.directory": "out"}, Path("out")),
        ({"autoReport.executionProfileProgramRunCount": "2"}, None),
    ],
)
def test_engine_options_that_ask_for_a_report(options, folder, monkeypatch):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(options))
    assert report_folder(ipu.config.IPUConfig()) == folder
    vain = without_effect(ipu.config.IPUConfig())
    assert list(vain) == [name for name in options if name.endswith("RunCount")]


@pytest.fixture(scope="module")
def estimator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on an estimator that was trained, evaluated and asked for predictions."""
    from openipu.estimator import EstimatorSpec
    from openipu.ipu_estimator import IPUEstimator

    def model_fn(features, labels, mode):
        outputs = keras.layers.Dense(1)(features)
        loss = None if labels is None else keras.ops.mean((outputs - labels) ** 2)
        op = keras.optimizers.SGD().minimize(loss) if mode == "train" else None
        return EstimatorSpec(mode, outputs, loss, op, eval_metric_ops={})

    folder = tmp_path_factory.mktemp("estimator")
    config = RunConfig(IPURunConfig(4), save_summary_steps=None, report_dir=folder / "out")
    one = IPUEstimator(model_fn, folder / "model", config.replace(tf_random_seed=1))
    x = np.ones((16, 4), "float32")
    one.train(lambda: ipu.data.repeat(x, x[:, :1], batch_size=8), steps=8)
    one.evaluate(lambda: ipu.data.repeat(x, x[:, :1], batch_size=8), steps=4)
    list(one.predict(lambda: (x[i : i + 8] for i in (0, 8))))
    return folder / "out"


def test_estimators_fill_the_same_facts(estimator):
    report = files.read(estimator)
    train, evaluate, predict = report.runs
    assert [run.name for run in report.runs] == ["train", "evaluate", "predict"]
    assert (train.model, train.launches, train.steps, train.samples) == ("model_fn", 2, 8, 64)
    assert [logged.step for logged in train.logged] == [4, 8]
    assert (evaluate.launches, predict.samples) == (1, 16)
    assert [(saved.step, saved.bytes > 0) for saved in train.checkpoints] == [(8, True)]
    assert report.ended


def console() -> Console:
    return Console(record=True, width=200, color_system=None, file=io.StringIO())


def test_the_summary_in_the_terminal(estimator):
    shown = console()
    command.show(estimator, shown)
    text = shown.export_text()
    for words in ("train of model_fn", "throughput", "where the time went", "devices compute", str(estimator)):
        assert words in text


def test_two_reports_side_by_side(estimator, tmp_path):
    report = files.read(estimator)
    train = report.runs[0]
    slower = replace(
        train,
        timed=replace(train.timed, seconds=2 * train.timed.seconds),
        place=replace(train.place, replicas=2),
        failure="[bold]words[/]",
    )
    files.write(tmp_path / "b", replace(report, runs=(slower,)))
    shown = console()
    command.compare(estimator, tmp_path / "b", shown)
    text = shown.export_text()
    assert "+100.0 %, worse" in text
    assert "-50.0 %, worse" in text
    assert "effective batch 8 (8 x 1 x 1) -> 2 replicas" in text
    assert f"predict of model_fn: only in {estimator}" in text
    printed = subprocess.run(
        [sys.executable, "-m", "openipu", "report", str(estimator), str(tmp_path / "b")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "+100.0 %, worse" in printed.stdout
    shown = console()
    command.show(tmp_path / "b", shown)
    assert "It failed: [bold]words[/]" in shown.export_text()


def test_a_folder_without_a_report_is_an_error_of_one_line(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "openipu", "report", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert f"There is no report.json in {tmp_path}" in result.stderr.replace("\n", "")
