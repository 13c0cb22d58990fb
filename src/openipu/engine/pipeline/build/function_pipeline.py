"""`pipeline`: runs plain functions that use existing Keras variables as one program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.core.model_state import assign, values_of
from openipu.engine.core.pipelining import Pipelining
from openipu.engine.core.state import Outcome, State
from openipu.engine.data.slab import Slab
from openipu.engine.devices import systems
from openipu.engine.devices.current_system import system_of
from openipu.engine.devices.kept_programs import KeptPrograms
from openipu.engine.devices.placement import Placement, placement_on
from openipu.engine.devices.running import running
from openipu.engine.devices.transfer import read
from openipu.engine.facts.calls import recorded
from openipu.engine.interrupts import uninterrupted
from openipu.engine.keras_compat.patches import tracing
from openipu.engine.pipeline.runtime.stage_function import Arrays
from openipu.engine.pipeline.runtime.stage_layout import StageLayout
from openipu.engine.pipeline.runtime.stage_loop import StageLoop
from openipu.engine.program.variable_scope import VariableScope
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import keras

from .assemble import make_loop
from .function_stages import Functions, NewState, functions_in_stages, gradient_check
from .optimizer_output import OptimizerFunctionOutput

KEPT = 16
"""How many pipelines are kept with their programs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Variables:
    """The variables that the functions use: a `Binding`."""

    trained: tuple[keras.Variable, ...]
    others: tuple[keras.Variable, ...]
    weights: tuple[tuple[int, ...], ...]
    state: tuple[tuple[int, ...], ...]

    @property
    def trainable(self) -> list[bool]:
        """Which of them are trainable now."""
        return [v.trainable for v in (*self.trained, *self.others)]

    @contextlib.contextmanager
    def bound(self, stage: int, weights: Arrays, state: Arrays) -> Iterator[NewState]:
        """While active, the variables of a stage have these values. Yields a function that returns the new state."""
        own = [self.others[n] for n in self.state[stage]]
        mapping = [
            *zip((self.trained[n] for n in self.weights[stage]), weights, strict=True), *zip(own, state, strict=True)
        ]  # fmt: skip
        with keras.StatelessScope(state_mapping=mapping) as scope:
            yield lambda: [scope.get_current_value(v) for v in own]


@dataclass(frozen=True, slots=True)
class Request:
    """What one call of `pipeline` asks for, apart from its data."""

    functions: Functions
    pipelining: Pipelining
    ordinal: int
    key: Hashable
    """Equal for calls that can use the same program."""


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """A pipeline that is ready to run."""

    variables: _Variables
    optimizer: keras.optimizers.Optimizer | None
    loop: StageLoop
    layout: StageLayout
    place: Placement
    trainable: list[bool]

    def run(self, body: Tree, count: int) -> Tree:
        """Run `count` micro-batches per replica and update the variables. Returns the results of each micro-batch."""
        owners = State(
            list(self.variables.trained),
            list(self.variables.others),
            list(self.optimizer.variables) if self.optimizer is not None else [],
            [],
        )
        slab = Slab(0, count * self.place.replicas.count, body, None)
        with (
            uninterrupted(),
            running(self, "pipeline", "`pipelining_ops`"),
            recorded("pipeline", "functions", together=True),
        ):
            state = self.layout.spread(values_of(owners))
            [result], state = self.loop.execute(state, None, slab)
            assign(owners, self.layout.gather(state))
        return jax.tree.map(read, result.value[0])


_runners: KeptPrograms[Runner] = KeptPrograms(KEPT)


def runner(request: Request, element: Tree) -> Runner:
    """The pipeline for a request and the shape of an element. The most recently used ones are kept."""
    systems.reserve()
    place = placement_on(system_of(request.ordinal), request.pipelining.device_count)
    shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(element))
    return _runners.get(place, (request.key, shapes), lambda: _make(request, element, place), _is_current)


def _is_current(runner: Runner) -> bool:
    """Whether the same variables are trainable as when the pipeline was made."""
    return runner.trainable == runner.variables.trainable


def _make(request: Request, element: Tree, place: Placement) -> Runner:
    functions = request.functions
    variables, optimizer = _discover(functions, element, place)
    model = functions_in_stages(functions, variables, (variables.trained, variables.others), optimizer, place)
    paths = [v.path for v in variables.trained]
    check = gradient_check(functions, variables, paths) if optimizer is not None else None
    loop, layout = make_loop("pipeline", Outcome("all", check=check), model, request.pipelining, place)
    return Runner(variables, optimizer, loop, layout, place, variables.trainable)


def _discover(
    functions: Functions, element: Tree, place: Placement
) -> tuple[_Variables, keras.optimizers.Optimizer | None]:
    """Trace all functions to learn which variables they use, and which optimizer trains them."""
    received: list[Any] = []
    used: list[dict[int, keras.Variable]] = []
    outputs: list[OptimizerFunctionOutput] = []
    for number in range(len(functions.stages)):
        scope = VariableScope()
        trained = number == functions.last and functions.optimizer_function is not None
        probe = place.replicas.program(
            _probe(functions, number, scope, outputs if trained else None), (None, None), None
        )
        with tracing():
            received = jax.eval_shape(probe, received, element)
        used.append(scope.read | scope.assigned)
    everything = {key: v for part in used for key, v in part.items()}
    optimizer, chosen = None, [v for v in everything.values() if v.trainable]
    if outputs:
        optimizer = outputs[-1].opt
        chosen = chosen if outputs[-1].variables is None else outputs[-1].variables
        _check(optimizer, chosen)
        everything = {k: v for k, v in everything.items() if not any(v is own for own in optimizer.variables)}
    is_trained = {id(v): i for i, v in enumerate(chosen)}
    others = [v for key, v in everything.items() if key not in is_trained]
    is_other = {id(v): i for i, v in enumerate(others)}

    def numbers(known: dict[int, int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(known[key] for key in part if key in known)) for part in used)

    return _Variables(tuple(chosen), tuple(others), numbers(is_trained), numbers(is_other)), optimizer


def _probe(
    functions: Functions, number: int, scope: VariableScope, outputs: list[OptimizerFunctionOutput] | None
) -> Callable[[Arrays, Tree], Tree]:
    """One stage, to be traced: `scope` notes its variables, `outputs` takes what `optimizer_function` returns."""

    def probe(received: Arrays, element: Tree) -> Tree:
        with scope:
            values = functions.call(number, received, element)
            if outputs is not None and functions.optimizer_function is not None:
                outputs.append(functions.optimized(values))
        return jax.tree.map(jnp.asarray, values)

    return probe


def _check(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    if not variables:
        raise RuntimeError(
            "The pipeline has nothing to train: its stages use no trainable variable. Use Keras layers or variables "
            "that you create outside the stages."
        )
    if any(isinstance(v.value, jax.core.Tracer) for v in optimizer.variables):
        raise ValueError(
            "The optimizer is created inside `optimizer_function`, which is traced more than once. Create it outside."
        )
    if not optimizer.built:
        optimizer.build(list(variables))
