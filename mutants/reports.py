"""Mistakes in the facts about runs and in reports."""

from __future__ import annotations

from .mutant import Mutant, mutant

TIMELINE = "engine/facts/test_timeline.py"
REPORT = "engine/report/test_report.py"
WAYS = "public/test_reports.py"
COSTS = "engine/core/test_layer_costs.py"
SECTIONS = "engine/report/test_cost_sections.py"
SERVER = "public/test_report_server.py"

MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "the-devices-time-is-the-hosts",
        "engine/facts/timeline.py",
        "busy, at = busy + end - begin, end",
        "busy, at = 0.0, end",
        TIMELINE,
    ),
    mutant(
        "executions-overlap",
        "engine/facts/timeline.py",
        "execution.start = max(execution.start, min(self._free_at, now))",
        "pass",
        TIMELINE,
    ),
    mutant(
        "a-sample-loses-its-end",
        "engine/facts/bounded.py",
        "return (*self._items, last) if last is not None and last is not self._items[-1] else tuple(self._items)",
        "return tuple(self._items)",
        TIMELINE,
    ),
    mutant(
        "a-validation-counts-as-training",
        "engine/facts/calls.py",
        "return _local.depth <= _local.begun",
        "return True",
        f"{REPORT}::test_every_call_is_a_run_and_what_is_inside_another_belongs_to_it",
    ),
    mutant(
        "a-launch-that-failed-runs-on",
        "engine/facts/recorder.py",
        "while self._open:  # launches that have failed",
        "while False:",
        f"{REPORT}::test_a_launch_that_fails_does_not_keep_the_devices_busy",
    ),
    mutant(
        "the-clock-runs-on-while-another-call-runs",
        "engine/facts/recorder.py",
        'STOPS = ("trace", "lower", "compile", "call")',
        'STOPS = ("trace", "lower", "compile")',
        f"{REPORT}::test_a_step_is_timed_without_the_calls_inside",
    ),
    mutant(
        "single-steps-are-runs-of-their-own",
        "engine/facts/calls.py",
        "if known is not None and (together or len(self.runs) >= MOST_RUNS):",
        "if known is not None and len(self.runs) >= MOST_RUNS:",
        f"{REPORT}::test_calls_of_single_steps_are_added_up",
    ),
    mutant(
        "words-of-users-are-html",
        "engine/report/page.py",
        "autoescape=True,",
        "autoescape=False,",
        f"{REPORT}::test_names_from_users_are_text",
    ),
    mutant(
        "a-layer-reads-what-it-has-made",
        "engine/core/layer_costs.py",
        "if unit is not None and unit != value.maker:",
        "if unit is not None:",
        COSTS,
    ),
    mutant(
        "buffers-stay-until-the-end",
        "engine/loop/buffers.py",
        "last[operand] = max(last.get(operand, 0), until)",
        "last[operand] = clock",
        "engine/loop/test_buffers.py",
    ),
    mutant(
        "the-peak-is-that-of-one-device",
        "engine/report/summary.py",
        "speed = max(counted) * run.peak.devices * timed.steps / timed.seconds",
        "speed = max(counted) * timed.steps / timed.seconds",
        SECTIONS,
    ),
    mutant(
        "a-failure-is-not-told",
        "engine/facts/calls.py",
        "run.failure = failure or run.failure",
        "run.failure = None",
        f"{REPORT}::test_a_run_that_fails_leaves_a_report_that_says_so",
    ),
    mutant(
        "more-is-always-better",
        "cli/report.py",
        "(change < 0) == a.less_is_better",
        "change > 0",
        f"{WAYS}::test_two_reports_side_by_side",
    ),
    mutant(
        "the-server-gives-out-everything",
        "cli/serve.py",
        "if wanted not in (PAGE, JSON, TRACE):",
        "if False:",
        f"{SERVER}::test_nothing_else_is",
    ),
    mutant(
        "any-page-may-read-a-report",
        "cli/serve.py",
        'not in (HOST, "localhost"):',
        "in ():",
        f"{SERVER}::test_pages_from_elsewhere_cannot_read_it_under_a_name_of_their_own",
    ),
)
