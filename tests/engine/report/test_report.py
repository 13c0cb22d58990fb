"""The facts of real runs, and the files that are made from them."""

from __future__ import annotations

import json
import time
from dataclasses import astuple, replace
from html.parser import HTMLParser
from pathlib import Path

import openipu as ipu
from openipu.engine.facts import calls
from openipu.engine.facts.recorder import RunRecorder
from openipu.engine.facts.values import PipelineFacts, Report, StageFacts
from openipu.engine.report import files
from openipu.engine.report.page import page
from openipu.engine.report.summary import advice, measures

import keras
import numpy as np
import pytest

from zoo import KERAS_WARNINGS

EVIL = "<script>alert(1)</script>"


def configure(devices: int = 1) -> ipu.ipu_strategy.IPUStrategy:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategy()


def make_model(name: str = "net", steps: int = 4) -> keras.Model:
    with configure().scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)], name=name)
        model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=steps)
    return model


def data(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).random((rows, 8), "float32")
    return x, x.sum(1, keepdims=True)


class Slow(keras.callbacks.Callback):
    """Takes its time after each execution."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.calls = seconds, 0
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        del batch
        float(logs["loss"])  # waits for the execution
        self.ends.append(time.perf_counter())
        self.calls += 1
        time.sleep(self.seconds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a `fit` with validation, an `evaluate` and a `predict`."""
    model, (x, y) = make_model(), data()
    folder = tmp_path_factory.mktemp("reports") / "out"
    with ipu.report(folder):
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y))
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return files.read(folder)


def test_every_call_is_a_run_and_what_is_inside_another_belongs_to_it(report):
    assert [run.name for run in report.runs] == ["fit", "evaluate", "predict"]
    assert report.ended
    fit, evaluate, predict = report.runs
    assert (fit.launches, fit.steps, fit.samples) == (6, 24, 3 * 64), "validation is not counted"
    assert (evaluate.launches, evaluate.samples, predict.samples) == (1, 64, 64)
    assert [(program.name, program.own) for program in fit.programs] == [("net_train", True), ("net_test", False)]
    assert fit.place is not None
    assert (fit.place.replicas, fit.place.batch_size, fit.place.effective_batch) == (1, 8, 8)
    assert all(run.ended and run.failure is None for run in report.runs)


def test_the_parts_of_the_time_add_up_to_the_whole(report):
    for run in report.runs:
        assert sum(astuple(run.parts)) == pytest.approx(run.seconds, rel=0.05)
        assert run.parts.device > 0
        assert run.parts.compiling == pytest.approx(
            sum(program.seconds for program in run.programs if not program.before), rel=0.05
        )
    assert report.runs[0].first_step_seconds < report.runs[0].seconds


def test_a_second_run_of_a_program_traces_nothing(tmp_path):
    traced = []

    class Seen(keras.layers.Layer):
        def call(self, x):
            traced.append(x.shape)
            return x

    with configure().scope():
        model = keras.Sequential([keras.Input((8,)), Seen(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
    with ipu.report(tmp_path):
        model.fit(*data(), batch_size=8, verbose=0)
        before = len(traced)
        model.fit(*data(), batch_size=8, verbose=0)
    first, second = (run.programs[0] for run in files.read(tmp_path).runs)
    assert len(traced) == before
    assert (first.before, second.before) == (False, True)
    assert first.counted is not None
    assert second == replace(first, before=True)


def test_losses_are_those_that_callbacks_see(tmp_path):
    model, (x, y) = make_model(), data()
    seen = []
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(float(logs["loss"])))
    with ipu.report(tmp_path):
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[see])
    [run] = files.read(tmp_path).runs
    assert [logged.step for logged in run.logged] == [4, 8, 12, 16]
    assert [logged.values["loss"] for logged in run.logged] == pytest.approx(seen)


def test_numbers_that_json_lacks_are_none(tmp_path):
    model, (x, y) = make_model(), data()
    with ipu.report(tmp_path):
        model.fit(x * np.float32("nan"), y, batch_size=8, verbose=0)
    assert files.read(tmp_path).runs[0].logged[0].values["loss"] is None
    assert "NaN" not in (tmp_path / "report.json").read_text()


def test_known_waits_are_found_again_and_throughput_is_that_of_a_stopwatch(tmp_path):
    model, (x, y) = make_model(), data(64)
    model.fit(x, y, batch_size=8, verbose=0)  # compiles
    slow = Slow(0.03)
    began = time.perf_counter()
    with ipu.report(tmp_path):
        model.fit(x, y, batch_size=8, epochs=10, verbose=0, callbacks=[slow])
    elapsed = time.perf_counter() - began
    [run] = files.read(tmp_path).runs
    slept = slow.calls * slow.seconds
    assert 0.7 * slept <= run.parts.callbacks <= elapsed, "the end of an execution is noticed within 5 ms or so"
    assert any("wait for callbacks" in words for words in advice(run))
    assert run.programs[0].before
    by_name = {measure.name: measure.value for measure in measures(run)}
    between = slow.ends[-1] - slow.ends[0]  # of the first and the last of the 20 executions of 32 samples
    assert by_name["throughput"] == pytest.approx(19 * 32 / between, rel=0.05)
    assert by_name["time per step"] == pytest.approx(1e6 * between / (19 * 4), rel=0.05)


def test_a_step_is_timed_without_the_calls_inside(tmp_path):
    model, (x, y) = make_model(), data()
    wait = keras.callbacks.LambdaCallback(on_test_end=lambda _: time.sleep(0.1))
    model.fit(x, y, batch_size=8, verbose=0, validation_data=(x, y))  # compiles
    with ipu.report(tmp_path):
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y), callbacks=[wait])
    [run] = files.read(tmp_path).runs
    assert run.parts.callbacks >= 3 * 0.1
    between = run.executions[-1].end - run.executions[0].end
    assert run.timed.seconds <= between - 2 * 0.1, "the host slept twice between the first and the last execution"
    assert run.timed.steps == 20


