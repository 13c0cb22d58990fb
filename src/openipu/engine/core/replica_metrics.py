"""Which metrics may be added up over replicas."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras

log = logging.getLogger("openipu")


def mention_metrics(owner: str, metrics: Sequence[Any]) -> None:
    """Name the metrics of which it is not known that the sum of several replicas' variables is right."""
    parts = [part for metric in metrics for part in getattr(metric, "metrics", [metric])]
    names = [m.name for m in parts if not adds_up(m)]
    if names:
        log.warning(
            "%s: on several replicas, the variables of a metric are added up. Make sure that this is right for %s: "
            "variables that start at zero and hold sums or counts.", owner, ", ".join(names),
        )  # fmt: skip


def adds_up(metric: Any) -> bool:
    """Whether a metric is known to hold sums, so that those of several replicas may be added."""
    return isinstance(metric, keras.metrics.Mean) or type(metric).__module__.split(".")[0] == "keras"
