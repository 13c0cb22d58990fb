"""A function that is being traced into a device program, and the loops inside it.

Every function is traced twice. The first tracing discovers which variables it reads and assigns, which feeds it uses,
and how many elements it takes from them; the body of a loop is traced only once. The second tracing builds the program:
variables and feeds are threaded through it, and loops become XLA's loops.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openipu.engine.convolution import rewrite
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat.api import in_layer_call
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras
from jax import lax

from . import added_losses
from .added_losses import LossSpec
from .variable_scope import VariableScope

Body = Callable[[list[Any]], list[Any]]
"""Computes new loop-carried values from old ones."""

_active = threading.local()


class NotInProgram(Exception):  # noqa: N818 - not an error
    """Raised when a traced function meets something that is a program by itself. The function then runs on the host."""


@dataclass(frozen=True, slots=True)
class Site:
    """What one loop or conditional changes: variables, cells of feeds by their owners, and losses of layers."""

    variables: tuple[keras.Variable, ...] = ()
    owners: tuple[object, ...] = ()
    losses: tuple[LossSpec, ...] = ()
    accumulates: bool = False
    """Whether the losses of all turns of a loop count. Otherwise those of the last turn: each turn calls layers from
    outside of layers, which begins anew."""


@dataclass
class ProgramTrace:
    """The state of one tracing, which is `discovering` or building."""

    replicas: Replicas
    ordinal: int
    discovering: bool
    scope: VariableScope
    sites: list[Site] = field(default_factory=list)
    demands: dict[int, tuple[Any, int | None]] = field(default_factory=dict)
    """Infeeds, and the number of elements that each replica takes; None if that depends on the run."""
    outfeeds: dict[int, tuple[Any, Tree]] = field(default_factory=dict)
    """Outfeeds, and the shapes of their elements."""
    slabs: dict[int, Tree] = field(default_factory=dict)
    """Elements that were sent before the launch, by infeed."""
    optimizers: dict[int, keras.optimizers.Optimizer] = field(default_factory=dict)
    """Optimizers that were applied."""
    rows: int | None = None
    """Samples in one element of an infeed, which is the micro-batch of one replica."""
    whole: bool = True
    """Whether this is a whole program, and not a part of one (part.py)."""
    _turns: int | None = 1
    _next_site: int = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[ProgramTrace]:
        """Until the block ends, `current()` is this trace."""
        before, _active.trace = current(), self
        try:
            with self.scope, added_losses.noted():
                yield self
        finally:
            _active.trace = before

    @contextlib.contextmanager
    def within(self, scope: VariableScope) -> Iterator[VariableScope]:
        """Until the block ends, changes are recorded in `scope`."""
        before, self.scope = self.scope, scope
        try:
            with scope:
                yield scope
        finally:
            self.scope = before

    def need(self, feed: object) -> None:
        """Count one element of `feed`, for each iteration of the enclosing loops."""
        _, known = self.demands.get(id(feed), (feed, 0))
        total = None if known is None or self._turns is None else known + self._turns
        self.demands[id(feed)] = (feed, total)

    # --- loops and conditionals

    def cond(self, condition: Array | bool, branches: tuple[Body, Body], carry: list[Any]) -> list[Any]:
        """Run the first branch if the condition holds, else the second. Both return values of the same shapes."""
        if self.discovering:
            index = len(self.sites)
            self.sites.append(Site())
            children = []
            for branch in branches:
                with self.within(VariableScope(self.scope)) as child:
                    result = branch(carry)
                children.append(child)
            losses = [loss for child in children for loss in added_losses.taken(child)]
            for child in children:
                self.scope.adopt(child)
            self.sites[index] = Site(
                tuple({k: v for c in children for k, v in c.assigned.items()}.values()),
                tuple({k: v for c in children for k, v in c.touched.items()}.values()),
                added_losses.specs(losses),
            )
            added_losses.added_again(losses)
            return result
        site, inner = self._take_site()
        ends = []

        def run(branch: Body, first: int, is_first: bool, state: Tree) -> Tree:
            self._next_site = first
            carry, values, cells, losses = state
            with self._child(site, values, cells) as child:
                new = branch(carry)
            ends.append(self._next_site)
            added = added_losses.taken(child)
            # The losses of the first branch come first. Those of the branch that is not taken are zero.
            own = slice(len(added)) if is_first else slice(len(losses) - len(added), None)
            losses[own] = added_losses.values(site.losses[own], added)
            return new, *self._changes(site, child), losses

        state = lax.cond(
            condition,
            lambda state: run(branches[0], inner, True, state),
            lambda state: run(branches[1], ends[0], False, state),
            self._start(site, carry),
        )
        return self._after(site, state)

    def repeat(self, count: Array | int, body: Body, carry: list[Any]) -> list[Any]:
        """Run `body` `count` times."""
        if self.discovering:
            return self._discover(body, carry, count if isinstance(count, int) else None)
        site, step, start = self._turn(body, carry)
        return self._after(site, lax.fori_loop(0, count, lambda _, state: step(state), start))

    def while_loop(
        self, condition: Callable[[list[Any]], Any], body: Body, carry: list[Any], most: int | None
    ) -> list[Any]:
        """Run `body` while `condition` holds, at most `most` times."""
        if self.discovering:
            self._check(condition, carry)
            return self._discover(body, carry, None)
        site, step, start = self._turn(body, carry)

        def goes_on(state: Tree) -> Any:
            turn, (carry, values, cells, _) = state
            with self._child(site, values, cells):
                answer = condition(carry)
            return answer if most is None else jnp.logical_and(turn < most, answer)

        _, end = lax.while_loop(goes_on, lambda state: (state[0] + 1, step(state[1])), (jnp.int32(0), start))
        return self._after(site, end)

    def _discover(self, body: Body, carry: list[Any], count: int | None) -> list[Any]:
        """Trace the body of a loop once, and note what it changes. `count` is None if it depends on the run."""
        outer, index = self._turns, len(self.sites)
        self.sites.append(Site())
        self._turns = None if count is None or outer is None else outer * count
        with self.within(VariableScope(self.scope)) as child:
            new = body(carry)
        self._turns = outer
        losses = added_losses.taken(child)
        changes = tuple(child.assigned.values()), tuple(child.touched.values())
        self.sites[index] = Site(*changes, added_losses.specs(losses), in_layer_call())
        self.scope.adopt(child)
        added_losses.added_again(losses)
        return new

    def _check(self, condition: Callable[[list[Any]], Any], carry: list[Any]) -> None:
        with self.within(VariableScope(self.scope)) as child:
            answer = jnp.asarray(condition(carry))
        if answer.shape or answer.dtype != bool:
            raise TypeError(
                f"The condition of a loop has shape {answer.shape} and dtype {answer.dtype}. Give one boolean."
            )
        if child.assigned or child.touched:
            raise ValueError("The condition of a loop changes variables or uses a feed. Do that in its body.")

    def _turn(self, body: Body, carry: list[Any]) -> tuple[Site, Callable[[Tree], Tree], Tree]:
        """The next loop: what it changes, one iteration as a pure function, and the input of the first iteration."""
        site, inner = self._take_site()

        def turn(state: Tree) -> Tree:
            self._next_site = inner  # because JAX may trace the body more than once
            carry, values, cells, losses = state
            with self._child(site, values, cells) as child:
                new = body(carry)
            added = added_losses.values(site.losses, added_losses.taken(child))
            if site.accumulates:
                added = [old + loss for old, loss in zip(losses, added, strict=True)]
            return new, *self._changes(site, child), added

        rewritten = rewrite(turn, self.replicas.platform) if self.whole else turn
        return site, rewritten, self._start(site, carry)

    def _start(self, site: Site, carry: list[Any]) -> Tree:
        """What goes into a loop or conditional: carried values, and what the site changes."""
        return carry, *self._changes(site, self.scope), [loss.zeros() for loss in site.losses]

    def _take_site(self) -> tuple[Site, int]:
        """The next site, and the number of the first site inside it."""
        site = self.sites[self._next_site]
        self._next_site += 1
        return site, self._next_site

    @contextlib.contextmanager
    def _child(self, site: Site, values: list[Any], cells: list[Tree]) -> Iterator[VariableScope]:
        pairs = zip(site.variables, values, strict=True), zip(site.owners, cells, strict=True)
        with self.within(VariableScope(self.scope, *pairs)) as child:
            yield child

    @staticmethod
    def _changes(site: Site, scope: VariableScope) -> tuple[list[Any], list[Tree]]:
        """The current values of what a site changes."""
        values = [
            lax.convert_element_type(scope.get_current_value(v), jax.dtypes.canonicalize_dtype(v.dtype))
            for v in site.variables
        ]
        return values, [scope.cell(owner) for owner in site.owners]

    def _after(self, site: Site, state: Tree) -> list[Any]:
        """Record what a site has changed, and return the carried values."""
        carry, values, cells, losses = state
        for variable, value in zip(site.variables, values, strict=True):
            self.scope.add_update((variable, value))
        for owner, cell in zip(site.owners, cells, strict=True):
            self.scope.set_cell(owner, cell)
        added_losses.added_again((spec.layer, loss) for spec, loss in zip(site.losses, losses, strict=True))
        return list(carry)


@contextlib.contextmanager
def stage_of_pipeline() -> Iterator[None]:
    """Until the block ends, this thread traces a stage of a pipeline, where feeds cannot be used."""
    before, _active.stage = in_stage(), True
    try:
        yield
    finally:
        _active.stage = before


def in_stage() -> bool:
    """Whether this thread is tracing a stage of a pipeline."""
    return getattr(_active, "stage", False)


def current() -> ProgramTrace | None:
    """The trace that is active in this thread, if there is one."""
    return getattr(_active, "trace", None)
