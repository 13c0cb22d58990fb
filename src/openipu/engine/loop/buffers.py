"""What the memory of a compiled program holds: XLA's buffer assignment in the words of reports.

XLA says where each buffer lies, but not for how long. That follows from the order of the program: a buffer is needed
from the instruction that makes it to the last one that reads it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from openipu.engine.facts.costs import Buffer, Buffers, Moment
from openipu.engine.facts.layers import ACCUMULATED, IN_FLIGHT, layer_in_program

from .xla_messages import parsed

LARGEST: Final = 10
"""How many buffers are named."""
MOMENTS: Final = 200
"""How many points of a program are kept of those at which its memory changes."""

_ALIASES: Final = ("bitcast", "get-tuple-element", "tuple", "optimization-barrier")
"""Instructions whose results are their operands."""
_KINDS: Final = (
    (r"\btrainable\[", "weights"),
    (r"\bnon_trainable\[", "other variables"),
    (r"\boptimizer\[", "optimizer state"),
    (r"\bmetrics\[", "metrics"),
    (r"^(state|constants)\[", "weights"),
)


def buffers_of(assignment: bytes, module: bytes) -> Buffers:
    """What a program's memory holds, from its buffer assignment and the program itself, as XLA writes them."""
    given = parsed("Assignment", assignment)
    program = _Program.of(parsed("Module", module))
    arguments = [
        Buffer(name, _kind(name), "", allocation.size)
        for allocation in given.allocations
        if allocation.is_parameter
        and (name := program.parameters.get(allocation.parameter) or f"argument {allocation.parameter}")
    ]
    by_kind: dict[str, int] = defaultdict(int)
    for buffer in arguments:
        by_kind[buffer.kind] += buffer.bytes
    temporary = list(_temporary(given, program))
    at_peak, moments = _moments(temporary)
    held = [Buffer(piece.name, piece.kind, piece.layer, piece.size) for piece in _apart(at_peak)]
    largest = sorted([*arguments, *held], key=lambda buffer: -buffer.bytes)[:LARGEST]
    return Buffers(dict(by_kind), tuple(moments), tuple(largest))


def kind_of(op_name: str) -> str:
    """What a temporary buffer holds: a value of a forward, of a backward, or neither."""
    if "transpose(" in op_name or ACCUMULATED in op_name:
        return "gradients"
    return "activations" if "jvp(" in op_name or IN_FLIGHT in op_name else "temporary"


def _kind(name: str) -> str:
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name)), "feeds")


@dataclass(frozen=True, slots=True)
class _Program:
    """A compiled program in the order in which it runs, the body of each loop once."""

    names: dict[int, tuple[str, str]]
    """For each instruction, its name and that of the operation that it comes from."""
    begin: dict[int, int]
    """When an instruction begins."""
    last: dict[int, int]
    """When the result of an instruction is read for the last time."""
    parameters: dict[int, str]

    @staticmethod
    def of(module: Any) -> _Program:
        """The program in XLA's message."""
        computations = {computation.id: computation for computation in module.computations}
        order = {entry.key: list(entry.value.ids) for entry in module.schedule.sequences}
        every = {i.id: i for computation in module.computations for i in computation.instructions}
        begin: dict[int, int] = {}
        end: dict[int, int] = {}
        clock = 0

        def run(computation: int) -> None:
            nonlocal clock
            for number in order.get(computation, ()):
                clock += 1
                begin[number] = clock
                for called in every[number].called:
                    run(called)
                end[number] = clock
            for number in order.get(computation, ()):
                if number == computations[computation].root:
                    end[number] = clock  # what a computation returns stays until its end

        run(module.entry)
        last = dict(end)
        for number in sorted(begin, key=lambda n: -begin[n]):
            for operand in every[number].operands:
                until = last[number] if every[number].opcode in _ALIASES else end[number]
                last[operand] = max(last.get(operand, 0), until)
        named = {i.id: (i.name, _origin(i, every)) for i in every.values()}
        inputs = [i for i in computations[module.entry].instructions if i.opcode == "parameter"]
        return _Program(named, begin, last, {i.parameter: i.metadata.op_name for i in inputs})


def _origin(instruction: Any, every: dict[int, Any]) -> str:
    """The operation that an instruction comes from, or else one of its operands."""
    operands = (every[number].metadata.op_name for number in instruction.operands if number in every)
    return str(instruction.metadata.op_name or next((name for name in operands if name), ""))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A temporary buffer: where it lies, and from when to when."""

    offset: int
    size: int
    begin: int
    end: int
    name: str
    kind: str
    layer: str


def _temporary(given: Any, program: _Program) -> Iterator[_Piece]:
    """The temporary buffers. Several areas of memory are put one after the other."""
    makers = {buffer.id: buffer.defined_at.instruction for buffer in given.buffers}
    start = 0
    for area in given.allocations:
        if area.is_parameter or area.is_result or area.is_constant or area.is_thread_local:
            continue
        for assigned in area.assigned:
            maker = makers.get(assigned.id, 0)
            if maker in program.begin:
                name, origin = program.names[maker]
                yield _Piece(
                    start + assigned.offset, assigned.size, program.begin[maker], program.last[maker],
                    name, kind_of(origin), layer_in_program(origin),
                )  # fmt: skip
        start += area.size


def _moments(pieces: list[_Piece]) -> tuple[list[_Piece], list[Moment]]:
    """The buffers at the peak, and the memory over the program. Where buffers share memory, it counts once."""
    change: dict[int, int] = defaultdict(int)
    for piece in pieces:
        change[piece.begin] += piece.size
        change[piece.end + 1] -= piece.size
    times, sizes, whole = sorted(change), [], 0
    for time in times:
        whole += change[time]
        sizes.append(whole)
    width = max(1, -(-len(times) // MOMENTS))
    moments, peak, most = [], -1, []
    for start in range(0, len(times), width):
        at = max(range(start, min(start + width, len(times))), key=lambda i: sizes[i])
        alive = [piece for piece in pieces if piece.begin <= times[at] <= piece.end]
        moments.append(_moment(alive))
        if moments[-1].whole > peak:
            peak, most = moments[-1].whole, alive
    return most, moments


def _apart(pieces: list[_Piece]) -> list[_Piece]:
    """One buffer for each place in memory: the first one whose layer is known, if there is any."""
    found: dict[tuple[int, int], _Piece] = {}
    for piece in sorted(pieces, key=lambda piece: (not piece.layer, piece.begin)):
        found.setdefault((piece.offset, piece.size), piece)
    return list(found.values())


def _moment(alive: list[_Piece]) -> Moment:
    found = {"activations": 0, "gradients": 0, "temporary": 0}
    covered = 0
    for piece in sorted(alive, key=lambda piece: (piece.offset, -piece.size)):
        end = piece.offset + piece.size
        found[piece.kind] += max(0, end - max(piece.offset, covered))
        covered = max(covered, end)
    return Moment(**found)
