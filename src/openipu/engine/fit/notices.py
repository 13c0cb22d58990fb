"""What users are told about a model before it runs."""

from __future__ import annotations

import logging

from openipu.engine.core.options import Options
from openipu.engine.data.feed import Feed
from openipu.engine.devices.replicas import Replicas

import keras

log = logging.getLogger("openipu")


def refuse_eager(model: keras.Model) -> None:
    """Raise an error if the model has `run_eagerly=True`."""
    if model.run_eagerly:
        raise RuntimeError(
            f"Model {model.name!r} cannot run eagerly (`run_eagerly=True`), because under `IPUStrategy` all steps are "
            "compiled into one program. Compile it without `run_eagerly`, or make it outside the strategy's scope to "
            "debug it step by step."
        )


def mention_jit(model: keras.Model) -> None:
    """Warn that `jit_compile=False` has no effect."""
    if model.compiled and model.jit_compile is False:
        log.warning(
            "%s: jit_compile=False has no effect, because steps are always compiled under a strategy", model.name
        )


def describe_updates(feed: Feed, replicas: Replicas, options: Options) -> str:
    """One line about the sizes on which a good learning rate depends."""
    accumulation = options.updates.accumulation
    batches = replicas.count * accumulation.steps
    size = feed.source.batch_size
    samples = f" of {size} samples = {batches * size} samples" if size else ""
    steps = feed.num_steps
    updates = f", {-(-steps // batches)} updates per epoch" if steps else ""
    factor = accumulation.strength(1 if options.average_replicas else replicas.count)
    return (
        f"each update: {replicas.count} replica(s) x {accumulation.steps} micro-batch(es){samples}{updates}; the "
        f"learning rate acts on {factor} x the mean gradient of these samples"
    )
