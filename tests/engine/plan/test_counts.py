"""What is counted in the stages of known models, by hand."""

from __future__ import annotations

import openipu as ipu
from openipu.engine.core.pipelining import Recompute
from openipu.engine.plan.counts import Counter
from openipu.engine.plan.values import Cut

import jax
import keras
import pytest

ROWS, WIDTH = 8, 16
PRODUCT = 2.0 * ROWS * WIDTH * WIDTH


def counter(recompute: Recompute = Recompute.NOTHING, model: keras.Model | None = None) -> Counter:
    with ipu.ipu_strategy.IPUStrategy().scope():
        if model is None:
            dense = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(4)]
            model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    batch = tuple(jax.ShapeDtypeStruct((ROWS, WIDTH), "float32") for _ in range(2))
    model._symbolic_build(data_batch=batch)
    return Counter(model, batch, model._ipu_session.place("train"), recompute)


@pytest.fixture(scope="module")
def in_two() -> Cut:
    return counter().cut_into(2)


def test_two_stages_of_two_products_each(in_two):
    first, last = in_two.stages
    assert first.forward == 2 * PRODUCT
    assert first.backward == 3 * PRODUCT, "the first layer needs no gradient of its inputs"
    assert first.weights == last.weights == 2 * WIDTH * WIDTH * 4
    assert first.slots == pytest.approx(2 * first.weights, rel=0.01), "Adam has two slots for each weight"
    assert (first.received, last.received, last.returned) == (0, ROWS * WIDTH * 4, ROWS * WIDTH * 4)
    assert first.kept == ROWS * WIDTH * 4, "the input of the second layer; that of the first is the micro-batch"
    assert 4 * PRODUCT <= last.backward <= 4.2 * PRODUCT
    assert in_two.batch_size == ROWS
    assert in_two.batch_bytes == 2 * ROWS * WIDTH * 4


def test_one_piece_is_as_much_as_all_stages(in_two):
    [whole] = counter().cut_into(1).stages
    assert whole.forward == sum(stage.forward for stage in in_two.stages)
    assert whole.backward == pytest.approx(sum(stage.backward for stage in in_two.stages))
    assert whole.weights == sum(stage.weights for stage in in_two.stages)
    assert whole.update == pytest.approx(sum(stage.update for stage in in_two.stages))
    assert whole.update > 4 * WIDTH * WIDTH


def test_recomputation_keeps_less_and_computes_more(in_two):
    first, _ = counter(Recompute.EVERYTHING).cut_into(2).stages
    assert first.kept == 0
    assert first.backward > in_two.stages[0].backward


def test_a_model_that_cannot_be_cut_says_so():
    with pytest.raises(ValueError, match="has 4 layer calls, too few for 8 stages"):
        counter().cut_into(8)


class Own(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(WIDTH)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, state, data):
        return super().train_step(state, data)


def test_a_train_step_of_ones_own_cannot_be_planned():
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = Own()
    model(keras.ops.ones((ROWS, WIDTH)))
    with pytest.raises(ValueError, match="`train_step` of its own"):
        counter(model=model).cut_into(1)
