"""A script for TensorFlow and the IPU in, a native one and a list of what needs a person out."""

from __future__ import annotations

from dataclasses import dataclass

from .edits import Edit, Remark, apply, line_of, moved_to, outermost
from .imports import import_remarks, new_statements
from .keras_calls import judge_calls
from .order import import_edits
from .regions import find_regions
from .script import parse
from .steps import judge_steps
from .uses import judge_uses, names_of_modules


@dataclass(frozen=True, slots=True)
class Note:
    """What needs a person, with its line before and after the edits."""

    line: int
    new_line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Migration:
    """A script before and after, and what needs a person."""

    old: str
    new: str
    notes: tuple[Note, ...]

    @property
    def changes(self) -> bool:
        """Whether there is anything to edit."""
        return self.old != self.new


def migrate(source: str, local: frozenset[str] = frozenset()) -> Migration:
    """Make a native script.

    Args:
        source: The text of the script. Raises `SourceError` if it is not valid Python.
        local: The names of modules next to the script. They may load Keras, so openipu is imported before them.
    """
    script = parse(source)
    steps = judge_steps(script)
    uses = judge_uses(script, find_regions(script), steps.removed)
    names = names_of_modules(script)
    wanted = {}
    for module in sorted(uses.needed, reverse=True):
        providers = [one for one in script.imports if one.at_top and one.bound == names[module]]
        uses.kept.update(providers)
        if not providers:
            wanted[module] = names[module]
    found = [*steps.found, *judge_calls(script, steps.removed), *uses.edits, *uses.remarks, *import_remarks(script)]
    edits = [one for one in found if isinstance(one, Edit)]
    edits += import_edits(script, list(new_statements(script, uses)), wanted, local)
    remarks = sorted({one for one in found if isinstance(one, Remark)})
    edits = outermost(edits)
    new = apply(source, edits)
    notes = (Note(line_of(source, one.start), line_of(new, moved_to(edits, one.start)), one.reason) for one in remarks)
    return Migration(source, new, tuple(dict.fromkeys(notes)))
