"""`ipu.pipelining_ops`: values that a user makes."""

from __future__ import annotations

from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import ops

from stages import assign, dense, reloaded, stages
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True)
def scope() -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        yield


def test_recomputation_checkpoint(tmp_path: Any) -> None:
    import jax

    checkpoint = ipu.ops.pipelining_ops.recomputation_checkpoint
    text = str(jax.make_jaxpr(lambda x: checkpoint({"a": x, "b": [x]})["b"])(1.0))
    assert "name=recomputation_checkpoint" in text
    inputs = keras.Input((3,))
    model = keras.Model(inputs, dense("b")(checkpoint(dense("a")(inputs))))
    np.testing.assert_array_equal(reloaded(model, tmp_path).predict(np.ones((2, 3)), verbose=0), 9.0)
    assign(model, [0, 1])
    assert len(stages(model)) == 2


@pytest.mark.parametrize("name", ["convolution_options", "matmul_options", "slice_options"])
def test_stage_options(name: str) -> None:
    made = ipu.ops.pipelining_ops.PipelineStageOptions(**{name: {"a": 1}})
    assert getattr(made, name) == {"a": 1}
    with pytest.raises(TypeError, match=name):
        ipu.ops.pipelining_ops.PipelineStageOptions(**{name: [1]})


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"opt": "sgd"}, TypeError, "`opt` is a str"),
        ({"loss": 1.0}, TypeError, "`loss` is a float"),
        ({"compute_gradients_args": [1]}, TypeError, "`compute_gradients_args` is"),
        ({"apply_gradients_kwargs": [1]}, TypeError, "`apply_gradients_kwargs` is"),
        ({"compute_gradients_args": (1,)}, ValueError, "`variables` says what to train"),
        ({"compute_gradients_kwargs": {"a": 1}}, ValueError, "`variables` says what to train"),
        ({"variables": [], "tape": 1}, ValueError, "`variables` and `tape`"),
        ({"tape": 1, "gradient_capture_context": 1}, ValueError, "`tape` and `gradient_capture_context`"),
        ({"captured_gradient_outfeed": 1}, ValueError, "`captured_gradient_outfeed` needs"),
    ],
)
def test_output_of_an_optimizer_function(given: dict[str, Any], error: type[Exception], words: str) -> None:
    right = {"opt": keras.optimizers.SGD(), "loss": ops.ones(())}
    made = ipu.ops.pipelining_ops.OptimizerFunctionOutput(**right)
    assert (made.opt, made.loss, made.variables) == (right["opt"], right["loss"], None)
    with pytest.raises(error, match=words):
        ipu.ops.pipelining_ops.OptimizerFunctionOutput(**right | given)


def test_arguments_of_apply_gradients_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    right = {"opt": keras.optimizers.SGD(), "loss": ops.ones(())}
    ipu.ops.pipelining_ops.OptimizerFunctionOutput(**right, apply_gradients_args=(), apply_gradients_kwargs={})
    assert caplog.text == ""
    for _ in range(2):
        ipu.ops.pipelining_ops.OptimizerFunctionOutput(
            **right, apply_gradients_args=(1,), apply_gradients_kwargs={"name": "a"}
        )
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("No effect here: apply_gradients_args (Keras' optimizers take only gradients")
    assert "apply_gradients_kwargs (" in message


@pytest.mark.parametrize(
    "name",
    [
        "offload_weight_update_variables",
        "offload_activations",
        "offload_gradient_accumulation_buffers",
        "offload_weights",
        "replicated_weight_sharding",
        "gradient_accumulation_for_captured_grads",
    ],
)
@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_switches_of_a_pipeline_are_true_or_false(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is .* Give True or False"):
        ipu.ops.pipelining_ops.pipeline([lambda x: x] * 2, 4, inputs=[1.0], **{name: value})


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"accumulate_outfeed_dtype": lambda _: "float32"}, ValueError, "which is no dtype. Give one for all outputs"),
        ({"accumulate_outfeed_dtype": "flat32"}, ValueError, "is 'flat32', which is no dtype"),
        ({"computational_stages": [abs, [abs, abs]]}, NotImplementedError, "one function here. Give a function that"),
        ({"batch_serialization_iterations": 2}, NotImplementedError, "are not cut further here. Give 1"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_before_it_runs(
    given: dict[str, Any], error: type[Exception], words: str
) -> None:
    def stage(x: Any) -> Any:
        pytest.fail(f"a stage was traced with {x}")

    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    right = {"computational_stages": [stage, stage], "accumulate_outfeed": True, "outfeed_queue": outfeed}
    with pytest.raises(error, match=words):
        ipu.ops.pipelining_ops.pipeline(gradient_accumulation_count=4, inputs=[1.0], **right | given)


def trained_with(first: Any, variables: list[keras.Variable] | None = None) -> None:
    """Train two stages, the first of which is `first`, for one update."""
    optimizer, last = keras.optimizers.SGD(0.1), dense("last")
    last.build((None, 3))

    def optimizer_function(loss: Any) -> Any:
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss, variables=variables)

    with configured(2):
        ipu.pipelining_ops.pipeline(
            [first, lambda x: ops.mean(last(x))], 4, inputs=[ops.ones((2, 3))], optimizer_function=optimizer_function
        )


