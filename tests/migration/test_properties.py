"""What holds for any script: untouched code is unchanged, the result is valid Python, and twice is once."""

from __future__ import annotations

import ast

from openipu.migration.edits import Edit, apply, line_of, moved_to, outermost
from openipu.migration.script import SourceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrated import migrate

NEUTRAL = (
    "x = 1", "# a comment: tf.keras, ipu", "", "   ", "'''text\n   over lines'''", "def f(a, *, b=2): return a  # b",
    "class A:\n    y = (1,\n         2)  # é", "for i in range(3):\n    pass\nelse:\n\t\tx = 'ü'", "import os, sys",
    "if x: y = {}",
    "lambda tf: tf.cast(1)", "from numpy import (array,\n)", "@staticmethod\ndef g(): ...", "x = f'{x!r:>{10}}'; y = 3",
    "try:\n  pass\nexcept Exception as e:\n  raise", "async def h():\n    await g()", "print(lr := 3)",
    "x[1:2, ...] += 1",
)  # fmt: skip
OURS = (
    "import tensorflow as tf", "from tensorflow import keras", "from tensorflow.python import ipu", "import popdist",
    "from tensorflow.keras.layers import (Dense,  # one\n    Input)", "import tensorflow.keras as K; import os",
    "from tensorflow.python.ipu import utils as u, serving", "import tensorflow.python.ipu.config",
    "try:\n    from tensorflow.python import ipu as i2\nexcept ImportError:\n    i2 = None",
    "class L(tf.keras.layers.Layer):\n    def call(self, x):\n        return tf.reshape(tf.cast(x, tf.int32), [-1])",
    "@tf.function(experimental_compile=True)\ndef step(x): return tf.reduce_sum(x, name='s')",
    "def late():\n    import tensorflow as tf\n    from tensorflow import keras\n    return tf.keras.Model, keras",
    "opt = tf.keras.optimizers.SGD(lr=0.1, decay=0.0)", "keras = None",
    "d = tf.data.Dataset.range(3).map(lambda x: tf.abs(x))",
    "if tf.__version__[0] != '2':\n    raise ImportError('x')", "with keras.ipu.PipelineStage(0): y = tf.nn.relu",
    "m.compile(loss=lambda a, b: tf.reduce_mean(K.square(a - b)), experimental_steps_per_execution=3)",
    "popdist.init(); u.IPUConfig(); ipu.serving.x; tf.Variable(3)", "tf.keras.Input(shape=(80))",
)  # fmt: skip
LINE_ENDS = st.sampled_from(["\n", "\r\n"])
scripts = st.lists(st.sampled_from(NEUTRAL + OURS), max_size=12)


def script(pieces: list[str], line_end: str) -> str:
    return "".join(f"{piece}\n" for piece in pieces).replace("\n", line_end)


@given(st.lists(st.sampled_from(NEUTRAL), max_size=12), LINE_ENDS)
def test_a_script_that_is_none_of_ours_stays_the_same(pieces, line_end):
    source = script(pieces, line_end)
    result = migrate(source)
    assert result.new == source
    assert result.notes == ()


@given(scripts, LINE_ENDS)
def test_the_result_is_valid_and_final(pieces, line_end):
    result = migrate(script(pieces, line_end))
    ast.parse(result.new)
    assert migrate(result.new).new == result.new


@given(scripts, LINE_ENDS)
def test_lines_that_are_none_of_ours_stay_the_same(pieces, line_end):
    """In their order. The pieces that are ours have none of these lines."""
    marked = [
        part for number, piece in enumerate(pieces) for part in (f"mark_{number} = [ {number},]  # {number}", piece)
    ]
    source = script(marked, line_end)
    new = migrate(source).new
    marks = [line for line in source.split(line_end) if line.startswith("mark_")]
    assert [line for line in new.split(line_end) if line.startswith("mark_")] == marks
    assert new.count("\r") == (new.count("\n") if line_end == "\r\n" else 0)


@given(scripts)
def test_notes_point_at_lines_that_exist(pieces):
    result = migrate(script(pieces, "\n"))
    for note in result.notes:
        assert 1 <= note.line <= result.old.count("\n") + 1
        assert 1 <= note.new_line <= result.new.count("\n") + 1
        what = (
            note.reason.partition(":")[0].partition("(")[0].split(".")[-1].removesuffix("=").split(",")[0].split(" ")[0]
        )
        assert what in result.old.splitlines()[note.line - 1]


@given(st.text(), st.data())
def test_edits_change_nothing_else(source, data):
    """Against a plain model: the bytes of the source as a list, each of which an edit removes or not."""
    content = source.encode()
    starts = sorted({len(source[:n].encode()) for n in range(len(source) + 1)})
    cuts = data.draw(st.lists(st.sampled_from(starts), max_size=6).map(sorted))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    edits = outermost([Edit(start, end, "<new>") for start, end in dict.fromkeys(pairs)])
    pieces, last = [], 0
    for edit in edits:
        pieces += [content[last : edit.start].decode(), "<new>"]
        last = edit.end
    assert apply(source, edits) == "".join([*pieces, content[last:].decode()])
    for byte in starts:
        if all(not edit.start <= byte < edit.end for edit in edits) and byte < len(content):
            new = apply(source, edits).encode()
            assert new[moved_to(edits, byte)] == content[byte]


def test_lines_are_counted_for_all_line_ends():
    assert [line_of("a\nb\r\nc\rd", start) for start in (0, 2, 5, 7)] == [1, 2, 3, 4]


def test_the_examples_need_nothing(repository):
    for path in sorted((repository / "examples").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        result = migrate(source, frozenset(other.stem for other in path.parent.glob("*.py")))
        assert result.new == source, path
        assert result.notes == (), path


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\nprint 'a'\n", "line 2 is not valid Python: Missing parentheses"),
        ("x = 1\x00", "null bytes"),
        ("x = " + "(" * 1000 + ")" * 1000, "too many nested parentheses"),
        ("import tensorflow\rx = 1\r", "because of its line ends"),
        ("x = " + "-" * 700 + "1", "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_refused(source, reason):
    with pytest.raises(SourceError, match=reason):
        migrate(source)


def test_a_strange_escape_is_not_our_concern(recwarn):
    assert migrate("import tensorflow.keras as K\nx = '\\d'\n").new == "import keras as K\nx = '\\d'\n"
    assert not recwarn