def test_devices_that_wait_for_data_are_found_out(tmp_path):
    model, (x, y) = make_model(), data(64)

    def batches():
        for i in range(0, 64, 8):
            time.sleep(0.02)
            yield x[i : i + 8], y[i : i + 8]

    with ipu.report(tmp_path):
        model.fit(batches(), shuffle=False, verbose=0)
    [run] = files.read(tmp_path).runs
    assert run.feed_seconds >= 8 * 0.02
    assert run.parts.feed > 0.5 * run.feed_seconds
    assert any("wait for data" in words for words in advice(run))


def test_nothing_is_recorded_unless_somebody_asks():
    model, (x, y) = make_model(), data()
    seen = []
    see = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(calls.current()))
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[see])
    assert seen == [None]
    assert calls.doing("feed") is calls.doing("trace"), "the same object that does nothing"


def test_a_run_that_fails_leaves_a_report_that_says_so(tmp_path):
    model, (x, y) = make_model(), data()

    def fail(*_: object) -> None:
        raise KeyError(EVIL)

    with pytest.raises(KeyError):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[
            ipu.callbacks.Report(tmp_path), keras.callbacks.LambdaCallback(on_epoch_end=fail)
        ])  # fmt: skip
    found = files.read(tmp_path)
    assert found.runs[0].failure == f"KeyError: '{EVIL}'"
    assert (found.runs[0].launches, found.ended) == (2, True)
    assert EVIL not in (tmp_path / "report.html").read_text()


def test_one_callback_reports_on_all_its_calls_and_only_on_them(tmp_path):
    model, (x, y) = make_model(), data()
    callback = ipu.callbacks.Report(tmp_path)
    model.fit(x, y, verbose=0, callbacks=[callback])
    model.fit(x, y, verbose=0)
    model.evaluate(x, y, verbose=0, callbacks=[callback])
    assert [run.name for run in files.read(tmp_path).runs] == ["fit", "evaluate"]
    assert not calls.recordings


def test_calls_of_single_steps_are_added_up(tmp_path):
    model, (x, y) = make_model(), data()
    double = lambda value: value * 2  # noqa: E731
    with ipu.report(tmp_path):
        for _ in range(3):
            model.train_on_batch(x, y)
            model._ipu_session.strategy.run(double, args=[np.ones(4, "float32")])
    found = {run.name: run for run in files.read(tmp_path).runs}
    assert set(found) == {"train_on_batch", "run"}
    assert [run.launches for run in found.values()] == [3, 3]


def test_devices_compute_while_asynchronous_callbacks_run(tmp_path):
    model, (x, y) = make_model(steps=8), data()
    model.set_asynchronous_callbacks(True)
    model.fit(x, y, batch_size=8, verbose=0)
    slow = Slow(0.02)
    with ipu.report(tmp_path):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[slow])
    [run] = files.read(tmp_path).runs
    assert slow.calls == 8
    assert sum(astuple(run.parts)) == pytest.approx(run.seconds, rel=0.05)
    assert run.parts.device + run.parts.callbacks >= 8 * slow.seconds
    assert run.executions[0].end - run.executions[0].start > 0


def test_a_launch_that_fails_does_not_keep_the_devices_busy():
    run = RunRecorder("run", "fn")
    run.enter()
    run.launching()
    run.leave()
    run.enter()
    time.sleep(0.05)
    run.leave()
    facts = run.facts()
    assert facts.parts.other >= 0.05
    assert facts.parts.device < 0.05