def test_a_variable_without_a_gradient_is_an_error() -> None:
    """As in the original, whose optimizers raise it; `fit` only warns, as Keras does."""
    used, idle = dense("used"), dense("idle")
    for layer in (used, idle):
        layer.build((None, 3))

    def first(x: Any) -> Any:
        return used(x) + ops.stop_gradient(idle(x))

    with pytest.raises(ValueError, match=r"2 of 6 variables to train have no .*: idle/kernel, idle/bias\. Use"):
        trained_with(first)
    before = [used.kernel.numpy(), idle.kernel.numpy()]
    trained_with(first, [used.kernel])
    assert not np.array_equal(used.kernel.numpy(), before[0])
    np.testing.assert_array_equal(idle.kernel.numpy(), before[1])


def configured(devices: int) -> Any:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategy().scope()


@pytest.mark.parametrize("order", ["numbers", "number first", "number last"])
def test_elements_with_plain_numbers_on_replicas(order: str) -> None:
    numbers = [np.float32(i) for i in range(4)]
    vector = np.arange(3, dtype="float32")
    elements = {
        "numbers": numbers,
        "number first": [(n, vector) for n in numbers],
        "number last": [(vector, n) for n in numbers],
    }
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    with configured(4):
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements[order])
        ipu.pipelining_ops.pipeline(
            [lambda *parts: parts, lambda *parts: sum(parts)], 2, infeed_queue=infeed, outfeed_queue=outfeed,
            pipeline_schedule="Sequential",
        )  # fmt: skip
    found = outfeed.dequeue().reshape(4, -1)
    np.testing.assert_array_equal(found, [sum(e) if isinstance(e, tuple) else [e] for e in elements[order]])


def test_an_outfeed_that_gets_nothing_is_an_error_before_weights_change() -> None:
    weight, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1)

    def loss(x: Any) -> Any:
        return ops.sum(x * weight)

    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    more: list[dict[str, Any]] = [
        {
            "outfeed_mask": [True],
            "optimizer_function": lambda loss: ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss),
        },
        {"computational_stages": [lambda x: x, lambda _: None]},
    ]
    for options in more:
        with configured(2), pytest.raises(ValueError, match="The `outfeed_queue` gets nothing"):
            ipu.pipelining_ops.pipeline(
                **{"computational_stages": [lambda x: x, loss], "inputs": [ops.ones(1)], **options},
                gradient_accumulation_count=2, outfeed_queue=outfeed, pipeline_schedule="Sequential",
            )  # fmt: skip
    assert float(weight.numpy()) == 1


def test_layers_that_are_frozen_between_two_runs() -> None:
    """The same functions and the same shapes, so the compiled pipeline of the first run is at hand."""
    first, last, optimizer = dense("first"), dense("last"), keras.optimizers.SGD(0.1)
    for layer in (first, last):
        layer.build((None, 3))
    optimizer.build([*first.trainable_variables, *last.trainable_variables])

    def loss(x: Any) -> Any:
        return ops.mean(last(x))

    def optimizer_function(loss: Any) -> Any:
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    def changed() -> list[bool]:
        before = [layer.kernel.numpy() for layer in (first, last)]
        with configured(2):
            ipu.pipelining_ops.pipeline(
                [first, loss], 4, inputs=[ops.ones((2, 3))], optimizer_function=optimizer_function
            )
        after = [layer.kernel.numpy() for layer in (first, last)]
        return [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]

    assert changed() == [True, True]
    first.trainable = False
    with pytest.raises(ValueError, match="built for 4 trainable weights, but there are 2 now"):
        changed()
    first.trainable = True
    assert changed() == [True, True]
