"""Wrappers around optimizers: what they declare, that they otherwise are the inner optimizer, and saving."""

import os
import subprocess
import sys

import openipu as ipu
from openipu.engine.core.optimizer_chain import describe, map_gradients
from openipu.optimizers import (
    CrossReplicaGradientAccumulationOptimizerV2,
    CrossReplicaOptimizer,
    GradientAccumulationOptimizerV2,
    IpuOptimizer,
    MapGradientOptimizer,
)

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zoo
from gradient_maps import decayed, doubled

pytestmark = zoo.KERAS_WARNINGS


Method = ipu.optimizers.GradientAccumulationReductionMethod


WRAPPERS = {
    "base": IpuOptimizer,
    "cross replica": CrossReplicaOptimizer,
    "accumulation": lambda opt: GradientAccumulationOptimizerV2(opt, 1),
    "both": lambda opt: CrossReplicaGradientAccumulationOptimizerV2(opt, 1),
    "older": lambda opt: ipu.optimizers.CrossReplicaGradientAccumulationOptimizer(opt, 1),
    "sharded": ipu.optimizers.ShardedOptimizer,
    "map": lambda opt: MapGradientOptimizer(opt, lambda gradient, _: gradient),
    "nested": lambda opt: MapGradientOptimizer(CrossReplicaOptimizer(opt), lambda gradient, _: gradient),
}


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(12, 3)).astype("float32"), rng.normal(size=(12, 1)).astype("float32")


def small_model(optimizer, **kwargs):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **kwargs)
    return model


def trained(optimizer, **kwargs):
    model = small_model(optimizer, **kwargs)
    model.fit(*data(), batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model


# --- being the inner optimizer ---------------------------------------------------------------------------------------


def stepped(optimizer, jit):
    """The weights and the optimizer's variables after three updates."""
    variables = [keras.Variable([1.0, -2.0]), keras.Variable([[3.0]])]
    gradients = [[jnp.array([0.5 * i, 1.0]), jnp.array([[-1.0 * i]])] for i in range(1, 4)]
    if not jit:
        for g in gradients:
            optimizer.apply(g, variables)
        optimizer.finalize_variable_values(variables)
        return [np.asarray(v.value) for v in (*variables, *optimizer.variables)]
    optimizer.build(variables)
    weights, state = [v.value for v in variables], [v.value for v in optimizer.variables]
    step = jax.jit(optimizer.stateless_apply)
    for g in gradients:
        weights, state = step(state, g, weights)
    return [np.asarray(value) for value in (*weights, *state)]


INNER = {
    "name": lambda: "adam",
    "config": lambda: {"class_name": "RMSprop", "config": {"learning_rate": 0.1}},
    "averages": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 4.0),
}


# `apply` of Keras' `LossScaleOptimizer` does not run outside of programs on JAX.
@pytest.mark.parametrize(
    ("inner", "jit"), [("name", False), ("config", False), ("averages", False), ("averages", True), ("scaled", True)]
)
def test_a_wrapper_updates_as_its_inner_optimizer(inner, jit):
    expected = stepped(keras.optimizers.get(INNER[inner]()), jit)
    for wrapper in WRAPPERS.values():
        got = stepped(wrapper(INNER[inner]()), jit)
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_wrapper_trains_as_its_inner_optimizer():
    expected, got = trained("adam"), trained(WRAPPERS["nested"]("adam"))
    for a, b in zip(expected.get_weights(), got.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(got.optimizer.iterations) == 6


def test_settings_are_the_inner_optimizers():
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.25, clipnorm=2.0)
    wrapper = CrossReplicaOptimizer(MapGradientOptimizer(inner, doubled))
    assert float(wrapper.learning_rate) == pytest.approx(0.1)
    assert (wrapper.weight_decay, wrapper.clipnorm, wrapper.beta_1) == (0.25, 2.0, 0.9)
    wrapper.learning_rate = 0.5
    wrapper.clipnorm = 3.0
    assert float(inner.learning_rate) == 0.5
    assert inner.clipnorm == 3.0
    wrapper.exclude_from_weight_decay(var_names=["bias"])
    wrapper.build([keras.Variable([1.0], name="bias")])
    wrapper.set_weights([np.full(v.shape, 7.0) for v in wrapper.variables])
    assert [float(np.ravel(v)[0]) for v in inner.variables] == [7.0] * len(inner.variables)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = wrapper.nonsense


def test_apply_and_apply_gradients():
    weight = keras.Variable([1.0, 2.0])
    wrapper = CrossReplicaOptimizer(keras.optimizers.SGD(0.5))
    wrapper.apply([jnp.array([1.0, 1.0])], [weight])
    assert int(wrapper.apply_gradients([(jnp.array([1.0, 1.0]), weight)])) == 2
    wrapper.apply([jnp.array([2.0, 2.0])])
    np.testing.assert_allclose(weight, [-1.0, 0.0])


