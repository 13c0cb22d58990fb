"""Loops, conditionals and gradients of users' code in a program that something else traces, such as a step of `fit`.

A function that is given to `strategy.run` is a program, and `ProgramTrace` follows it from its beginning to its end. A
layer, a loss or a model's own step is only a part of a program. `as_part` follows it in the same way, twice, and hands
what it assigns to the scope around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from openipu.engine.core import enqueued
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat.api import has_value, stateless_scope, value_in
from openipu.engine.types import Array

import jax
import keras

from . import added_losses
from .gradient_marks import resolved
from .program_trace import ProgramTrace, Site, current
from .variable_scope import VariableScope

R = TypeVar("R")

_NOWHERE = Replicas(())
"""A part does not know the devices of its program, and has no feeds that would have to."""


def as_part(function: Callable[[], R]) -> R:
    """The result of a function that may use the loops and conditionals of `ProgramTrace`.

    In a function that is traced for `strategy.run`, this just calls it.
    """
    if current() is not None:
        return function()
    around = stateless_scope()
    sites = _discover(function, around)
    scope = _scope(around)
    with ProgramTrace(_NOWHERE, 0, False, scope, sites, whole=False).active():
        result = function()
        new = [(variable, scope.state_mapping[key]) for key, variable in scope.assigned.items()]
    for variable, value in new:
        variable.assign(value)
    added_losses.added_again(added_losses.taken(scope))
    return result


def as_step(function: Callable[[], R]) -> R:
    """The result of a function that may also ask for gradients, and enqueue into outfeeds."""
    result, found = as_part(lambda: resolved(enqueued.collecting(function)))
    for outfeed, element in found.items():
        if not enqueued.enqueue(outfeed, element):
            raise RuntimeError(
                "An outfeed was used in the step of a model that no strategy trains. Make the model in the scope of a "
                "strategy."
            )
    return cast(R, result)


def _discover(function: Callable[[], object], around: keras.StatelessScope | None) -> list[Site]:
    """Trace the function a first time, to find out what its loops and conditionals change."""
    scope = _scope(around)
    trace = ProgramTrace(_NOWHERE, 0, True, scope, whole=False)

    def run() -> None:
        scope.belongs_here()
        function()

    with enqueued.ignored(), trace.active():
        jax.eval_shape(run)
    added_losses.taken(scope)
    if trace.demands:
        raise RuntimeError(
            "An infeed or an iterator was used in a layer, a loss or a step of a Keras model, which get their data "
            "from `fit`. Use it in a function that you give to `strategy.run`."
        )
    return trace.sites


def _scope(around: keras.StatelessScope | None) -> VariableScope:
    def outer(variable: keras.Variable) -> Array | None:
        value = None if around is None else around.get_current_value(variable)
        return value_in(variable) if value is None and has_value(variable) else value

    scope = VariableScope(unknown=outer)
    if around is not None:
        scope.losses = list(around.losses)
    return scope
