"""Initial values are compiled quickly, and are Keras' own to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from openipu.engine.keras_compat.initial_values import quick_initial_values
from openipu.engine.keras_compat.patches import RANDOM_FUNCTIONS

import jax
import keras
import numpy as np
import pytest

# In a process of its own, because tests run with flags that make all compilations quick.
PROGRAM = """
import collections, json
import openipu as ipu
import jax, keras

seconds = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(lambda name, spent, **_: seconds.update({name: spent}))

def drawn(initializers, shape, dtype):
    seconds.clear()
    values = [keras.ops.convert_to_numpy(make(shape, dtype=dtype)).tobytes().hex() for make in initializers]
    return values, seconds["/jax/core/compile/backend_compile_duration"]

def initializers(seed):
    kinds = keras.initializers
    return [kinds.GlorotUniform(seed=seed), kinds.RandomNormal(seed=seed), kinds.HeNormal(seed=seed)]

jax.random.normal(jax.random.key(0))
spent, equal = {"plain": 0, "quick": 0}, []
for dtype, shape in CASES:
    expected, plain = drawn(initializers(7), shape, dtype)
    with ipu.ipu_strategy.IPUStrategy().scope():
        values, quick = drawn(initializers(7), shape, dtype)
    equal.append(values == expected)
    spent["plain"] += plain
    spent["quick"] += quick
print(json.dumps([equal, spent]))
"""
FEW = [("float32", (3, 3, 4, 7))]
MANY = [(dtype, shape) for dtype in ("float32", "bfloat16", "float16") for shape in ((33, 10), (3, 3, 2, 8))]


@pytest.mark.parametrize("cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_values_are_the_same_and_compile_in_less_time(cases: list[tuple[str, Any]]) -> None:
    program = PROGRAM.replace("CASES", repr(cases))
    variables = os.environ | {"XLA_FLAGS": "", "OPENIPU_CACHE": "off", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    equal, spent = json.loads(done.stdout.splitlines()[-1])
    assert all(equal), equal
    assert spent["quick"] < 0.7 * spent["plain"], spent


def test_flags_of_users_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the values are those that plain Keras draws with them."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    with quick_initial_values():
        assert not RANDOM_FUNCTIONS.active


ROUNDING = 1e-6 if "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "") else 0.0
"""None, except in the fast tests, where what is expected is compiled at level 0."""


def draw(seed: Any) -> jax.Array:
    value: jax.Array = keras.random.normal((2, 3), seed=seed)
    return value


def test_draws_inside_of_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    key = jax.random.PRNGKey(3)
    keys = jax.random.split(key, 4)
    expected, several = draw(key), np.stack([draw(k) for k in keys])
    with quick_initial_values():
        assert RANDOM_FUNCTIONS.active
        np.testing.assert_allclose(draw(key), expected, rtol=ROUNDING)
        np.testing.assert_allclose(jax.jit(lambda: draw(key))(), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(draw)(key), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(draw)(keys), several, rtol=1e-6)
        assert jax.eval_shape(draw, key).shape == (2, 3)


def test_shapes_may_be_lists_and_bounds_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    bounds = {"minval": np.float32(-1), "maxval": jax.numpy.float32(3), "seed": 5}
    expected = keras.random.uniform([4, 2], **bounds)
    with quick_initial_values():
        np.testing.assert_allclose(keras.random.uniform([4, 2], **bounds), expected, rtol=ROUNDING)
