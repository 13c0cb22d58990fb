"""Tutorials as notebooks and pages: each is one script in jupytext's percent format.

`python docs/site/notebooks.py docs/tutorials/mnist.py mnist.ipynb` runs a tutorial and writes the notebook with what it
printed. The environment variable OPENIPU_TUTORIAL_IMAGES makes tutorials smaller.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbclient
import nbconvert
import nbformat

SECONDS = 600
"""How long a cell may take."""
PICTURE = re.compile(r"!\[svg\]\((\S+)\)")
LABEL = re.compile(r'aria-label="([^"]*)"')


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook of a script, without outputs. Equal scripts give equal notebooks."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return notebook


def run(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same notebook with its outputs. Files that it writes go to a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        return nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=where).execute()


def as_json(notebook: nbformat.NotebookNode) -> str:
    """The text of the .ipynb file."""
    return nbformat.writes(notebook)


@dataclass(frozen=True, slots=True)
class Page:
    """A notebook as a page of the site."""

    markdown: str
    pictures: dict[str, bytes]
    """What its cells have drawn: the files beside the page, by name."""


def as_page(notebook: nbformat.NotebookNode, name: str) -> Page:
    """A page, with a link to the notebook below its heading. Log lines and progress on stderr are left out."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    text, found = nbconvert.MarkdownExporter().from_notebook_node(notebook, {"unique_key": name})
    pictures = found["outputs"]
    text = PICTURE.sub(lambda link: f"![{described(pictures[link[1]])}]({link[1]})", text)
    heading, rest = text.lstrip().split("\n", 1)
    return Page(f"{heading}\n\n[This page as a notebook]({name}.ipynb)\n{rest}", pictures)


def described(picture: bytes) -> str:
    """What a drawing says about itself."""
    label = LABEL.search(picture.decode("utf-8"))
    return label[1] if label else "What the cell draws"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(as_json(run(read(Path(sys.argv[1])))), encoding="utf-8")
