"""Scripts on disk: encodings, backups, links, and files that cannot be read or written."""

from __future__ import annotations

import codecs
import stat
from pathlib import Path

from openipu.migration import files

import pytest

from migrated import migrate

OLD, NEW = "from tensorflow.python import ipu\n", "import openipu as ipu\n"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "é = 1\n".encode(),
        codecs.BOM_UTF8 + "é = 1\r\n".encode(),
        "# -*- coding: latin-1 -*-\né = 1\n".encode("latin-1"),
        b"",
        b"x = 1",
        b"x = 1\r\n\x0c\r\ny = 2\r\n",
    ],
    ids=["UTF-8", "byte order mark", "latin-1", "empty", "no line end", "form feed"],
)
def test_a_file_is_written_as_it_was_read(tmp_path, content):
    path = tmp_path / "script.py"
    path.write_bytes(content)
    file = files.read(path)
    assert file.encode(migrate(file.text).new) == content


def test_edits_are_in_the_encoding_of_the_file(tmp_path):
    path = tmp_path / "script.py"
    path.write_bytes(f"# coding: latin-1\n{OLD}s = 'ü'\n".encode("latin-1"))
    file = files.read(path)
    files.write(file, migrate(file.text).new)
    assert path.read_bytes() == f"# coding: latin-1\n{NEW}s = 'ü'\n".encode("latin-1")


@pytest.mark.parametrize("content", [b"# coding: nonsense\n", "s = 'ü'\n".encode("latin-1")])
def test_a_text_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "script.py"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"its text cannot be read: .*Save it as UTF-8"):
        files.read(path)


def test_backups_never_replace_a_file(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("one")
    path.chmod(0o754)
    (tmp_path / "script.py.bak").write_text("mine")
    backups = [files.write(files.read(path), text) for text in ("two", "three")]
    assert [backup.name for backup in backups] == ["script.py.bak1", "script.py.bak2"]
    assert [backup.read_text() for backup in backups] == ["one", "two"]
    assert (tmp_path / "script.py.bak").read_text() == "mine"
    assert path.read_text() == "three"
    assert stat.S_IMODE(path.stat().st_mode) == 0o754
    assert names_in(tmp_path) == ["script.py", "script.py.bak", "script.py.bak1", "script.py.bak2"]


def test_a_link_stays_a_link(tmp_path):
    real, link = tmp_path / "real" / "script.py", tmp_path / "link.py"
    real.parent.mkdir()
    real.write_text("one")
    link.symlink_to(real)
    backup = files.write(files.read(link), "two")
    assert link.is_symlink()
    assert (real.read_text(), backup) == ("two", real.with_name("script.py.bak"))


def test_a_read_only_file_is_not_changed(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("one")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=r"it is read-only\. Make it writable first: chmod u\+w"):
        files.write(files.read(path), "two")
    assert names_in(tmp_path) == ["script.py"]


def test_folders_are_searched_and_each_file_is_found_once(tmp_path):
    for name in ("a.py", "b.txt", "sub/c.py", ".hidden/d.py", "env/e.py", "env/pyvenv.cfg", "__pycache__/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "b.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = files.find_scripts([tmp_path, tmp_path / "a.py", tmp_path / "b.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a.py", "sub/c.py", "b.txt"]


def test_modules_beside_a_script(tmp_path):
    for name in ("script.py", "model.py", "package/__init__.py", "folder/x.py", "data.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert files.modules_beside(tmp_path / "script.py") == {"model", "package"}
