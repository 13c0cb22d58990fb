"""Traces, lowers and compiles: the only way from a function to a program, for loops and for users' functions."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from openipu.engine import convolution
from openipu.engine.devices import group, program_cache
from openipu.engine.devices.memory import device_memory
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.systems import spare_threads
from openipu.engine.facts import calls
from openipu.engine.facts.costs import Buffers, Counted, Rewritten
from openipu.engine.facts.recorder import RunRecorder, StageTiming
from openipu.engine.facts.timeline import Interval
from openipu.engine.facts.values import MemoryUse, PipelineFacts, Place, ProgramFacts
from openipu.engine.host_io.outfeed_buffer import HostBuffer
from openipu.engine.interrupts import SHORT, in_thread, let_through, uninterrupted
from openipu.engine.keras_compat.patches import tracing
from openipu.engine.types import Tree

import jax

from .arrays import zeros
from .buffers import buffers_of

log = logging.getLogger("openipu")

LONGEST_TEXT = 40_000
"""The most characters of a compiled program that a report shows."""

Function = Callable[..., tuple[Any, ...]]
"""Takes the state first. Returns results, the new state, and possibly more."""


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, and the facts about it that reports show."""

    name: str
    call: Function
    """Runs it. If programs are only compiled, returns zeros and the unchanged state."""
    compiled: jax.stages.Compiled
    seconds: tuple[float, float, float]
    """The time that it took to trace, to lower and to compile it."""
    cached: bool = False
    """Whether it came from the cache of compiled programs."""
    operations: Callable[[], Counted] | None = None
    """Counts the operations of one step on one device: a micro-batch, and its share of an update."""
    rewritten: tuple[Rewritten, ...] = ()
    """The convolutions in it that are computed in another form."""
    outfeeds: Mapping[HostBuffer, Tree] = field(default_factory=dict)
    """The outfeeds that it fills, and the shapes of their elements."""
    number: int = field(default_factory=itertools.count().__next__)
    """Tells it apart from all others of the process."""

    def note(self, run: RunRecorder, before: bool) -> None:
        """Tell a run that is recorded that this program is a part of it. `before` says whether it is an old one."""
        run.used(
            self.number,
            lambda: replace(self._facts, before=before, own=calls.is_own()),
            self.operations and (lambda: self._counted),
        )

    @cached_property
    def _facts(self) -> ProgramFacts:
        """The facts about it, without its costs. Reading them off a large program takes a second."""
        text, analysis = self.compiled.as_text() or "", self.compiled.memory_analysis()
        return ProgramFacts(
            self.name,
            *self.seconds,
            False,
            True,
            self.cached,
            float((self.compiled.cost_analysis() or {}).get("bytes accessed", 0.0)),
            _memory(analysis),
            len(text),
            shortened(text),
            _buffers(self.compiled, analysis),
            None,
            self.rewritten,
        )

    @cached_property
    def _counted(self) -> Counted:
        """Its costs. Counting them takes as long as tracing it."""
        assert self.operations is not None
        with tracing():
            return self.operations()


def compile_program(
    name: str,
    place: Placement,
    make: Callable[[], Function],
    arguments: tuple[Any, ...],
    *,
    donate: bool = True,
    operations: Callable[[], Counted] | None = None,
    outfeeds: Mapping[HostBuffer, Tree] | None = None,
    noted: bool = True,
) -> CompiledProgram:
    """Compile the function that `make` returns for arguments like these, which may be arrays or their shapes.

    `donate` lets the program reuse the buffers of its first argument. `noted` is False for programs that a report
    itself needs, which are not a part of the run.
    """
    clock, hits = _Clock(name, noted), program_cache.hits()
    with convolution.counted() as replaced:
        lowered = _lower(make, arguments, donate, clock)
    options: dict[str, Any] = replaced.compiler_options(place.replicas.platform) | dict(place.compiler_options)
    check_callbacks(lowered, place.replicas, name)
    if not place.replicas.is_local:
        _check_same(lowered, name)
    # In a thread of its own, because a compiler that runs in the main thread would not hear Ctrl-C.
    with clock.doing("compile"):
        compiled = _shared(lambda: in_thread(lambda: lowered.compile(options), "openipu-compile"), place, name)
    call = _never_run(lowered) if place.compile_only else compiled
    if place.dump_folder is not None:
        _dump(compiled, place.dump_folder, name)
    log.debug("%s: compiled in %.2f s", name, sum(clock.seconds))
    trace, lower, compile = clock.seconds
    program = CompiledProgram(
        name, call, compiled, (trace, lower, compile), program_cache.hits() > hits, operations,
        tuple(replaced.convolutions), outfeeds or {},
    )  # fmt: skip
    if noted and (run := calls.current()) is not None:
        program.note(run, before=False)
    return program


def note_launch(
    run: RunRecorder,
    programs: Sequence[CompiledProgram],
    replicas: Replicas,
    batch_size: int = 0,
    accumulation: int = 1,
    pipeline: Callable[[], PipelineFacts | None] = lambda: None,
    timing: Callable[[], StageTiming | None] = lambda: None,
) -> Interval:
    """Tell a run that is recorded that these programs are about to be launched."""
    for program in programs:
        program.note(run, before=True)
    if calls.is_own():
        run.placed(
            lambda: Place(
                replicas.platform, str(replicas.devices[0].device_kind), replicas.count, replicas.each,
                device_memory(replicas), batch_size, accumulation,
            ),
            pipeline,
            timing,
        )  # fmt: skip
    return run.launching()


