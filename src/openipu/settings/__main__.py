"""`python -m openipu.settings` prints the table of options in Markdown; docs/config.md contains it."""

import sys
from collections.abc import Iterator

from .option import Option, type_name
from .option_table import OPTIONS


def table() -> str:
    """The Markdown table of all options."""
    return "\n".join(
        ["| option | type | default | what it does here |", "|---|---|---|---|", *map(_row, OPTIONS.values())]
    )


def _row(option: Option) -> str:
    default = getattr(option.default, "name", repr(option.default))
    return f"| `{option.name}` | {_cell(type_name(option.type))} | `{default}` | {_cell(' '.join(_effect(option)))} |"


def _effect(option: Option) -> Iterator[str]:
    if option.no_effect is not None:
        yield f"**No effect**: {option.no_effect}."
    yield option.doc
    if option.xla:
        yield (
            "Sets "
            + ", ".join(f"`{name}` ({platform})" for platform, name in option.xla.items())
            + "; no effect elsewhere."
        )
    if option.deprecated:
        yield f"Deprecated: {option.deprecated}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
