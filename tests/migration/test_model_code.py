"""Operations of TensorFlow: replaced in model code, left alone in data code, and listed where it is not clear."""

from __future__ import annotations

import pytest

from migrated import rewritten, text

LAYER = """
import tensorflow as tf
class Layer(tf.keras.layers.Layer):
    def call(self, x):
        return {}
"""
CALLS = {
    "tf.cast(x, tf.float32)": 'keras.ops.cast(x, "float32")',
    "tf.cast(x, dtype=tf.half)": 'keras.ops.cast(x, dtype="float16")',
    "tf.reduce_mean(input_tensor=x, axis=-1, keepdims=True)": "keras.ops.mean(x=x, axis=-1, keepdims=True)",
    "tf.math.reduce_sum(x, name='sum', axis=0)": "keras.ops.sum(x, axis=0)",
    "tf.concat([x, x], axis=1)": "keras.ops.concatenate([x, x], axis=1)",
    "tf.concat(values=[x, x], axis=1)": "keras.ops.concatenate(xs=[x, x], axis=1)",
    "tf.argmax(x, output_type=tf.int32)": "keras.ops.argmax(x, axis=0)",
    "tf.argmax(input=x, axis=-1)": "keras.ops.argmax(x=x, axis=-1)",
    "tf.nn.gelu(x)": "keras.ops.gelu(x, approximate=False)",
    "tf.nn.gelu(x, True)": "keras.ops.gelu(x, True)",
    "tf.gather(x, i)": "keras.ops.take(x, i, axis=0)",
    "tf.gather(x, i, axis=1)": "keras.ops.take(x, i, axis=1)",
    "tf.split(x, 2, axis=1)": "keras.ops.split(x, 2, axis=1)",
    "tf.where(x > 0, x, 0)": "keras.ops.where(x > 0, x, 0)",
    "x[:, tf.newaxis]": "x[:, None]",
    "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=x, logits=y)": (
        "keras.ops.sparse_categorical_crossentropy(target=x, output=y, from_logits=True)"
    ),
    'f"{tf.cast(x, tf.int32)}"': "f\"{keras.ops.cast(x, 'int32')}\"",
    "helper(tf.square)": "helper(keras.ops.square)",
    "helper(tf.matmul)": "helper(keras.ops.matmul)",
    "tf.reshape(  # flat\n            x, [-1])": "keras.ops.reshape(  # flat\n            x, [-1])",
}


@pytest.mark.parametrize(("before", "after"), CALLS.items(), ids=CALLS)
def test_operations_with_an_exact_equivalent(before, after):
    result = rewritten(LAYER.format(before))
    assert result.new.partition("return ")[2] == f"{after}\n"
    assert "import tensorflow" not in result.new
    assert result.notes == ()


LEFT = {
    "tf.split(x, [1, 2], axis=1)": "unless it is a number",
    "tf.where(x > 0)": "a call without x",
    "tf.gather(x, i, batch_dims=1)": "the argument batch_dims=",
    "tf.gather(x, i, None, 1)": "argument number 3 without a name",
    "tf.concat(*x)": "arguments with *",
    "tf.map_fn(f, x)": "keras.ops has no exact equivalent",
    "tf.random.uniform([3])": "keras.random",
    "tf.print(x)": "jax.debug.print",
    "tf.range(3)": "ipu.loops.repeat",
    "helper(tf.argmax)": "differs from keras.ops.argmax in its arguments",
    "tf.Variable(x)": "keras.Variable",
}


@pytest.mark.parametrize(("code", "reason"), LEFT.items(), ids=LEFT)
def test_operations_that_need_a_person(code, reason):
    result = rewritten(LAYER.format(code))
    assert result.new.partition("return ")[2] == f"{code}\n"
    (note,) = result.notes
    assert (note.line, note.new_line) == (4, 5)
    assert reason in note.reason


MODEL_CODE = {
    "a class of a class": """
        class A(tf.keras.Model):
            pass
        class B(A):
            def call(self, x):
                return tf.abs(x)
        """,
    "a loss": """
        def loss(x, y):
            return tf.abs(x - y)
        model.compile(loss=loss)
        """,
    "a metric in a list": """
        model.compile(metrics=["accuracy", lambda x, y: tf.abs(x - y)])
        """,
    "a program": """
        def step(x):
            return tf.abs(x)
        strategy.run(step, args=(1,))
        """,
    "a loop": """
        from tensorflow.python import ipu
        def body(x):
            return tf.abs(x)
        ipu.loops.repeat(3, body, [1])
        """,
    "stages": """
        from tensorflow.python import ipu
        def one(x):
            return tf.abs(x)
        ipu.pipelining_ops.pipeline([one, lambda x: x], 8)
        """,
    "a model_fn": """
        from tensorflow.python import ipu
        def model_fn(features, labels):
            return helper(features)
        def helper(x):
            def inner():
                return tf.abs(x)
            return inner()
        ipu.ipu_estimator.IPUEstimator(model_fn=model_fn)
        """,
    "a function that builds a model": """
        def build():
            x = tf.keras.Input((3,))
            return tf.keras.Model(x, tf.abs(x))
        """,
    "what tf.function compiles": """
        @tf.function(experimental_compile=True)
        def step(x):
            return tf.abs(x)
        """,
}


