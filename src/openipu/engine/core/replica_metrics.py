"""Which metrics may be added up over replicas."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import keras

log = logging.getLogger("openipu")


def mention_metrics(owner: str, metrics: Sequence[keras.metrics.Metric]) -> None:
    """Warn about metrics that may be wrong when the variables of several replicas are added up."""
    parts = [part for metric in metrics for part in getattr(metric, "metrics", [metric])]
    names = [m.name for m in parts if not adds_up(m)]
    if names:
        log.warning(
            "%s: the metric variables of all replicas are added up. Make sure that this is right for %s: the variables "
            "have to start at zero and hold sums or counts.", owner, ", ".join(names),
        )  # fmt: skip


def adds_up(metric: keras.metrics.Metric) -> bool:
    """Whether a metric is known to hold sums, so that those of several replicas can be added up."""
    return isinstance(metric, keras.metrics.Mean) or type(metric).__module__.split(".")[0] == "keras"
