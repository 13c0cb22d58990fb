"""What leaves an execution: results at its end, and the logs of each step while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from openipu.engine.core.state import Outcome, State
from openipu.engine.devices.replicas import Replicas
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
from jax import lax

from .arrays import as_before, zeros
from .outfeeds import Cells, Outfeeds
from .remainder import Number


class Kept(NamedTuple):
    """What has been collected so far."""

    results: Tree
    told: Tree
    """Logs that wait for `live` to receive them."""
    cells: Cells
    """Elements that wait to leave through outfeeds."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Collects what an `Outcome` asks for, inside the program of one replica."""

    outcome: Outcome
    replicas: Replicas
    live: StepLogs | None
    """Receives the logs of each step while the execution runs."""
    first: Number
    """The first step that the program runs."""
    batches: Number
    """The number of full batches up to its end, over all replicas."""
    outfeeds: Outfeeds

    def start(self, metrics: list[Array], result: Tree, of_tail: Tree, rows: int) -> Kept:
        """Empty room for the results of `rows` steps, shaped like `result`, and of the tail, shaped like `of_tail`.

        `result` is None if there are no full batches, and `of_tail` is None if there is no tail.
        """
        one = of_tail if result is None else result
        room = _room(self.outcome, result, of_tail, rows)
        return Kept(room, self._nothing_told(metrics, one), self.outfeeds.start())

    def add(self, kept: Kept, index: Number | None, result: Tree, active: Number, metrics: list[Array]) -> Kept:
        """Add the results of step `index`, or of the tail if it is None. `active` says if this replica had data."""
        told = kept.told
        if self.live is not None and not (index is None and self.outcome.collect == "all"):
            count = self.replicas.count
            done = self.batches + 1 if index is None else jnp.minimum((index + 1) * count, self.batches)
            logs = self._logs(metrics, result, active)
            told = self.live.outlet.put(told, (done, logs), self.replicas.index(), self.replicas.speaks())
        place = None if index is None else index - self.first
        return Kept(_keep(self.outcome, kept.results, place, result, active), told, kept.cells)

    def finish(self, kept: Kept) -> None:
        """Hand over the logs and elements that still wait."""
        self.outfeeds.flush(kept.cells)
        if self.live is not None:
            self.live.outlet.flush(kept.told, self.replicas.index(), self.replicas.speaks())

    def results(self, state: State, kept: Tree) -> Tree:
        """What the execution returns: logs, or for predict the outputs, with an axis for replicas."""
        if self.outcome.collect != "all":
            return self._over_replicas(state, kept)
        outputs, of_tail = kept
        return jax.tree.map(lambda a: a[:, None], outputs), of_tail

    def _over_replicas(self, state: State, kept: Tree) -> Tree:
        """The logs over all replicas: true values of metrics, and for everything else means over the last step."""
        known = self.outcome.finish(state) if self.outcome.finish is not None else {}
        if self.outcome.collect == "none":
            return known
        logs = self.replicas.mean_of_active(*kept) if self.replicas.count > 1 else kept[0]
        return {name: known.get(name, value) for name, value in logs.items()}

    def _logs(self, metrics: list[Array], result: Tree, active: Number) -> Tree:
        """What to report after one step: the logs so far, or for predict the outputs of all replicas."""
        if self.outcome.collect == "all":
            return self.replicas.gather(result)
        return self._over_replicas(State([], [], [], metrics), (result, active))

    def _nothing_told(self, metrics: list[Array], result: Tree) -> Tree:
        if self.live is None:
            return ()
        logs = jax.eval_shape(lambda m, r: self._logs(m, r, True), metrics, result)
        self.live.describe(logs)
        return self.live.outlet.start((jax.ShapeDtypeStruct((), jnp.int32), logs))


def _room(outcome: Outcome, result: Tree, of_tail: Tree, rows: int) -> Tree:
    """Empty room for no results, for those of one step, or for those of `rows` steps and of the tail."""
    if outcome.collect == "none":
        return ()
    if outcome.collect == "last":
        return zeros(of_tail if result is None else result), jnp.zeros((), bool)
    return None if result is None else zeros(result, rows), None if of_tail is None else zeros(of_tail)


def _keep(outcome: Outcome, kept: Tree, index: Number | None, result: Tree, active: Number) -> Tree:
    """The results so far. For means over replicas, the last ones also say whether this replica was active."""
    if outcome.collect == "none":
        return ()
    if outcome.collect == "last":
        return as_before((result, active), kept)
    outputs, of_tail = kept
    if index is None:
        return outputs, as_before(result, of_tail)
    outputs = jax.tree.map(lambda rows, new: lax.dynamic_update_index_in_dim(rows, new, index, 0), outputs, result)
    return outputs, of_tail
