"""The stages of a pipeline, timed one by one for a report."""

from __future__ import annotations

from typing import Any

import openipu as ipu
from openipu.engine.facts.values import FORMAT, Report, RunFacts, Versions
from openipu.engine.pipeline.runtime import stage_timing
from openipu.engine.report import files
from openipu.engine.report.page import page
from openipu.engine.report.stages import costs_of, in_flight, pipeline_times, stage_advice
from openipu.engine.schedule.actions import Kind
from openipu.engine.schedule.measures import bubble, total_time
from openipu.engine.schedule.schedules import Grouped
from openipu.engine.schedule.table_arrays import NONE, compile_table

import keras
import numpy as np
import pytest

from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


def pipelined(wide: int, devices: int = 2) -> keras.Model:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        layers = [keras.layers.Dense(wide, "relu"), keras.layers.Dense(wide, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers], name="net")
        model.set_pipeline_stage_assignment([0, 0, 1])
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        model.compile("adam", "mse", steps_per_execution=4)
    return model


def reported(model: keras.Model, folder: Any, call: str = "fit") -> RunFacts:
    x = np.random.default_rng(0).random((32 * 8, 8), "float32")
    with ipu.report(folder):
        given = (x, x[:, :1]) if call == "fit" else (x,)
        getattr(model, call)(*given, batch_size=32, verbose=0)
    [run] = files.read(folder).runs
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFacts:
    return reported(pipelined(512), tmp_path_factory.mktemp("timed"))


def test_the_larger_stage_takes_longer(run):
    assert run.warnings == ()
    measured = run.pipeline.measured
    assert measured.forward[0] > 2 * measured.forward[1]
    assert measured.backward[0] > 2 * measured.backward[1]
    assert measured.update > 0
    assert measured.kept[0] >= 32 * 512 * 4, "what the second layer has received"
    assert measured.kept[1] >= 32 * 512 * 4, "what the stage has received"


def test_the_measured_schedule_is_the_planned_one_with_other_times(run):
    measured, table = run.pipeline.measured, Grouped().table(2, 4)
    costs = costs_of(measured)
    assert measured.bubble == pytest.approx(bubble(table, costs))
    assert measured.bubble > run.pipeline.bubble, "one of the stages does nearly everything"
    assert measured.seconds == pytest.approx(total_time(table, costs) + measured.update)
    assert costs.balance() < 0.8
    assert any("Stage 0 does" in words for words in stage_advice(run))
    names = [name for name, _ in pipeline_times(run)]
    assert names[:3] == ["bubble, planned", "bubble, by measured times", "stage balance"]
    assert "an update, in the run" in names


def test_timing_is_not_a_part_of_the_run(run):
    assert [program.name for program in run.programs] == ["net_train"]
    assert run.launches == 2
    assert run.parts.reporting > 0


def test_the_page_draws_both_schedules(run):
    text = page(Report(FORMAT, "t", Versions("1", "2", "3", "4"), 0.0, True, None, (run,)))
    assert text.count('class="openipu-schedule"') == 2
    assert "<title>B1:2, tick 4</title>" in text
    assert "<title>B1:2, tick 4, " in text, "the measured one says how long"
    assert "timed alone on its device after the run" in text
    assert "Activations in flight" in text
    assert in_flight(run.pipeline) == [(3, 3 * run.pipeline.measured.kept[0]), (1, run.pipeline.measured.kept[1])]


@pytest.mark.slow
def test_replicas_and_inference_are_timed_too(tmp_path):
    model = pipelined(64, devices=4)
    fit = reported(model, tmp_path / "a")
    predict = reported(model, tmp_path / "b", "predict")
    assert fit.place.replicas == 2
    assert (fit.warnings, predict.warnings) == ((), ())
    assert len(fit.pipeline.measured.backward) == 2
    assert (predict.pipeline.measured.backward, predict.pipeline.measured.update) == ((), 0.0)
    assert all(seconds > 0 for seconds in predict.pipeline.measured.forward)


def test_rows_have_one_action_and_no_exchange_or_the_other_way_round():
    table = compile_table(Grouped().table(3, 6))
    for kind in Kind:
        for stage in range(3):
            rows = stage_timing._rows(table, kind, stage)
            mine, other = (rows.forward, rows.backward) if kind is Kind.FORWARD else (rows.backward, rows.forward)
            assert (mine.micro_batch[:, stage] != NONE).all()
            assert (mine.micro_batch != NONE).sum() == len(mine.micro_batch) == stage_timing.ROWS
            assert (other.micro_batch == NONE).all()
            assert (rows.exchange == 0).all()
    idle = stage_timing._rows(table, Kind.FORWARD, None)
    assert (idle.forward.micro_batch == NONE).all()
    assert (idle.backward.micro_batch == NONE).all()
    assert {len(table.exchanges[number]) for number in idle.exchange} == {2}, "a device in the middle sends both ways"


@pytest.mark.parametrize("turn", [3e-6, 2e-4, 0.02, 10.0])
def test_the_time_of_a_launch_does_not_count(monkeypatch, turn):
    now = 0.0

    def run(turns: int) -> None:
        nonlocal now
        now += 1e-3 + turns * turn

    monkeypatch.setattr(stage_timing.time, "perf_counter", lambda: now)
    assert stage_timing.per_turn(run) == pytest.approx(turn, rel=1e-3), "a launch takes a millisecond"
