"""Scripts on disk: which files are meant, their encodings, and writing with a backup."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import stat
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SKIPPED: Final = ("__pycache__", "node_modules", "site-packages")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The text of a script, and how to write it: its encoding and whether it begins with a byte order mark."""

    path: Path
    text: str
    encoding: str
    has_mark: bool

    def encode(self, text: str) -> bytes:
        """A text as the bytes of this file."""
        return (codecs.BOM_UTF8 if self.has_mark else b"") + text.encode(self.encoding)


def find_scripts(paths: Iterable[Path]) -> Iterator[Path]:
    """The files that are named, and the Python files in the folders that are named, each once.

    Links that are named are followed; links inside of folders are not, because they may lead out of them.
    """
    seen: set[Path] = set()
    for path in paths:
        for script in _in_folder(path) if path.is_dir() else [path]:
            if (real := script.resolve()) not in seen:
                seen.add(real)
                yield script


def _in_folder(folder: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        here = Path(name)
        folders[:] = sorted(
            f for f in folders
            if not f.startswith(".") and f not in _SKIPPED and not (here / f / "pyvenv.cfg").exists()
        )  # fmt: skip
        scripts = (here / file for file in sorted(files) if file.endswith(".py"))
        yield from (script for script in scripts if not script.is_symlink())


def modules_beside(path: Path) -> frozenset[str]:
    """The modules that a script imports from its own folder."""
    own = path.resolve()
    try:
        entries = list(own.parent.iterdir())
    except OSError:
        return frozenset()
    files = {entry.stem for entry in entries if entry.suffix == ".py" and entry != own}
    return frozenset(files | {entry.name for entry in entries if (entry / "__init__.py").is_file()})


def read(path: Path) -> SourceFile:
    """Read a script in the encoding that it declares. Raises `ValueError` or `OSError`, with the reason."""
    content = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        has_mark = content.startswith(codecs.BOM_UTF8)
        text = content.removeprefix(codecs.BOM_UTF8).decode(encoding.removesuffix("-sig"))
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise ValueError(f"its text cannot be read: {error}. Save it as UTF-8.") from None
    return SourceFile(path, text, encoding.removesuffix("-sig"), has_mark)


def write(file: SourceFile, text: str) -> Path:
    """Write a new text, and return the path of the backup, which never replaces another file.

    A link stays a link: the file that it leads to is changed, and the backup is next to that file.
    """
    path = file.path.resolve()
    status = path.stat()
    if not status.st_mode & stat.S_IWUSR or not os.access(path, os.W_OK):
        raise PermissionError(f"it is read-only. Make it writable first: chmod u+w {path}")
    content = file.encode(text)
    backup = _back_up(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        shutil.copymode(path, temporary)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return backup


def _back_up(path: Path) -> Path:
    """Copy a file to NAME.bak, or to the first of NAME.bak1, NAME.bak2, ... that does not exist."""
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            with backup.open("xb") as stream:
                stream.write(path.read_bytes())
        except FileExistsError:
            number += 1
            continue
        shutil.copystat(path, backup)
        return backup
