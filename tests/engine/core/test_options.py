"""The options that are saved with a model: files written by earlier versions still load."""

from __future__ import annotations

import json

import openipu  # noqa: F401 - chooses Keras' backend
from openipu.engine.core.options import Options

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


@pytest.mark.parametrize("text", [DEFAULTS, PIPELINED])
def test_what_is_loaded_is_saved_again(text: str) -> None:
    assert json.loads(Options.from_json(text).to_json()) == json.loads(text)
