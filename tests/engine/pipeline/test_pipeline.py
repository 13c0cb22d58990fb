"""Pipelined models: one program, each device its own stages, the same numbers, and rules that say what is wrong."""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openipu as ipu
from openipu.engine.core.pipelining import Recompute
from openipu.engine.pipeline.runtime.stage_function import StageContext, StageFunction, StageResults, differentiate
from openipu.schedules import Table, journey

import jax
import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo
from stages import accumulating

pytestmark = zoo.KERAS_WARNINGS

STEPS = 4
BATCH = 4


@pytest.fixture(scope="module", autouse=True)
def _four_devices() -> None:
    configure(4)


def configure(devices: int, **options: Any) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.allow_recompute = options.get("recompute", False)
    config.norms.experimental.distributed_batch_norm_replica_group_size = options.get("group", 1)
    config.configure_ipu_system()


def data(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 3, rows)


def mixing() -> keras.Model:
    """Batch normalisation, dropout and a skip connection: what depends on how samples are put together."""
    x = inputs = keras.Input((6,))
    first = x = layers.Dense(8, "tanh")(x)
    x = layers.BatchNormalization(momentum=0.8)(x)
    x = layers.Dense(8)(layers.Dropout(0.3)(x))
    x = layers.BatchNormalization(momentum=0.8)(layers.Add()([x, first]))
    return keras.Model(inputs, layers.Dense(3, "softmax")(layers.Dropout(0.2)(x)))


def dense() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), *(layers.Dense(8, "tanh") for _ in range(3)), layers.Dense(3, "softmax")]
    )


def made(
    make: Callable[[], keras.Model], stages: list[int] | None, *, optimizer: Any = "sgd", steps: int = STEPS,
    per_execution: int = 2 * STEPS, **options: Any,
) -> keras.Model:  # fmt: skip
    """A model under a strategy, pipelined if it is given stages."""
    keras.utils.set_random_seed(5)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make()
        if stages is None:
            model.set_gradient_accumulation_options(steps)
        else:
            assignment = model.get_pipeline_stage_assignment()
            for part, stage in zip(assignment, stages, strict=True):
                part.pipeline_stage = stage
            model.set_pipeline_stage_assignment(assignment)
            model.set_pipelining_options(steps, **options)
        model.compile(
            optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=per_execution
        )
    return model


def fit(model: keras.Model, rows: int = 64, **settings: Any) -> dict[str, list[float]]:
    settings = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False} | settings
    return dict(model.fit(*data(rows), **settings).history)


# --- numbers ---------------------------------------------------------------------------------------------------------

MIXING = [0, 0, 0, 1, 1, 1, 1, 1]
MOMENTUM = functools.partial(keras.optimizers.SGD, 0.02, momentum=0.9)


@pytest.mark.parametrize(
    ("devices", "group", "rows"), [pytest.param(2, 1, 64, marks=pytest.mark.slow), (4, 1, 76), (4, 2, 64)]
)
def test_statistics_and_dropout_are_those_of_replicas_without_stages(devices: int, group: int, rows: int) -> None:
    configure(devices // 2, group=group)
    # Not Adam: a bias before a normalisation has no gradient but rounding, which Adam would magnify.
    plain = made(mixing, None, optimizer=MOMENTUM())
    expected = fit(plain, rows), plain.get_weights(), plain.evaluate(*data(rows), batch_size=BATCH, verbose=0)
    configure(devices, group=group)
    model = made(mixing, MIXING, optimizer=MOMENTUM(), pipeline_schedule="OneFOneB")
    replication.assert_same_history(fit(model, rows), expected[0])
    replication.assert_close(model.get_weights(), expected[1])
    np.testing.assert_allclose(model.evaluate(*data(rows), batch_size=BATCH, verbose=0), expected[2], rtol=1e-5)
    configure(4)


@pytest.mark.parametrize("divided", [False, True])
def test_constraints(divided: bool) -> None:
    def constrained() -> keras.Model:
        rules = keras.constraints.UnitNorm(), keras.constraints.NonNeg(), None
        hidden = [layers.Dense(8, "tanh", kernel_constraint=rule) for rule in rules]
        return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3, "softmax")])

    configure(2)
    expected = made(constrained, None, optimizer=MOMENTUM())
    fit(expected)
    configure(4)
    model = made(constrained, [0, 0, 1, 1], optimizer=MOMENTUM(), replicated_optimizer_state_sharding=divided)
    fit(model)
    replication.assert_close(model.get_weights(), expected.get_weights())


