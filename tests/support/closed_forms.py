"""What theory says about the built-in schedules, with every stage on a device of its own.

There are S stages and N micro-batches. A forward takes time f and a backward takes time b, which is at least f:

| schedule    | ticks      | time                   | live micro-batches of stage s |
|-------------|------------|------------------------|-------------------------------|
| Grouped     | N + 2S - 1 | (N+S-1) (f+b)          | 2 (S-s) - 1                   |
| Interleaved | 2N + 2S - 2| S f + (2N+S-2) b       | S - s                         |
| Sequential  | 2 S N      | S N (f+b)              | 1                             |
| GPipe       | 2N + 2S - 2| (N+S-1) (f+b)          | N                             |
| OneFOneB    | 2N + 2S - 2| S f + (2N+S-2) b       | S - s, at most N              |

Without training, Sequential takes S N ticks and the others N + S - 1.
"""

from __future__ import annotations

from openipu.engine.schedule.measures import Costs, Measures
from openipu.engine.schedule.schedules import GPipe, Grouped, Interleaved, OneFOneB, Schedule, Sequential


def closed_form(
    schedule: Schedule, stages: int, micro_batches: int, training: bool = True, costs: Costs | None = None
) -> Measures:
    """The measures that a built-in schedule should have. `measure(table)` returns those that its table does have."""
    costs = costs or Costs()
    s, n, f, b = stages, micro_batches, costs.forward, costs.backward
    if not training:
        ticks = s * n if isinstance(schedule, Sequential) else n + s - 1
        return Measures(ticks, ticks * f, 1 - n / ticks, (0,) * s, (0,) * s)
    if b < f:
        raise ValueError(
            f"A backward takes {b} and a forward {f}. Give a backward that takes at least as long as a forward."
        )
    match schedule:
        case Grouped():
            ticks, time, live = n + 2 * s - 1, (n + s - 1) * (f + b), [2 * (s - i) - 1 for i in range(s)]
        case GPipe():
            ticks, time, live = 2 * n + 2 * s - 2, (n + s - 1) * (f + b), [n] * s
        case Interleaved() | OneFOneB():
            ticks, time = 2 * n + 2 * s - 2, s * f + (2 * n + s - 2) * b
            live = [min(n, s - i) for i in range(s)]
        case Sequential():
            ticks, time, live = 2 * s * n, s * n * (f + b), [1] * s
        case _:
            raise ValueError(f"No closed form is known for {schedule}. Measure its table instead.")
    return Measures(ticks, time, 1 - n * (f + b) / time, tuple(live), tuple(held - 1 for held in live))
