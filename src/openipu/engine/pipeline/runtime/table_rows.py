"""The compiled table inside a program: its rows, how many of them to run, and the exchange at the end of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import NamedTuple

from openipu.engine.devices.replicas import STAGE_AXIS
from openipu.engine.schedule.table_arrays import ActionArrays, Permutation, TableArrays
from openipu.engine.types import Array

import jax
import numpy as np
from jax import lax

from .mailbox import Vectors

jax.tree_util.register_dataclass(
    ActionArrays, data_fields=[field.name for field in fields(ActionArrays)], meta_fields=[]
)


class TableRow(NamedTuple):
    """One row of the compiled table, or all of them in arrays with one more axis. See `TableArrays`."""

    forward: ActionArrays
    backward: ActionArrays | None
    exchange: Array | np.ndarray
    receive: Array | np.ndarray | None
    """None if nothing is ever received."""


def rows_of(table: TableArrays) -> TableRow:
    """All rows of a table."""
    # `receive` must not be an array of size 0, because the partitioner of JAX 0.11 fails on it.
    receive = table.receive if table.rounds else None
    return TableRow(table.forward, table.backward, table.exchange, receive)


def rows_needed(table: TableArrays) -> np.ndarray:
    """How many rows have to run for 0, 1, 2, ... micro-batches."""
    present = [actions.micro_batch for actions in (table.forward, table.backward) if actions is not None]
    numbers = np.concatenate(present, axis=1)
    rows = [1 + int(np.nonzero((numbers == m).any(axis=1))[0].max()) for m in range(int(numbers.max()) + 1)]
    return np.maximum.accumulate(np.array([0, *rows], np.int32))


def exchange(table: TableArrays, row: TableRow, me: Array, mailbox: Vectors, outbox: Vectors) -> Vectors:
    """The mailbox of device `me` after all devices have sent what is in their outboxes."""
    if row.receive is None:
        return mailbox
    receive = row.receive

    def through(rounds: Sequence[Permutation]) -> Callable[[Vectors], Vectors]:
        def run(mailbox: Vectors) -> Vectors:
            new = dict(mailbox)
            for turn, permutation in enumerate(rounds):
                slot = receive[turn, me]
                for name in mailbox:
                    arrived = lax.ppermute(outbox[name][turn], STAGE_AXIS, permutation)
                    new[name] = new[name].at[slot].set(arrived, mode="promise_in_bounds")
            return new

        return run

    arrived: Vectors = lax.switch(row.exchange, [through(rounds) for rounds in table.exchanges], mailbox)
    return arrived