def test_an_optimizer_that_goes_by_paths() -> None:
    """Muon treats embeddings in another way, which it knows by the paths of weights."""

    def embedding() -> keras.Model:
        last = [layers.Flatten(), layers.Dense(8), layers.Dense(3, "softmax")]
        return keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(20, 4), *last])

    weights = []
    for devices, stages in ((1, None), (2, [0, 0, 1, 1])):
        configure(devices)
        model = made(embedding, stages, optimizer=keras.optimizers.Muon(0.01))
        model.fit(*zoo.tokens(32), batch_size=BATCH, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    configure(4)
    replication.assert_close(weights[1], weights[0])


def test_divided_optimizer_state() -> None:
    expected = made(dense, [0, 0, 1, 1], optimizer="adam")
    fit(expected)
    model = made(dense, [0, 0, 1, 1], optimizer="adam", replicated_optimizer_state_sharding=True)
    fit(model)
    replication.assert_close(model.get_weights(), expected.get_weights())
    slots = [v.numpy() for v in model.optimizer.variables]
    replication.assert_close(slots, [v.numpy() for v in expected.optimizer.variables])
    whole, divided = (sum(a.size for a in _optimizer_arrays(m)) for m in (expected, model))
    assert divided < 0.6 * whole


def _optimizer_arrays(model: keras.Model) -> list[Any]:
    function = model.train_function
    values = [v.value for v in model.optimizer.variables]
    state = function.spread.spread(zoo_state(model, values))
    return [a.addressable_data(0) for a in state.optimizer]


def zoo_state(model: keras.Model, optimizer: list[Any]) -> Any:
    from openipu.engine.core.state import State

    return State(
        [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables], optimizer, []
    )


def test_runs_are_bitwise_repeatable() -> None:
    first, second = (made(mixing, MIXING, optimizer="adam") for _ in range(2))
    fit(first)
    fit(second)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        assert np.array_equal(a, b)


def test_single_batches() -> None:
    x, y = data(BATCH)
    results = []
    for devices, stages in ((1, None), (2, [0, 0, 1, 1])):
        configure(devices)
        model = made(dense, stages)
        results.append([*model.train_on_batch(x, y), *model.test_on_batch(x, y), *model.predict_on_batch(x).ravel()])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    configure(4)


# --- one program -----------------------------------------------------------------------------------------------------


def wide(width: int = 128) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(width, "tanh") for _ in range(7)), layers.Dense(3)])


@pytest.fixture(scope="module")
def four_stages() -> keras.Model:
    model = made(wide, [0, 0, 1, 1, 2, 2, 3, 3], steps=8, optimizer="adam", per_execution=16)
    fit(model, 128)
    return model


def test_one_program_and_one_launch_per_execution(four_stages: keras.Model, caplog: pytest.LogCaptureFixture) -> None:
    launches: list[int] = []
    with caplog.at_level(logging.DEBUG, "openipu"):
        fit(
            four_stages,
            128,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, **_: launches.append(batch))],
        )
    assert launches == [15, 31] * 2
    assert "compiled for" not in caplog.text
    (program,) = replication.programs(four_stages)
    assert "collective-permute" in program.as_text()


