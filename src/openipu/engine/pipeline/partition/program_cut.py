"""One traced function -> stages: its operations in their order, cut where layers begin.

A stage has the variables that its operations use. Whatever an operation needs from an earlier stage travels over the
boundaries between them. Every device has the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from openipu.engine.pipeline.runtime.stage_function import Arrays, StageContext, StageFunction, StageResults
from openipu.engine.pipeline.runtime.variable_store import zero_filled
from openipu.engine.shapes import specs_of
from openipu.engine.types import Array, Tree

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from .balance import LINK, cuts
from .costs import BYTE, cost_of

Atom = Var | Literal
"""An argument or a result of an operation in a jaxpr."""


class FunctionInputs(NamedTuple):
    """The arguments of the whole function: values, or their shapes to trace it with."""

    weights: Arrays
    state: Arrays
    optimizer: Arrays
    """All variables of the optimizer. Only those that belong to no weight have their real values."""
    active: Any
    """Whether this replica has a micro-batch: an array, or its shape where nothing is computed."""
    batch: Tree
    metrics: Arrays


class FunctionOutputs(NamedTuple):
    """What the whole function computes."""

    loss: Array | None
    """None if nothing is trained."""
    state: Arrays
    metrics: Arrays
    result: Tree


WholeFunction = Callable[[FunctionInputs], FunctionOutputs]
Layer = tuple[tuple[int, ...], tuple[int, ...]]
"""The numbers of a layer's weights, and of its other variables."""


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The function for one shape of micro-batch, with operations on metrics moved to the end."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    inputs: FunctionInputs
    """Variables of the jaxpr instead of values."""
    outputs: FunctionOutputs
    """Variables of the jaxpr instead of values."""

    @property
    def changed(self) -> dict[int, Atom]:
        """The new value of each state variable that changes, by number."""
        pairs = enumerate(zip(self.inputs.state, self.outputs.state, strict=True))
        return {number: new for number, (old, new) in pairs if new is not old}

    def first_uses(self, layers: Sequence[Layer]) -> list[int | None]:
        """The position of the operation with which each layer begins: the first one that uses a variable of it."""
        firsts: dict[Var, int] = {}
        for position, equation in enumerate(self.jaxpr.eqns):
            for v in _variables(equation.invars):
                firsts.setdefault(v, position)
        found = []
        for weights, state in layers:
            own = [*(self.inputs.weights[n] for n in weights), *(self.inputs.state[n] for n in state)]
            found.append(min((firsts[v] for v in own if v in firsts), default=None))
        return found

    def parts(self, begins: Sequence[int]) -> tuple[Part, ...]:
        """The program of each stage: the operations before, between and after these positions."""
        equations = [self.jaxpr.eqns[a:b] for a, b in pairwise([0, *begins, len(self.jaxpr.eqns)])]
        made = {v: stage for stage, part in enumerate(equations) for eqn in part for v in eqn.outvars}
        end = len(equations) - 1
        finals = [*jax.tree.leaves(self.outputs.loss), *self.outputs.metrics, *jax.tree.leaves(self.outputs.result)]
        last_use = {v: stage for stage, part in enumerate(equations) for eqn in part for v in _variables(eqn.invars)}
        last_use |= dict.fromkeys(_variables(finals), end)
        home = {n: made.get(new, 0) if isinstance(new, Var) else 0 for n, new in self.changed.items()}
        found: list[Part] = []
        received: list[Var] = []
        for stage, part in enumerate(equations):
            known = [*received, *(v for eqn in part for v in eqn.outvars)]
            sent = [v for v in known if last_use.get(v, -1) > stage]
            changes = [n for n, at in home.items() if at == stage]
            outputs = [*sent, *(self.changed[n] for n in changes), *(finals if stage == end else ())]
            found.append(self._part(part, received, outputs, len(sent), changes))
            received = sent
        return tuple(found)

    def _part(
        self,
        equations: Sequence[JaxprEqn],
        received: Sequence[Var],
        outputs: Sequence[Atom],
        sent: int,
        changes: Sequence[int],
    ) -> Part:
        used = set(_variables([v for eqn in equations for v in eqn.invars] + list(outputs)))
        flat = jax.tree.leaves(self.inputs)
        inputs = [i for i, v in enumerate(flat) if v in used]
        arguments = [*(flat[i] for i in inputs), *received]
        effects = frozenset(effect for eqn in equations for effect in eqn.effects)
        jaxpr = Jaxpr(self.jaxpr.constvars, arguments, list(outputs), equations, effects, self.jaxpr.debug_info)
        return Part(
            ClosedJaxpr(jaxpr, self.consts),
            tuple(inputs),
            sent,
            tuple(changes),
            tuple(n for n, v in enumerate(self.inputs.weights) if v in used),
            tuple(n for n, v in enumerate(self.inputs.state) if v in used or n in changes),
        )


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


