"""Which splits are possible, and which of them are the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from openipu.engine.schedule.schedules import by_name

from .predict import multiple_of, predict
from .units import rate
from .values import Cut, Machine, Prediction, Split

SCHEDULES: Final = ("Grouped", "OneFOneB", "GPipe")
"""The schedules that are tried. Interleaved takes what OneFOneB does, and in Sequential one device works at a time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user asks for."""

    micro_batches: int
    """Micro-batches of all replicas in one update: the effective batch divided by the batch size."""
    stages: int | None = None
    """None for any number that divides the number of devices."""
    schedule: str | None = None
    """None for the best one."""
    shards: bool = False
    """Whether replicas divide the optimizer's state."""


@dataclass(frozen=True, slots=True)
class Found:
    """The splits that fit, the best first, and why others were not considered."""

    best: tuple[Prediction, ...]
    reasons: tuple[str, ...]


def search(machine: Machine, wanted: Wanted, cut_into: Callable[[int], Cut]) -> Found:
    """The best splits. `cut_into(stages)` raises an error if the model cannot be cut like that."""
    predictions: list[Prediction] = []
    reasons: list[str] = []
    for stages in _stage_numbers(machine, wanted):
        splits = splits_of(machine.devices, stages, wanted)
        if not splits:
            reasons.append(_no_split(machine, stages, wanted))
            continue
        try:
            cut = cut_into(stages)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reasons.append(f"{stages} stages: {error}")
            continue
        predictions += [predict(cut, split, machine, wanted.shards) for split in splits]
    if not predictions:
        raise ValueError(" ".join(reasons))
    fitting = [one for one in predictions if machine.memory is None or one.memory.total <= machine.memory]
    if not fitting:
        raise ValueError(_too_large(min(predictions, key=lambda one: one.memory.total), machine))
    return Found(tuple(sorted(fitting, key=_order)), tuple(reasons))


def _order(one: Prediction) -> tuple[float, int, int]:
    """The fastest first; of equally fast ones, the one with fewer devices and then with less memory."""
    return round(one.time.total, 12), one.split.devices, one.memory.total


def splits_of(devices: int, stages: int, wanted: Wanted) -> list[Split]:
    """The splits into so many stages with more than half of the most replicas that divide the micro-batches."""
    most = devices // stages
    replicas = [count for count in range(1, most + 1) if wanted.micro_batches % count == 0]
    replicas = [count for count in replicas if 2 * count > max(replicas)]
    if stages == 1:
        return [Split(count, 1, wanted.micro_batches // count, "") for count in replicas]
    names = SCHEDULES if wanted.schedule is None else (type(by_name(wanted.schedule)).__name__,)
    return [
        Split(count, stages, accumulation, name)
        for name in names
        for count in replicas
        if (accumulation := wanted.micro_batches // count) % multiple_of(name, stages) == 0
    ]


def _stage_numbers(machine: Machine, wanted: Wanted) -> Sequence[int]:
    if wanted.stages is None:
        first = 1 if wanted.schedule is None else 2
        return [count for count in range(first, machine.devices + 1) if machine.devices % count == 0]
    if wanted.stages > machine.devices:
        raise ValueError(
            f"--stages is {wanted.stages}, but --devices is {machine.devices}, and each stage takes a device. Give at "
            f"most {machine.devices} stages."
        )
    if wanted.stages == 1 and wanted.schedule is not None:
        raise ValueError(f"--schedule is {wanted.schedule}, but --stages is 1. A schedule needs at least 2 stages.")
    return [wanted.stages]


def _no_split(machine: Machine, stages: int, wanted: Wanted) -> str:
    names = SCHEDULES if wanted.schedule is None else (wanted.schedule,)
    need = min(multiple_of(name, stages) for name in names) if stages > 1 else 1
    most = machine.devices // stages
    return (
        f"{stages} stages: an update has {wanted.micro_batches} micro-batches, which cannot be divided among so many "
        f"replicas (up to {most}) in multiples of {need}. Use fewer --devices, or an --effective-batch of "
        f"{most * need} times the batch size."
    )


def _too_large(least: Prediction, machine: Machine) -> str:
    assert machine.memory is not None
    needed = rate(least.memory.total, "B")
    return (
        f"No split fits into --memory {rate(machine.memory, 'B')}. The smallest one ({least.split}) needs {needed} on "
        f"each device: {rate(least.memory.weights, 'B')} of weights, {rate(least.memory.optimizer, 'B')} of optimizer "
        f"state, {rate(least.memory.gradients, 'B')} of gradients and {rate(least.memory.activations, 'B')} of "
        "activations. Use more devices, smaller micro-batches, `allow_recompute`, or "
        "`replicated_optimizer_state_sharding`."
    )
