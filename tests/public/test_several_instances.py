"""Several instances of a script that train one model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu import popdist

import jax
import keras
import numpy as np
import pytest

import instance_callbacks
import instance_collectives
import instance_estimators
import instance_programs
import instance_sources
import instances

CASES = ("plain", "accumulated", "sharded", "pipeline")


def launch(folder: Path, instances_: int, devices: int, shard: str, *cases: str, script: Any = instances) -> str:
    """Run the script on `instances_` instances, and return what it prints."""
    arguments = [script.__file__, str(folder), str(devices), shard, *cases]
    command = [sys.executable, "-m", "openipu", "launch", "--num-instances", str(instances_), "--num-replicas",
               str(instances_ * devices)]  # fmt: skip
    if instances_ == 1:
        command = [sys.executable]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def results(folder: Path, case: str, shard: str, instance: int = 0) -> dict[str, Any]:
    with np.load(folder / f"{case}-{shard}-{instance}.npz") as found:
        return dict(found)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("count", "devices", "cases"),
    [
        (2, 2, ("plain",)),
        pytest.param(2, 2, CASES[1:], marks=pytest.mark.slow),
        pytest.param(4, 1, CASES, marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(count: int, devices: int, cases: tuple[str, ...], tmp_path: Path) -> None:
    """With one device for each instance, the stages of a pipeline are in different instances."""
    shown = launch(tmp_path, count, devices, "auto", *cases)
    assert {path.name for path in tmp_path.glob("*.csv")} == {f"{case}-0.csv" for case in cases}
    assert sum("Epoch 1/3" in line for line in shown.splitlines()) == len(cases), "one instance shows the progress"
    cached = [int(line.split()[-1]) for line in shown.splitlines() if line.startswith("[1] programs from the cache:")]
    assert cached[0] > 0, "the others read what instance 0 has compiled"
    launch(tmp_path, 1, 4, "one", *cases)
    for case in cases:
        for instance in range(count):
            assert_same(results(tmp_path, case, "auto", instance), results(tmp_path, case, "one"))


@pytest.mark.slow
def test_instances_with_data_of_their_own(tmp_path: Path) -> None:
    """Each sample is used once, although one instance has more of them than the other."""
    launch(tmp_path, 2, 2, "off", "plain")
    first, second = (results(tmp_path, "plain", "off", i) for i in range(2))
    assert first["history count"].tolist()[:2] == [sum(instances.SIZES)] * 2
    assert first["evaluated count"] == sum(instances.SIZES)
    assert first["few"].tolist() == [2 * rows for rows in instances.FEW]
    assert (len(first["outputs"]), len(second["outputs"])) == instances.SIZES
    del first["outputs"], second["outputs"]
    assert_same(first, second)


@pytest.mark.slow
def test_models_and_data_of_many_kinds_equal_one_process(tmp_path: Path) -> None:
    cases = tuple(instance_sources.CASES)
    launch(tmp_path, 2, 1, "auto", *cases, script=instance_sources)
    launch(tmp_path, 1, 2, "one", *cases, script=instance_sources)
    for case in cases:
        expected = results(tmp_path, case, "one")
        for instance in range(2):
            assert_same(results(tmp_path, case, "auto", instance), expected)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["auto", "off"])
def test_callbacks_that_act_in_one_instance(shard: str, tmp_path: Path) -> None:
    """Those that read change nothing, also if the instances have a part of the state each. If one stops, all stop."""
    cases = ("plain", "sharded", "pipeline") if shard == "auto" else ("plain", "sharded")
    launch(tmp_path, 2, 1, shard, *cases, script=instance_callbacks)
    for case in cases:
        first, second = (results(tmp_path, case, shard, i) for i in range(2))
        own = shard == "off" and (first.pop("predicted"), second.pop("predicted"))
        assert not own or own[0] > own[1]
        assert_same(first, second)
        assert first["epochs"] == 1
        for name in first:
            if name.startswith("plain"):
                np.testing.assert_array_equal(first[name], first[name.replace("plain", "watched")], name)
            if name.startswith("logged"):
                np.testing.assert_array_equal(first[name], first[name.replace("logged", "plain")], name)


BY_REPLICA = {"x": 1, "total": 1, "latest": 0, "loss by step": 1}
"""Results that have an axis for replicas, and which axis that is. An instance has those of its own replicas."""


@pytest.mark.parametrize(
    ("count", "devices", "shard", "cases"),
    [
        pytest.param(2, 1, "off", ("repeated", "fetched", "watched"), marks=pytest.mark.slow),
        pytest.param(2, 2, "auto", tuple(instance_programs.CASES), marks=pytest.mark.slow),
        pytest.param(2, 2, "off", tuple(instance_programs.CASES), marks=pytest.mark.slow),
        pytest.param(4, 1, "auto", tuple(instance_programs.CASES), marks=pytest.mark.slow),
    ],
)
def test_programs_equal_those_of_one_process(
    count: int, devices: int, shard: str, cases: tuple[str, ...], tmp_path: Path
) -> None:
    """With one device for each instance, "staged" has its stages in different instances."""
    launch(tmp_path, count, devices, shard, *cases, script=instance_programs)
    launch(tmp_path, 1, count * devices, "one", *cases, script=instance_programs)
    for case in cases:
        for instance in range(count):
            actual, expected = results(tmp_path, case, shard, instance), results(tmp_path, case, "one")
            own = actual.pop("own")
            for name, axis in BY_REPLICA.items():
                if name in expected:
                    expected[name] = expected[name].take(own if len(own) > 1 else own[0], axis)
            del expected["own"]
            assert_same(actual, expected)


def test_too_little_data_in_one_instance_is_told_by_both(tmp_path: Path) -> None:
    shown = launch(tmp_path, 2, 1, "off", "short", script=instance_programs)
    assert shown.count("takes 3 elements of the infeed queue, but 2 are left in instance 1") == 2


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["auto", "off"])
@pytest.mark.parametrize("case", ["whole", "staged"])
def test_estimators_equal_those_of_one_process(shard: str, case: str, tmp_path: Path) -> None:
    """Instance 0 writes all files; the others have the same results without any."""
    launch(tmp_path, 2, 2, shard, case, script=instance_estimators)
    launch(tmp_path, 1, 4, "one", case, script=instance_estimators)
    expected = results(tmp_path, case, "one")
    assert_same(results(tmp_path, case, shard, 0), expected)
    metrics = {name: value for name, value in expected.items() if name.startswith("evaluated")}
    assert_same(results(tmp_path, case, shard, 1), metrics)
    assert [path.name for path in (tmp_path / f"{case}-{shard}").iterdir()] == ["0"]


def test_what_instances_tell_each_other(tmp_path: Path) -> None:
    launch(tmp_path, 2, 2, "off", script=instance_collectives)
    for instance in range(2):
        found = results(tmp_path, "collectives", "off", instance)
        np.testing.assert_array_equal(found["sum_a"], [3, 30])
        np.testing.assert_array_equal(found["mean_a"], [1.5, 15])
        np.testing.assert_array_equal(found["of_last_a"], [2, 20])
        np.testing.assert_array_equal(found["all_a"], [[1, 10], [2, 20]])
        numbers = [found[name].item() for name in ("sum_b", "mean_b", "of_last_b", "replicas_total", "replicas_local")]
        assert numbers == [1, 0.5, 1, 4, 2]


def test_without_a_launcher_there_is_one_instance() -> None:
    """Also if JAX was used before, after which instances could no longer meet."""
    jax.devices()
    popdist.init()
    with ipu.distributed.popdist_strategy.PopDistStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=2, verbose=0)
    assert popdist.getNumInstances() == 1
