"""A stage as two pure functions, its forward and its backward, and what has to be kept between them.

[Note: what is kept] Differentiating a stage yields residuals: values that the backward needs. Most of them need no
memory of their own. Weights and the micro-batch are still there when the backward runs, and so is the stage's input,
which stays in the mailbox. What depends on weights alone (a weight cast to bfloat16) is computed again. Only the rest
is kept, once for each micro-batch in flight.

Recomputing a stage instead of keeping its values works the same way, with `jax.checkpoint` around the stage: its
residuals then are its inputs and what `recomputation_checkpoint` marks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from openipu.engine.core.enqueued import Enqueued
from openipu.engine.core.pipelining import Recompute
from openipu.engine.core.recomputation import recomputed
from openipu.engine.core.state import Spot
from openipu.engine.shapes import has_gradient
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.core import Literal as Constant

from .packing import Spec

Arrays = list[Any]
"""Arrays, or their shapes while a stage is traced."""


class StageContext(NamedTuple):
    """What a stage can read besides its weights and its input."""

    batch: Tree
    """The micro-batch. Every stage can read it."""
    optimizer: Arrays
    """The optimizer's variables that belong to no weight, such as a loss scale."""
    active: Any
    """Whether this replica has a micro-batch: at the end of the data, some may have none. None in a backward."""
    state: Arrays
    """The stage's own non-trainable variables."""
    metrics: Arrays
    """The variables of the metrics. Only the last stage has them."""
    spot: Spot | None = None
    """Where the micro-batch lies in the batch of all replicas, if not side by side with others of its size. None in a
    backward."""


class StageResults(NamedTuple):
    """What a stage leaves behind."""

    state: Arrays
    metrics: Arrays
    result: Tree
    """The last stage's logs or outputs."""
    enqueued: Enqueued = Enqueued()
    """What layers of the stage enqueue into outfeeds."""


@dataclass(frozen=True, slots=True)
class StageFunction:
    """One slice of a model, as a function."""

    weights: tuple[int, ...]
    """The numbers of its weights in the model's state."""
    state: tuple[int, ...]
    """The numbers of its other variables."""
    run: Callable[[Arrays, Arrays, StageContext], tuple[Any, StageResults]]
    """`run(weights, boundary, context)` returns the boundary to the next stage, a list of arrays, and `StageResults`.
    In training, the last stage returns the loss in place of a boundary."""
    map_gradients: Callable[[Arrays, Arrays, Arrays], Arrays] | None = None
    """`map_gradients(gradients, weights, optimizer)` changes the gradients of each micro-batch before they are added
    up."""
    layers: tuple[str, ...] = ()
    """The names of its layers, for reports."""


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A stage whose forward returns what its backward needs."""

    kept: tuple[Spec, ...]
    """The residuals that take memory. See [Note: what is kept]."""
    _closed: ClosedJaxpr
    """The forward, which also returns all residuals."""
    _outputs: jax.tree_util.PyTreeDef
    """The structure of the forward's outputs, without residuals."""
    _residuals: tuple[_Residual, ...]
    _vjp: jax.tree_util.PyTreeDef
    """The structure of the function that `jax.vjp` returns, with residuals as leaves."""
    _again: Callable[..., Arrays]
    """Computes the residuals that depend on weights alone."""

    def forward(self, weights: Arrays, boundary: Arrays, context: StageContext) -> tuple[Any, StageResults, Arrays]:
        """The boundary to the next stage or the loss, the `StageResults`, and what to keep for the backward."""
        flat = jaxpr_as_fun(self._closed)(*jax.tree.leaves((weights, boundary, context)))
        out, results = jax.tree.unflatten(self._outputs, flat[: self._outputs.num_leaves])
        values = flat[self._outputs.num_leaves :]
        kept = {r.number: v for r, v in zip(self._residuals, values, strict=True) if r.source == "kept"}
        return out, results, [kept[i] for i in range(len(kept))]

    def backward(
        self, weights: Arrays, boundary: Arrays, context: StageContext, kept: Arrays, gradients: Tree
    ) -> tuple[Arrays, Arrays]:
        """The gradients of the weights, and of the floating-point part of the boundary into the stage.

        `gradients` has the gradients of what the stage sends (its floating-point part), or of the loss.
        """
        given = jax.tree.leaves((weights, boundary, context))
        again = self._again(*weights)
        sources = {"given": given, "kept": kept, "again": again}
        vjp = jax.tree.unflatten(self._vjp, [sources[r.source][r.number] for r in self._residuals])
        of_weights, of_boundary = vjp(gradients)
        return list(of_weights), list(of_boundary)


