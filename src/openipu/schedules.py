"""Schedules of pipelined training as values: print them, measure them, draw them, write your own.

>>> from openipu.schedules import Grouped
>>> print(Grouped().table(stages=2, micro_batches=4))
tick      0     1     2          3          4          5     6
device 0  F0:0  F0:1  F0:2       B0:0,F0:3  B0:1       B0:2  B0:3
device 1  -     F1:0  B1:0,F1:1  B1:1,F1:2  B1:2,F1:3  B1:3  -

`Schedule` shows how to write one. In a terminal: `openipu schedule Grouped --stages 4 --micro-batches 16`.
"""

from openipu.engine.schedule.actions import (
    Action,
    Kind,
    ScheduleError,
    Table,
    backward,
    forward,
    journey,
    render,
    validate,
)
from openipu.engine.schedule.measures import Costs, Measures, bubble, live, live_on_devices, measure, stash, total_time
from openipu.engine.schedule.picture import svg
from openipu.engine.schedule.schedules import (
    GPipe,
    Grouped,
    Interleaved,
    OneFOneB,
    Schedule,
    Sequential,
    by_name,
    check,
)

__all__ = [
    "Action",
    "Costs",
    "GPipe",
    "Grouped",
    "Interleaved",
    "Kind",
    "Measures",
    "OneFOneB",
    "Schedule",
    "ScheduleError",
    "Sequential",
    "Table",
    "backward",
    "bubble",
    "by_name",
    "check",
    "forward",
    "journey",
    "live",
    "live_on_devices",
    "measure",
    "render",
    "stash",
    "svg",
    "total_time",
    "validate",
]