class Part(NamedTuple):
    """The operations of one stage as a program of their own."""

    closed: ClosedJaxpr
    """Takes inputs of the whole function, then what the stage receives. Returns what the stage sends, then its new
    state, and in the last stage then the outputs of the whole function."""
    inputs: tuple[int, ...]
    """Which leaves of the function's inputs it takes."""
    sent: int
    """How many of its results go to the next stage."""
    changes: tuple[int, ...]
    """The numbers of the state variables that it changes."""
    weights: tuple[int, ...]
    """The numbers of the weights that it uses."""
    state: tuple[int, ...]
    """The numbers of the state variables that it uses or changes."""


def trace(whole: WholeFunction, shapes: FunctionInputs) -> Traced:
    """Trace a function for values of these shapes."""
    closed, results = jax.make_jaxpr(whole, return_shape=True)(shapes)
    jaxpr = closed.jaxpr
    inputs: FunctionInputs = jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.invars)
    late = set(inputs.metrics)
    for equation in jaxpr.eqns:
        if not late.isdisjoint(_variables(equation.invars)):
            late.update(equation.outvars)
    order = sorted(jaxpr.eqns, key=lambda equation: not late.isdisjoint(equation.outvars))
    outputs: FunctionOutputs = jax.tree.unflatten(jax.tree.structure(results), jaxpr.outvars)
    return Traced(jaxpr.replace(eqns=order), tuple(closed.consts), inputs, outputs)


