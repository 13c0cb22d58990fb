"""`serialization_output_folder`: a folder that receives the text of every compiled program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest

from replication import configure_all
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.serialization_output_folder = str(tmp_path / "programs")
    config.configure_ipu_system()
    yield tmp_path / "programs"
    configure_all()


def names(folder: Path) -> list[str]:
    for file in folder.iterdir():
        assert file.read_text().startswith("HloModule")
    return sorted(file.name for file in folder.iterdir())


def test_the_program_of_a_function_is_written(folder):
    def double(x):
        return 2 * x

    strategy = ipu.ipu_strategy.IPUStrategy()
    strategy.run(double, (np.ones(3, "float32"),))
    assert names(folder) == ["double_0.hlo.txt"]
    strategy.run(double, (np.zeros(3, "float32"),))
    assert names(folder) == ["double_0.hlo.txt"], "it was compiled before"
    strategy.run(double, (np.ones(4, "float32"),))
    assert names(folder) == ["double_0.hlo.txt", "double_1.hlo.txt"]


def test_programs_of_the_same_name_have_files_of_their_own(folder):
    strategy = ipu.ipu_strategy.IPUStrategy()
    strategy.run(lambda x: x + 1, (np.ones(3, "float32"),))
    strategy.run(lambda x: x * 5, (np.ones(3, "float32"),))
    x = np.ones((4, 3), "float32")
    for units in (1, 2):
        with strategy.scope():
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)], name="twin").predict(x, verbose=0)
    assert names(folder) == [
        "_lambda__0.hlo.txt", "_lambda__1.hlo.txt", "twin_predict_0.hlo.txt", "twin_predict_1.hlo.txt"
    ]  # fmt: skip
    texts = {file.read_text() for file in folder.iterdir()}
    assert len(texts) == 4


def test_a_folder_that_has_programs_keeps_them(folder):
    folder.mkdir()
    (folder / "twice_0.hlo.txt").write_text("HloModule of an earlier process")

    def twice(x):
        return x + x

    ipu.ipu_strategy.IPUStrategy().run(twice, (1.0,))
    assert names(folder) == ["twice_0.hlo.txt", "twice_1.hlo.txt"]
    assert (folder / "twice_0.hlo.txt").read_text() == "HloModule of an earlier process"


def test_a_second_run_of_the_same_programs_adds_nothing(folder):
    def thrice(x):
        return x + x + x

    def run(*rows):
        strategy = ipu.ipu_strategy.IPUStrategy()
        for number in rows:
            strategy.run(thrice, (np.ones(number, "float32"),))

    written = []
    # The texts have the numbers of the lines from which a program was called, so that is one line.
    for change, rows in enumerate([(3, 4), (4, 3), (3, 5)]):
        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 1
        config.serialization_output_folder = str(folder)
        config.allow_recompute = change % 2 == 1  # a change of the configuration drops the compiled programs
        config.configure_ipu_system()
        run(*rows)
        written.append({file.name: file.stat().st_mtime_ns for file in folder.iterdir()})
    assert sorted(written[0]) == ["thrice_0.hlo.txt", "thrice_1.hlo.txt"]
    assert written[1] == written[0]
    assert names(folder) == ["thrice_0.hlo.txt", "thrice_1.hlo.txt", "thrice_2.hlo.txt"]
