"""One traced function -> stages: its operations in their order, cut where layers begin.

A stage has the variables that its operations use. What an operation needs from an earlier stage travels over the
boundaries between them; the micro-batch is there on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from openipu.engine.pipeline.runtime.stage_function import After, Around, Arrays, StageFunction, specs_of
from openipu.engine.pipeline.runtime.variable_store import filled

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from .balance import BYTE, LINK, cost_of, cuts

Tree = Any


class Given(NamedTuple):
    """What the whole function sees."""

    weights: Arrays
    state: Arrays
    optimizer: Arrays
    """All variables of the optimizer; only those that belong to no weight have their values."""
    active: Any
    batch: Tree
    metrics: Arrays


class Gives(NamedTuple):
    """What the whole function computes."""

    loss: Any
    """None where nothing is trained."""
    state: Arrays
    metrics: Arrays
    result: Tree


Whole = Callable[[Given], Gives]
Layer = tuple[tuple[int, ...], tuple[int, ...]]
"""The numbers of a layer's weights and of its other variables."""


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The function for one shape of micro-batch, its operations in an order in which those on metrics are last."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    given: Given
    """Variables of the program in place of values."""
    gives: Gives

    @property
    def changed(self) -> dict[int, Any]:
        """The new value of each state that changes, by number."""
        pairs = enumerate(zip(self.given.state, self.gives.state, strict=True))
        return {number: new for number, (old, new) in pairs if new is not old}

    def first_uses(self, layers: Sequence[Layer]) -> list[int | None]:
        """The operation with which each layer begins: the first one that uses any of its variables."""
        firsts: dict[Any, int] = {}
        for position, equation in enumerate(self.jaxpr.eqns):
            for v in _variables(equation.invars):
                firsts.setdefault(v, position)
        found = []
        for weights, state in layers:
            own = [*(self.given.weights[n] for n in weights), *(self.given.state[n] for n in state)]
            found.append(min((firsts[v] for v in own if v in firsts), default=None))
        return found

    def parts(self, begins: Sequence[int]) -> tuple[Part, ...]:
        """The operations before, between and after these positions."""
        equations = [self.jaxpr.eqns[a:b] for a, b in pairwise([0, *begins, len(self.jaxpr.eqns)])]
        made = {v: stage for stage, part in enumerate(equations) for eqn in part for v in eqn.outvars}
        end = len(equations) - 1
        finals = [*jax.tree.leaves(self.gives.loss), *self.gives.metrics, *jax.tree.leaves(self.gives.result)]
        last_use = {v: stage for stage, part in enumerate(equations) for eqn in part for v in _variables(eqn.invars)}
        last_use |= dict.fromkeys(_variables(finals), end)
        home = {n: made.get(new, 0) if isinstance(new, Var) else 0 for n, new in self.changed.items()}
        found: list[Part] = []
        received: list[Any] = []
        for stage, part in enumerate(equations):
            known = [*received, *(v for eqn in part for v in eqn.outvars)]
            sent = [v for v in known if last_use.get(v, -1) > stage]
            changes = [n for n, at in home.items() if at == stage]
            outputs = [*sent, *(self.changed[n] for n in changes), *(finals if stage == end else ())]
            found.append(self._part(part, received, outputs, len(sent), changes))
            received = sent
        return tuple(found)

    def _part(
        self, equations: Any, received: Sequence[Any], outputs: Sequence[Any], sent: int, changes: Sequence[int]
    ) -> Part:
        used = set(_variables([v for eqn in equations for v in eqn.invars] + list(outputs)))
        flat = jax.tree.leaves(self.given)
        inputs = [i for i, v in enumerate(flat) if v in used]
        arguments = [*(flat[i] for i in inputs), *received]
        effects = frozenset(effect for eqn in equations for effect in eqn.effects)
        jaxpr = Jaxpr(self.jaxpr.constvars, arguments, list(outputs), equations, effects, self.jaxpr.debug_info)
        return Part(
            ClosedJaxpr(jaxpr, self.consts),
            tuple(inputs),
            sent,
            tuple(changes),
            tuple(n for n, v in enumerate(self.given.weights) if v in used),
            tuple(n for n, v in enumerate(self.given.state) if v in used or n in changes),
        )


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


class Part(NamedTuple):
    """The operations of one stage as a program: of inputs of the whole and what it receives, to what it sends."""

    closed: ClosedJaxpr
    inputs: tuple[int, ...]
    """Which leaves of `Given`; then comes what it receives."""
    sent: int
    """How many of its results go on. Then come new states, and from the last stage what the whole gives."""
    changes: tuple[int, ...]
    """The numbers of the state that it changes."""
    weights: tuple[int, ...]
    state: tuple[int, ...]


def trace(whole: Whole, given: Given) -> Traced:
    """Trace a function for values of these shapes."""
    closed, shapes = jax.make_jaxpr(whole, return_shape=True)(given)
    jaxpr = closed.jaxpr
    names: Given = jax.tree.unflatten(jax.tree.structure(given), jaxpr.invars)
    late = set(names.metrics)
    for equation in jaxpr.eqns:
        if not late.isdisjoint(_variables(equation.invars)):
            late.update(equation.outvars)
    order = sorted(jaxpr.eqns, key=lambda equation: not late.isdisjoint(equation.outvars))
    gives: Gives = jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.outvars)
    return Traced(jaxpr.replace(eqns=order), tuple(closed.consts), names, gives)


