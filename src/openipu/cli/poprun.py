"""The command line of `openipu launch`: options, then what to run, as `poprun` reads it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from typer.core import TyperCommand

_VIPU: Final = "there are no IPUs to reserve"
_MPI: Final = "MPI is not used"
_VALUES: Final = {
    "--mpi-global-args": _MPI,
    "--mpi-local-args": f"{_MPI}; set environment variables before the command",
    "--num-ilds": _VIPU,
    "--vipu-allocation": _VIPU,
    "--vipu-cluster": _VIPU,
    "--vipu-partition": _VIPU,
    "--vipu-server-host": _VIPU,
    "--vipu-server-port": _VIPU,
    "--vipu-server-timeout": _VIPU,
}
"""Options of poprun that have no effect here and are followed by a value, and why they have none."""
_SWITCHES: Final = {
    "--numa-aware": "the system places the processes",
    "--offline-mode": "programs are compiled where they run",
    "--remove-partition": _VIPU,
    "--reset-partition": _VIPU,
    "--update-partition": _VIPU,
    "-v": "there is one level of detail",
    "-vv": "there is one level of detail",
    "-vvv": "there is one level of detail",
}
"""The same, with or without one of `_TRUTHS` after them."""
_TRUTHS: Final = ("yes", "no", "on", "off", "true", "false", "1", "0")
WITHOUT_EFFECT: Final = (*_VALUES, *_SWITCHES)


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a command line, by what they are for."""

    options: tuple[str, ...]
    command: tuple[str, ...]
    without_effect: dict[str, str]
    """Options of poprun, and why they have no effect."""


def split(words: Sequence[str], with_value: Collection[str]) -> Words:
    """Divide a command line. `with_value` are the options that are followed by a value.

    What to run begins at the first word that does not belong to an option, at `-m`, or after `--`. Later words are for
    the script, even if they look like options.
    """
    rest = list(words)
    options: list[str] = []
    without_effect: dict[str, str] = {}
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        has_value = name in with_value or name in _VALUES or (name in _SWITCHES and rest[:1] and rest[0] in _TRUTHS)
        value = [rest.pop(0)] if has_value and rest and not equals else []
        if why := _VALUES.get(name) or _SWITCHES.get(name):
            without_effect[name] = why
        else:
            options += [word, *value]
    if rest[:1] == ["--"]:
        rest.pop(0)
    return Words(tuple(options), tuple(rest), without_effect)


class LaunchCommand(TyperCommand):
    """A command whose options end where the command line of the user's script begins."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options that have an effect, and leave the names of the others in `ctx.obj`."""
        with_value = {name for option in self.params if not getattr(option, "is_flag", True) for name in option.opts}
        words = split(args, with_value)
        ctx.obj = words.without_effect
        return super().parse_args(ctx, [*words.options, "--", *words.command] if args else args)
