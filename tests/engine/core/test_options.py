"""Options as values: what is saved with a model, which updates count, and what a pipeline says about itself."""

from __future__ import annotations

import json
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend
from openipu.engine.core.accumulation import Accumulation, Reduction
from openipu.engine.core.options import MetricReduction, Options
from openipu.engine.core.pipelining import Pipelining, RecomputationMode, Recompute
from openipu.engine.core.updates import Updates
from openipu.engine.schedule.schedules import GPipe, Grouped, Interleaved, OneFOneB, Schedule, Sequential

import pytest

DEFAULTS = """{
 "accumulation": {"steps": 1, "method": "SUM", "dtype": null},
 "metric_reduction": "NONE",
 "shard_optimizer": false,
 "offload_optimizer": null,
 "average_replicas": false,
 "stages": null,
 "pipelining": null,
 "live_callbacks": false,
 "prefetch_depth": null,
 "buffer_depth": null
}"""
PIPELINED = """{
 "accumulation": {"steps": 4, "method": "MEAN", "dtype": "float16"},
 "metric_reduction": "LIST",
 "shard_optimizer": true,
 "offload_optimizer": true,
 "average_replicas": false,
 "stages": [["a", 0], ["b", 1]],
 "pipelining": {
  "schedule": "OneFOneB",
  "device_mapping": [0, 1],
  "recomputation_mode": "RecomputeThenBackpropagate",
  "accumulate_outfeed": true,
  "accumulation": {"steps": 8, "method": "RUNNING_MEAN", "dtype": ["float16", "float32"]},
  "shard_optimizer": false,
  "offload_optimizer": false
 },
 "live_callbacks": true,
 "prefetch_depth": 3,
 "buffer_depth": 5
}"""


@pytest.mark.parametrize("opening", [{"layers": [], "shapes": []}, {"layers": [1, 3], "shapes": [[[4, 6], "int32"]]}])
@pytest.mark.parametrize("text", [DEFAULTS, PIPELINED])
def test_what_is_loaded_is_saved_again(text: str, opening: dict[str, Any]) -> None:
    since = {"check_labels": False, "opening": opening}
    text = json.dumps({**json.loads(text), **since})
    assert json.loads(Options.from_json(text).to_json()) == json.loads(text)


def test_files_of_earlier_versions_are_read() -> None:
    assert Options.from_json(DEFAULTS) == Options()
    assert Options.from_json(DEFAULTS).check_labels is True
    own = Accumulation(8, Reduction.RUNNING_MEAN, ("float16", "float32"))
    assert Options.from_json(PIPELINED) == Options(
        unpipelined=Updates(Accumulation(4, Reduction.MEAN, "float16"), True, True),
        metric_reduction=MetricReduction.LIST,
        stages=(("a", 0), ("b", 1)),
        pipelining=Pipelining(
            OneFOneB(), (0, 1), RecomputationMode.RecomputeThenBackpropagate, True, Updates(own, False, False)
        ),
        live_callbacks=True,
        prefetch_depth=3,
        buffer_depth=5,
    )


def test_a_pipeline_has_its_own_updates() -> None:
    options = Options(Updates(Accumulation(2)), pipelining=Pipelining(updates=Updates(Accumulation(8))))
    assert options.resolved(pipelined=True).updates.steps == 8
    assert options.resolved(pipelined=False).updates.steps == 2
    assert options.resolved(pipelined=False).pipelining is None
    assert Options(Updates(Accumulation(2))).resolved(pipelined=True).pipelining == Pipelining()


@pytest.mark.parametrize(
    ("schedule", "mode", "expected"),
    [
        (Grouped(), RecomputationMode.Auto, Recompute.EVERYTHING),
        (Sequential(), RecomputationMode.Auto, Recompute.UNMARKED),
        (Grouped(), RecomputationMode.RecomputeThenBackpropagate, Recompute.EVERYTHING),
        (Grouped(), RecomputationMode.RecomputeAndBackpropagateInterleaved, Recompute.UNMARKED),
    ],
)
def test_recomputation(schedule: Schedule, mode: RecomputationMode, expected: Recompute) -> None:
    pipelining = Pipelining(schedule, recomputation_mode=mode)
    assert pipelining.recompute(allowed=True) is expected
    assert pipelining.recompute(allowed=False) is Recompute.NOTHING


@pytest.mark.parametrize(
    ("schedule", "multiple", "in_inference"), [(Grouped(), 6, 3), (Interleaved(), 3, 3), (GPipe(), 1, 1)]
)
def test_tables(schedule: Schedule, multiple: int, in_inference: int) -> None:
    pipelining = Pipelining(schedule, updates=Updates(Accumulation(12)))
    training, inference = pipelining.for_stages(3, training=True), pipelining.for_stages(3, training=False)
    assert (training.multiple(), inference.multiple()) == (multiple, in_inference)
    table = training.table(5)
    assert (table.micro_batches, table.training) == (12, True)
    table = inference.table(5)
    assert (table.micro_batches, table.training) == (6 if in_inference == 3 else 5, False)
    assert training.single_table() == Sequential().table(3, 1)
