"""Tensors that leave the steps of an execution."""

from __future__ import annotations

from openipu.engine.estimator.outbox import Mean, Outbox, steps_first

import jax
import jax.numpy as jnp
import numpy as np


def test_steps_that_only_some_replicas_had_are_left_out() -> None:
    """At the end of the data, the first replica may have one more step."""
    of_replicas = np.arange(6).reshape(2, 3)
    assert steps_first(np.array([3, 2]), of_replicas, every=True).tolist() == [[0, 3], [1, 4]]
    assert steps_first(np.array([3, 2]), of_replicas[:, 0], every=False).tolist() == [0, 3]


def test_the_axis_of_a_single_replica_is_dropped() -> None:
    assert steps_first(np.array([2]), np.arange(3)[None], every=True).tolist() == [0, 1]
    assert steps_first(np.array([2]), np.arange(3)[None], every=False).tolist() == [0, 1, 2]


def test_all_steps_or_the_last_one() -> None:
    outbox = Outbox(({"a": jax.ShapeDtypeStruct((), jnp.float32)},) * 2, (True, False), rows=3)
    kept = outbox.start()
    for step in range(2):
        kept = outbox.put(kept, [{"a": jnp.float32(step + 1)}] * 2)
    assert [np.asarray(a).tolist() for a in kept] == [2, [1.0, 2.0, 0.0], 2.0]


def test_a_mean_counts_rows_not_batches() -> None:
    kept = Mean.add(Mean.add(Mean.start(), jnp.float32(1.0), 3), jnp.float32(5.0), 1)
    assert float(Mean.result(kept)) == 2.0
