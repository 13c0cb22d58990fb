"""A user's function as one compiled program on all replicas, with the Keras variables that it uses.

    program = user_program(fn, ordinal)       # the same object for the same function
    program(args, kwargs)                     # traces and compiles once per shape of the arguments, then launches

Variables that the function assigns are inputs and outputs of the program, and their buffers are donated. Variables that
it only reads are inputs. Feeds take part through their cells (variable_scope.py) and say during tracing what they need
(program_trace.py).

[Note: programs that visit the host] On a CPU, XLA runs a program that calls Python on the thread that launches it, so
the launch returns when the program has ended. For equal behaviour, we wait for its end on other devices too; to read
while it runs, use another thread. A program that fetches its data may fail halfway, when the data ends. Its buffers are
not donated, so that the variables keep their values.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from openipu.engine.core.differing import mention_differing
from openipu.engine.core.replicated_step import one_of_several
from openipu.engine.devices import group, same_values, systems, transfer
from openipu.engine.devices.current_system import system_of
from openipu.engine.devices.kept_programs import KeptPrograms
from openipu.engine.devices.launching import in_turn
from openipu.engine.devices.memory import SLAB_SHARE, free_memory
from openipu.engine.devices.placement import Placement, placement_on
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.running import running
from openipu.engine.facts import calls
from openipu.engine.facts.calls import recorded
from openipu.engine.host_io.outfeed_buffer import filled
from openipu.engine.interrupts import SHORT, interruptible, uninterrupted
from openipu.engine.keras_compat.patches import tracing
from openipu.engine.loop.compile import CompiledProgram, compile_program, note_launch
from openipu.engine.loop.replica_state import mean_where_changed
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras
import numpy as np

from . import optimizer_calls as optimize
from .call_arguments import CallArguments, SameObject
from .infeed import FeedArgument, InfeedSource, slabs_of
from .program_trace import NotInProgram, ProgramTrace, Site
from .variable_scope import VariableScope

KEPT = 64
"""The number of functions whose programs are kept."""


class Operation:
    """What a device does without producing a value, such as an `enqueue`. Bodies may return it after their values."""


jax.tree_util.register_static(Operation)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the first tracing of a function has found out."""

    state: tuple[keras.Variable, ...]
    """Variables that it assigns."""
    constants: tuple[keras.Variable, ...]
    """Variables that it only reads."""
    sites: tuple[Site, ...]
    sent: dict[int, tuple[Any, int]]
    """Infeeds whose elements are sent before the launch, and the number of elements for each replica."""
    fetched: tuple[Any, ...]
    """Infeeds whose elements the program fetches while it runs."""
    outfeeds: dict[int, tuple[Any, Tree]]
    optimizers: tuple[keras.optimizers.Optimizer, ...]

    @property
    def visits_host(self) -> bool:
        """Whether the program calls Python while it runs. See [Note: programs that visit the host]."""
        return bool(self.fetched or self.outfeeds)

    @property
    def moving(self) -> list[int]:
        """Where in `state` there are moving statistics, counts and the like, and no weights, metrics or optimizers."""
        own = {id(v) for optimizer in self.optimizers for v in optimizer.variables}
        return [i for i, v in enumerate(self.state) if not (v.trainable or id(v) in own or _adds_up(v))]

    @property
    def trainable(self) -> list[bool]:
        """Which of its variables are trainable now. A program that was made when others were is out of date."""
        return [v.trainable for v in (*self.state, *self.constants)]


@dataclass(frozen=True, slots=True)
class Kept:
    """A compiled function: what it needs, its program, and the stand-ins for iterators among its arguments."""

    needs: Needs
    program: CompiledProgram
    stand_ins: Sequence[FeedArgument]
    trainable: list[bool]

    def sources(self, call: CallArguments) -> dict[int, InfeedSource]:
        """The sources that a call feeds to the program, by those of the stand-ins that it uses."""
        used = {id(feed) for feed in (*(feed for feed, _ in self.needs.sent.values()), *self.needs.fetched)}
        pairs = zip(self.stand_ins, call.feeds, strict=True)
        found = {id(slot.source()): given.source() for slot, given in pairs if id(slot.source()) in used}
        if any(id(given) in used for given in found.values()):
            raise ValueError(
                "A function takes elements from an iterator that is one of its arguments, and from the same iterator "
                "as a variable from outside. Use it as an argument only."
            )
        return found


