"""The optimizers of `ipu.keras.optimizers` against NumPy and against Keras, alone and under a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import openipu as ipu
from openipu.keras.optimizers import (
    AdamIpuOptimizer,
    ALSGradientAccumulationOptimizer,
    ALSOptimizer,
    GradientAccumulationOptimizer,
    IpuOptimizerBase,
    LAMBIpuOptimizer,
    SGDIpuOptimizer,
)

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

STARTS = {"kernel": np.array([[1.0, -2.0], [0.5, 3.0]]), "bias": np.array([0.0, 0.0]), "one": np.array([4.0])}


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=start.shape) for name, start in STARTS.items()}


def applied(optimizer: Any, steps: int = 4, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The weights after some updates."""
    weights = {name: keras.Variable(start, dtype=dtype, name=name) for name, start in STARTS.items()}
    for step in range(steps):
        of_step = [jnp.asarray(g, dtype) for g in gradients(step).values()]
        optimizer.apply(of_step, list(weights.values()))
    return {name: np.asarray(v.value, "float64") for name, v in weights.items()}


def same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


# --- against NumPy and Keras -----------------------------------------------------------------------------------------


def adam(rate: float, steps: int = 4, debiasing: bool = True, amsgrad: bool = False) -> dict[str, np.ndarray]:
    weights = {name: start.copy() for name, start in STARTS.items()}
    m, v, top = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(3))
    for step in range(steps):
        for name, g in gradients(step).items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            top[name] = np.maximum(top[name], v[name])
            used = top[name] if amsgrad else v[name]
            factor = np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1)) if debiasing else 1.0
            weights[name] -= rate * factor * m[name] / (np.sqrt(used) + 1e-7)
    return weights


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("debiasing", [False, True])
def test_adam(debiasing: bool, amsgrad: bool) -> None:
    expected = adam(0.01, debiasing=debiasing, amsgrad=amsgrad)
    same(applied(AdamIpuOptimizer(0.01, debiasing=debiasing, amsgrad=amsgrad)), expected)
    if debiasing:
        same(applied(keras.optimizers.Adam(0.01, amsgrad=amsgrad)), expected)


def lamb(rate: float, decay: float, steady: tuple[str, ...], unadapted: tuple[str, ...], **options: Any) -> Any:
    weights = {name: start.copy() for name, start in STARTS.items()}
    m, v = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(4):
        for name, g in gradients(step).items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            biases = (1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)) if options.get("debiasing", True) else (1, 1)
            update = m[name] / biases[0] / (np.sqrt(v[name] / biases[1]) + 1e-6)
            update += 0 if name in steady else decay * weights[name]
            norms = min(np.linalg.norm(weights[name]), options.get("clip", np.inf)), np.linalg.norm(update)
            ratio = norms[0] / norms[1] if min(norms) > 0 and name not in unadapted else 1.0
            weights[name] -= ratio * rate * update
    return weights


def test_lamb() -> None:
    same(applied(LAMBIpuOptimizer(0.01)), lamb(0.01, 0.0, (), ()))
    same(applied(keras.optimizers.Lamb(0.01, epsilon=1e-6)), lamb(0.01, 0.0, (), ()))
    excluding = LAMBIpuOptimizer(0.01, weight_decay_rate=0.1, exclude_from_weight_decay=["bias", "^one$"])
    same(applied(excluding), lamb(0.01, 0.1, ("bias", "one"), ("bias", "one")))
    apart = LAMBIpuOptimizer(
        0.01, weight_decay_rate=0.1, exclude_from_weight_decay=["bias"], exclude_from_layer_adaptation=["kernel"]
    )
    same(applied(apart), lamb(0.01, 0.1, ("bias",), ("kernel",)))
    none = LAMBIpuOptimizer(0.01, exclude_from_weight_decay=["bias"], exclude_from_layer_adaptation=[])
    same(applied(none), lamb(0.01, 0.0, (), ()))
    options = LAMBIpuOptimizer(0.01, debiasing=False, weight_norm_clip=2.0)
    same(applied(options), lamb(0.01, 0.0, (), (), debiasing=False, clip=2.0))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd(momentum: float, nesterov: bool) -> None:
    expected = applied(keras.optimizers.SGD(0.1, momentum, nesterov))
    same(applied(SGDIpuOptimizer(0.1, momentum, nesterov)), expected, 1e-6)


