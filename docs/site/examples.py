"""Shows the `>>>` examples of docstrings as code, wherever they stand, in the API reference (see mkdocs.yml)."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).+)*", re.MULTILINE)
"""From the first `>>>` to the next empty line."""
DIRECTIVE = re.compile(r" *# doctest:.*")


def as_code(docstring: str) -> str:
    """The same text with its examples in fences, and without notes to those who run them."""
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{DIRECTIVE.sub('', found[0])}\n{found[1]}```", docstring)


class Examples(griffe.Extension):
    """Changes the docstrings of everything that is documented."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of one docstring, once."""
        if obj.docstring is not None and "```pycon" not in obj.docstring.value:
            obj.docstring.value = as_code(obj.docstring.value)
