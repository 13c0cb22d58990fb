"""A function being traced into a device program, and the loops inside it.

Every function is traced twice. The first time, to discover: which variables it reads and assigns, which feeds it uses
and how many elements it takes from them. Values only flow through, and a loop's body is run through once. The second
time, to build: all of that is threaded through the program, and loops are XLA's loops.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openipu.engine.convolution import rewrite
from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
from jax import lax

from .variable_scope import VariableScope

Body = Callable[[list[Any]], list[Any]]
"""New loop-carried values from old ones."""

_active = threading.local()


class NotInProgram(Exception):  # noqa: N818 - no error: it says how to run what raised it
    """Something was met while a function is traced that is a program by itself: the function runs on the host."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the body of one loop changes."""

    variables: tuple[Any, ...]
    owners: tuple[Any, ...]


@dataclass
class ProgramTrace:
    """The state of one tracing; `discovering` the first time."""

    replicas: Replicas
    ordinal: int
    discovering: bool
    scope: VariableScope
    sites: list[Site] = field(default_factory=list)
    demands: dict[int, tuple[Any, int | None]] = field(default_factory=dict)
    """Infeeds and the elements that each replica takes from them; None where that is not known before it runs."""
    outfeeds: dict[int, tuple[Any, Tree]] = field(default_factory=dict)
    """Outfeeds and a description of their elements."""
    slabs: dict[int, Tree] = field(default_factory=dict)
    """Elements of infeeds that were sent before the launch, by feed."""
    optimizers: dict[int, Any] = field(default_factory=dict)
    """Optimizers that were applied."""
    rows: int | None = None
    """Samples in one element of an infeed: the micro-batch of one replica."""
    _turns: int | None = 1
    _next_site: int = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[ProgramTrace]:
        """Until the block ends, this is what is traced in this thread."""
        before, _active.trace = current(), self
        try:
            with self.scope:
                yield self
        finally:
            _active.trace = before

    @contextlib.contextmanager
    def within(self, scope: VariableScope) -> Iterator[VariableScope]:
        """Until the block ends, changes go into `scope`."""
        before, self.scope = self.scope, scope
        try:
            with scope:
                yield scope
        finally:
            self.scope = before

    def need(self, feed: Any) -> None:
        """One element of `feed` is taken here, each time around the loops that are around this place."""
        _, known = self.demands.get(id(feed), (feed, 0))
        total = None if known is None or self._turns is None else known + self._turns
        self.demands[id(feed)] = (feed, total)

    # --- loops and conditionals

    def cond(self, condition: Any, branches: tuple[Body, Body], carry: list[Any]) -> list[Any]:
        """The first branch if the condition holds, else the second one; both give values of the same kinds."""
        if self.discovering:
            index = len(self.sites)
            self.sites.append(Site((), ()))
            children = []
            for branch in branches:
                with self.within(VariableScope(self.scope)) as child:
                    result = branch(carry)
                children.append(child)
            for child in children:
                self.scope.adopt(child)
            self.sites[index] = Site(
                tuple({k: v for c in children for k, v in c.assigned.items()}.values()),
                tuple({k: v for c in children for k, v in c.touched.items()}.values()),
            )
            return result
        site, inner = self._take_site()
        ends = []

        def run(branch: Body, first: int, state: Tree) -> Tree:
            self._next_site = first
            carry, values, cells = state
            with self._child(site, values, cells) as child:
                new = branch(carry)
            ends.append(self._next_site)
            return new, *self._changes(site, child)

        start = (carry, *self._changes(site, self.scope))
        state = lax.cond(
            condition,
            lambda state: run(branches[0], inner, state),
            lambda state: run(branches[1], ends[0], state),
            start,
        )
        return self._after(site, state)

    def repeat(self, count: Any, body: Body, carry: list[Any]) -> list[Any]:
        """`body` so many times."""
        if self.discovering:
            return self._discover(body, carry, count if isinstance(count, int) else None)
        site, step, start = self._turn(body, carry)
        return self._after(site, lax.fori_loop(0, count, lambda _, state: step(state), start))

    def while_loop(
        self, condition: Callable[[list[Any]], Any], body: Body, carry: list[Any], most: int | None
    ) -> list[Any]:
        """`body` as long as `condition` holds, at most `most` times."""
        if self.discovering:
            self._check(condition, carry)
            return self._discover(body, carry, None)
        site, step, start = self._turn(body, carry)

        def goes_on(state: Tree) -> Any:
            turn, (carry, values, cells) = state
            with self._child(site, values, cells):
                answer = condition(carry)
            return answer if most is None else jnp.logical_and(turn < most, answer)

        _, end = lax.while_loop(goes_on, lambda state: (state[0] + 1, step(state[1])), (jnp.int32(0), start))
        return self._after(site, end)

    def _discover(self, body: Body, carry: list[Any], count: int | None) -> list[Any]:
        outer, index = self._turns, len(self.sites)
        self.sites.append(Site((), ()))
        self._turns = None if count is None or outer is None else outer * count
        with self.within(VariableScope(self.scope)) as child:
            new = body(carry)
        self._turns = outer
        self.sites[index] = Site(tuple(child.assigned.values()), tuple(child.touched.values()))
        self.scope.adopt(child)
        return new

    def _check(self, condition: Callable[[list[Any]], Any], carry: list[Any]) -> None:
        with self.within(VariableScope(self.scope)) as child:
            answer = jnp.asarray(condition(carry))
        if answer.shape or answer.dtype != bool:
            raise TypeError(
                f"The condition of a loop gave shape {answer.shape} and dtype {answer.dtype}. Give one boolean."
            )
        if child.assigned or child.touched:
            raise ValueError("The condition of a loop changes variables or uses a feed. Do that in its body.")

    def _turn(self, body: Body, carry: list[Any]) -> tuple[Site, Callable[[Tree], Tree], Tree]:
        """The next loop: what it changes, one turn of it as a pure function, and what the first turn gets."""
        site, inner = self._take_site()

        def turn(state: Tree) -> Tree:
            self._next_site = inner  # JAX may trace the body more than once
            carry, values, cells = state
            with self._child(site, values, cells) as child:
                new = body(carry)
            return new, *self._changes(site, child)

        return site, rewrite(turn, self.replicas.platform), (carry, *self._changes(site, self.scope))

    def _take_site(self) -> tuple[Site, int]:
        """What is changed at the next place, and the number of the first place inside it."""
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
        values = [
            lax.convert_element_type(scope.get_current_value(v), jax.dtypes.canonicalize_dtype(v.dtype))
            for v in site.variables
        ]
        return values, [scope.cell(owner) for owner in site.owners]

    def _after(self, site: Site, state: Tree) -> list[Any]:
        carry, values, cells = state
        for variable, value in zip(site.variables, values, strict=True):
            self.scope.add_update((variable, value))
        for owner, cell in zip(site.owners, cells, strict=True):
            self.scope.set_cell(owner, cell)
        return list(carry)


@contextlib.contextmanager
def stage_of_pipeline() -> Iterator[None]:
    """Until the block ends, a stage of a pipeline is traced in this thread, where feeds cannot be used."""
    before, _active.stage = in_stage(), True
    try:
        yield
    finally:
        _active.stage = before


def in_stage() -> bool:
    """Whether a stage of a pipeline is being traced in this thread."""
    return getattr(_active, "stage", False)


def current() -> ProgramTrace | None:
    """What is being traced in this thread, if anything is."""
    return getattr(_active, "trace", None)
