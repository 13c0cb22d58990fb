"""A mistake: which text of which file is replaced by what, and which tests ought to notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path("src/openipu")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake: `old`, which occurs once in `file`, becomes `new`. At least one of `tests` ought to fail."""

    name: str
    file: str
    """Below src/openipu."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or ids below tests/. The cheapest that notice it."""

    @property
    def path(self) -> Path:
        """The changed file, seen from the root of the checkout."""
        return PACKAGE / self.file

    @property
    def selection(self) -> tuple[str, ...]:
        """The tests as pytest wants them."""
        return tuple(f"tests/{test}" for test in self.tests)

    def problem(self, root: Path) -> str | None:
        """Why this mistake cannot be made any more, if so."""
        if not (root / self.path).is_file():
            return f"{self.name}: there is no file {self.path}."
        found = (root / self.path).read_text(encoding="utf-8").count(self.old)
        if found != 1:
            return f"{self.name}: {self.old!r} occurs {found} times in {self.path}, not once."
        missing = [test for test in self.selection if not (root / test.partition("::")[0]).is_file()]
        return f"{self.name}: there is no {missing[0]}." if missing else None


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A mistake with its tests as further arguments."""
    return Mutant(name, file, old, new, tests)