def test_a_device_holds_its_own_stage_only(four_stages: keras.Model) -> None:
    """Arguments per device against weights and optimizer slots of the largest stage, and the resident data."""
    (program,) = replication.programs(four_stages)
    per_layer = [3 * sum(w.size for w in layer.get_weights()) * 4 for layer in four_stages.layers]
    stages = [sum(per_layer[2 * i : 2 * i + 2]) for i in range(4)]
    x, y = data(128)
    # Row numbers of the batches travel too; labels are kept as 32-bit numbers.
    resident = x.nbytes + y.size * 4 + 128 * 4
    assert program.memory_analysis().argument_size_in_bytes <= 1.15 * max(stages) + resident
    assert max(stages) < 0.5 * sum(per_layer)


def test_programs_do_not_grow_with_micro_batches() -> None:
    lengths = []
    for steps in (4, 32):
        model = made(dense, [0, 0, 1, 1], steps=steps, per_execution=steps)
        fit(model, BATCH * steps * 2, epochs=1)
        lengths.append(sum(map(len, replication.computations(replication.programs(model)[0].as_text()).values())))
    assert lengths[1] <= 1.02 * lengths[0]


def test_gradients_are_reduced_once_per_update() -> None:
    model = made(dense, [0, 0, 1, 1])
    fit(model, epochs=1)
    parts = replication.computations(replication.programs(model)[0].as_text())
    (updates,) = replication.loops(parts)
    (ticks,) = replication.loops(parts, updates)
    inside = [kind for name in set(replication.reached(parts, ticks)) for kind in replication.collectives(parts[name])]
    assert set(inside) == {"collective-permute"}
    assert "all-reduce" in replication.collectives(parts[updates])


def test_gradients_are_added_up_in_place() -> None:
    configure(2)
    model = made(deep, [0] * 4 + [1] * 5, steps=4)
    fit(model, 128, batch_size=8, epochs=1)
    parts = replication.computations(replication.programs(model)[0].as_text())
    (updates,) = replication.loops(parts)
    (ticks,) = replication.loops(parts, updates)
    lines = [line for name in set(replication.reached(parts, ticks)) for line in parts[name]]
    weights = f"f32[{256 * 256}]"
    assert any(weights in line for line in lines)
    assert not [line for line in lines if f" = {weights}" in line and " copy(" in line]
    configure(4)


def test_recomputation_keeps_less() -> None:
    def temporary(recompute: bool) -> int:
        configure(2, recompute=recompute)
        model = made(deep, [0] * 8 + [1], steps=16, per_execution=16, pipeline_schedule="GPipe")
        fit(model, 128, batch_size=8, epochs=1)
        (program,) = replication.programs(model)
        return int(program.memory_analysis().temp_size_in_bytes)

    assert temporary(True) < 0.6 * temporary(False)
    configure(4)


def deep() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(256, "tanh") for _ in range(8)), layers.Dense(3)])


# --- schedules of a user ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneByOne:
    """Like Sequential; `late` leaves out how long a stage has to wait."""

    late: bool = False

    def table(self, stages: int, micro_batches: int, devices: Any = None, training: bool = True) -> Table:
        ticks = {}
        for m in range(micro_batches):
            for k, action in enumerate(journey(stages, m, training)):
                ticks[action] = m * 2 * stages + (k if not self.late or k == 0 else k - 1)
        return Table.at(ticks, devices or range(stages), training, one_at_a_time=False)


def test_a_schedule_of_the_users_own() -> None:
    configure(2)
    model = made(dense, [0, 0, 1, 1], pipeline_schedule=OneByOne())
    fit(model)
    configure(1)
    expected = made(dense, None)
    fit(expected)
    replication.assert_close(model.get_weights(), expected.get_weights())
    configure(4)


def test_a_schedule_that_cannot_work_is_shown() -> None:
    model = made(dense, [0, 0, 1, 1], pipeline_schedule=OneByOne(late=True))
    with pytest.raises(ValueError, match=r"uses the result of F0:0(?s:.)*>F1:0<"):
        fit(model)


# --- rules -----------------------------------------------------------------------------------------------------------


