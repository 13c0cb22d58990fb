"""What devices can do at best is measured once, and only for reports."""

from __future__ import annotations

import openipu as ipu
from openipu.engine.devices import speed
from openipu.engine.report.files import read

import keras
import numpy as np


def test_the_peak_is_measured_once() -> None:
    first = speed.measured_peak("cpu", 1, "float32")
    assert (first.devices, first.dtype) == (1, "float32")
    assert first.operations_per_second > first.bytes_per_second / 100 > 0, "products take more operations than bytes"
    assert speed.measured_peak("cpu", 1, "float32") is first


def test_only_a_report_asks_for_it(tmp_path, monkeypatch) -> None:
    asked = []
    real = speed._measured

    def measured(*arguments):
        asked.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(speed, "_known", {})
    monkeypatch.setattr(speed, "_measured", measured)
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2)
    x = np.ones((32, 4), "float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    assert asked == []
    with ipu.report(tmp_path):
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    assert len(asked) == 1
    peaks = [run.peak for run in read(tmp_path).runs]
    assert peaks[0] is not None
    assert peaks[0] == peaks[1]
