"""The table that `print_pipeline_stage_assignment_summary` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from openipu.engine.pipeline.partition.nodes import Graph, Node

import keras


def summary(
    model: keras.Model, graph: Graph | None, calls: Sequence[Node], stages: Sequence[int | None], width: int | None
) -> Iterator[str]:
    """The lines of a table with one row per layer call."""
    sequential = isinstance(model, keras.Sequential)
    width = width or (60 if sequential else 89)
    ends = [width // 2, width] if sequential else [width * 2 // 5, width * 4 // 5, width]
    titles = ["Layer (type)", "Pipeline Stage"]
    if not sequential:
        titles = ["Layer (type) (node index)", "Input Layers", "Pipeline Stage"]
    sources = graph.sources() if graph else {}
    yield f'Model: "{model.name}"'
    yield "_" * width
    yield from _row(titles, ends)
    yield "=" * width
    for i, (node, stage) in enumerate(zip(calls, stages, strict=True)):
        if i:
            yield "_" * width
        yield from _row(_cells(node, stage, sources.get(id(node), []), sequential), ends)
    yield "=" * width


def _cells(node: Node, stage: int | None, sources: Sequence[Any], sequential: bool) -> list[str]:
    path = "/".join([*(nested.model.name for nested in node.within), node.operation.name])
    title = f"{path} ({type(node.operation).__name__})"
    if sequential:
        return [title, str(stage)]
    return [f"{title} ({node.index})", ", ".join(source.name for source in sources), str(stage)]


def _row(cells: Sequence[str], ends: Sequence[int]) -> Iterator[str]:
    """The lines of a row; cells that are too long continue on the next line."""
    widths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    columns = [textwrap.wrap(cell, width - 1) or [""] for cell, width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, columns))):
        parts = [column[number] if number < len(column) else "" for column in columns]
        yield "".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
