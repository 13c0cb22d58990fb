"""trace.json: what happened when, in the format that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openipu.engine.facts.values import Report, RunFacts

_TRACKS = ("host", "devices", "checkpoints")


def trace(report: Report) -> bytes:
    """The text of the file. Each run is a process, with one thread for each of the host, devices and checkpoints."""
    zero = min((run.began for run in report.runs), default=0.0)
    events = [event for number, run in enumerate(report.runs) for event in _events(run, number, run.began - zero)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")).encode("utf-8")


def _events(run: RunFacts, number: int, offset: float) -> Iterator[dict[str, Any]]:
    """The events of one run, which began `offset` seconds after the first one."""
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{run.name} of {run.model}"}}
    for thread, track in enumerate(_TRACKS):
        yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": track}}
    for event in run.events:
        yield {
            "ph": "X", "cat": event.kind, "name": f"{event.kind}: {event.name}" if event.name else event.kind,
            "pid": number, "tid": _TRACKS.index(event.track),
            "ts": _micro(offset + event.start), "dur": _micro(event.end - event.start),
        }  # fmt: skip
    for execution in run.executions:
        yield {
            "ph": "C", "name": "slabs ready", "pid": number, "ts": _micro(offset + execution.start),
            "args": {"slabs": execution.ready},
        }  # fmt: skip


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