class UserProgram:
    """A user's function on the devices of one place. `programs` has one entry per shape of the arguments."""

    def __init__(self, fn: Callable[..., Any], place: Placement, ordinal: int) -> None:
        self._fn, self._place, self._ordinal = fn, place, ordinal
        self.programs: dict[Any, Kept] = {}
        self._spread: dict[int, tuple[Any, Any]] = {}
        self._lock = threading.RLock()

    def __call__(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the function on all replicas, and return what the first one returns."""
        call = CallArguments.of(args, kwargs or {})
        if self._place.replicas.is_local:
            call = call.placed_on(self._place.replicas)
        with (
            uninterrupted(SHORT),
            running(call, "run", "a strategy"),
            recorded("run", getattr(self._fn, "__name__", "program"), together=True),
        ):
            with self._lock, contextlib.suppress(NotInProgram):
                known = self.programs.get(call.key)
                if known is None or known.trainable != known.needs.trainable:
                    self.programs.pop(call.key, None)
                    traced = call.with_stand_ins()
                    with calls.doing("plan"):
                        needs = self._discover(traced)
                    program = self._compile(needs, traced)
                    self.programs[call.key] = Kept(needs, program, traced.feeds, needs.trainable)
            if call.key in self.programs:
                return self._launch(self.programs[call.key], call)
        # The function runs a pipeline, which is a program of its own and all that the function does on devices.
        return self._fn(*args, **(kwargs or {}))

    # --- tracing

    def _discover(self, call: CallArguments) -> Needs:
        """Trace the function a first time, to find out what it needs."""
        scope = VariableScope()
        trace = ProgramTrace(self._place.replicas, self._ordinal, True, scope)

        def run(arrays: list[Array]) -> None:
            scope.belongs_here()
            with self._environment(trace):
                positional, named = call.args(arrays)
                jax.tree.map(jnp.asarray, self._fn(*positional, **named))  # a variable that is returned is read

        # The scope ends outside the tracing, because Keras then initialises the variables that were made in it.
        with tracing(), trace.active():
            jax.eval_shape(self._place.replicas.program(run, (None,), None), call.arrays)
        state = tuple(scope.assigned.values())
        constants = tuple(v for key, v in scope.read.items() if key not in scope.assigned)
        sent, fetched = {}, []
        limit = SLAB_SHARE * free_memory(self._place.replicas)
        if trace.demands and not self._place.replicas.is_local:
            limit = min(group.exchange("the memory for feeds", limit))  # all instances must make the same choice
        for feed, count in trace.demands.values():
            if count is not None and feed.slab_bytes(count) <= limit:
                sent[id(feed)] = (feed, count)
            else:
                fetched.append(feed)
        return Needs(
            state, constants, tuple(trace.sites), sent, tuple(fetched), trace.outfeeds, tuple(trace.optimizers.values())
        )

    def _compile(self, needs: Needs, call: CallArguments) -> CompiledProgram:
        """Trace the function a second time, with everything that it needs, and compile it."""
        replicas = self._place.replicas

        def run(state: list[Array], constants: list[Array], slabs: list[Tree], arrays: list[Array]) -> Any:
            first = [_first_value(v, value, replicas) for v, value in zip(needs.state, state, strict=True)]
            values = [*zip(needs.state, first, strict=True), *zip(needs.constants, constants, strict=True)]
            scope = VariableScope(None, values, self._cells(needs), _unknown)
            trace = ProgramTrace(replicas, self._ordinal, False, scope, list(needs.sites))
            trace.slabs = dict(zip(needs.sent, slabs, strict=True))
            with trace.active(), self._environment(trace):
                positional, named = call.args(arrays)
                result = jax.tree.map(jnp.asarray, self._fn(*positional, **named))
                flushed = [feed.outlet.flush(scope.cell(feed), replicas.index()) for feed, _ in needs.outfeeds.values()]
                new = [scope.state_mapping[id(v)] for v in needs.state]
            taken = [jnp.reshape(scope.cell(feed).taken, (1,)) for feed in needs.fetched]
            # To wait for these values is to wait for the last visit of every replica.
            visits = [jnp.reshape(waiting.due, (1,)) for waiting in flushed]
            return result, self._agreed(needs, new, first), taken, visits

        return compile_program(
            getattr(self._fn, "__name__", "program"),
            self._place,
            lambda: replicas.program(run, (None, None, 1, None), (None, None, 0, 0)),
            (*self._values(needs), self._slab_shapes(needs), call.arrays),
            donate=not needs.fetched,
        )

    @contextlib.contextmanager
    def _environment(self, trace: ProgramTrace) -> Iterator[None]:
        """The context in which the user's function is traced, both times."""
        place = self._place
        with optimize.in_program(trace):
            if place.replicas.count == 1:
                yield
                return
            with one_of_several(place.replicas, place.batch_norm_group, lambda: trace.rows):
                yield

    def _cells(self, needs: Needs) -> list[tuple[Any, Tree]]:
        sent = [(feed, feed.first_cell(sent=True)) for feed, _ in needs.sent.values()]
        fetched = [(feed, feed.first_cell(sent=False)) for feed in needs.fetched]
        return [*sent, *fetched, *((feed, feed.outlet.start(spec)) for feed, spec in needs.outfeeds.values())]

    def _agreed(self, needs: Needs, new: list[Array], old: list[Array]) -> list[Array]:
        """New values, made equal on all replicas: sums of metrics, means of moving statistics.

        Weights and the optimizers' own variables are already equal, because gradients are reduced before they are
        applied.
        """
        replicas = self._place.replicas
        if replicas.count == 1:
            return new
        found = [replicas.sum(a) if _adds_up(v) else a for v, a in zip(needs.state, new, strict=True)]
        means = mean_where_changed(replicas, [new[i] for i in needs.moving], [old[i] for i in needs.moving])
        for i, mean in zip(needs.moving, means, strict=True):
            found[i] = mean
        return found

    # --- launching

    def _launch(self, kept: Kept, call: CallArguments) -> Any:
        """Feed the program, run it, and put the new values into the variables.

        Ctrl-C waits for that, except in a program that fetches its data: it may fail, and may wait for data forever.
        """
        needs = kept.needs
        if self._place.compile_only:
            return kept.program.call([])[0]  # nothing is sent, fetched or assigned
        given = kept.sources(call)
        with calls.doing("feed"), interruptible():
            slabs = slabs_of([(given.get(id(feed), feed), count) for feed, count in needs.sent.values()], self._place)
        with contextlib.ExitStack() as lent, uninterrupted():
            for feed in needs.fetched:
                if id(feed) in given:
                    lent.enter_context(feed.reading(given[id(feed)]))
            return self._launch_with(slabs, needs, kept.program, call)

    def _launch_with(self, slabs: list[Tree], needs: Needs, program: CompiledProgram, call: CallArguments) -> Any:
        replicas = self._place.replicas
        if not replicas.is_local:
            self._share(needs, call)
        values = self._values(needs)
        feeds = [feed for feed, _ in needs.outfeeds.values()]
        for feed in needs.fetched:
            feed.begin(self._place)
        try:
            with filled(needs.outfeeds.values(), replicas.own), _letting_through(needs):
                launch = in_turn(self if needs.state else None, replicas.devices, program.call, program.name)
                run = calls.current()
                execution = None if run is None else note_launch(run, [program], replicas)
                result, state, taken, visits = launch(*values, slabs, self._sent(call.arrays))
                if run is not None and execution is not None:
                    run.launched(execution, result, (taken, visits, state), 1, 0, calls.is_own())
                if needs.visits_host:
                    jax.block_until_ready((result, state, taken, visits))
        except jax.errors.JaxRuntimeError:
            systems.settle(replicas.devices)
            for feed in needs.fetched:
                if feed.error is not None:
                    raise feed.error from None
            raise
        if replicas.count > 1:
            mention_differing([needs.state[i] for i in needs.moving], [state[i] for i in needs.moving])
        for variable, value in zip(needs.state, state, strict=True):
            self._give(variable, value)
        for feed, count in zip(needs.fetched, taken, strict=True):
            feed.end(transfer.read(count))
        for feed in feeds:
            if feed.interrupt is not None:
                raise feed.interrupt
            feed.check()
        return jax.tree.map(lambda a: a if replicas.count == 1 else a.addressable_data(0), result)

    def _share(self, needs: Needs, call: CallArguments) -> None:
        """Let all instances start alike: arguments must be equal, and variables become those of instance 0."""
        check_same_arguments("strategy.run", call.arrays)
        variables = [*needs.state, *needs.constants]
        for variable, value in zip(variables, same_values.same([v.value for v in variables]), strict=True):
            if value is not variable.value:
                variable.assign(value)
        same_values.mark([v.value for v in variables])

    def _sent(self, arrays: Tree) -> Tree:
        return arrays if self._place.replicas.is_local else self._place.replicas.send(arrays)

    def _values(self, needs: Needs) -> tuple[list[Array], list[Array]]:
        seen = {id(v.value) for v in needs.constants}
        for variable in needs.state:  # their arrays are used up, so each needs one of its own
            if id(variable.value) in seen:
                variable.assign(variable.value.copy())
            seen.add(id(variable.value))
        return [self._take(v) for v in needs.state], [self._take(v) for v in needs.constants]

    def _take(self, variable: keras.Variable) -> Any:
        """A variable's value on the devices of all replicas. A value that is already there is not copied."""
        value = variable.value
        if self._place.replicas.count == 1:
            (device,) = self._place.replicas.devices
            return value if value.devices() == {device} else jax.device_put(value, device)
        first, spread = self._spread.get(id(variable), (None, None))
        if first is not value:
            spread = self._place.replicas.send(value)
            self._spread[id(variable)] = value, spread
        return spread

    def _give(self, variable: keras.Variable, value: Array) -> None:
        """Assign a value that is on the devices of all replicas, and remember that it is there."""
        if self._place.replicas.count > 1:
            spread, value = value, value.addressable_data(0)
            self._spread[id(variable)] = value, spread
        variable.assign(value)
        if not self._place.replicas.is_local:
            same_values.mark([variable.value])

    def _slab_shapes(self, needs: Needs) -> list[Tree]:
        """The shapes of the slabs that are sent before the launch, and where they live."""
        replicas = self._place.replicas

        def shape(count: int, spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = replicas.split(1)
            if replicas.count == 1:
                sharding = jax.sharding.SingleDeviceSharding(sharding)
            return jax.ShapeDtypeStruct((count, replicas.count, *spec.shape), spec.dtype, sharding=sharding)

        return [jax.tree.map(lambda spec, n=count: shape(n, spec), feed.spec) for feed, count in needs.sent.values()]


def _letting_through(needs: Needs) -> contextlib.AbstractContextManager[None]:
    return interruptible() if needs.fetched else contextlib.nullcontext()


def check_same_arguments(what: str, arrays: Sequence[Array | np.ndarray]) -> None:
    """Raise unless all instances give the same arguments to `what`."""
    parts = (np.asarray(a).tobytes() for a in arrays)
    group.agree_on_bytes(what, "the arguments", parts, f"Give `{what}` the same arguments in all instances.")


def _adds_up(variable: keras.Variable) -> bool:
    """Whether the values of all replicas add up, as for the variables of metrics."""
    return str(variable.aggregation) == "sum"


def _first_value(variable: keras.Variable, value: Array, replicas: Replicas) -> Array:
    """The value with which a replica starts. If values add up, all replicas but the first start from zero."""
    if replicas.count == 1 or not _adds_up(variable):
        return value
    return jnp.where(replicas.index() == 0, value, jnp.zeros_like(value))


def _unknown(variable: keras.Variable) -> NoReturn:
    raise ValueError(
        f"The function uses the Keras variable {variable.path!r}, which it creates again each time it is traced. "
        "Create layers, models, optimizers and metrics outside the function."
    )


_programs: KeptPrograms[UserProgram] = KeptPrograms(KEPT)


def user_program(fn: Callable[..., Any], ordinal: int) -> UserProgram:
    """The program of `fn` on system number `ordinal`. Recently used programs are kept."""
    place = placement_on(system_of(ordinal))
    key = (fn if isinstance(fn, Hashable) else SameObject(fn), ordinal)
    return _programs.get(place, key, lambda: UserProgram(fn, place, ordinal))
