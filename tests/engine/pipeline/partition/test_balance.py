"""Automatic stages: equal work in each, small boundaries between them."""

from __future__ import annotations

import itertools
from typing import Any

import openipu as ipu
from openipu.engine.pipeline.partition import balance, costs
from openipu.engine.pipeline.partition.assignment import stages_of_model

import keras
import numpy as np
import pytest
from keras import layers, ops

from stages import dense, options, stack
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True)
def scope() -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        yield


def auto(model: Any, count: int, **settings: Any) -> list[int]:
    model.set_pipeline_stage_assignment("auto", stages=count, print_fn=None, **settings)
    return [stage for _, stage in options(model).stages or ()]


def test_equal_layers_are_shared_out_equally() -> None:
    model = keras.Sequential([keras.Input((64,)), *(layers.Dense(64) for _ in range(8))])
    assert auto(model, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert auto(model, 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert auto(model, 8) == list(range(8))


class Heavy(layers.Layer):
    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, inputs: Any) -> Any:
        for _ in range(40):
            inputs = ops.tanh(ops.matmul(inputs, self.kernel))
        return inputs


def test_a_heavy_layer_has_a_stage_to_itself() -> None:
    model = keras.Sequential([keras.Input((64,)), *(layers.Dense(64) for _ in range(4)), Heavy(), layers.Dense(64)])
    with pytest.warns(UserWarning, match=r"Stage 1 .* has 71% .* 33% would be even.*'heavy' \(Heavy\)\. Use fewer"):
        assert auto(model, 3) == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, stages = 9, int(rng.integers(2, 5))
    costs, traffic = rng.exponential(size=size), np.array([0, *rng.exponential(size=size - 1), 0])

    def worth(begins: Any) -> tuple[float, float]:
        largest = max(part.sum() for part in np.split(costs, begins))
        return round(largest + max(traffic[list(begins)]), 9), sum(traffic[list(begins)])

    best = min(worth(begins) for begins in itertools.combinations(range(1, size), stages - 1))
    assert worth(balance.cuts(costs, traffic, stages)) == pytest.approx(best)


def test_cuts_avoid_large_boundaries() -> None:
    x = inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(32, 3, padding="same", name="a")(x)
    x = layers.MaxPooling2D(4, name="b")(x)
    x = layers.Conv2D(32, 3, padding="same", name="c")(x)
    x = layers.Conv2D(32, 3, padding="same", name="d")(x)
    assert auto(keras.Model(inputs, x), 2) == [0, 0, 1, 1]


def test_turns_of_a_loop_are_counted() -> None:
    model = keras.Sequential([
        keras.Input((50, 8)), layers.LSTM(32, name="loop"), *(layers.Dense(32) for _ in range(4)),
    ])  # fmt: skip
    with pytest.warns(UserWarning, match=r"'loop' \(LSTM\), which cannot be cut: its `call` cannot be traced"):
        assert auto(model, 2) == [0, 1, 1, 1, 1]


class Decoder(keras.Model):
    """A small language model with tied embeddings, of which the last product costs the most."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = layers.Embedding(2000, 32), [layers.Dense(32, "relu") for _ in range(6)]

    def call(self, inputs: Any) -> Any:
        x = self.embed(inputs)
        for block in self.blocks:
            x = x + block(x)
        return ops.matmul(x, ops.transpose(self.embed.embeddings))


def test_tied_embeddings() -> None:
    model = Decoder()
    model(x := np.ones((4, 10), "int32"))
    found = auto(model, 2, inputs=x)
    # The product with the embedding's weights goes with the last layer, and outweighs all others.
    assert found == sorted(found)
    assert found.count(1) <= 2
    first, last = stages_of_model(model, options(model).stages, x)
    assert [v.name for v in last.borrows] == ["embeddings"]
    assert all(tensor.shape == (4, 10, 32) for tensor in first.sends)


def test_the_balance_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = stack()
    model.set_pipeline_stage_assignment("auto", stages=2)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("2 stages, balance ")
    assert rest[0].endswith("2 layers (a ... b), sends 384 bytes")
    assert rest[1].endswith("2 layers (c ... d)")


def test_what_auto_needs() -> None:
    for count in (None, 1, True):
        with pytest.raises(ValueError, match=r"`stages` is .* Give a whole number of 2 or more"):
            stack().set_pipeline_stage_assignment("auto", stages=count)
    with pytest.raises(ValueError, match=r"4 layer calls.*at most 4"):
        auto(stack(), 5)
    with pytest.raises(RuntimeError, match="has not been built"):
        auto(keras.Sequential([dense("a"), dense("b")]), 2)
    model = keras.Sequential([keras.Input((None, 3)), dense("a"), dense("b")])
    with pytest.raises(ValueError, match="Give `inputs`"):
        auto(model, 2)
    assert auto(model, 2, inputs=np.ones((2, 7, 3), "float32")) == [0, 1]
    with pytest.raises(ValueError, match='Give `stages` only with "auto"'):
        stack().set_pipeline_stage_assignment([0, 0, 1, 1], stages=2)


class Table(layers.Layer):
    """Settings that no configuration can hold."""

    def __init__(self, table: np.ndarray, then: Any) -> None:
        super().__init__()
        self.table, self.then = table, then

    def call(self, inputs: Any) -> Any:
        return self.then(ops.matmul(inputs, self.table))


def test_layers_without_a_configuration_are_cut() -> None:
    tables = [np.ones((8, 8), "float32")] * 2 + [np.ones((8, 16), "float32"), np.ones((16, 8), "float32")]
    model = keras.Sequential([keras.Input((8,)), *(Table(table, ops.tanh) for table in tables)])
    with pytest.raises(NotImplementedError):
        model.layers[0].get_config()
    assert auto(model, 2) == [0, 0, 1, 1]


def test_equal_layers_are_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    estimated = []
    original = costs._cost
    monkeypatch.setattr(costs, "_cost", lambda node, values: estimated.append(str(node)) or original(node, values))
    blocks = [layers.Dense(6, "tanh" if i % 2 else None, name=f"d{i}") for i in range(4)]
    auto(keras.Sequential([keras.Input((6,)), *blocks, layers.Dense(3, name="d4")]), 2)
    assert estimated == ["d0", "d1", "d4"]


def test_messages_count_and_name_things_properly() -> None:
    with pytest.raises(ValueError, match=r"has 1 layer call, too few for 2 stages. It cannot be pipelined."):
        auto(keras.Sequential([keras.Input((3,)), dense("a")]), 2)
    with pytest.raises(ValueError, match=r"has 2 layer calls, too few for 3 stages. Use at most 2 stages."):
        auto(keras.Sequential([keras.Input((3,)), dense("a"), dense("b")]), 3)
    first, second = keras.Input((3,)), keras.Input((None, 3))
    model = keras.Model([first, second], dense("b")(second) + dense("a")(first))
    name = next(layer.name for layer in model.layers if layer.output is second)
    with pytest.raises(ValueError, match=rf"Input '{name}' has the shape \(None, None, 3\)"):
        auto(model, 2)


def test_preprocessing_layers_have_a_cost() -> None:
    """They hold Keras' backend, which has a function called `shape`."""
    scaled = [layers.Rescaling(0.5), layers.Dense(64), layers.Normalization(mean=0.0, variance=1.0), layers.Dense(64)]
    assert auto(keras.Sequential([keras.Input((64,)), *scaled]), 2)[1::2] == [0, 1]
