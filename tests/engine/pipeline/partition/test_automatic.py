"""Automatic stages that look into layers, and what is said when a model cannot be cut evenly."""

from __future__ import annotations

from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers, ops

import composite_zoo
from stages import options, reloaded, stages
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True)
def scope() -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        yield


@keras.saving.register_keras_serializable("test_automatic")
class Encoder(layers.Layer):
    """All blocks of a model in one layer."""

    def __init__(self, blocks: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = blocks
        self.blocks = [layers.Dense(64, "tanh", name=f"block_{i}") for i in range(blocks)]

    def build(self, input_shape: Any) -> None:
        for block in self.blocks:
            block.build(input_shape)

    def call(self, inputs: Any) -> Any:
        x = inputs
        for block in self.blocks:
            x = x + block(x)
        return x

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"blocks": self.count}


def encoder(blocks: int = 8, layer: type[layers.Layer] = Encoder) -> keras.Model:
    x = layers.Dense(64, name="patches")(inputs := keras.Input((16,)))
    return keras.Model(inputs, layers.Dense(4, name="head")(layer(blocks, name="encoder")(x)))


def auto(model: Any, count: int, **settings: Any) -> list[list[str]]:
    model.set_pipeline_stage_assignment("auto", stages=count, print_fn=None, **settings)
    return stages(model)


def test_a_layer_that_holds_most_of_the_model_is_cut_inside() -> None:
    model = encoder()
    found = auto(model, 4)
    assert found[0] == ["patches", "encoder/block_0", "encoder/block_1"]
    assert found[1] == ["encoder/block_2", "encoder/block_3"]
    assert [len(names) for names in found] == [3, 2, 2, 3]


def test_layers_are_looked_into_only_where_it_helps() -> None:
    even = keras.Sequential([keras.Input((64,)), *(Encoder(2, name=f"e{i}") for i in range(4))])
    assert auto(even, 4) == [["e0"], ["e1"], ["e2"], ["e3"]]
    assert options(even).opening.layers == ()
    odd = keras.Sequential([keras.Input((64,)), *(Encoder(2, name=f"e{i}") for i in range(3))])
    assert auto(odd, 2) == [["e0", "e1/block_0"], ["e1/block_1", "e2"]]


def test_a_model_that_begins_with_preprocessing() -> None:
    even = [layers.Dense(64, name=f"d{i}") for i in range(4)]
    model = keras.Sequential([keras.Input((64,)), layers.Rescaling(1 / 255, name="scale"), *even])
    assert auto(model, 2) == [["scale", "d0", "d1"], ["d2", "d3"]]


def test_a_model_of_few_layers_can_have_more_stages() -> None:
    model = keras.Sequential([keras.Input((64,)), Encoder(4, name="e")])
    assert auto(model, 4) == [[f"e/block_{i}"] for i in range(4)]
    with pytest.raises(ValueError, match="has 4 layer calls, too few for 5 stages"):
        auto(model, 5)


def test_layers_inside_layers_are_found() -> None:
    class Nest(layers.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.inner = Encoder(4, name="inner")

        def call(self, inputs: Any) -> Any:
            return ops.tanh(self.inner(inputs))

    model = keras.Sequential([keras.Input((64,)), Nest(name="nest"), layers.Dense(64, name="last")])
    found = auto(model, 2)
    assert found[0] == ["nest/inner/block_0", "nest/inner/block_1"]
    assert found[1] == ["nest/inner/block_2", "nest/inner/block_3", "last"]


def test_opened_layers_are_read_changed_printed_and_reset() -> None:
    model = encoder(3)
    auto(model, 2)
    patches, inside, head = model.get_pipeline_stage_assignment()
    assert inside.is_nested_model
    assert inside.nested_model is model.get_layer("encoder")
    for call in inside.pipeline_stage_assignments:
        call.pipeline_stage = 0
    model.set_pipeline_stage_assignment([patches, inside, head])
    assert [len(names) for names in stages(model)] == [4, 1]
    lines: list[str] = []
    model.print_pipeline_stage_assignment_summary(print_fn=lines.append)
    assert any("encoder/block_1 (Dense) (0)" in line for line in lines)
    model.reset_pipeline_stage_assignment()
    assert len(model.get_pipeline_stage_assignment()) == 3


def test_opened_layers_are_saved(tmp_path: Any) -> None:
    model = encoder()
    found = auto(model, 4)
    again = reloaded(model, tmp_path)
    assert stages(again) == found
    assert stages(again, training=True) == found


def test_shapes_that_the_model_leaves_open_come_from_the_inputs(tmp_path: Any) -> None:
    inputs = keras.Input((None, 64))
    model = keras.Model(inputs, layers.Dense(4)(Encoder(4, name="encoder")(inputs)))
    found = auto(model, 2, inputs=np.ones((2, 5, 64), "float32"))
    assert any("encoder/block_1" in name for name in found[0])
    assert stages(reloaded(model, tmp_path)) == found


class Fickle(Encoder):
    """Can be traced in training only."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = super().call(inputs)
        return x if training else x + ops.convert_to_tensor(self.blocks[0].bias)


def test_a_layer_is_cut_only_if_it_can_be_cut_in_every_mode() -> None:
    model = encoder(4, Fickle)
    with pytest.warns(UserWarning, match=r"'encoder' \(Fickle\), which cannot be cut: its `call` cannot be traced"):
        assert auto(model, 2) == [["patches"], ["encoder", "head"]]
    assert stages(model, training=True) == stages(model)


def test_what_keras_hides_from_a_trace_stays_in_one_piece() -> None:
    """A call that insists on a mode changes the mode of the calls after it, also from inside another layer."""

    class Insists(Encoder):
        def __init__(self, blocks: int, **kwargs: Any) -> None:
            super().__init__(blocks, **kwargs)
            self.noise, self.drop = composite_zoo.Noise(64), layers.Dropout(0.5)

        def build(self, input_shape: Any) -> None:
            super().build(input_shape)
            self.noise(keras.KerasTensor(input_shape))

        def call(self, inputs: Any) -> Any:
            return super().call(self.drop(self.noise(inputs)))

    with pytest.warns(UserWarning, match=r"'encoder' \(Insists\), which cannot be cut: it computes something else"):
        auto(encoder(4, Insists), 2)


def test_an_uneven_cut_names_the_layer_the_reason_and_the_remedy() -> None:
    class Rigid(Encoder):
        def call(self, inputs: Any) -> Any:
            self.add_loss(ops.mean(inputs))
            return super().call(inputs)

    words = (
        r"Stage 1 of model 'functional\w*' has 9\d% of the cost, where 33% would be even, so 3 stages can be at most "
        r"1\.\d times as fast as one device\. 9\d% is in layer 'encoder' \(Rigid\), which cannot be cut: its `call` "
        r"cannot be traced \(.*\)\. Call the parts of this layer in the model itself, or use fewer stages\."
    )
    with pytest.warns(UserWarning, match=words) as said:
        assert auto(encoder(8, Rigid), 3) == [["patches"], ["encoder"], ["head"]]
    assert said[0].filename == __file__
