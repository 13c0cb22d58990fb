"""What programs keep in memory, against XLA's own numbers."""

from __future__ import annotations

import openipu as ipu
from openipu.engine.facts.costs import Buffers
from openipu.engine.facts.layers import layer_in_program
from openipu.engine.facts.values import ProgramFacts
from openipu.engine.loop.compile import LONGEST_TEXT, shortened
from openipu.engine.report.costs import memory_rows
from openipu.engine.report.files import read

import keras
import numpy as np
import pytest

from zoo import KERAS_WARNINGS


def trained(folder, stages: int = 1) -> list[ProgramFacts]:
    """The programs of a model that was trained, in one piece or in stages."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = stages
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential(
            [
                keras.Input((32,)),
                keras.layers.Dense(64, activation="relu", name="wide"),
                keras.layers.Dense(8, name="end"),
            ],
            name="net",
        )
        if stages > 1:
            model.set_pipeline_stage_assignment([0, 1])
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        model.compile("adam", "mse", steps_per_execution=4)
    with ipu.report(folder):
        model.fit(np.ones((64, 32), "float32"), np.ones((64, 8), "float32"), batch_size=16, verbose=0)
    return list(read(folder).runs[0].programs)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ProgramFacts:
    [found] = trained(tmp_path_factory.mktemp("buffers"))
    return found


def buffers_in(program: ProgramFacts) -> Buffers:
    assert program.buffers is not None
    return program.buffers


def test_arguments_add_up_to_xlas_size(program):
    arguments = buffers_in(program).arguments
    weights = 4 * (32 * 64 + 64 + 64 * 8 + 8)
    assert arguments["weights"] == weights
    assert arguments["optimizer state"] == 2 * weights + 8, "two moments, the iteration and the learning rate"
    assert arguments["feeds"] >= 4 * 64 * (32 + 8), "the arrays stay on the device"
    assert sum(arguments.values()) == program.memory.arguments


def test_temporary_memory_is_within_xlas_size_and_nearly_fills_it(program):
    found = buffers_in(program)
    assert program.memory.temporary is not None
    assert 0.8 * program.memory.temporary < found.peak.whole <= program.memory.temporary
    assert all(moment.whole <= program.memory.temporary for moment in found.moments)
    after = [moment.whole for moment in found.moments[found.moments.index(found.peak) : -1]]
    assert min(after) < found.peak.whole, "memory is given back before the end"


def test_the_parts_of_the_memory_add_up(program):
    memory = program.memory
    needed = (memory.arguments or 0) + (memory.results or 0) - (memory.reused or 0) + (memory.temporary or 0)
    assert sum(size for _, size in memory_rows(program)) == needed + (memory.program or 0)


def test_the_largest_buffers_know_their_layers(program):
    largest = buffers_in(program).largest
    assert len(largest) == 10
    assert [buffer.bytes for buffer in largest] == sorted((buffer.bytes for buffer in largest), reverse=True)
    assert len({(buffer.name, buffer.bytes) for buffer in largest}) == 10
    layers = {buffer.name: buffer.layer for buffer in largest}
    assert layers["state.trainable[0]"] == "wide"
    kinds = {(buffer.kind, buffer.layer) for buffer in largest}
    assert ("activations", "wide") in kinds or ("gradients", "wide") in kinds


@KERAS_WARNINGS
@pytest.mark.slow
def test_stages_fill_the_same_facts(tmp_path):
    [program] = trained(tmp_path, stages=2)
    found = buffers_in(program)
    assert sum(found.arguments.values()) == program.memory.arguments
    assert program.memory.temporary is not None
    assert 0 < found.peak.whole <= program.memory.temporary
    assert ("activations in flight", "activations") in {(buffer.layer, buffer.kind) for buffer in found.largest}
    assert program.counted is not None
    assert sum(cost.operations for cost in program.counted.costs) == pytest.approx(2 * program.counted.operations)
    by_layer = {(cost.layer, cost.part): cost.operations for cost in program.counted.costs}
    assert sum(count for (_, part), count in by_layer.items() if part == "update") > 0
    assert by_layer["wide", "forward"] >= 2 * 16 * 32 * 64
    assert by_layer["end", "backward"] >= 2 * 2 * 16 * 64 * 8


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("jit(run)/while/body/jvp(net)/dense/add", "net/dense"),
        ("jit(run)/while/body/transpose(jvp(net))/dense/dot_general", "net/dense"),
        ("jit(run)/jvp(f(x))/jit(relu)/max", "f(x)"),
        ("jit(run)/shard_map/while/body/jvp()/add", ""),
        ("reduce_sum", ""),
    ],
)
def test_layers_in_the_names_of_compiled_programs(name, layer):
    assert layer_in_program(name) == layer


def test_a_long_text_loses_its_middle():
    text = "a" * LONGEST_TEXT + "b" * 1000
    short = shortened(text)
    assert "1,000 characters are left out" in short
    assert short.startswith("aaa")
    assert short.endswith("bbb")
    assert shortened("x" * LONGEST_TEXT) == "x" * LONGEST_TEXT