def choose(traced: Traced, layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """The layers with which stages 1, 2, ... should begin to balance the costs of the stages."""
    firsts = {position: n for n, position in reversed(list(enumerate(traced.first_uses(layers)))) if position}
    produced = {v: i for i, equation in enumerate(traced.jaxpr.eqns) for v in equation.outvars}
    for number, new in traced.changed.items():
        old = traced.inputs.state[number]
        span = [i for i, equation in enumerate(traced.jaxpr.eqns) if old in _variables(equation.invars)]
        span.append(produced.get(new, 0) if isinstance(new, Var) else 0)
        # Whatever reads a state variable stays together with whatever computes its new value.
        firsts = {position: n for position, n in firsts.items() if not min(span) < position <= max(span)}
    begins = sorted(firsts)
    if len(begins) + 1 < stages:
        raise ValueError(
            f"`num_shards` is {stages}, but the number of places where the model can be cut is {len(begins)}: it can "
            f"be cut where a layer with variables begins. Set `num_shards` to {len(begins) + 1} or less."
        )
    parts = traced.parts(begins)
    costs = np.array([cost_of(part.closed) for part in parts])
    sizes = [sum(v.aval.size * v.aval.dtype.itemsize for v in p.closed.jaxpr.outvars[: p.sent]) for p in parts]
    chosen = cuts(costs, np.array([0, *sizes]) * BYTE * LINK, stages)
    return tuple(firsts[begins[unit - 1]] for unit in chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A function in stages, traced on demand once per shape of micro-batch."""

    whole: WholeFunction
    inputs: FunctionInputs
    """Shapes. The shape of the micro-batch is replaced."""
    counters: int
    """How many of the first state variables count steps: one for each stage. The function only reads the first."""
    layers: tuple[Layer, ...]
    begins: tuple[int, ...]
    """The layers with which stages 1, 2, ... begin."""
    _known: dict[str, tuple[tuple[Part, ...], FunctionOutputs]] = field(default_factory=dict)

    def at(self, batch: Tree) -> tuple[tuple[Part, ...], FunctionOutputs]:
        """The stages for micro-batches of this shape, and the outputs of the whole function."""
        batch = specs_of(batch)
        if str(batch) not in self._known:
            traced = trace(self.whole, self.inputs._replace(batch=batch))
            firsts = traced.first_uses(self.layers)
            begins = [position for position in (firsts[layer] for layer in self.begins) if position is not None]
            if len(begins) < len(self.begins) or begins != sorted(set(begins)):
                raise ValueError(
                    "The layers of model_fn run in another order for batches of this shape. Give all batches the same "
                    "shape."
                )
            self._known[str(batch)] = traced.parts(begins), traced.outputs
        return self._known[str(batch)]

    def used(self, batch: Tree) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The weights of each stage, and its state variables, of which the first is its counter of steps."""
        parts, _ = self.at(batch)
        state = [(stage, *(n for n in part.state if n >= self.counters)) for stage, part in enumerate(parts)]
        return [part.weights for part in parts], state

    def stages(
        self, batch: Tree, common: Sequence[int], map_gradients: Callable[..., Arrays] | None
    ) -> tuple[StageFunction, ...]:
        """The stages as the executor runs them. `common` has the numbers of the optimizer's common variables."""
        weights, state = self.used(batch)
        return tuple(
            StageFunction(w, s, _CutStage(self, number, w, s, tuple(common)).run, map_gradients)
            for number, (w, s) in enumerate(zip(weights, state, strict=True))
        )


@dataclass(frozen=True, slots=True, eq=False)
class _CutStage:
    """One stage, for micro-batches of any shape."""

    cut: Cut
    number: int
    weights: tuple[int, ...]
    state: tuple[int, ...]
    common: tuple[int, ...]

    def run(self, weights: Arrays, boundary: Arrays, context: StageContext) -> tuple[Any, StageResults]:
        """Run one micro-batch as `StageFunction.run` does."""
        parts, outputs = self.cut.at(context.batch)
        part = parts[self.number]
        self._check(part)
        flat = jax.tree.leaves(self._inputs(weights, context), is_leaf=lambda leaf: leaf is None)
        computed = jaxpr_as_fun(part.closed)(*(flat[i] for i in part.inputs), *boundary)
        sent, rest = computed[: part.sent], computed[part.sent :]
        old = dict(zip(self.state, context.state, strict=True))
        new = old | dict(zip(part.changes, rest, strict=False))
        new[self.number] = old[self.number] + (outputs.loss is not None)
        state = [new[n] for n in self.state]
        if self.number < len(parts) - 1:
            return list(sent), StageResults(state, [], None)
        finals = iter(rest[len(part.changes) :])
        loss, _, metrics, result = jax.tree.map(lambda _: next(finals), outputs._replace(state=[]))
        return loss, StageResults(state, metrics, result)

    def _inputs(self, weights: Arrays, context: StageContext) -> FunctionInputs:
        """The arguments of the whole function, or None for those that this stage does not have."""
        shapes, state = self.cut.inputs, dict(zip(self.state, context.state, strict=True))
        return FunctionInputs(
            _at(dict(zip(self.weights, weights, strict=True)), len(shapes.weights)),
            # The function reads counter 0, so each stage puts its own counter there.
            _at(state | {0: context.state[0]}, len(shapes.state)),
            zero_filled(shapes.optimizer, self.common, context.optimizer) if shapes.optimizer else [],
            context.active,
            context.batch,
            context.metrics or [None] * len(shapes.metrics),
        )

    def _check(self, part: Part) -> None:
        own_state = {n for n in part.state if n >= self.cut.counters}
        if not set(part.weights) <= set(self.weights) or not own_state <= set(self.state):
            raise ValueError(
                f"Stage {self.number} of model_fn uses other variables for batches of this shape. Give all batches the "
                "same shape."
            )


def _at(values: dict[int, Any], count: int) -> list[Any]:
    """A list of this length with the values at their places and None elsewhere."""
    return [values.get(number) for number in range(count)]
