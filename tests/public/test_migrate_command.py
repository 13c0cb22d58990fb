"""`openipu migrate` as a user starts it: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import shutil
import subprocess
import sys

from openipu.cli import app

import pytest
from typer.testing import CliRunner

OLD = "import tensorflow as tf\nfrom tensorflow.python import ipu\nprint(tf.keras.Model, ipu)\n"
NEW = "import openipu as ipu\nimport keras\nprint(keras.Model, ipu)\n"
LEFT = "import tensorflow as tf\n\n\nx = tf.Variable(1)\n"


def migrate(*arguments):
    return CliRunner().invoke(app, ["migrate", *map(str, arguments)], env={"COLUMNS": "300", "NO_COLOR": "1"})


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(OLD, encoding="utf-8")
    return path


def test_the_edits_are_a_diff_and_nothing_is_changed(script):
    result = migrate(script)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"--- {script}", f"+++ {script}", "@@ -1,3 +1,3 @@", "-import tensorflow as tf",
        "-from tensorflow.python import ipu", "-print(tf.keras.Model, ipu)",
        "+import openipu as ipu", "+import keras", "+print(keras.Model, ipu)",
    ]  # fmt: skip
    assert result.stderr == "1 script of 1 to edit. Make the edits with --write.\n"
    assert script.read_text(encoding="utf-8") == OLD
    assert [path.name for path in script.parent.iterdir()] == ["script.py"]


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the program patch")
@pytest.mark.parametrize("old", [OLD, OLD.replace("\n", "\r\n"), OLD.rstrip("\n"), f"x = 'é'\n{OLD}", f"\ufeff{OLD}"])
def test_the_diff_is_what_write_does(script, old):
    script.write_bytes(old.encode())
    diff = migrate(script).stdout_bytes
    written = script.with_name("written.py")
    written.write_bytes(old.encode())
    assert migrate("--write", written).exit_code == 0
    subprocess.run(["patch", "--binary", "-s", script], input=diff, check=True)
    assert script.read_bytes() == written.read_bytes() != old.encode()


def test_write_makes_the_edits_and_keeps_the_original(script):
    result = migrate("--write", script)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"{script}: edited; the original is {script}.bak\n1 script of 1 edited.\n" == result.stderr
    assert script.read_text(encoding="utf-8") == NEW
    assert script.with_name("script.py.bak").read_text(encoding="utf-8") == OLD
    again = migrate("--write", script)
    assert (again.exit_code, again.stderr) == (0, "Nothing to do: the script is native already.\n")
    assert sorted(path.name for path in script.parent.iterdir()) == ["script.py", "script.py.bak"]


def test_what_needs_a_person_is_listed_with_its_line(script):
    script.write_text(f"{LEFT}y = tf.keras.Model\n", encoding="utf-8")
    before = migrate(script)
    assert before.exit_code == 1
    assert f"{script}:4: tf.Variable: " in before.stderr
    assert "1 script of 1 to edit, 1 place left for you." in before.stderr
    after = migrate("--write", script)
    assert after.exit_code == 1
    assert f"{script}:5: tf.Variable: " in after.stderr, "the line that it has now"


def test_several_files_and_folders(tmp_path):
    (tmp_path / "folder").mkdir()
    names = {"folder/one.py": OLD, "folder/two.py": "x = 1\n", "bad.py": "def f(:\n", "left.py": LEFT}
    for name, text in names.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    result = migrate("--write", tmp_path / "folder", tmp_path / "bad.py", tmp_path / "left.py")
    assert result.exit_code == 2
    assert f"{tmp_path / 'bad.py'}: line 1 is not valid Python" in result.stderr
    assert "1 script of 4 edited, 1 place left for you, 1 failed." in result.stderr
    assert (tmp_path / "folder/one.py").read_text(encoding="utf-8") == NEW
    assert (tmp_path / "bad.py").read_text(encoding="utf-8") == "def f(:\n"


def test_a_read_only_script_fails_with_the_remedy(script):
    script.chmod(0o444)
    result = migrate("--write", script)
    assert result.exit_code == 2
    assert f"{script}: it is read-only. Make it writable first: chmod u+w" in result.stderr
    assert script.read_text(encoding="utf-8") == OLD


def test_openipu_goes_above_modules_of_the_same_folder(script):
    script.with_name("model.py").write_text("", encoding="utf-8")
    script.write_text("import model\nfrom tensorflow.python import ipu\n", encoding="utf-8")
    migrate("--write", script)
    assert script.read_text(encoding="utf-8") == "import openipu as ipu\nimport model\n"


@pytest.mark.parametrize("path", ["no/such/file.py", "empty"])
def test_nothing_to_read_is_an_error(tmp_path, path):
    (tmp_path / "empty").mkdir()
    result = migrate(tmp_path / path)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr or "There are no Python files in" in result.stderr


def test_without_libcst_one_sentence_says_what_to_install(script):
    program = "import sys; sys.modules['libcst'] = None; from openipu.cli import app; app()"
    result = subprocess.run(
        [sys.executable, "-c", program, "migrate", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 2
    assert "needs LibCST, which is not installed. Run: pip install 'openipu[migrate]'" in " ".join(
        result.stderr.split()
    )
    assert "Traceback" not in result.stderr


def test_help_names_the_exit_codes():
    assert "Exit codes: 0 if nothing is left" in migrate("--help").stdout