def choose(traced: Traced, layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """The layers with which stages 1, 2, ... begin, so that their costs are balanced."""
    firsts = {position: n for n, position in reversed(list(enumerate(traced.first_uses(layers)))) if position}
    produced = {v: i for i, equation in enumerate(traced.jaxpr.eqns) for v in equation.outvars}
    for number, new in traced.changed.items():
        old = traced.given.state[number]
        span = [i for i, equation in enumerate(traced.jaxpr.eqns) if old in _variables(equation.invars)]
        span.append(produced.get(new, 0) if isinstance(new, Var) else 0)
        # What uses a state and what makes its new value stay together.
        firsts = {position: n for position, n in firsts.items() if not min(span) < position <= max(span)}
    begins = sorted(firsts)
    if len(begins) + 1 < stages:
        raise ValueError(
            f"The model can be cut in {len(begins)} places, where layers with variables begin, but `num_shards` is "
            f"{stages}. Set it to {len(begins) + 1} or less."
        )
    parts = traced.parts(begins)
    costs = np.array([cost_of(part.closed) for part in parts])
    sizes = [sum(v.aval.size * v.aval.dtype.itemsize for v in p.closed.jaxpr.outvars[: p.sent]) for p in parts]
    chosen = cuts(costs, np.array([0, *sizes]) * BYTE * LINK, stages)
    return tuple(firsts[begins[unit - 1]] for unit in chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A function in stages, traced once per shape of micro-batch when it is asked for."""

    whole: Whole
    given: Given
    """Shapes; that of the micro-batch is replaced."""
    counters: int
    """How many of the first states count steps: one for each stage. The function sees the first one only."""
    layers: tuple[Layer, ...]
    begins: tuple[int, ...]
    """The layers with which stages 1, 2, ... begin."""
    _known: dict[str, tuple[tuple[Part, ...], Gives]] = field(default_factory=dict)

    def at(self, batch: Tree) -> tuple[tuple[Part, ...], Gives]:
        """The stages for micro-batches of this shape, and what the last one gives."""
        batch = specs_of(batch)
        if str(batch) not in self._known:
            traced = trace(self.whole, self.given._replace(batch=batch))
            firsts = traced.first_uses(self.layers)
            begins = [position for position in (firsts[layer] for layer in self.begins) if position is not None]
            if len(begins) < len(self.begins) or begins != sorted(set(begins)):
                raise ValueError(
                    "The layers of model_fn run in another order for batches of this shape. Give all batches the same."
                )
            self._known[str(batch)] = traced.parts(begins), traced.gives
        return self._known[str(batch)]

    def used(self, batch: Tree) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The weights of each stage, and its state: first its counter."""
        parts, _ = self.at(batch)
        state = [(stage, *(n for n in part.state if n >= self.counters)) for stage, part in enumerate(parts)]
        return [part.weights for part in parts], state

    def stages(
        self, batch: Tree, common: Sequence[int], mapped: Callable[..., Arrays] | None
    ) -> tuple[StageFunction, ...]:
        """The stages as the executor runs them; `common` are the numbers of the optimizer's common variables."""
        weights, state = self.used(batch)
        own = zip(weights, state, strict=True)
        return tuple(
            StageFunction(w, s, partial(self._run, stage, tuple(common), w, s), mapped)
            for stage, (w, s) in enumerate(own)
        )

    def _run(
        self, stage: int, common: tuple[int, ...], own: tuple[int, ...], states: tuple[int, ...],
        weights: Arrays, boundary: Arrays, around: Around,
    ) -> tuple[Any, After]:  # fmt: skip
        parts, gives = self.at(around.batch)
        part = parts[stage]
        if not set(part.weights) <= set(own) or not {n for n in part.state if n >= self.counters} <= set(states):
            raise ValueError(
                f"Stage {stage} of model_fn uses other variables for batches of this shape. Give all batches the same."
            )
        old = dict(zip(states, around.state, strict=True))
        optimizer = filled(self.given.optimizer, common, around.optimizer) if self.given.optimizer else []
        known = Given(
            _at(dict(zip(own, weights, strict=True)), len(self.given.weights)),
            _at(old | {0: around.state[0]}, len(self.given.state)),
            optimizer,
            around.active,
            around.batch,
            around.metrics or [None] * len(self.given.metrics),
        )
        flat = jax.tree.leaves(known, is_leaf=lambda leaf: leaf is None)
        outputs = jaxpr_as_fun(part.closed)(*(flat[i] for i in part.inputs), *boundary)
        sent, rest = outputs[: part.sent], outputs[part.sent :]
        new = old | dict(zip(part.changes, rest, strict=False))
        new[stage] = old[stage] + (gives.loss is not None)
        state = [new[n] for n in states]
        if stage < len(parts) - 1:
            return list(sent), After(state, [], None)
        finals = iter(rest[len(part.changes) :])
        loss, _, metrics, result = jax.tree.map(lambda _: next(finals), gives._replace(state=[]))
        return loss, After(state, metrics, result)


def _at(values: dict[int, Any], count: int) -> list[Any]:
    """A list with values at their places and nothing elsewhere."""
    return [values.get(number) for number in range(count)]