def test_too_few_devices() -> None:
    model = made(wide, [0, 1, 2, 3, 4, 4, 4, 4], steps=10, per_execution=10)
    with pytest.raises(ValueError, match=r"need 5 devices, but 4 are configured.*multiple of 5"):
        fit(model)


def test_devices_without_work_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = made(dense, [0, 1, 1, 2], steps=6, per_execution=6)
    for _ in range(2):
        fit(model)
    assert caplog.text.count("1 of the 4 configured devices stays idle, because each replica of the model takes 3") == 1


@pytest.mark.parametrize(("schedule", "steps", "near"), [("Grouped", 6, "4 or 8"), ("Interleaved", 3, "2 or 4")])
def test_accumulation_that_does_not_fit_the_schedule(schedule: str, steps: int, near: str) -> None:
    model = made(dense, [0, 0, 1, 1], steps=steps, per_execution=2 * steps, pipeline_schedule=schedule)
    with pytest.raises(ValueError, match=rf"Use {near}"):
        fit(model)


def test_accumulation_has_to_be_set() -> None:
    with pytest.raises(ValueError, match="each update has only 1 micro-batch"):
        fit(made(dense, [0, 0, 1, 1], steps=1))


def test_steps_per_execution_are_whole_updates() -> None:
    with pytest.raises(RuntimeError, match="not a multiple of the 4"):
        fit(made(dense, [0, 0, 1, 1], per_execution=6))


def test_own_steps_cannot_be_cut() -> None:
    class Own(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            return super().train_step(*args)

    with pytest.raises(RuntimeError, match="own `train_step`"):
        fit(made(lambda: Own([keras.Input((6,)), layers.Dense(4), layers.Dense(3)]), [0, 1]))


def test_moving_statistics_on_two_devices() -> None:
    def twice() -> keras.Model:
        x, norm = layers.Dense(8)(inputs := keras.Input((6,))), layers.BatchNormalization()
        return keras.Model(inputs, layers.Dense(3)(norm(layers.Dense(8)(norm(x)))))

    with pytest.raises(
        ValueError, match=r"Stage 0 changes .*moving_mean.*a stage on another device uses, too.*device_mapping"
    ):
        fit(made(twice, [0, 0, 1, 1, 1]))


def test_interleaved_needs_a_device_for_each_stage() -> None:
    model = made(dense, [0, 0, 1, 1], pipeline_schedule="Interleaved", device_mapping=[0, 0])
    with pytest.raises(NotImplementedError, match="every stage on a device of its own"):
        fit(model)


# --- what belongs to a run -------------------------------------------------------------------------------------------


def test_live_callbacks() -> None:
    model = made(dense, [0, 0, 1, 1])
    model.set_asynchronous_callbacks(True)
    seen: list[tuple[int, float]] = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append((b, logs["loss"])))
    history = fit(model, 70, epochs=1, callbacks=[callback])
    assert [b for b, _ in seen] == list(range(18))
    assert seen[-1][1] == pytest.approx(history["loss"][0])


def test_a_checkpoint_of_stages_goes_on_without_them(tmp_path: pathlib.Path) -> None:
    whole = made(dense, [0, 0, 1, 1], optimizer="adam")
    fit(whole, epochs=3)
    half = made(dense, [0, 0, 1, 1], optimizer="adam")
    fit(half, epochs=1, callbacks=[ipu.callbacks.Checkpoint(tmp_path / "a")])
    again = made(dense, [0, 0, 1, 1], optimizer="adam")
    fit(again, epochs=3, callbacks=[ipu.callbacks.Checkpoint(tmp_path / "a")])
    for a, b in zip(again.get_weights(), whole.get_weights(), strict=True):
        assert np.array_equal(a, b)
    configure(2)
    plain = made(dense, None, optimizer="adam")
    fit(plain, epochs=3, callbacks=[ipu.callbacks.Checkpoint(tmp_path / "a")])
    replication.assert_close(plain.get_weights(), whole.get_weights())
    configure(4)


