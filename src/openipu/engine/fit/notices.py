"""What users are told about a model before it runs."""

from __future__ import annotations

from openipu._validate import counted
from openipu.engine.core.options import Options
from openipu.engine.data.feed import Feed
from openipu.engine.devices.replicas import Replicas


def describe_updates(feed: Feed, replicas: Replicas, options: Options) -> str:
    """One line about the sizes on which a good learning rate depends."""
    accumulation = options.updates.accumulation
    batches = replicas.count * accumulation.steps
    size = feed.source.batch_size
    samples = f" of {size} samples = {batches * size} samples" if size else ""
    steps = feed.num_steps
    updates = f", {-(-steps // batches)} updates per epoch" if steps else ""
    averaged = options.average_replicas or replicas.average
    factor = accumulation.strength(1 if averaged else replicas.count)
    return (
        f"each update: {counted(replicas.count, 'replica')} x {accumulation.steps} micro-batches{samples}{updates}; "
        f"the learning rate acts on {factor} x the mean gradient of these samples"
    )