def test_callbacks_see_through_wrappers():
    model = small_model(CrossReplicaOptimizer(IpuOptimizer(keras.optimizers.SGD(0.1, use_ema=True))))
    swap = keras.callbacks.SwapEMAWeights()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.25 / (epoch + 1))
    history = model.fit(*data(), epochs=2, validation_data=data(), callbacks=[swap, schedule], verbose=0)
    assert history.history["learning_rate"] == [0.25, 0.125]
    plain = small_model(keras.optimizers.SGD(0.1, use_ema=True))
    plain.fit(*data(), epochs=2, validation_data=data(), callbacks=[swap, schedule], verbose=0)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_around_several_optimizers():
    def several():
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {"kernel": keras.optimizers.Adam(0.1)})
        )

    expected, got = trained(several()), trained(CrossReplicaOptimizer(several()))
    for a, b in zip(expected.get_weights(), got.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    hidden = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {"kernel": CrossReplicaOptimizer("sgd")})
    )
    with pytest.raises(ValueError, match="'CrossReplicaOptimizer' is one of several optimizers inside"):
        describe(hidden)


# --- inside of the engine --------------------------------------------------------------------------------------------

R = 4


@pytest.fixture
def scope():
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = R
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        yield
    ipu.config.reset_ipu_configuration()


