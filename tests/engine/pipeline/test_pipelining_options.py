"""Pipelining options: what they become, that they are saved with stages, and the rules of a plan."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openipu as ipu
from openipu.engine.core import options as engine_options
from openipu.engine.core.accumulation import Accumulation, Reduction
from openipu.engine.core.pipelining import Pipelining
from openipu.engine.core.updates import Updates
from openipu.engine.pipeline.build import rules
from openipu.engine.pipeline.partition.assignment import is_pipelined
from openipu.engine.schedule.schedules import GPipe, Grouped, Interleaved, OneFOneB, Sequential

import keras
import numpy as np
import pytest
from keras import ops

from stages import Marked, PipelineStage, built, dense, nested, options, reloaded, stack, stages, two_branches
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


PipelineSchedule = ipu.ops.pipelining_ops.PipelineSchedule


RecomputationMode = ipu.ops.pipelining_ops.RecomputationMode


@pytest.fixture(autouse=True)
def scope() -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        yield


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [stack, two_branches, nested])
def test_stages_are_saved(make: Callable[[], Any], tmp_path: Any) -> None:
    model = make()
    model.set_pipeline_stage_assignment("auto", stages=2, print_fn=None)
    loaded = reloaded(model, tmp_path)
    assert stages(loaded) == stages(model)
    assert options(loaded) == options(model)


def test_marks_are_saved(tmp_path: Any) -> None:
    inputs = keras.Input((3,))
    with PipelineStage(0):
        x = dense("a")(inputs)
    with PipelineStage(1):
        model = keras.Model(inputs, dense("b")(ops.relu(x)))
    loaded = reloaded(model, tmp_path)
    assert stages(loaded) == [["a"], ["b"]]
    model.reset_pipeline_stage_assignment()
    loaded = reloaded(model, tmp_path)
    assert not is_pipelined(loaded, options(loaded).stages)


def test_subclassed_models_are_saved(tmp_path: Any) -> None:
    x = np.ones((2, 3), "float32")
    loaded = reloaded(built(Marked()), tmp_path, custom_objects={"Marked": Marked})
    assert stages(loaded, x) == [["first", "second"], ["second (call 1)", "last"]]


def test_plain_keras_opens_it(tmp_path: Any) -> None:
    model = stack()
    model.set_pipeline_stage_assignment([0, 0, 1, 1])
    model.save(tmp_path / "model.keras")
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(keras.models.load_model(tmp_path / "model.keras")))
    worker.start()
    worker.join()
    assert not hasattr(found[0], "set_pipelining_options")
    np.testing.assert_array_equal(found[0].predict(np.ones((2, 3)), verbose=0), 81.0)


@dataclass(frozen=True)
class Bursts:
    """A schedule as a user writes one."""

    size: int = 2

    def table(self, *args: Any, **kwargs: Any) -> Any:
        return GPipe().table(*args, **kwargs)


def test_options_are_saved(tmp_path: Any) -> None:
    model = stack()
    model.set_pipelining_options(
        8, [0, 1], True, "mean", pipeline_schedule=Bursts(3), gradient_accumulation_dtype="float16",
        recomputation_mode=RecomputationMode.RecomputeThenBackpropagate, replicated_optimizer_state_sharding=True,
        offload_weight_update_variables=True,
    )  # fmt: skip
    assert options(reloaded(model, tmp_path)) == options(model)
    kept = json.loads(options(model).to_json())["pipelining"]
    assert kept["schedule"] == {"class": f"{__name__}:Bursts", "fields": {"size": 3}}


def test_schedules_that_cannot_be_saved_or_found(tmp_path: Any) -> None:
    @dataclass(frozen=True)
    class Local(Bursts):
        pass

    model = stack()
    model.set_pipelining_options(pipeline_schedule=Local())
    with pytest.raises(ValueError, match=r"cannot be saved.*Make it one"):
        model.save(tmp_path / "model.keras")
    text = engine_options.Options(pipelining=Pipelining(Bursts())).to_json()
    with pytest.raises(ValueError, match=r"nowhere:Bursts, which cannot be found"):
        engine_options.Options.from_json(text.replace(__name__, "nowhere"))


def test_options_of_older_files_are_read() -> None:
    known = engine_options.Options(Updates(shard_optimizer=True))
    old = json.loads(known.to_json())
    del old["stages"], old["pipelining"]
    assert engine_options.Options.from_json(json.dumps(old)) == known


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_become_one_value() -> None:
    model = stack()
    assert options(model).pipelining is None
    model.set_pipelining_options(8, pipeline_schedule=PipelineSchedule.Interleaved)
    assert options(model).pipelining == Pipelining(Interleaved(), updates=Updates(Accumulation(8)))
    # What is not given stays as it was.
    model.set_pipelining_options(device_mapping=[0, 0], gradient_accumulation_reduction_method="MEAN")
    assert options(model).pipelining == Pipelining(
        Interleaved(), (0, 0), updates=Updates(Accumulation(8, Reduction.MEAN))
    )


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        (PipelineSchedule.Grouped, Grouped()),
        (PipelineSchedule.Interleaved, Interleaved()),
        (PipelineSchedule.Sequential, Sequential()),
        (PipelineSchedule.GPipe, GPipe()),
        (PipelineSchedule.OneFOneB, OneFOneB()),
        ("grouped", Grouped()),
        ("1F1B", OneFOneB()),
        (Bursts(4), Bursts(4)),
    ],
)
def test_schedules(given: Any, schedule: Any) -> None:
    model = stack()
    model.set_pipelining_options(pipeline_schedule=given)
    assert options(model).pipelining == Pipelining(schedule)


def test_each_setter_has_its_own_accumulation(tmp_path: pathlib.Path) -> None:
    """That of stages counts while the model is pipelined, the other one while it is not."""
    model = stack()
    model.set_pipelining_options(8, gradient_accumulation_reduction_method="mean")
    model.set_gradient_accumulation_options(2, replicated_optimizer_state_sharding=True)
    model.set_pipeline_stage_assignment([0, 0, 1, 1])

    def found(model: keras.Model) -> tuple[Any, ...]:
        updates = model._ipu_session.effective_options.updates
        return updates.steps, updates.accumulation.method.name, updates.shard_optimizer

    model.save(tmp_path / "model.keras")
    for same in (model, keras.models.load_model(tmp_path / "model.keras")):
        assert found(same) == (8, "MEAN", False)
        same.reset_pipeline_stage_assignment()
        assert found(same) == (2, "SUM", True)


POPLAR = ipu.ops.pipelining_ops.PipelineStageOptions()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"gradient_accumulation_steps_per_replica": 0}, ValueError, "is 0. Give a whole number of 1 or more"),
        ({"gradient_accumulation_steps_per_replica": 2.0}, ValueError, "is 2.0. Give a whole number"),
        ({"device_mapping": 1}, ValueError, "list with the device of each stage"),
        ({"device_mapping": [0, 1.0]}, ValueError, r"`device_mapping\[1\]` is 1.0. Give a whole number"),
        ({"device_mapping": [0, -1]}, ValueError, r"`device_mapping\[1\]` is -1"),
        ({"accumulate_outfeed": "yes"}, ValueError, "True or False"),
        ({"gradient_accumulation_reduction_method": "max"}, ValueError, "SUM, MEAN, RUNNING_MEAN"),
        ({"gradient_accumulation_dtype": "float17"}, ValueError, "float17"),
        ({"pipeline_schedule": 7}, TypeError, "7, which is not a schedule"),
        ({"pipeline_schedule": Bursts}, TypeError, r"Make an instance: Bursts\(\)"),
        ({"pipeline_schedule": "Groupd"}, ValueError, "Did you mean 'Grouped'"),
        ({"recomputation_mode": "Auto"}, TypeError, "RecomputationMode"),
        ({"gradient_accumulation_dtype": "int32"}, ValueError, "`gradient_accumulation_dtype` is 'int32'"),
        ({"gradient_accumulation_dtype": "float64"}, ValueError, "float16, bfloat16 or float32"),
        ({"replicated_optimizer_state_sharding": 1}, ValueError, "True or False"),
        (
            {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": False},
            ValueError,
            "Leave `offload_weight_update_variables` out",
        ),
        ({"offload_weight_update_variables": 1}, ValueError, "True or False"),
        ({"offload_activations": 1}, ValueError, "True or False"),
        ({"continuous_weight_updates": True}, NotImplementedError, "continuous_weight_updates"),
        ({"gradient_accumulation_count": 4}, ValueError, "`gradient_accumulation_steps_per_replica` here"),
        ({"experimental_normalize_gradients": True}, ValueError, "reduction_method"),
        ({"infeed_queue": None}, ValueError, "set by the model itself"),
        ({"outfeed_mask": [True]}, ValueError, "cannot be used with Keras"),
        ({"forward_propagation_stages_poplar_options": POPLAR}, TypeError, "is a PipelineStageOptions. Give a list"),
        (
            {"backward_propagation_stages_poplar_options": [{}]},
            TypeError,
            r"options\[0\]` is a dict. Give a `PipelineStageOptions`",
        ),
        ({"weight_update_poplar_options": [POPLAR]}, TypeError, "is a list. Give a `PipelineStageOptions`"),
        ({"schedule": "Grouped"}, ValueError, "no option `schedule`. Did you mean `pipeline_schedule`"),
        (
            {"pipeline_schedule": "Sequential", "recomputation_mode": RecomputationMode.RecomputeThenBackpropagate},
            NotImplementedError,
            "Sequential does not work with",
        ),
        (
            {
                "pipeline_schedule": "Interleaved",
                "recomputation_mode": RecomputationMode.RecomputeAndBackpropagateInterleaved,
            },
            NotImplementedError,
            "Interleaved does not work with",
        ),
    ],
)
def test_wrong_options(given: dict[str, Any], error: type[Exception], words: str) -> None:
    model = stack()
    with pytest.raises(error, match=words):
        model.set_pipelining_options(**given)
    assert options(model) == engine_options.Options()


def test_what_means_nothing_here_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"offload_weights": True, "offload_activations": False, "weight_update_poplar_options": POPLAR}
    model = stack()
    for _ in range(2):
        model.set_pipelining_options(**asked, name="pipeline")
    assert [record.message for record in caplog.records] == [
        "No effect here: offload_weights (weights stay in device memory); "
        "weight_update_poplar_options (XLA has no such options)."
    ]


def test_options_without_stages_are_mentioned_in_training(caplog: pytest.LogCaptureFixture) -> None:
    x = np.ones((4, 3), "float32")
    model = keras.Sequential([keras.Input((3,)), dense("a")])
    model.compile("sgd", "mse")
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    model.evaluate(x, x, verbose=0)
    assert "no stages" not in caplog.text
    model.fit(x, x, epochs=2, verbose=0)
    assert caplog.text.count("has pipelining options but no stages, so they have no effect") == 1


def test_a_dtype_for_each_variable() -> None:
    model = stack()

    def found() -> Accumulation:
        updates = options(model).pipelining.updates
        return rules.one_dtype(updates.of_weights(model.trainable_variables)).accumulation

    model.set_pipelining_options(gradient_accumulation_dtype=lambda _: "bfloat16")
    assert found().dtype == "bfloat16"
    model.set_pipelining_options(gradient_accumulation_dtype=lambda v: "float16" if len(v.shape) == 1 else None)
    with pytest.raises(ValueError, match=r"float16, float32.*in one dtype"):
        found()
    model.set_pipelining_options(gradient_accumulation_dtype=np.float32)
    assert found().dtype == "float32"


# --- rules of a plan -------------------------------------------------------------------------------------------------


def test_micro_batches_have_to_fit_the_schedule() -> None:
    def check(schedule: Any, steps: int, stages: int, devices: tuple[int, ...] | None = None) -> None:
        pipelining = Pipelining(schedule, devices, updates=Updates(Accumulation(steps))).for_stages(stages, True)
        rules.check_accumulation_is_set(pipelining)
        rules.check_micro_batches(pipelining, "`steps`")

    for schedule, steps in ((Grouped(), 8), (Interleaved(), 6), (Sequential(), 1), (GPipe(), 3), (OneFOneB(), 1)):
        check(schedule, steps, 2)
    with pytest.raises(ValueError, match=r"only 1 micro-batch.*multiple of 4"):
        check(Grouped(), 1, 2)
    with pytest.raises(ValueError, match=r"needs a multiple of 6 micro-batches, not 8.*Use 6 or 12 \(`steps`\)"):
        check(Grouped(), 8, 3)
    with pytest.raises(NotImplementedError, match="Interleaved can only train"):
        check(Interleaved(), 6, 3, (0, 1, 0))


def test_devices_of_stages() -> None:
    def placed(mapping: tuple[int, ...] | None, stages: int) -> Pipelining:
        found = Pipelining(device_mapping=mapping).for_stages(stages, True)
        rules.check_all_devices_used(found)
        return found

    assert (placed(None, 3).devices, placed(None, 3).device_count) == ((0, 1, 2), 3)
    assert (placed((0, 1, 0), 3).devices, placed((0, 1, 0), 3).device_count) == ((0, 1, 0), 2)
    with pytest.raises(ValueError, match="2 devices are given for 3 stages"):
        placed((0, 1), 3)
    with pytest.raises(ValueError, match="leaves out device 1"):
        placed((0, 2), 2)


@pytest.mark.parametrize("name", ["train_step", "test_step", "predict_step", "make_train_function"])
def test_steps_of_the_users_own_are_refused(name: str) -> None:
    own = type("Own", (keras.Model,), {name: lambda *_: None, "__module__": __name__})
    inputs = keras.Input((3,))
    rules.check_model(stack())
    with pytest.raises(RuntimeError, match=f"has a `{name}` of its own"):
        rules.check_model(own(inputs, dense("a")(inputs)))
