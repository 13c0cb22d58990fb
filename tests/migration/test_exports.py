"""The names that are read from the source of OpenIPU and Keras are those that importing them gives."""

from __future__ import annotations

import importlib

import openipu
from openipu.migration import exports
from openipu.migration.names import moved, new_name

import pytest


@pytest.mark.parametrize("name", [name for name in openipu.__all__ if name not in openipu._FUNCTIONS])
def test_names_of_openipu(name):
    module = getattr(openipu, name)
    named = exports.public_names(f"openipu.{name}")
    assert named, f"openipu.{name} has no public names"
    assert named == set(getattr(module, "__all__", named))
    assert all(hasattr(module, one) for one in named)
    assert all(exports.exists(f"openipu.{name}.{one}") for one in named)


@pytest.mark.parametrize(
    "name", ["keras", "keras.layers", "keras.ops", "keras.optimizers", "keras.losses", "keras.utils"]
)
def test_names_of_keras(name):
    module = importlib.import_module(name)
    assert exports.public_names(name) == {one for one in dir(module) if not one.startswith("_")} - {"src"}


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "openipu.nonsense",
        "openipu.config.nonsense",
        "openipu._validate",
        "keras.layers.nonsense.deep",
        "os.path",
    ],
)
def test_what_does_not_exist(name):
    assert not exports.exists(name)


def test_members_of_classes_are_not_looked_at():
    assert exports.exists("openipu.config.DeviceConnectionType.ALWAYS")


def test_a_replacement_for_a_name_exists():
    """Whatever the tables name is really there."""
    from openipu.migration import ops

    every = [*ops.TENSORFLOW.values(), *ops._KERAS_BACKEND.values()]
    assert [op.new for op in every if not exports.exists(f"keras.ops.{op.new}")] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tensorflow.python.ipu", "openipu"),
        ("tensorflow.python.ipu.keras.PipelineStage", "openipu.keras.PipelineStage"),
        ("tensorflow.compat.v2.keras.Model", "keras.Model"),
        ("tensorflow.ipus", "tensorflow.ipus"),
        ("keras_hub.models", "keras_hub.models"),
        ("popdistance", "popdistance"),
    ],
)
def test_where_names_are_now(old, new):
    assert moved(old) == new


def test_names_of_others_are_none_of_ours():
    assert new_name("tensorflow.data.Dataset") is None
    assert new_name("numpy.array") is None