def test_defaults() -> None:
    for optimizer, values in (
        (AdamIpuOptimizer(), {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False, "name": "Adam"}),
        (LAMBIpuOptimizer(), {"epsilon": 1e-6, "weight_decay_rate": 0.0, "name": "LAMB", "weight_norm_clip": None}),
        (SGDIpuOptimizer(), {"momentum": 0.0, "nesterov": False, "name": "SGD", "momentum_accum_dtype": None}),
    ):
        config = optimizer.get_config()
        assert {name: config[name] for name in values} == values
        assert isinstance(optimizer, IpuOptimizerBase)
    assert [float(o.learning_rate) for o in (AdamIpuOptimizer(), SGDIpuOptimizer())] == pytest.approx([0.001, 0.01])


# --- precisions ------------------------------------------------------------------------------------------------------


def test_slots_have_their_own_dtypes() -> None:
    optimizer = AdamIpuOptimizer(m_dtype="float16", v_dtype=np.float32, vhat_dtype=jnp.bfloat16, amsgrad=True)
    optimizer.build([keras.Variable(np.ones(2), dtype="float16")])
    assert [v.dtype for v in optimizer.variables[2:]] == ["float16", "float32", "bfloat16"]
    optimizer = SGDIpuOptimizer(momentum=0.5, momentum_accum_dtype="float32")
    optimizer.build([keras.Variable(np.ones(2), dtype="float16")])
    assert optimizer.variables[-1].dtype == "float32"


@pytest.mark.parametrize("make", [AdamIpuOptimizer, LAMBIpuOptimizer, SGDIpuOptimizer])
def test_half_precision_weights_are_updated_in_full_precision(make: Callable[..., Any]) -> None:
    """The square of a gradient of 1e-4 is zero in float16, and Adam would divide by epsilon."""
    slots = (
        {"momentum_accum_dtype": "float32"} if make is SGDIpuOptimizer else {"m_dtype": "float32", "v_dtype": "float32"}
    )
    results = []
    for dtype in ("float16", "float32"):
        weight = keras.Variable([2.0, 3.0], dtype=dtype)
        optimizer = make(0.125, **slots)
        for _ in range(2):
            optimizer.apply([jnp.full(2, 1e-4, dtype)], [weight])
        results.append(np.asarray(weight.value, "float32"))
    np.testing.assert_allclose(*results, rtol=2e-3)


# --- in models -------------------------------------------------------------------------------------------------------


def configure(devices: int) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()


def trained(optimizer: Any, devices: int, stages: bool = False, steps: int = 4, **options: Any) -> keras.Model:
    """A model with 16 samples per update, whatever the number of replicas."""
    configure(devices)
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(64, 6)).astype("float32"), rng.integers(0, 3, 64)
    replicas = devices // 2 if stages else devices
    keras.utils.set_random_seed(5)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.LayerNormalization(), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, steps_per_execution=steps)
        if stages:
            model.set_pipeline_stage_assignment([0, 0, 1])
            model.set_pipelining_options(4, gradient_accumulation_reduction_method="mean", **options)
        else:
            model.set_gradient_accumulation_options(4, gradient_accumulation_reduction_method="mean", **options)
    model.fit(x, y, batch_size=4 // replicas, epochs=2, shuffle=False, verbose=0)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "adam": lambda: AdamIpuOptimizer(0.02, amsgrad=True, m_dtype="float32"),
    "lamb": lambda: LAMBIpuOptimizer(0.02, weight_decay_rate=0.1, exclude_from_weight_decay=["bias", "/beta$"]),
    "sgd": lambda: SGDIpuOptimizer(0.02, 0.9),
}


