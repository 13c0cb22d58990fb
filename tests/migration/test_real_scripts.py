"""Whole scripts for TensorFlow and IPUs: migrated without anything left for a person, then run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ipu_scripts
from migrated import rewritten

LAUNCH = ("-m", "openipu", "launch", "--num-instances", "2", "--num-replicas", "2", "--only-output-from-instance", "0")


def run(source: str, tmp_path: Path, *launcher: str) -> dict[str, list[str]]:
    """Migrate and run a script, and give the words of each line that it prints, by the first of them."""
    result = rewritten(source)
    assert result.notes == ()
    path = tmp_path / "script.py"
    path.write_text(result.new, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, *launcher, path.name], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {words[0]: words[1:] for line in done.stdout.splitlines() if (words := line.split())}


def test_no_tensorflow_is_left_where_it_is_not_needed():
    new = rewritten(ipu_scripts.PIPELINE).new
    assert "tensorflow" not in new
    assert "tf." not in new


def test_data_stays_with_tensorflow():
    new = rewritten(ipu_scripts.STRATEGY).new
    assert "return tf.cast(image, tf.float32) / 255., label" in new
    assert new.index("import openipu as ipu") < new.index("import tensorflow as tf")


def test_the_example_of_the_page_is_true(repository):
    page = (repository / "docs" / "migrate.md").read_text(encoding="utf-8")
    lines = page.partition("```diff\n")[2].partition("```")[0].splitlines(keepends=True)
    before, after = ("".join(line[1:] or "\n" for line in lines if line[0] != sign) for sign in "+-")
    assert rewritten(before).new == after


@pytest.mark.slow
def test_a_strategy_with_tf_data(tmp_path):
    assert float(run(ipu_scripts.STRATEGY, tmp_path)["accuracy"][0]) > 0.95


@pytest.mark.slow
def test_a_pipeline_with_a_layer_and_a_loss(tmp_path):
    first, last = map(float, run(ipu_scripts.PIPELINE, tmp_path)["losses"])
    assert last < 0.7 * first


@pytest.mark.slow
def test_feeds_and_a_loop(tmp_path):
    printed = run(ipu_scripts.FEEDS, tmp_path)
    assert float(printed["total"][0]) == 1 + 3 + 7 + 11 + 15 + 19 + 23
    rows = [float(word.strip("[],")) for word in printed["rows"]]
    assert rows == [3, 6, 7, 22, 11, 38, 15, 54, 19, 70, 23, 86]


@pytest.mark.slow
def test_an_estimator(tmp_path):
    printed = run(ipu_scripts.ESTIMATOR, tmp_path)
    before, after = map(float, printed["losses"])
    assert after < 0.7 * before
    assert float(printed["accuracy"][0]) > 0.9


@pytest.mark.slow
def test_two_instances(tmp_path):
    printed = run(ipu_scripts.DISTRIBUTED, tmp_path, *LAUNCH)
    assert printed["instances"] == ["2"]
    first, last = map(float, printed["losses"])
    assert last < 0.5 * first