@pytest.mark.parametrize("there", [[0, 0, 1, 1], None])
def test_a_checkpoint_from_the_middle_of_an_epoch_goes_on_elsewhere(
    tmp_path: pathlib.Path, there: list[int] | None
) -> None:
    """From stages to one device, and the other way round: weights and the metrics of the whole epoch."""

    def on(stages: list[int] | None, *callbacks: Any) -> tuple[keras.Model, dict[str, list[float]]]:
        configure(4 if stages else 2)
        model = made(dense, stages, optimizer="adam", per_execution=4)
        return model, fit(model, epochs=2, callbacks=list(callbacks))

    def stop(batch: int) -> None:
        if batch >= 8:
            raise KeyboardInterrupt

    elsewhere = None if there else [0, 0, 1, 1]
    whole, expected = on(there)
    interrupt = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: stop(batch))  # noqa: ARG005
    with pytest.raises(KeyboardInterrupt):
        on(there, ipu.callbacks.Checkpoint(tmp_path / "a", max_share=1), interrupt)
    assert {path.name for path in (tmp_path / "a").glob("*")} == {"8"}  # of 16 steps of an epoch
    again, history = on(elsewhere, ipu.callbacks.Checkpoint(tmp_path / "a", max_share=1))
    replication.assert_close(again.get_weights(), whole.get_weights())
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-5), name
    configure(4)


def test_saved_and_loaded_with_its_stages(tmp_path: pathlib.Path) -> None:
    model = made(dense, [0, 0, 1, 1], optimizer="adam")
    fit(model)
    model.save(tmp_path / "m.keras")
    with ipu.ipu_strategy.IPUStrategy().scope():
        again = keras.models.load_model(tmp_path / "m.keras")
    fit(model)
    fit(again)
    replication.assert_close(again.get_weights(), model.get_weights(), 1e-7)
    assert jax.tree.leaves(again._ipu_session.pipeline("train").pipelining.devices) == [0, 1]


def test_a_weight_without_a_gradient_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def unused() -> keras.Model:
        x = layers.Dense(8)(inputs := keras.Input((6,)))
        y = layers.Dense(8, name="idle")(x)
        return keras.Model(inputs, layers.Dense(3)(x + 0 * keras.ops.stop_gradient(y)))

    model = made(unused, [0, 1, 1])
    before = model.get_layer("idle").get_weights()
    fit(model)
    assert "have no gradient" in caplog.text
    assert "idle/kernel" in caplog.text
    replication.assert_close(model.get_layer("idle").get_weights(), before, 0)