@KERAS_WARNINGS
def test_the_plan_of_a_pipeline(tmp_path):
    with configure(2).scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, name="wide"), keras.layers.Dense(1, name="<script>")]
        )
        model.set_pipeline_stage_assignment([0, 1])
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        model.compile("sgd", "mse", steps_per_execution=4)
    with ipu.report(tmp_path):
        model.fit(*data(), batch_size=8, verbose=0)
    [run] = files.read(tmp_path).runs
    plan = run.pipeline
    assert plan is not None
    assert [(stage.device, stage.layers, stage.weights) for stage in plan.stages] == [
        (0, ("wide",), 8 * 16 + 16), (1, ("<script>",), 16 + 1)
    ]  # fmt: skip
    grouped = ipu.schedules.Grouped().table(2, 4)
    assert (plan.schedule, plan.micro_batches, plan.ticks) == ("Grouped", 4, grouped.ticks)
    assert plan.bubble == ipu.schedules.bubble(grouped)
    assert "B1:2,F1:3" in plan.table[1]
    html = (tmp_path / "report.html").read_text()
    assert "<title>B1:2, tick 4</title>" in html, "hover shows the action"
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


def test_memory_and_operations_are_those_of_the_program(report):
    model, (x, y) = make_model(), data()
    model.fit(x, y, batch_size=8, verbose=0)
    [program] = model.train_function.loop.programs.values()
    analysis = program.compiled.memory_analysis()
    facts = report.runs[0].programs[0]
    assert facts.memory.arguments == analysis.argument_size_in_bytes
    assert facts.memory.temporary == analysis.temp_size_in_bytes
    products = 2 * 8 * (8 * 16 + 16)  # of the forward; the backward has those of the weights, and one for the inputs
    assert facts.operations > 2 * products + 2 * 8 * 16


# --- files


def test_the_schema_is_that_of_the_facts(folder):
    assert json.loads(files.SCHEMA.read_text()) == files.schema(), (
        "run: python -m openipu.engine.report > .../report.schema.json"
    )
    text = (folder / "report.json").read_bytes()
    assert files.to_json(files.from_json(text, "report.json")) == text
    broken = json.loads(text)
    broken["runs"][0]["steps"] = "many"
    with pytest.raises(ValueError, match=r"not a report of this version \(runs\.0\.steps"):
        files.from_json(json.dumps(broken).encode(), "report.json")


def test_the_trace_has_every_kind_of_event_inside_its_run(folder, report):
    trace = json.loads((folder / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"trace", "lower", "compile", "execution", "call"} <= {event["cat"] for event in spans}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    ends = {i: run.began - report.runs[0].began + run.seconds for i, run in enumerate(report.runs)}
    assert all(event["ts"] + event["dur"] <= 1e6 * ends[event["pid"]] + 1e5 for event in spans)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"fit of net", "evaluate of net", "predict of net"}


class Page(HTMLParser):
    """The elements of a page, and whether they are closed in order."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def with_evil_names(report: Report) -> Report:
    run = report.runs[0]
    plan = PipelineFacts(
        EVIL, (StageFacts(0, (EVIL,), 1),), 1, 2, 0.0, (1,), True, ("F0:0 B0:0",)
    )  # fmt: skip
    programs = tuple(replace(program, name=EVIL) for program in run.programs)
    logged = tuple(replace(logged, values={EVIL: 1.0}) for logged in run.logged)
    evil = replace(
        run, name=EVIL, model=EVIL, programs=programs, logged=logged, pipeline=plan, failure=EVIL, warnings=(EVIL,)
    )
    return replace(report, title=EVIL, failure=EVIL, runs=(evil,))


def test_names_from_users_are_text(report):
    text = page(with_evil_names(report))
    found = Page(text)
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 10
    assert not found.open
    assert "script" not in {tag for tag, _ in found.elements}


def test_the_page_needs_nothing_else(folder):
    found = Page((folder / "report.html").read_text())
    assert not found.open
    tags = [tag for tag, _ in found.elements]
    assert not {"script", "link", "img", "iframe", "object"} & set(tags)
    assert not any("src" in attributes for _, attributes in found.elements)
    assert "url(" not in (folder / "report.html").read_text()
    headings = (folder / "report.html").read_text()
    for heading in ("Summary", "Compile", "Training", "Feeds", "Memory"):
        assert f"<h3>{heading}</h3>" in headings
    assert all("aria-label" in attributes for tag, attributes in found.elements if attributes.get("role") == "img")


def test_a_page_of_many_layers_stays_small(report):
    run = report.runs[0]
    stages = tuple(StageFacts(i, tuple(f"a_rather_long_layer_name_{i}_{n}" for n in range(500)), 1) for i in range(4))
    plan = PipelineFacts("Grouped", stages, 8, 11, 0.1, (1,) * 4, True, ())
    many = replace(report, runs=(replace(run, pipeline=plan),) * 8)
    assert len(page(many).encode()) < 5_000_000


def test_a_folder_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    model, (x, y) = make_model(), data()
    (tmp_path / "file").write_text("")
    model.fit(x, y, verbose=0, callbacks=[ipu.callbacks.Report(tmp_path / "file" / "out")])
    assert "The report could not be written" in caplog.text
    with pytest.raises(OSError, match="file"), ipu.report(tmp_path / "file" / "out"):
        pass
