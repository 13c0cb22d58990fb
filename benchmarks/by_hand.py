"""The same training steps written directly in JAX, in a plain `lax.scan`: what a loop can cost at best.

It does what `fit` does per step: gather a shuffled batch, forward, backward, update, running loss and accuracy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.models import Case

WEIGHTS = {
    "mlp": [(784, 128), (128, 10)],
    "cnn": [(3, 3, 1, 32), (3, 3, 32, 64), (1600, 10)],
    "cifar": [(3, 3, 3, 32), (3, 3, 32, 32), (3, 3, 32, 64), (3, 3, 64, 64), (2304, 512), (512, 10)],
}


def initial(case: Case) -> Any:
    """Weights and biases."""
    rng = np.random.default_rng(0)
    shapes = WEIGHTS[case.name]
    weights = [jnp.asarray(rng.normal(size=s) / np.sqrt(np.prod(s[:-1])), jnp.float32) for s in shapes]
    return [(w, jnp.zeros(w.shape[-1])) for w in weights]


def _conv(x: Any, w: Any, padding: str = "VALID") -> Any:
    kernel, bias = w
    y = lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + bias)


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _drop(x: Any, rate: float, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _dense(x: Any, w: Any) -> Any:
    return x @ w[0] + w[1]


def _logits(case: Case, w: Any, x: Any, key: Any) -> Any:
    flat = len(x)
    if case.name == "mlp":
        return _dense(jax.nn.relu(_dense(x.reshape(flat, -1), w[0])), w[1])
    if case.name == "cnn":
        x = _pool(_conv(_pool(_conv(x, w[0])), w[1]))
        return _dense(_drop(x.reshape(flat, -1), 0.5, key), w[2])
    k1, k2, k3 = jax.random.split(key, 3)
    x = _drop(_pool(_conv(_conv(x, w[0], "SAME"), w[1])), 0.25, k1)
    x = _drop(_pool(_conv(_conv(x, w[2], "SAME"), w[3])), 0.25, k2)
    x = _drop(jax.nn.relu(_dense(x.reshape(flat, -1), w[4])), 0.5, k3)
    return _dense(x, w[5])


def _update(case: Case, w: Any, slots: Any, g: Any) -> tuple[Any, Any]:
    if case.name != "cifar":
        return jax.tree.map(lambda a, b: a - 0.01 * b, w, g), slots
    slots = jax.tree.map(lambda s, b: 0.9 * s + 0.1 * b * b, slots, g)
    return jax.tree.map(lambda a, s, b: a - 1e-4 * b * lax.rsqrt(s + 1e-7), w, slots, g), slots


def epoch(case: Case) -> Any:
    """A jitted function that runs the steps of one epoch: (carry, x, y, order) -> carry."""

    def loss(w: Any, x: Any, y: Any, key: Any) -> Any:
        logits = _logits(case, w, x, key)
        target = jax.nn.one_hot(y, 10) if case.sparse else y
        right = (logits.argmax(-1) == target.argmax(-1)).sum()
        return -(jax.nn.log_softmax(logits) * target).sum(-1).mean(), right

    def step(x: Any, y: Any, carry: Any, rows: Any) -> Any:
        w, slots, key, total, hits = carry
        key, now = jax.random.split(key)
        (value, right), g = jax.value_and_grad(loss, has_aux=True)(w, x[rows], y[rows], now)
        w, slots = _update(case, w, slots, g)
        return (w, slots, key, total + value, hits + right), None

    return jax.jit(lambda c, x, y, order: lax.scan(lambda c, r: step(x, y, c, r), c, order)[0], donate_argnums=0)


def carry(case: Case) -> Any:
    """Where an epoch starts."""
    w = initial(case)
    slots = jax.tree.map(jnp.zeros_like, w) if case.name == "cifar" else None
    return w, slots, jax.random.key(0), jnp.float32(0), jnp.int32(0)
