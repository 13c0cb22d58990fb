"""Run the mistakes: `python -m mutants`, `python -m mutants --only NAME 10-20`, `python -m mutants --list`.

Ends with an error if fewer than 95 % of the mistakes are noticed.
"""

from __future__ import annotations

import argparse
import compileall
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import engine, outside, pipeline, plans, reports
from .mutant import PACKAGE, Mutant

ROOT = Path(__file__).parent.parent
ALL: tuple[Mutant, ...] = (*engine.MUTANTS, *pipeline.MUTANTS, *outside.MUTANTS, *reports.MUTANTS, *plans.MUTANTS)
LEAST_NOTICED = 0.95
COPIED = ("src", "tests", "examples", "docs", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
LIMIT_SECONDS = 300
"""A mistake that makes the tests hang for this long is noticed, too."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests of one mistake did."""

    mutant: Mutant
    result: str
    """One of "noticed", "hung", "UNNOTICED", and "error" if the tests could not be run."""
    seconds: float
    by: str
    """The first test that failed, or pytest's last words."""

    @property
    def noticed(self) -> bool:
        """Whether the tests did not just pass."""
        return self.result in ("noticed", "hung")


def main() -> int:
    """Run the mistakes that the command line asks for, and return the exit status."""
    options = _parser().parse_args()
    chosen = _chosen(options.only)
    problems = [problem for mutant in ALL if (problem := mutant.problem(ROOT))]
    names = [mutant.name for mutant in ALL]
    problems += [f"{name}: there are two of that name." for name in sorted({n for n in names if names.count(n) > 1})]
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 2
    if options.list:
        for number, mutant in enumerate(ALL, 1):
            print(f"{number:3} {mutant.name:52} {mutant.file:45} {' '.join(mutant.tests)}")
        return 0
    with _copies(options.jobs) as copies:
        if options.check and not _check(copies, chosen):
            return 2
        return _report(list(_run(copies, chosen)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names, numbers or ranges (10-20) of mistakes")
    parser.add_argument("--check", action="store_true", help="first see that the tests pass without any mistake")
    parser.add_argument("--jobs", type=int, default=1, help="how many mistakes to run at a time (default: 1)")
    parser.add_argument("--list", action="store_true", help="print the mistakes and their tests, and run nothing")
    return parser


def _chosen(only: Sequence[str] | None) -> list[Mutant]:
    """The mistakes that were asked for, in the order of the list."""
    if only is None:
        return list(ALL)
    numbers: set[int] = set()
    for word in only:
        first, _, last = word.partition("-")
        if first.isdecimal():
            numbers.update(range(int(first) - 1, int(last) if last.isdecimal() else int(first)))
        else:
            found = [i for i, mutant in enumerate(ALL) if mutant.name == word]
            if not found:
                raise SystemExit(f"There is no mistake {word!r}. `python -m mutants --list` prints all of them.")
            numbers.update(found)
    return [mutant for i, mutant in enumerate(ALL) if i in numbers]


@contextmanager
def _copies(count: int) -> Iterator[queue.Queue[Path]]:
    """Copies of the code. The checkout itself is never changed."""
    free: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="openipu-mutants-") as folder:
        for number in range(max(1, count)):
            copy = Path(folder) / str(number)
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                elif source.exists():
                    shutil.copy2(source, copy / name)
            compileall.compile_dir(copy / PACKAGE, quiet=2)
            free.put(copy)
        yield free


def _check(copies: queue.Queue[Path], chosen: Sequence[Mutant]) -> bool:
    """Whether all tests of the chosen mistakes pass without a mistake. Each distinct selection runs once."""
    selections = list(dict.fromkeys(mutant.selection for mutant in chosen))
    bad = 0
    with ThreadPoolExecutor(copies.qsize()) as pool:
        for number, (status, seconds, last) in enumerate(pool.map(lambda s: _on_copy(copies, None, s), selections), 1):
            bad += status != 0
            words = "pass" if status == 0 else f"DO NOT PASS: {last}"
            tests = " ".join(selections[number - 1])
            print(f"{number} of {len(selections)}, {seconds:.0f} s: {tests} {words}", flush=True)
    return bad == 0


def _run(copies: queue.Queue[Path], chosen: Sequence[Mutant]) -> Iterator[Outcome]:
    """Run the tests of each mistake, and print how far it is."""

    def one(mutant: Mutant) -> Outcome:
        status, seconds, last = _on_copy(copies, mutant, mutant.selection)
        result = {0: "UNNOTICED", 1: "noticed", None: "hung"}.get(status, "error")
        return Outcome(mutant, result, seconds, last)

    began = time.monotonic()
    with ThreadPoolExecutor(copies.qsize()) as pool:
        for number, outcome in enumerate(pool.map(one, chosen), 1):
            spent = time.monotonic() - began
            print(
                f"{number} of {len(chosen)}, {spent:.0f} s: {outcome.mutant.name} {outcome.result} in "
                f"{outcome.seconds:.0f} s", flush=True,
            )  # fmt: skip
            yield outcome


def _on_copy(
    copies: queue.Queue[Path], mutant: Mutant | None, selection: Sequence[str]
) -> tuple[int | None, float, str]:
    """pytest's exit status (None if it hung), the seconds it took, and its last line, on one of the copies."""
    copy = copies.get()
    try:
        with _mistaken(copy, mutant):
            return _pytest(copy, selection)
    finally:
        copies.put(copy)


@contextmanager
def _mistaken(copy: Path, mutant: Mutant | None) -> Iterator[None]:
    """Until the block ends, the copy has the mistake."""
    if mutant is None:
        yield
        return
    path = copy / mutant.path
    text, times = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    os.utime(path, (1, 1))  # another time than that of the compiled file, even if the size is the same
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _pytest(copy: Path, selection: Sequence[str]) -> tuple[int | None, float, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "--durations=0", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(copy / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *selection], cwd=copy, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = None
    seconds = time.monotonic() - began
    lines = [line for line in output.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return status, seconds, (failed or lines or [""])[0 if failed else -1]


def _report(outcomes: Sequence[Outcome]) -> int:
    """Print the table of all mistakes, and return the exit status."""
    print()
    for outcome in outcomes:
        by = outcome.by.removeprefix("FAILED ").partition(" - ")[0]
        print(f"{outcome.result:9} {outcome.seconds:5.0f} s  {outcome.mutant.name:52} {by}")
    noticed, errors = sum(o.noticed for o in outcomes), sum(o.result == "error" for o in outcomes)
    share = noticed / max(1, len(outcomes))
    print(f"\n{noticed} of {len(outcomes)} mistakes noticed ({share:.1%}), {errors} could not be run.")
    return 0 if share >= LEAST_NOTICED and not errors else 1


if __name__ == "__main__":
    sys.exit(main())
