"""The files of a report. Each is there as a whole or not at all, even if the process is killed while it writes."""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from typing import Any, Final

from openipu.engine.facts.values import FORMAT, Report

from .page import page
from .trace import trace

JSON: Final = "report.json"
TRACE: Final = "trace.json"
PAGE: Final = "report.html"
SCHEMA: Final = Path(__file__).with_name("report.schema.json")
"""What report.json looks like, as a JSON schema."""


def write(folder: Path, report: Report) -> None:
    """Write a report to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / JSON, to_json(report))
    _write(folder / TRACE, trace(report))
    _write(folder / PAGE, page(report).encode("utf-8"))


def read(folder: Path) -> Report:
    """The report in a folder, or in its report.json."""
    path = folder / JSON if folder.is_dir() else folder
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"There is no {JSON} in {folder}. Give the folder that a report was written to.") from None
    return from_json(text, str(path))


def to_json(report: Report) -> bytes:
    """A report as JSON."""
    written: bytes = _adapter().dump_json(report)
    return written


def from_json(text: bytes, path: str) -> Report:
    """The inverse of `to_json`. `path` is for errors."""
    from pydantic import ValidationError

    try:
        report: Report = _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path} is not a report of this version ({where}: {first['msg']}). Write it again with this version, or "
            "look at its report.html."
        ) from None
    if report.format != FORMAT:
        raise ValueError(f"{path} has format {report.format}, but this version reads format {FORMAT}.")
    return report


def schema() -> dict[str, Any]:
    """The JSON schema of report.json, as the facts define it."""
    found: dict[str, Any] = _adapter().json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # here, because it takes a while to load

    return TypeAdapter(Report)


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