@pytest.mark.parametrize("name", ["lamb", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "sgd"))])
def test_replicas_and_stages_train_alike(name: str) -> None:
    mean = ipu.optimizers.CrossReplicaOptimizer
    expected = trained(mean(MODELS[name]()), 1).get_weights()
    replication.assert_close(trained(mean(MODELS[name]()), 2).get_weights(), expected, 1e-4)
    replication.assert_close(trained(mean(MODELS[name]()), 2, stages=True).get_weights(), expected, 1e-4)


def test_divided_state() -> None:
    options = {"replicated_optimizer_state_sharding": True}
    expected = trained(AdamIpuOptimizer(0.02), 2).get_weights()
    replication.assert_close(trained(AdamIpuOptimizer(0.02), 2, **options).get_weights(), expected, 1e-5)
    with pytest.raises(ValueError, match="LAMBIpuOptimizer cannot be divided over replicas"):
        trained(LAMBIpuOptimizer(0.02), 2, **options)


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name: str, tmp_path: Any) -> None:
    model = trained(MODELS[name](), 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)


def test_mixed_precision_with_loss_scaling_is_that_of_keras() -> None:
    with zoo.policy("mixed_float16"):
        model, expected = trained(AdamIpuOptimizer(0.02), 1), trained(keras.optimizers.Adam(0.02), 1)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    replication.assert_close(model.get_weights(), expected.get_weights(), 1e-4)


# --- gradient accumulation -------------------------------------------------------------------------------------------


def test_accumulation_of_one_micro_batch_is_the_optimizer_itself() -> None:
    inner = keras.optimizers.SGD(0.1)
    assert GradientAccumulationOptimizer(inner, 1) is inner
    assert isinstance(GradientAccumulationOptimizer("adam", 1), keras.optimizers.Adam)
    several = GradientAccumulationOptimizer(inner, 4, reduction_method="mean")
    assert ipu.optimizers.GradientAccumulationOptimizerV2 in type(several).__mro__
    again = GradientAccumulationOptimizer.from_config(several.get_config())
    assert again.get_config() == several.get_config()
    with pytest.raises(ValueError, match="`num_mini_batches` is 0"):
        GradientAccumulationOptimizer(inner, 0)


# --- automatic loss scaling ------------------------------------------------------------------------------------------


def simulated(sizes: list[float], frequency: int, edge: float, accumulate: bool = True) -> list[float]:
    """The factors after gradients of these sizes (before scaling), with `frequency` and `edge`."""
    factor, n, counts, factors = 4.0, 0, np.zeros(2), []
    for size in sizes:
        new = np.array([3.0, 0.0]) if size * factor <= edge else np.array([0.0, 3.0])
        counts = counts + new if accumulate else new
        if frequency == 1 or (n > 0 and n % frequency == 0):
            wanted = factor / 2 if counts[1] / counts.sum() > 1e-5 else factor * 2
            factor = wanted if 1 <= wanted < 64 else factor
            n, counts = 0, np.zeros(2)
        else:
            n += 1
        factors.append(factor)
    return factors


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("frequency", [1, 2])
def test_automatic_loss_scaling(frequency: int, accumulate: bool) -> None:
    optimizer = ALSOptimizer(
        keras.optimizers.SGD(1.0), 4, frequency, 2, 64, accumulate, histogram_bin_edge=100.0
    )  # fmt: skip
    weight = keras.Variable(np.zeros(3), dtype="float16")
    optimizer.build([weight])
    sizes = [1.0, 1.0, 1.0, 50.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 70.0, 90.0, 90.0, 90.0, 90.0, 200.0, 200.0]
    factors = []
    for size in sizes:
        optimizer.apply([optimizer.scale_loss(jnp.full(3, size, "float16")).astype("float16")])
        factors.append(float(optimizer.loss_scaling_factor))
    assert factors == simulated(sizes, frequency, 100.0, accumulate)
    assert len(set(factors)) > 2
    np.testing.assert_allclose(np.asarray(weight, "f"), -sum(sizes), rtol=1e-2)
    optimizer.reset()
    assert float(optimizer.loss_scaling_factor) == 4
    assert int(optimizer.update_counter) == 0