@dataclass(slots=True)
class _Clock:
    """Measures how long each part of compiling a program takes."""

    name: str
    noted: bool = True
    """Whether the run that is recorded is told."""
    seconds: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def doing(self, part: str) -> Iterator[None]:
        """Measure the next part."""
        began = time.perf_counter()
        with calls.doing(part, self.name) if self.noted else contextlib.nullcontext():
            yield
        self.seconds.append(time.perf_counter() - began)


def _lower(make: Callable[[], Function], arguments: tuple[Any, ...], donate: bool, clock: _Clock) -> jax.stages.Lowered:
    """Trace and lower: the part of compiling that runs Python code of the user and of Keras."""
    with uninterrupted(SHORT), tracing(), _without_collecting():
        with clock.doing("trace"):
            traced = jax.jit(make(), donate_argnums=0 if donate else ()).trace(*arguments)
        _check_closed(traced, arguments, clock.name)
        let_through()
        with clock.doing("lower"):
            lowered: jax.stages.Lowered = traced.lower()
    let_through()
    return lowered


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Pause Python's garbage collector until the block ends.

    Tracing makes many objects and hardly any garbage. For every so many objects, the collector goes through all that
    JAX and Keras have: several times in a large model, which is some percent of the time to its first step.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_closed(traced: jax.stages.Traced, arguments: tuple[Any, ...], name: str) -> None:
    """Raise if the program needs more than its arguments: values of a trace that has ended, which it cannot get."""
    if len(traced.jaxpr.in_avals) > len(jax.tree.leaves(arguments)):
        raise ValueError(
            f"The program of {name!r} reads a value that was computed elsewhere in the model and is out of reach. Most "
            "likely a gradient of your own (`jax.custom_vjp`, `keras.ops.custom_gradient`) reads a value from outside "
            "its function. Pass that value to the function as an argument, and to its gradient as a residual."
        )


def check_callbacks(lowered: jax.stages.Lowered, replicas: Replicas, name: str) -> None:
    """Raise an error if the program would hang. See [Note: virtual CPU devices] in devices/systems.py."""
    used = len(replicas.devices)
    if replicas.platform != "cpu" or used == 1 or spare_threads(used) > 0:
        return
    if re.search(r"@xla_ffi_\w*python_cpu_callback", lowered.as_text()):
        raise ValueError(
            f"The program of {name!r} calls Python (`pure_callback`, `jax.debug.print`, ...) on {used} virtual CPU "
            f"devices, which have {used} threads and need one more for that. Set the environment variable "
            f"JAX_NUM_CPU_DEVICES={used + 1} before Python starts, or remove the calls."
        )


def _check_same(lowered: jax.stages.Lowered, name: str) -> None:
    """Raise unless all instances have traced the same program. Different ones would wait for each other forever."""
    group.agree_on_bytes(
        f"compiling {name}",
        f"the program {name!r}",
        [lowered.as_text().encode("utf-8")],
        "Make sure that all instances build the same model with the same options.",
    )


def _shared(compile: Callable[[], jax.stages.Compiled], place: Placement, name: str) -> jax.stages.Compiled:
    """Compile. Of instances on one machine, the first does it with all cores; the others read it from the cache."""
    if place.replicas.is_local or not group.on_one_machine():
        return compile()
    kept = all(group.exchange(f"cache for {name}", program_cache.is_on()))
    return group.first_then_others(f"compiled {name}", compile) if kept else compile()


def _never_run(lowered: jax.stages.Lowered) -> Function:
    """Stands in for a program that is compiled but not run. Results are zero, and the state does not change."""
    results, _, *rest = lowered.out_info
    return lambda state, *_: (zeros(results), state, *zeros(rest))


def _memory(analysis: object) -> MemoryUse:
    names = ("argument", "output", "alias", "temp")
    arguments, results, reused, temporary = (getattr(analysis, f"{name}_size_in_bytes", None) for name in names)
    code = getattr(analysis, "generated_code_size_in_bytes", None) or None  # 0 bytes means unknown
    return MemoryUse(arguments, results, reused, temporary, code)


def _buffers(compiled: jax.stages.Compiled, analysis: object) -> Buffers | None:
    """What the memory of a program holds; None if XLA does not tell."""
    assignment = getattr(analysis, "serialized_buffer_assignment_proto", None)
    executable = compiled.runtime_executable()
    modules = executable.hlo_modules() if assignment and executable is not None else ()
    return buffers_of(assignment, modules[0].as_serialized_hlo_module_proto()) if assignment and modules else None


def shortened(text: str) -> str:
    """A text without its middle if it is long."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n\n... {len(text) - 2 * half:,} characters are left out here ...\n\n{text[-half:]}"


def _dump(compiled: jax.stages.Compiled, folder: Path, name: str) -> None:
    """Write the program's text to a new file in `serialization_output_folder`, unless one has the same text.

    So the same script can run again without adding files, and nothing that earlier runs have written is lost.
    """
    text = compiled.as_text() or ""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", name)
    for number in itertools.count():
        path = folder / f"{name}_{number}.hlo.txt"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return
        except FileExistsError:
            if path.read_text(encoding="utf-8", errors="replace") == text:
                return