class _Residual(NamedTuple):
    """Where the backward gets a residual from."""

    source: Literal["given", "again", "kept"]
    """An argument of the stage, computed again from weights, or stored."""
    number: int
    """The position among all values from that source."""


def differentiate(
    stage: StageFunction,
    weights: Arrays,
    boundary: Arrays,
    context: StageContext,
    recompute: Recompute = Recompute.NOTHING,
) -> Differentiated:
    """Trace a stage and its derivative. The arguments may be shapes or arrays."""
    trees: dict[str, Any] = {}

    def forward(weights: Arrays, boundary: Arrays, context: StageContext) -> Any:
        run = recomputed(differentiable(stage, boundary, context), recompute)
        out, vjp, (others, results) = jax.vjp(run, weights, floats_of(boundary), has_aux=True)
        residuals, trees["vjp"] = jax.tree.flatten(vjp)
        outputs = (_join(out, others) if isinstance(out, list) else out, results)
        flat, trees["outputs"] = jax.tree.flatten(outputs)
        return [*flat, *residuals]

    closed = jax.make_jaxpr(forward)(weights, boundary, context)
    groups = [len(jax.tree.leaves(part)) for part in (weights, boundary, context.batch, context.optimizer)]
    skip = trees["outputs"].num_leaves
    residuals, again = _classify(closed, skip, groups[0], sum(groups))
    specs: dict[int, Spec] = {}
    for residual, variable in zip(residuals, closed.jaxpr.outvars[skip:], strict=True):
        if residual.source == "kept":
            specs[residual.number] = Spec.of(variable.aval)
    kept = tuple(specs[i] for i in range(len(specs)))
    return Differentiated(kept, closed, trees["outputs"], residuals, trees["vjp"], again)


def differentiable(stage: StageFunction, boundary: Arrays, context: StageContext) -> Callable[..., Any]:
    """The stage as a function of weights and of that part of its boundary that has gradients."""
    others = [None if has_gradient(a) else a for a in boundary]

    def run(weights: Arrays, floats: Arrays) -> Any:
        out, results = stage.run(weights, _join(floats, others), context)
        if not isinstance(out, list):
            return out, ([], results)
        return floats_of(out), ([None if has_gradient(a) else a for a in out], results)

    return run


def floats_of(arrays: Sequence[Any]) -> Arrays:
    """The arrays of a boundary that have gradients."""
    return [a for a in arrays if has_gradient(a)]


def _join(floats: Sequence[Any], others: Sequence[Any]) -> Arrays:
    """Put floats back into a boundary: `others` has None in their places."""
    rest = iter(floats)
    return [next(rest) if other is None else other for other in others]


def _classify(
    closed: ClosedJaxpr, skip: int, weights: int, given: int
) -> tuple[tuple[_Residual, ...], Callable[..., Arrays]]:
    """Where each residual comes from, and the function that computes those that depend on weights alone.

    The first `weights` arguments are the weights. The first `given` arguments are available in the backward, too.
    """
    jaxpr = closed.jaxpr
    arguments = {v: i for i, v in enumerate(jaxpr.invars)}
    by_weights = set(jaxpr.invars[:weights]) | set(jaxpr.constvars)
    for equation in jaxpr.eqns:
        if not equation.effects and all(isinstance(v, Constant) or v in by_weights for v in equation.invars):
            by_weights.update(equation.outvars)
    found: list[_Residual] = []
    kept: dict[Any, int] = {}
    again: list[int] = []
    for position, v in enumerate(jaxpr.outvars[skip:], skip):
        if isinstance(v, Constant) or v in by_weights - set(jaxpr.invars):
            found.append(_Residual("again", len(again)))
            again.append(position)
        elif arguments.get(v, given) < given:
            found.append(_Residual("given", arguments[v]))
        else:
            found.append(_Residual("kept", kept.setdefault(v, len(kept))))
    return tuple(found), _from_weights(closed, weights, again)


def _from_weights(closed: ClosedJaxpr, weights: int, outputs: Sequence[int]) -> Callable[..., Arrays]:
    """A function of the weights that computes some outputs of a program, which must depend on weights alone.

    All other arguments are zeros here. XLA removes everything that uses them.
    """
    rest = [v.aval for v in closed.jaxpr.invars[weights:]]

    def run(*values: Array) -> Arrays:
        everything = jaxpr_as_fun(closed)(*values, *(jnp.zeros(a.shape, a.dtype) for a in rest))
        return [everything[i] for i in outputs]

    return run if outputs else lambda *_: []