@pytest.mark.parametrize("code", MODEL_CODE.values(), ids=MODEL_CODE)
def test_what_is_model_code(code):
    result = rewritten("import tensorflow as tf\n" + text(code))
    assert "keras.ops.abs(x" in result.new
    assert "tf." not in result.new
    assert result.notes == ()


DATA_CODE = {
    "a function for a dataset": "def f(x):\n    return tf.abs(x)\ndataset.map(f)\n",
    "a lambda for a dataset": "dataset.map(lambda x: tf.abs(x)).filter(lambda x: tf.less(x, 1))\n",
    "what such a function calls": "def g(x):\n    return tf.abs(x)\ndef f(x):\n    return g(x)\ndataset.map(f)\n",
    "a function that makes datasets": "def data():\n    return tf.data.Dataset.from_tensors(tf.abs(1))\n",
    "the script itself": "x = tf.abs(1)\n",
    "data in model code": "def f(x):\n    return d.map(lambda x: tf.abs(x))\nmodel.compile(loss=f)\n",
}


@pytest.mark.parametrize("code", DATA_CODE.values(), ids=DATA_CODE)
def test_what_is_data_code(code):
    result = rewritten("import tensorflow as tf\n" + code)
    assert not result.changes
    assert result.notes == ()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(x):\n    return tf.abs(x) + tf.exp(x)\n", "tf.abs, tf.exp: the function f may be data or model code"),
        ("\nmodel(tf.abs(tf.keras.Input((3,))))\n", "tf.abs: the script may be data or model code"),
        (
            "def f(m):\n    x = tf.abs(tf.keras.Input((3,)))\n    m(x).fit()\n",
            "the function f may be data or model code",
        ),
        ("def f(x):\n    return tf.abs(x)\nd.map(f)\nm.compile(loss=f)\n", "serves both a dataset and a model"),
    ],
)
def test_what_is_not_clear_is_listed_once(code, reason):
    result = rewritten("import tensorflow as tf\n" + code)
    assert "tf.abs(" in result.new
    (note,) = result.notes
    assert note.line == 3
    assert reason in note.reason


def test_a_step_with_a_tape_is_left_with_its_reasons():
    result = rewritten(
        """
        import tensorflow as tf
        @tf.function(experimental_compile=True)  # one program
        def step(model, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x))
            return tape.gradient(loss, model.trainable_variables)
        """
    )
    assert "@tf.function(jit_compile=True)  # one program" in result.new
    assert "loss = keras.ops.mean(model(x))" in result.new
    assert [(note.line, note.new_line) for note in result.notes] == [(2, 3), (4, 5)]
    assert all("ipu.training.minimize" in note.reason for note in result.notes)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for _ in tf.range(3):\n        x = x + 1\n    return x", "ipu.loops.repeat"),
        ("while x < 3:\n        x = x + 1\n    return x", "ipu.loops.while_loop"),
        ("if x < 3:\n        x = x + 1\n    return x", "ipu.loops.cond"),
        ("return next(x)", "IPUInfeedQueue"),
        ("return tf.image.resize(x, 3)", "listed below"),
    ],
)
def test_what_tf_function_gave_a_meaning_needs_a_person(body, reason):
    result = rewritten(f"import tensorflow as tf\n@tf.function\ndef step(x):\n    {body}\n")
    assert "@tf.function\n" in result.new
    assert any(reason in note.reason for note in result.notes if "@tf.function step" in note.reason)


def test_a_decorator_among_others_goes_with_its_line():
    result = rewritten(
        """
        import tensorflow as tf
        class A:
            @staticmethod
            @tf.function
            @other  # stays
            # here is
            @tf.function()  # a comment
            # before
            async def step(x):
                return tf.abs(x)
        """
    )
    assert result.new == text(
        """
        import keras
        class A:
            @staticmethod
            @other  # stays
            # here is
            # a comment
            # before
            async def step(x):
                return keras.ops.abs(x)
        """
    )
