"""What the engine reads from optimizers around optimizers, and how it maps gradients of scaled losses."""

import openipu as ipu
from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.optimizer_chain import describe, map_gradients, unwrapped, update
from openipu.engine.core.wrapped_optimizer import Declared
from openipu.optimizers import (
    CrossReplicaGradientAccumulationOptimizerV2,
    CrossReplicaOptimizer,
    GradientAccumulationOptimizerV2,
    MapGradientOptimizer,
)

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import zoo
from gradient_maps import decayed, doubled

pytestmark = zoo.KERAS_WARNINGS


Method = ipu.optimizers.GradientAccumulationReductionMethod


# --- what wrappers declare -------------------------------------------------------------------------------------------


def test_describe():
    assert describe(keras.optimizers.SGD()) == Declared(None, "sum", False, None)
    assert describe(CrossReplicaOptimizer("sgd")) == Declared(None, "mean", False, None)
    accumulate = GradientAccumulationOptimizerV2(
        "sgd", 4, True, replicated_optimizer_state_sharding=True, dtype=np.float16, reduction_method="running_mean"
    )
    assert describe(accumulate) == Declared(Accumulation(4, Method.RUNNING_MEAN, "float16"), "sum", True, True)
    both = CrossReplicaGradientAccumulationOptimizerV2("sgd", 2, dtype="bfloat16", reduction_method=Method.MEAN)
    expected = Declared(Accumulation(2, Method.MEAN, "bfloat16"), "mean", False, None)
    assert describe(both) == expected


def test_older_names():
    """They take fewer arguments, and say the same."""
    older = ipu.optimizers.GradientAccumulationOptimizer("sgd", 3, False)
    assert describe(older) == describe(GradientAccumulationOptimizerV2("sgd", 3))
    both = ipu.optimizers.CrossReplicaGradientAccumulationOptimizer("sgd", num_mini_batches=3)
    assert describe(both) == describe(CrossReplicaGradientAccumulationOptimizerV2("sgd", 3))
    sharded = ipu.optimizers.ShardedOptimizer(optimizer=older)
    assert describe(sharded) == describe(older)
    for wrapper in (older, both, sharded):
        again = type(wrapper).from_config(wrapper.get_config())
        assert again.get_config() == wrapper.get_config()
    with pytest.raises(ValueError, match="`verify_usage` is 'no'"):
        ipu.optimizers.GradientAccumulationOptimizer("sgd", 3, "no")


@pytest.mark.parametrize(
    "nested",
    [
        lambda: CrossReplicaOptimizer(GradientAccumulationOptimizerV2("sgd", 3)),
        lambda: GradientAccumulationOptimizerV2(CrossReplicaOptimizer("sgd"), 3),
        lambda: MapGradientOptimizer(CrossReplicaGradientAccumulationOptimizerV2("sgd", 3), doubled),
        lambda: keras.optimizers.LossScaleOptimizer(
            CrossReplicaOptimizer(MapGradientOptimizer(GradientAccumulationOptimizerV2("sgd", 3), doubled))
        ),
    ],
)
def test_describe_nested(nested):
    assert describe(nested()) == Declared(Accumulation(3), "mean", False, None)


def test_map_gradients():
    gradients, weights = [jnp.array([1.0, 2.0]), None], [jnp.array([4.0, 8.0]), jnp.zeros(3)]
    assert map_gradients(keras.optimizers.SGD(), gradients, weights) == gradients
    outer = MapGradientOptimizer(CrossReplicaOptimizer(MapGradientOptimizer("sgd", doubled)), decayed)
    first, second = map_gradients(outer, gradients, weights)
    np.testing.assert_array_equal(first, [6.0, 12.0])
    assert second is None


def test_update_leaves_gradients_as_the_engine_made_them():
    wrapper = MapGradientOptimizer(GradientAccumulationOptimizerV2(keras.optimizers.SGD(1.0), 4), doubled)
    wrapper.build([keras.Variable([5.0])])
    state = [v.value for v in wrapper.variables]
    weights, state = jax.jit(lambda s, g, w: update(wrapper, s, g, w))(state, [jnp.array([1.0])], [jnp.array([5.0])])
    assert float(weights[0][0]) == 4.0
    assert int(state[0]) == 1
    with pytest.raises(RuntimeError, match="accumulates 4 micro-batches"):
        wrapper.stateless_apply(state, [jnp.array([1.0])], weights)


def test_unwrapped():
    inner = keras.optimizers.SGD()
    assert unwrapped(inner) is inner
    assert unwrapped(CrossReplicaOptimizer(MapGradientOptimizer(inner, doubled))) is inner
    scaled = keras.optimizers.LossScaleOptimizer(CrossReplicaOptimizer(inner))
    assert unwrapped(scaled) is scaled


# --- scaled losses ---------------------------------------------------------------------------------------------------


def clipped(gradient, weight):
    del weight
    return jnp.clip(gradient, -0.5, 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.LossScaleOptimizer(MapGradientOptimizer(keras.optimizers.SGD(1.0), clipped), 1024.0),
        lambda: MapGradientOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1024.0), clipped),
        lambda: MapGradientOptimizer(keras.optimizers.SGD(1.0, loss_scale_factor=1024.0), clipped),
    ],
)
def test_gradients_of_a_scaled_loss_are_mapped_as_themselves(make):
    optimizer = make()
    weight = keras.Variable([1.0, 1.0])
    optimizer.build([weight])
    state = [v.value for v in optimizer.variables]
    scaled = [jnp.array([0.25, 3.0]) * 1024]
    by_engine = map_gradients(optimizer, scaled, [weight.value], state)
    np.testing.assert_allclose(by_engine[0], np.array([0.25, 0.5]) * 1024)
    one, _ = update(optimizer, state, by_engine, [weight.value])
    two, _ = optimizer.stateless_apply(state, scaled, [weight.value])
    np.testing.assert_allclose(one[0], [0.75, 0.5])
    np.testing.assert_allclose(two[0], [0.75, 0.5])


def test_an_overflow_survives_the_mapping():
    optimizer = keras.optimizers.LossScaleOptimizer(MapGradientOptimizer(keras.optimizers.SGD(1.0), clipped), 1024.0)
    weight = keras.Variable([1.0, 1.0])
    optimizer.build([weight])
    state = [v.value for v in optimizer.variables]
    mapped = map_gradients(optimizer, [jnp.array([jnp.inf, 1024.0])], [weight.value], state)
    np.testing.assert_allclose(mapped[0], [np.inf, 512.0])
    weights, state = update(optimizer, state, mapped, [weight.value])
    np.testing.assert_array_equal(weights[0], [1.0, 1.0])
    assert 512.0 in [float(s) for s in state], "the loss scale is halved"


def test_an_outer_loss_scale_replaces_an_inner_one():
    inner = keras.optimizers.SGD(loss_scale_factor=8.0)
    keras.optimizers.LossScaleOptimizer(CrossReplicaOptimizer(inner))
    assert inner.loss_scale_factor is None
    twice = keras.optimizers.LossScaleOptimizer(CrossReplicaOptimizer(keras.optimizers.LossScaleOptimizer(inner)))
    with pytest.raises(ValueError, match="2 `LossScaleOptimizer`s are nested"):
        describe(twice)