def test_automatic_loss_scaling_in_a_model(tmp_path: Any) -> None:
    with zoo.policy("float16"):
        got = trained(ALSOptimizer(SGDIpuOptimizer(0.02), 8, update_frequency=1), 2)
        expected = trained(SGDIpuOptimizer(0.02), 2)
    assert float(got.optimizer.loss_scaling_factor) == 8 * 2**8
    replication.assert_close(got.get_weights(), expected.get_weights(), 5e-3)
    got.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.loss_scaling_factor) == 8 * 2**8
    assert loaded.optimizer.get_config() == got.optimizer.get_config()


@pytest.mark.slow
def test_automatic_loss_scaling_in_stages() -> None:
    """Without half-precision gradients, nothing is counted, so stages need nothing of each other."""
    model = trained(ALSOptimizer(SGDIpuOptimizer(0.02), 8, update_frequency=1), 2, stages=True)
    replication.assert_close(model.get_weights(), trained(SGDIpuOptimizer(0.02), 2, stages=True).get_weights(), 1e-4)
    with pytest.raises(ValueError, match="computes a variable that belongs to no weight from"):
        trained(ALSOptimizer(SGDIpuOptimizer(0.02)), 2, stages=True, gradient_accumulation_dtype="float16")


def test_automatic_loss_scaling_refuses_another_one() -> None:
    with zoo.policy("mixed_float16"), pytest.raises(ValueError, match="auto_scale_loss=False"):
        trained(ALSOptimizer("sgd"), 1)
    with pytest.raises(ValueError, match="`opt` is a SGD"):
        ALSGradientAccumulationOptimizer(keras.optimizers.SGD(), 4)
    several = ALSGradientAccumulationOptimizer(ALSOptimizer("sgd"), 4)
    assert ALSGradientAccumulationOptimizer.from_config(several.get_config()).get_config() == several.get_config()


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "words"), [
    (functools.partial(AdamIpuOptimizer, m_dtype="int32"), "`m_dtype` is 'int32', but the optimizer's variables"),
    (functools.partial(AdamIpuOptimizer, beta_1=1.0), "`beta_1` is 1.0. Give a number of 0.0 or more and below 1.0"),
    (functools.partial(AdamIpuOptimizer, optimizer_compute_precisions=("float32",) * 2), "has 2 dtypes. Give 1"),
    (functools.partial(LAMBIpuOptimizer, optimizer_compute_precisions=("float32",)), "has 1 dtypes. Give 2"),
    (functools.partial(AdamIpuOptimizer, gradient_transformers=[lambda pairs: pairs]), "MapGradientOptimizer"),
    (functools.partial(AdamIpuOptimizer, nonsense=3), "nonsense"),
    (functools.partial(LAMBIpuOptimizer, weight_norm_clip=0), "`weight_norm_clip` is 0"),
    (functools.partial(SGDIpuOptimizer, momentum=2.0), "`momentum` is 2.0"),
    (functools.partial(ALSOptimizer, "sgd", increase_factor=3), "`increase_factor` is 3. Give a power of two"),
    (functools.partial(ALSOptimizer, "sgd", 2**14), "would become 32768, but `max_loss_scaling_factor` is 32768"),
    (functools.partial(ALSOptimizer, "sgd", update_frequency=0), "`update_frequency` is 0"),
    (functools.partial(ALSOptimizer, "sgd", ratio_threshold=1.0), "`ratio_threshold` is 1.0"),
    (functools.partial(ALSOptimizer, "sgd", captured_grads_only=True), "no layers that capture gradients"),
])  # fmt: skip
def test_mistakes(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
    with pytest.raises(TypeError, match="`exclude_from_weight_decay` is a str"):
        LAMBIpuOptimizer(exclude_from_weight_decay="bias")


def test_outlining_says_that_it_has_no_effect(caplog: Any) -> None:
    AdamIpuOptimizer(outline_apply_gradients=True)
    assert "outline_apply_gradients (XLA decides" in caplog.text