def gradient_of_one_update(optimizer, steps):
    """What SGD(1.0), inside the wrappers of `optimizer`, takes off each weight in one update of a linear model.

    The gradient of micro-batch i is i + 1; there are R * `steps` of them.
    """
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer, loss=lambda _, y: keras.ops.sum(y, -1), steps_per_execution=steps)
    x = np.arange(1, R * steps + 1, dtype="float32")[:, None]
    model.fit(x, x, batch_size=1, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 1
    (kernel,) = model.get_weights()
    return -kernel[0]


def halved_if_large(gradient, weight):
    del weight
    return jnp.where(gradient > 4, gradient / 2, gradient)


SGD = keras.optimizers.SGD


ONE_UPDATE = {
    "plain": (lambda: SGD(1.0), 1, 1 + 2 + 3 + 4),
    "mean over replicas": (lambda: CrossReplicaOptimizer(SGD(1.0)), 1, 2.5),
    "sum over all": (lambda: GradientAccumulationOptimizerV2(SGD(1.0), 2), 2, 36),
    "mean over micro-batches": (
        lambda: GradientAccumulationOptimizerV2(SGD(1.0), 2, reduction_method="mean", dtype="float32"), 2, 18
    ),
    "mean over replicas of sums": (lambda: CrossReplicaGradientAccumulationOptimizerV2(SGD(1.0), 2), 2, 9),
    "mapped before both": (
        lambda: CrossReplicaGradientAccumulationOptimizerV2(MapGradientOptimizer(SGD(1.0), halved_if_large), 2),
        2,
        (1 + 2 + 3 + 4 + 2.5 + 3 + 3.5 + 4) / 4,
    ),
    "divided state": (
        lambda: CrossReplicaGradientAccumulationOptimizerV2(SGD(1.0, 0.9), 2, None, True), 2, 9
    ),
    "scaled loss": (
        lambda: keras.optimizers.LossScaleOptimizer(
            MapGradientOptimizer(CrossReplicaOptimizer(SGD(1.0)), halved_if_large), 64.0
        ),
        1,
        2.5,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("scope")
@pytest.mark.parametrize("name", ONE_UPDATE)
def test_the_engine_does_what_wrappers_declare(name):
    make, steps, expected = ONE_UPDATE[name]
    np.testing.assert_allclose(gradient_of_one_update(make(), steps), [expected] * 3, rtol=1e-6)


@pytest.mark.usefixtures("scope")
def test_a_users_own_train_step_applies_the_mean_over_replicas():
    class OwnStep(keras.Model):
        def train_step(self, state, batch):
            weights, fixed, optimizer, metrics = state
            x, y = batch
            gradients = jax.grad(lambda w: keras.ops.sum(self.stateless_call(w, fixed, x)[0]))(weights)
            weights, optimizer = self.optimizer.stateless_apply(optimizer, gradients, weights)
            return {"loss": keras.ops.sum(y)}, (weights, fixed, optimizer, metrics)

    inputs = keras.Input((1,))
    model = OwnStep(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs))
    model.compile(CrossReplicaOptimizer(SGD(1.0)), "mse", steps_per_execution=2)
    x = np.arange(1, 2 * R + 1, dtype="float32")[:, None]
    model.fit(x, x, batch_size=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], [[-(2.5 + 6.5)]])


# --- outside of the engine -------------------------------------------------------------------------------------------


def test_accumulation_outside_a_scope_is_an_error():
    with pytest.raises(RuntimeError, match=r"accumulates 3 micro-batches per update.*inside `strategy.scope\(\)`"):
        trained(GradientAccumulationOptimizerV2("sgd", 3))
    with pytest.raises(RuntimeError, match="accumulates 3"):
        CrossReplicaGradientAccumulationOptimizerV2("sgd", 3).apply([jnp.ones(1)], [keras.Variable([1.0])])


def test_gradients_are_mapped_outside_a_scope():
    expected = trained(keras.optimizers.SGD(0.2))
    got = trained(MapGradientOptimizer(keras.optimizers.SGD(0.1), doubled))
    for a, b in zip(expected.get_weights(), got.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_the_mean_over_replicas_in_a_users_own_step():
    mesh = Mesh(np.array(jax.devices()[:1]), ("replica",))
    wrapper = CrossReplicaOptimizer(keras.optimizers.SGD(1.0))
    wrapper.build([keras.Variable(np.zeros(1))])
    state = [v.value for v in wrapper.variables]

    def step(gradient):
        return wrapper.stateless_apply(state, [gradient], [jnp.zeros(1)])[0][0]

    # Four replicas as a batch: a named axis is all that the mean needs.
    got = jax.vmap(step, axis_name="replica")(jnp.array([[1.0], [2.0], [3.0], [6.0]]))
    np.testing.assert_allclose(got, np.full((4, 1), -3.0))
    alone = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(jnp.ones(1))
    np.testing.assert_allclose(alone, [-1.0])


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 2.0, None, True])
def test_bad_counts(count):
    with pytest.raises(ValueError, match="`num_mini_batches` is"):
        GradientAccumulationOptimizerV2("sgd", count)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reduction_method": "median"}, "`reduction_method` is 'median'. Give one of SUM, MEAN, RUNNING_MEAN"),
        ({"dtype": "int32"}, "`dtype` is 'int32', but gradients are accumulated in a floating dtype"),
        ({"dtype": "nonsense"}, "nonsense"),
        ({"replicated_optimizer_state_sharding": 2}, "`replicated_optimizer_state_sharding` is 2"),
        ({"offload_weight_update_variables": "yes"}, "`offload_weight_update_variables` is 'yes'"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        CrossReplicaGradientAccumulationOptimizerV2("sgd", 2, **arguments)


def test_bad_optimizers_and_functions():
    with pytest.raises(ValueError, match="accumulates 2 micro-batches is inside one that accumulates 3"):
        GradientAccumulationOptimizerV2(CrossReplicaOptimizer(GradientAccumulationOptimizerV2("sgd", 2)), 3)
    with pytest.raises(ValueError, match="`opt` is None"):
        CrossReplicaOptimizer(None)
    with pytest.raises(ValueError, match="optimizer"):
        CrossReplicaOptimizer(3)
    with pytest.raises(ValueError, match=r"`gradient_mapping_function` is an int. Give a function"):
        MapGradientOptimizer("sgd", 3)
    wrong = MapGradientOptimizer("sgd", lambda gradient, _: gradient.sum())
    with pytest.raises(ValueError, match=r"returned shape \(\) for a gradient of shape \(2,\)"):
        map_gradients(wrong, [jnp.ones(2)], [jnp.ones(2)])


# --- saving ----------------------------------------------------------------------------------------------------------

SAVED = {
    "cross replica": lambda: CrossReplicaOptimizer(keras.optimizers.Adam(0.1), name="mine"),
    "accumulation": lambda: GradientAccumulationOptimizerV2(
        keras.optimizers.Adam(0.1), 1, True, True, jnp.float32, Method.MEAN
    ),
    "both": lambda: CrossReplicaGradientAccumulationOptimizerV2("adam", 1),
    "nested": lambda: GradientAccumulationOptimizerV2(
        MapGradientOptimizer(
            CrossReplicaOptimizer(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9))), decayed
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded_with_the_model(name, tmp_path):
    model = trained(SAVED[name]())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert describe(loaded.optimizer) == describe(model.optimizer)
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    for m in (model, loaded):
        m.fit(*data(), batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_function_without_a_name_cannot_be_saved(tmp_path):
    model = trained(MapGradientOptimizer("sgd", lambda gradient, _: gradient))
    with pytest.raises(ValueError, match="has no name to save it under"):
        model.save(tmp_path / "model.keras")


def test_a_function_that_is_not_registered_is_named_when_loading(tmp_path):
    trained(MapGradientOptimizer("sgd", doubled)).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"doubled": doubled})
    assert loaded.optimizer.gradient_mapping_function is doubled


def test_loading_in_a_fresh_process(tmp_path):
    path = tmp_path / "model.keras"
    trained(CrossReplicaGradientAccumulationOptimizerV2("adam", 1)).save(path)
    code = f"import openipu.optimizers, keras; print(keras.models.load_model({str(path)!r}).optimizer.name)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert result.stdout.strip() == "CrossReplicaGradientAccumulationOptimizerV2", result.stderr


def test_the_reduction_method_needs_no_keras():
    code = (
        "import sys; from openipu.gradient_accumulation import GradientAccumulationReductionMethod as Method; "
        "print(Method.parse('mean').name, 'keras' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert result.stdout.strip() == "MEAN False", result.stderr
    assert Method is ipu.gradient_accumulation.GradientAccumulationReductionMethod
