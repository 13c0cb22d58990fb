"""The operations that replace TensorFlow's compute the same: each is called as in a script, before and after."""

from __future__ import annotations

from openipu.migration import ops

import keras
import numpy as np
import pytest

from migrated import rewritten

EXAMPLES = {
    "nn.leaky_relu": ["tf.nn.leaky_relu(x)", "tf.nn.leaky_relu(x, alpha=0.1)"],
    "nn.gelu": ["tf.nn.gelu(x)", "tf.nn.gelu(x, approximate=True)"],
    "nn.bias_add": ["tf.nn.bias_add(x, y[0])"],
    "nn.embedding_lookup": ["tf.nn.embedding_lookup(x, i)"],
    "nn.softmax_cross_entropy_with_logits": [
        "tf.nn.softmax_cross_entropy_with_logits(labels=tf.nn.softmax(x), logits=y)"
    ],
    "nn.sparse_softmax_cross_entropy_with_logits": [
        "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=i, logits=y[:2])"
    ],
    "argmax": ["tf.argmax(x)", "tf.argmax(input=x, axis=1, output_type=tf.int32)"],
    "argmin": ["tf.argmin(x)", "tf.argmin(x, 1)"],
    "broadcast_to": ["tf.broadcast_to(x, [2, 3, 4])"],
    "cast": ["tf.cast(x, tf.int32)", "tf.cast(b, dtype=tf.float32)"],
    "clip_by_value": ["tf.clip_by_value(x, -0.5, clip_value_max=0.5)"],
    "concat": ["tf.concat([x, y], 1)", "tf.concat(values=[x, y], axis=0)"],
    "cond": ["tf.cond(x[0, 0] > 0, lambda: x, lambda: y)"],
    "constant": ["tf.constant([1.5, 2.0])", "tf.constant(3, dtype=tf.int32)"],
    "convert_to_tensor": ["tf.convert_to_tensor(value=[1.0, 2.0])"],
    "cumsum": ["tf.cumsum(x)", "tf.cumsum(x, axis=1)"],
    "expand_dims": ["tf.expand_dims(x, 1)", "tf.expand_dims(input=x, axis=-1)"],
    "fill": ["tf.fill([2, 3], 1.5)", "tf.fill(dims=[2], value=3.0)"],
    "gather": ["tf.gather(x, i)", "tf.gather(params=x, indices=i, axis=1)"],
    "identity": ["tf.identity(x)"],
    "matmul": ["tf.matmul(x, tf.transpose(y))", "tf.linalg.matmul(a=x, b=tf.transpose(y))"],
    "norm": ["tf.norm(x)", "tf.norm(tensor=x, axis=1, keepdims=True)"],
    "one_hot": ["tf.one_hot(i, 4)", "tf.one_hot(indices=i, depth=5)"],
    "ones": ["tf.ones([2, 3])", "tf.ones([2], dtype=tf.int32)"],
    "ones_like": ["tf.ones_like(x)", "tf.ones_like(input=i, dtype=tf.float32)"],
    "pad": ["tf.pad(x, [[1, 0], [0, 2]])", "tf.pad(tensor=x, paddings=[[1, 0], [0, 2]], constant_values=3)"],
    "rank": ["tf.rank(x)"],
    "reshape": ["tf.reshape(x, [-1])", "tf.reshape(tensor=x, shape=[4, -1])"],
    "shape": ["tf.shape(x)", "tf.shape(x)[0]"],
    "softplus": ["tf.math.softplus(x)"],
    "split": ["tf.split(x, 2, axis=1)", "tf.split(x, num_or_size_splits=3)"],
    "squeeze": ["tf.squeeze(x[:, :1], axis=1)", "tf.squeeze(x[:1])"],
    "stack": ["tf.stack([x, y])", "tf.stack(values=[x, y], axis=2)"],
    "stop_gradient": ["tf.stop_gradient(x)"],
    "tensordot": ["tf.tensordot(x, y, [[1], [1]])"],
    "tile": ["tf.tile(x, [2, 1])"],
    "transpose": ["tf.transpose(x)", "tf.transpose(a=x, perm=[1, 0])"],
    "unstack": ["tf.unstack(x)", "tf.unstack(x, axis=1)", "tf.unstack(x, 3)"],
    "where": ["tf.where(b, x, y)", "tf.where(condition=b, x=x, y=0.0)"],
    "while_loop": ["tf.while_loop(lambda n: n < 5, lambda n: [n + 2], [0], maximum_iterations=9)[0]"],
    "zeros": ["tf.zeros([2, 3])", "tf.zeros(shape=[2])"],
    "zeros_like": ["tf.zeros_like(x)"],
    "divide_no_nan": ["tf.math.divide_no_nan(x, tf.zeros_like(x))"],
    "reduce_all": ["tf.reduce_all(b, axis=1)"],
    "reduce_any": ["tf.reduce_any(b)"],
}
POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "pow", "asin", "acos")
BOOLEAN = ("logical_and", "logical_or", "logical_xor", "logical_not")


def calls(name: str) -> list[str]:
    """How scripts call an operation."""
    op = ops.TENSORFLOW[name]
    if name in EXAMPLES:
        return EXAMPLES[name]
    where = "tf" if name.startswith("nn.") else "tf.math"
    values = ("b", "c") if name in BOOLEAN else ("abs(x) / 4", "y") if name in POSITIVE else ("x", "y")
    if [parameter.old for parameter in op.positional] == ["input_tensor", "axis", "keepdims"]:
        return [f"{where}.{name}(x)", f"{where}.{name}(input_tensor=x, axis=-1, keepdims=True, name='n')"]
    if len(op.positional) == 2 and op.positional[1].old == "y":
        return [f"{where}.{name}({values[0]}, {values[1]})", f"{where}.{name}(x={values[0]}, y={values[1]})"]
    return [f"{where}.{name}({values[0]})", f"{where}.{name}({op.positional[0].old}={values[0]})"]


def migrated(call: str) -> str:
    """What becomes of an expression in a layer."""
    layer = f"import tensorflow as tf\nclass L(tf.keras.layers.Layer):\n    def call(self, x):\n        return {call}\n"
    result = rewritten(layer)
    assert result.notes == ()
    assert "tf." not in result.new
    return result.new.partition("return ")[2]


def values(library) -> dict[str, object]:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 3, 4)).astype("float32")
    arrays = {"x": x, "y": y, "b": x > 0, "c": y > 0, "i": np.array([2, 0], "int32")}
    return {name: library(array) for name, array in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ops.TENSORFLOW)
def test_an_operation_computes_the_same(name):
    tf = pytest.importorskip("tensorflow")
    for call in calls(name):
        old = tf.nest.flatten(eval(call, {"tf": tf, **values(tf.constant)}))
        new = keras.tree.flatten(eval(migrated(call), {"keras": keras, **values(keras.ops.convert_to_tensor)}))
        if name == "shape":
            old = list(np.asarray(old).reshape(-1))
        for one, other in zip(old, new, strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-6, atol=2e-6, err_msg=call)
            assert np.asarray(one).dtype.kind == np.asarray(other).dtype.kind, call
