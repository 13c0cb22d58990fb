"""How weights are trained on replicas, whatever computes the loss: gradients of a micro-batch, and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.devices.placement import Placement
from openipu.engine.types import Array

import jax
import keras

from . import offload
from .accumulation import Accumulation
from .enqueued import IN_SHARES, Enqueued, OutfeedError, collected, enqueue_again
from .optimizer_chain import map_gradients
from .optimizer_chain import update as apply_update
from .optimizer_sharding import make_shards
from .optimizer_twin import enqueued_by
from .options import Options
from .recomputation import recomputed_in_parts
from .state import Batch, State
from .state_layout import ReplicaLayout
from .update_rules import check_added_up

Forward = Callable[[State, Batch], tuple[Any, State, Any]]
"""Returns the (scaled) loss of a micro-batch (None without training), the state after it, and its results."""
Loss = Callable[[list[Any]], tuple[Any, tuple[list[Any], list[Any], Any, Enqueued]]]
"""The loss as a function of the weights. It also returns the non-trainable state, the metrics, the results, and what
was enqueued into outfeeds."""


@dataclass(frozen=True, slots=True, eq=False)
class Trainer:
    """An optimizer at work: how its state lies on the replicas, and how gradients reach it."""

    optimizer: keras.optimizers.Optimizer
    layout: ReplicaLayout
    twin: keras.optimizers.Optimizer | None
    """Updates a replica's shares in place of the optimizer, if its state is divided over replicas."""
    accumulation: Accumulation
    averaged: bool
    """Whether gradients are averaged over replicas instead of summed."""
    recompute: bool
    """Whether the backward pass recomputes the forward pass, except for what users mark, instead of keeping it."""

    def seen_by_keras(self, state: State) -> State:
        """The state with stand-ins for divided slots: Keras checks all shapes and reads the loss scale."""
        shards = self.layout.shards
        return state if shards is None else state._replace(optimizer=shards.stand_ins(state.optimizer))

    def micro(self, forward: Forward, state: State, batch: Batch) -> tuple[State, list[Any], Any]:
        """Train on a micro-batch: the new state, the gradients and the results."""
        seen = self.seen_by_keras(state)
        loss = loss_of(forward, seen, batch)
        if self.recompute:
            loss = recomputed_in_parts(loss, self.layout.replicas.platform)
        gradient = jax.grad(loss, has_aux=True)
        gradients, (non_trainable, metrics, results, enqueued) = gradient(state.trainable)
        enqueue_again(enqueued)
        gradients = map_gradients(self.optimizer, gradients, state.trainable, seen.optimizer)
        return state._replace(non_trainable=non_trainable, metrics=metrics), gradients, results

    def update(self, state: State, gradients: list[Array]) -> State:
        """The state after an update with accumulated gradients, which this reduces over replicas."""
        update = self._update if self.layout.shards is None else self._update_shares
        return (offload.around(update) if self.layout.offloaded else update)(state, gradients)

    def _update(self, state: State, gradients: list[Array]) -> State:
        replicas = self.layout.replicas
        gradients = replicas.reduced(gradients, self.averaged)
        trainable, slots = apply_update(self.optimizer, state.optimizer, gradients, state.trainable)
        return state._replace(trainable=trainable, optimizer=slots)

    def _update_shares(self, state: State, gradients: list[Array]) -> State:
        shards = self.layout.shards
        assert shards is not None
        assert self.twin is not None
        if enqueued_by(self.optimizer, state.trainable).outfeeds:
            raise OutfeedError(IN_SHARES)
        if self.averaged:
            gradients = [g / shards.replicas.count for g in gradients]
        own = shards.scatter(gradients), shards.mine(state.trainable)
        shares, optimizer = apply_update(self.twin, state.optimizer, *own)
        return state._replace(trainable=shards.gather(shares), optimizer=optimizer)


def make_trainer(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable], place: Placement, options: Options
) -> Trainer:
    """A trainer of `weights` with a built `optimizer` on the replicas of `place`."""
    replicas, updates = place.replicas, options.updates
    if replicas.count * updates.steps > 1:
        check_added_up(weights, f"the gradients of {replicas.count * updates.steps} micro-batches are added up")
    shards = twin = None
    if updates.shard_optimizer and replicas.count > 1:
        shards, twin = make_shards(optimizer, list(weights), replicas)
    layout = ReplicaLayout(replicas, shards, offload.is_offloaded(updates, replicas))
    accumulation = updates.accumulation.of_weights(weights)
    averaged = options.average_replicas or replicas.average
    return Trainer(optimizer, layout, twin, accumulation, averaged, place.recompute)


def loss_of(forward: Forward, state: State, batch: Batch) -> Loss:
    """The loss of a micro-batch as a function of the weights."""

    def loss(trainable: list[Any]) -> tuple[Any, tuple[list[Any], list[Any], Any, Enqueued]]:
        with collected() as enqueued:
            value, new, results = forward(state._replace(trainable=trainable), batch)
        return value, (new.non_trainable, new.metrics, results, enqueued())

    return loss
