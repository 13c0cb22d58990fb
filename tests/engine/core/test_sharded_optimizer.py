"""Optimizer state divided over replicas: the same numbers with a share of the memory on each device."""

from __future__ import annotations

import re
from typing import Any

from openipu.engine.core.model_state import variables_of
from openipu.engine.core.optimizer_sharding import share_of
from openipu.engine.core.state import State

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(scope="module", autouse=True)
def _systems() -> None:
    replication.configure_all()


OPTIMIZERS = {
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad and decay": lambda: optimizers.AdamW(0.01, amsgrad=True, weight_decay=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5),
    "lion": lambda: optimizers.Lion(0.003),
    "adadelta": lambda: optimizers.Adadelta(0.5),
    "clipvalue and ema": lambda: optimizers.Nadam(0.01, clipvalue=0.1, use_ema=True, ema_overwrite_frequency=2),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.02, 20)),
}


def made(
    optimizer: Any, replicas: int, *, sharded: bool, make: Any = zoo.dense, steps: int = 1, **settings: Any
) -> Any:
    keras.utils.set_random_seed(5)
    with replication.strategy(replicas).scope():
        model = make()
    model.set_gradient_accumulation_options(steps, replicated_optimizer_state_sharding=sharded)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": optimizer, "loss": loss, "steps_per_execution": 2 * steps} | settings)
    return model


SLOW = ("adam", "rmsprop", "lion", "adadelta")
"""They add no other kind of variable or setting to the rest."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in OPTIMIZERS])
def test_same_as_undivided(name: str) -> None:
    """Weights and the optimizer's own variables, with a remainder; 54 and 27 elements do not divide by 4."""
    models = [made(OPTIMIZERS[name](), 4, sharded=s, steps=2) for s in (False, True)]
    for model in models:
        model.fit(*zoo.table(75), batch_size=4, epochs=2, verbose=0, shuffle=False)
    for part in ("trainable_variables", "optimizer.variables"):
        plain, sharded = (
            [v.numpy() for v in (m.optimizer.variables if "." in part else m.trainable_variables)] for m in models
        )
        replication.assert_close(sharded, plain, 1e-6, part)


def test_shares_are_as_small_as_they_can_be() -> None:
    assert [share_of(size, 4) for size in (1, 4, 5, 8)] == [1, 1, 2, 2]


def test_more_replicas_than_elements() -> None:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dense(1), layers.Dense(3)])

    models = [made("adam", 8, sharded=s, make=make) for s in (False, True)]
    for model in models:
        model.fit(*zoo.table(43), batch_size=2, verbose=0, shuffle=False)
    replication.assert_close(models[1].get_weights(), models[0].get_weights(), 1e-6)


def test_constraints_act_on_whole_weights() -> None:
    def make() -> keras.Model:
        hidden = layers.Dense(7, kernel_constraint=keras.constraints.UnitNorm())
        return keras.Sequential([keras.Input((6,)), hidden, layers.Dense(3)])

    models = [made("adam", 4, sharded=s, make=make) for s in (False, True)]
    for model in models:
        model.fit(*zoo.table(43), batch_size=2, verbose=0, shuffle=False)
    replication.assert_close(models[1].get_weights(), models[0].get_weights(), 1e-6)
    np.testing.assert_allclose(np.linalg.norm(models[1].get_weights()[0], axis=0), 1, rtol=1e-5)


def test_weights_that_the_user_excludes_do_not_decay() -> None:
    biases = []
    for sharded in (False, True):
        optimizer = optimizers.AdamW(0.0001, weight_decay=100.0)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        model = made(optimizer, 2, sharded=sharded)
        model.layers[0].bias.assign(np.ones(9))
        model.fit(*zoo.table(32), batch_size=2, verbose=0, shuffle=False)
        biases.append(model.layers[0].bias.numpy())
    np.testing.assert_allclose(biases[1], biases[0], rtol=1e-6)
    assert biases[0].min() > 0.99, "with decay they would have lost 7 %"


def test_a_new_learning_rate_takes_effect() -> None:
    model = made("adam", 2, sharded=True)
    model.fit(*zoo.table(32), batch_size=2, verbose=0)
    before = model.get_weights()
    model.optimizer.learning_rate = 0.0
    model.fit(*zoo.table(32), batch_size=2, verbose=0)
    replication.assert_close(model.get_weights(), before, 1e-7)


@pytest.mark.parametrize("steps", [1, 4])
def test_one_reduce_scatter_and_one_all_gather_per_update(steps: int) -> None:
    model = made("adam", 4, sharded=True, steps=steps)
    model.fit(*zoo.table(4 * 4 * steps * 2 + 9), batch_size=4, verbose=0)
    program, rest = replication.programs(model)
    parts = replication.computations(program.as_text())
    [updates] = replication.loops(parts)
    inside = [line for name in replication.reached(parts, updates) for line in parts[name]]
    assert replication.collectives(inside) == ["all-gather", "reduce-scatter"]
    everything = replication.collectives([line for lines in parts.values() for line in lines])
    assert everything == ["all-gather", "all-reduce", "reduce-scatter"], "the update, and the metrics"
    assert replication.collectives(rest.as_text().splitlines()) == everything


@pytest.mark.parametrize(
    "replicas", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)]
)
def test_each_device_holds_a_share_of_the_state(replicas: int) -> None:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dense(64), layers.Dense(64), layers.Dense(3)])

    sizes = {}
    for sharded in (False, True):
        model = made("adam", replicas, sharded=sharded, make=make)
        model.fit(*zoo.table(32), batch_size=2, verbose=0)
        function = model.train_function
        state = function.spread.spread(State(*([v.value for v in part] for part in variables_of(model, "train"))))
        held = sum(a.addressable_shards[0].data.nbytes for a in state.optimizer)
        [program] = replication.programs(model)
        sizes[sharded] = held, program.memory_analysis().argument_size_in_bytes
        slots = sum(v.numpy().nbytes for v in model.optimizer.variables)
    assert sizes[False][0] == slots
    assert sizes[True][0] <= slots / replicas + 100
    saved = sizes[False][1] - sizes[True][1]
    assert saved == pytest.approx(slots * (1 - 1 / replicas), rel=0.02), "what the compiled program takes as arguments"


REFUSED = {
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=1.0),
    "global_clipnorm": lambda: optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
    "lamb": lambda: optimizers.Lamb(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "muon": lambda: optimizers.Muon(0.01),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_be_divided_are_refused(name: str) -> None:
    optimizer = REFUSED[name]()
    model = made(optimizer, 2, sharded=True)
    with pytest.raises(ValueError, match=rf"The state of {type(optimizer).__name__} cannot be divided") as caught:
        model.fit(*zoo.table(16), batch_size=2, verbose=0)
    assert re.search("Use `replicated_optimizer_state_sharding=False`, or", str(caught.value))


def test_an_optimizer_without_configuration_is_refused() -> None:
    class Own(optimizers.SGD):
        def __init__(self, factor: float) -> None:
            super().__init__(0.01 * factor, momentum=0.9)

    model = made(Own(2.0), 2, sharded=True)
    with pytest.raises(ValueError, match=r"state of Own .*configuration.*unexpected keyword.*complete `get_config`"):
        model.fit(*zoo.table(16), batch_size=2, verbose=0)


def test_on_one_replica_nothing_is_divided_nor_refused() -> None:
    model = made(optimizers.Lamb(0.01), 1, sharded=True)
    model.fit(*zoo.table(16), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 8