class Unbuilt(keras.Model):
    """Says in `call` which layer is in which stage; has no variables before it has seen a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(8, "tanh"), layers.Dense(3, "softmax")

    def call(self, x: Any) -> Any:
        with ipu.keras.PipelineStage(0):
            x = self.first(x)
        with ipu.keras.PipelineStage(1):
            return self.second(x)


def test_a_subclassed_model_is_built_from_the_data() -> None:
    keras.utils.set_random_seed(5)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = Unbuilt()
        model.set_pipelining_options(STEPS)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=STEPS)
    fit(model)
    assert model._ipu_session.place("train").replicas.count == 2
    with ipu.ipu_strategy.IPUStrategy().scope():
        other = Unbuilt()
    assert other.predict(data()[0], batch_size=BATCH, verbose=0).shape == (64, 3)


@pytest.mark.parametrize(
    ("recompute", "kept"), [(Recompute.NOTHING, 5), (Recompute.UNMARKED, 1), (Recompute.EVERYTHING, 0)]
)
def test_what_is_kept_between_forward_and_backward(recompute: Recompute, kept: int) -> None:
    """The marked value in the middle; without computing anything again, what derivatives use around it as well."""

    def run(weights: list[Any], boundary: list[Any], _: StageContext) -> tuple[list[Any], StageResults]:
        x = boundary[0]
        for weight in weights:
            x = ipu.pipelining_ops.recomputation_checkpoint(jax.numpy.sin(jax.numpy.exp(x @ weight)))
        return [x.sum(1)], StageResults([], [], None)

    weights, boundary = [np.ones((6, 6), "float32")] * 2, [np.ones((8, 6), "float32")]
    context = StageContext((), [], True, [], [])
    stage = differentiate(StageFunction((0, 1), (), run), weights, boundary, context, recompute)
    out, _, values = stage.forward(weights, boundary, context)
    assert len([spec for spec in stage.kept if spec.shape == (8, 6)]) == kept == len(values)
    gradients, _ = stage.backward(weights, boundary, context, values, [jax.numpy.ones_like(out[0])])
    whole = differentiate(StageFunction((0, 1), (), run), weights, boundary, context)
    expected, _ = whole.backward(
        weights, boundary, context, whole.forward(weights, boundary, context)[2], [np.ones(8, "f")]
    )
    replication.assert_close(gradients, expected)


@pytest.mark.parametrize(("mode", "schedule", "kept"), [
    ("Auto", "Grouped", "EVERYTHING"), ("Auto", "Sequential", "UNMARKED"),
    ("RecomputeThenBackpropagate", "Grouped", "EVERYTHING"),
    ("RecomputeAndBackpropagateInterleaved", "Grouped", "UNMARKED"),
])  # fmt: skip
def test_recomputation_modes(mode: str, schedule: str, kept: str) -> None:
    configure(2, recompute=True)
    mode = ipu.pipelining_ops.RecomputationMode[mode]
    model = made(dense, [0, 0, 1, 1], pipeline_schedule=schedule, recomputation_mode=mode)
    session = model._ipu_session
    assert session.pipeline("train").pipelining.recompute(session.place("train").recompute) is Recompute[kept]
    configure(4)
    assert session.pipeline("train").pipelining.recompute(session.place("train").recompute) is Recompute.NOTHING


class Distiller(keras.Model):
    """Its loss uses a layer that `call` does not, and may be a layer of an earlier stage."""

    def __init__(self, shared: bool = False, trained: bool = True) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(6, "tanh", name="first"), layers.Dense(3, name="last")
        self.teacher = self.first if shared else layers.Dense(3, name="teacher", trainable=trained)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.last.build((None, 6))
        if not self.teacher.built:
            self.teacher.build(shape)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *others: Any, **settings: Any) -> Any:
        del y, others, settings
        told = keras.ops.sum(self.teacher(x), axis=-1)
        return keras.ops.mean((keras.ops.sum(y_pred, axis=-1) - told) ** 2)


def distiller(stages: bool, **settings: Any) -> keras.Model:
    """A compiled distiller, in stages or not."""
    x, _ = data()
    keras.utils.set_random_seed(4)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = Distiller(**settings)
        model.build((None, x.shape[1]))
        model(x[:4])
        accumulating(model, stages)
        model.compile(keras.optimizers.SGD(0.05), steps_per_execution=4)
    return model


def distilled(stages: bool, **settings: Any) -> tuple[list[np.ndarray], list[float], float]:
    """The weights, losses and evaluation of a distiller after training."""
    (x, y), model = data(), distiller(stages, **settings)
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    return model.get_weights(), history, model.evaluate(x, y, batch_size=4, verbose=0)


@pytest.mark.parametrize("trained", [True, False])
def test_layers_that_only_the_loss_uses_are_in_the_last_stage(trained: bool) -> None:
    configure(1)
    expected, losses, evaluated = distilled(stages=False, trained=trained)
    configure(2)
    weights, staged_losses, staged_evaluated = distilled(stages=True, trained=trained)
    replication.assert_close(weights, expected, 1e-5)
    np.testing.assert_allclose(staged_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(staged_evaluated, evaluated, rtol=1e-5)


def test_a_loss_that_reads_an_earlier_stage_is_refused() -> None:
    configure(2)
    model = distiller(stages=True, shared=True)
    for call in (model.fit, model.fit, model.evaluate):
        with pytest.raises(ValueError, match=r"read .*first/kernel.*, which earlier stages hold"):
            call(*data(), batch_size=4, verbose=0)
