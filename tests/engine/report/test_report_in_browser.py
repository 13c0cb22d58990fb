"""The page of a report in a real browser: Chromium, without a window."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu.engine.facts.values import Report
from openipu.engine.report import files
from openipu.engine.report.page import page as text_of_page

import keras
import numpy as np
import pytest

from zoo import KERAS_WARNINGS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no browser is installed (Debian: apt-get install chromium)", allow_module_level=True)
driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make setup)")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed (make setup)")

pytestmark = KERAS_WARNINGS
EVIL = "<img src=x onerror=alert(1)>"
WORST = ("serious", "critical")


def pipelined(make: Callable[[], keras.Model]) -> keras.Model:
    """A model of two stages that runs one update per execution."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make()
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        model.compile("sgd", "mse", steps_per_execution=4)
    return model


def small() -> keras.Model:
    """A model of two layers, one of which has a bad name."""
    layers = [keras.Input((8,)), keras.layers.Dense(16, name="wide"), keras.layers.Dense(1, name=EVIL)]
    model = keras.Sequential(layers, name="net")
    model.set_pipeline_stage_assignment([0, 1])
    return model


def large() -> keras.Model:
    """A model of 2,000 layers with names. In one long chain, they would be too many for Keras."""
    x = inputs = keras.Input((8,))
    names = map("a_rather_long_name_of_a_layer_{}".format, itertools.count())
    for stage in range(2):
        with ipu.keras.PipelineStage(stage):
            ends = [reduce(lambda y, _: keras.layers.Identity(name=next(names))(y), range(20), x) for _ in range(50)]
            x = keras.layers.Average()(ends)
            if stage == 1:
                x = keras.layers.Dense(1)(x)
    return keras.Model(inputs, x, name="large")


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).random((64, 8), "float32")
    return x, x.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a long `fit` of a pipeline, one of whose layers has a bad name, and on a short one that fails."""
    model = pipelined(small)
    folder = tmp_path_factory.mktemp("browser") / "out"

    def fail(epoch: int, _: object) -> None:
        if epoch == 1:
            raise KeyError(EVIL)

    with ipu.report(folder, f"A net with {EVIL}"):
        model.fit(*data(), batch_size=8, epochs=40, verbose=0)
        with pytest.raises(KeyError):
            model.fit(
                *data(), batch_size=8, epochs=3, verbose=0,
                callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=fail)],
            )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return files.read(folder)


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    assert folder.exists(), "runs come first, because the driver of the browser has an event loop in this thread"
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Any, folder: Path, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """The page of a report, opened from disk. Nothing else is loaded, and nothing goes wrong meanwhile."""
    path = folder / files.PAGE
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(path.as_uri())
        yield page
    finally:
        context.close()
    assert not said
    assert asked == [path.as_uri()]


def test_the_pictures_have_what_the_facts_say(browser, folder, report):
    run, failed = report.runs
    assert run.pipeline is not None
    actions = sum(row.count(":") for row in run.pipeline.table)
    with opened(browser, folder) as page:
        first, second = page.locator("main > section").all()
        assert first.locator("svg.openipu-schedule g.n").count() == actions
        shown = first.get_by_role("list").first.get_by_role("listitem").all_text_contents()
        assert any(words.startswith("devices compute: ") for words in shown)
        pieces = first.locator("svg.bar").first.locator("g > rect")
        assert pieces.count() == len(shown)
        widths = [piece.bounding_box()["width"] for piece in pieces.all()]
        assert sum(widths) == pytest.approx(first.locator("svg.bar").first.bounding_box()["width"], rel=0.01)
        loss = first.locator("figure").filter(has_text="loss").first
        assert loss.locator("path.line").count() == 1
        assert loss.locator("circle.dot").count() == 0
        assert len(run.logged) > 60
        assert 30 <= loss.locator("circle.hit").count() <= 60
        dots = second.locator("figure").filter(has_text="loss").first.locator("circle.dot")
        assert dots.count() == len(failed.logged)
        assert second.get_by_text(f"It failed: KeyError: '{EVIL}'").is_visible()


def test_a_pointer_on_an_action_shows_its_name(browser, folder):
    with opened(browser, folder) as page:
        action = page.locator("svg.openipu-schedule g.n").filter(has_text="B1:2, tick").first
        action.hover()  # fails if something else is above it
        assert action.evaluate("one => one.matches(':hover')")
        piece = page.locator("svg.bar g").first
        piece.hover()
        assert piece.locator("title").text_content()
        point = page.locator("svg.chart circle.hit").nth(5)
        before = point.evaluate("one => getComputedStyle(one).fill")
        point.hover()
        assert point.evaluate("one => getComputedStyle(one).fill") != before
        assert "step " in point.locator("title").text_content()


def test_names_from_users_are_text(browser, folder):
    with opened(browser, folder) as page:
        assert page.get_by_role("heading", level=1).inner_text() == f"A net with {EVIL}"
        assert page.title() == f"Report: A net with {EVIL}"
        assert page.locator("td").filter(has_text=EVIL).first.is_visible()
        assert page.locator("img, script").count() == 0


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("dark", 360),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("light", 360), ("light", 1280), ("dark", 1280))),
    ],
)
def test_everybody_can_read_it(browser, folder, scheme, width):
    """On a telephone, too, and without a rule of axe-core that is seriously broken."""
    with opened(browser, folder, width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "only tables and pictures scroll"
        wide = page.locator(".wide, figure").evaluate_all(
            "all => all.filter(one => one.scrollWidth > one.clientWidth && one.tabIndex < 0).length"
        )
        assert wide == 0, "what scrolls can be reached with the keyboard"
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")
        broken = axe.Axe().run(page).response["violations"]
        assert [(rule["id"], rule["nodes"][0]["html"]) for rule in broken if rule["impact"] in WORST] == []


def test_the_keyboard_is_enough(browser, folder):
    with opened(browser, folder) as page:
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            one = page.evaluate_handle("document.activeElement")
            name = one.evaluate("one => one.tagName")
            if name == "BODY":
                break
            reached.add(name)
            assert one.evaluate("one => getComputedStyle(one).outlineStyle") == "solid", "it shows where one is"
            if name == "SUMMARY" and not one.evaluate("one => one.parentElement.open"):
                page.keyboard.press("Enter")
        assert reached >= {"A", "DIV", "FIGURE", "SUMMARY", "PRE"}
        assert "B1:2" in page.locator("pre").first.inner_text()
        assert page.locator("svg:not([role=img][aria-label])").count() == 0
        assert page.locator("table:not(:has(caption)), th:not([scope])").count() == 0


@pytest.mark.slow
def test_a_model_of_many_layers_opens_quickly(browser, tmp_path):
    model = pipelined(large)
    with ipu.report(tmp_path / "large"):
        model.fit(*data(), batch_size=8, verbose=0)
    page = tmp_path / "large" / files.PAGE
    assert page.stat().st_size < 5_000_000
    names = {layer.name for layer in model.layers if layer.name.startswith("a_rather_long_name")}
    assert len(names) == 2000
    assert names <= set(re.findall(r"\ba_\w+", page.read_text()))
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / files.PAGE).write_text("<!doctype html><title>blank</title>")

    def seconds(folder: Path) -> float:
        began = time.perf_counter()
        with opened(browser, folder) as page:
            page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
            return time.perf_counter() - began

    seconds(tmp_path / "blank")
    assert min(seconds(tmp_path / "large") for _ in range(3)) - min(seconds(tmp_path / "blank") for _ in range(3)) < 2


@pytest.mark.slow
def test_a_page_with_all_runs_that_fit_opens_as_well(browser, report, tmp_path):
    (tmp_path / files.PAGE).write_text(text_of_page(replace(report, runs=report.runs[:1] * 64)))
    with opened(browser, tmp_path, 360) as page:
        assert page.locator("main > section").count() == 64
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
