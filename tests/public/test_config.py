"""IPUConfig: its tree, its types, its rules, its environment, and what it says when something is wrong."""

import copy
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from openipu import _validate
from openipu import config as ipu_config
from openipu.config import (
    OPTIONS,
    DeviceConnectionType,
    IPUConfig,
    SelectionOrder,
    StochasticRoundingBehaviour,
    configure_ipu_system,
    get_ipu_config,
    reset_ipu_configuration,
)
from openipu.settings.__main__ import table
from openipu.settings.environment import FLAGS
from openipu.settings.frozen import freeze
from openipu.settings.options import CATEGORIES

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No configuration before and after, a clean environment, and nothing named as without effect yet."""
    for variable in ("TF_POPLAR_FLAGS", "POPLAR_ENGINE_OPTIONS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OPENIPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_validate, "_named", set())
    reset_ipu_configuration()
    yield
    reset_ipu_configuration()


def assign(config: IPUConfig, name: str, value: object) -> None:
    """Set an option by its dotted name, through the tree."""
    *categories, leaf = name.split(".")
    node: Any = config
    for category in categories:
        node = getattr(node, category)
    setattr(node, leaf, value)


def read(config: IPUConfig, name: str) -> Any:
    node: Any = config
    for part in name.split("."):
        node = getattr(node, part)
    return node


def configured(**options: object) -> IPUConfig:
    config = IPUConfig()
    for name, value in options.items():
        assign(config, name.replace("__", "."), value)
    return config


# The tree


def test_every_option_has_its_default_and_says_what_it_does() -> None:
    config = IPUConfig()
    for name, option in OPTIONS.items():
        assert read(config, name) == option.default
        option.check_type(option.default)
        assert option.doc.endswith(".")
        # An option either acts, or acts on some platforms, or says why it does not.
        assert not (option.no_effect and option.xla)


def test_the_option_names_are_those_of_the_original() -> None:
    assert len(OPTIONS) == 57
    assert {name.rpartition(".")[0] for name in OPTIONS} - {""} <= set(CATEGORIES)
    assert list(OPTIONS) == sorted(OPTIONS)


def another(value: Any) -> Any:
    """A value of the same type that is not this one."""
    if isinstance(value, Enum):
        return next(choice for choice in type(value) if choice is not value)
    if isinstance(value, bool):
        return not value
    return {dict: {"key": "value"}, list: [1], str: "other"}.get(type(value)) or value + 1


@pytest.mark.parametrize("name", list(OPTIONS))
def test_set_and_read_back(name: str) -> None:
    config = IPUConfig()
    before, value = config.to_dict(), another(OPTIONS[name].default)
    assign(config, name, value)
    assert read(config, name) is value
    assert [other for other, now in config.to_dict().items() if now != before[other]] == [name]


def test_instances_share_nothing() -> None:
    first, second = IPUConfig(), IPUConfig()
    first.convolutions.poplar_options["partialsType"] = "half"
    first.auto_select_ipus.append(3)
    assert second.convolutions.poplar_options == {}
    assert second.auto_select_ipus == []


def test_a_category_is_a_view() -> None:
    config = IPUConfig()
    math = config.optimizations.math
    math.fast = True
    assert config.optimizations.math.fast is True
    assert "fast" in dir(math)
    assert "optimizations" in dir(config)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("auto_select_ipu", "auto_select_ipus"),
        ("optimizations.maths.fast", "optimizations.math"),
        ("floating_point_behavior", "floating_point_behaviour"),
        ("optimizations.fast", "optimizations.math.fast"),
        ("esr", "floating_point_behaviour.esr"),
        ("scheduling.algoritm", "scheduling.algorithm"),
    ],
)
def test_unknown_names_are_value_errors_with_a_suggestion(name: str, meant: str) -> None:
    for action in (lambda: read(IPUConfig(), name), lambda: assign(IPUConfig(), name, 1)):
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'") as caught:
            action()
        assert not isinstance(caught.value, AttributeError)


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match=r"'qqq' is not an option of IPUConfig\. print"):
        IPUConfig().qqq = 1


def test_protocols_of_python_hear_attribute_error() -> None:
    assert not hasattr(IPUConfig(), "__array__")
    assert not hasattr(IPUConfig(), "_repr_html_")
    with pytest.raises(ValueError, match="is not an option"):
        hasattr(IPUConfig(), "auto_select")
    with pytest.raises(ValueError, match="is not an option"):
        IPUConfig()._private = 1
    with pytest.raises(ValueError, match="cannot be deleted"):
        del IPUConfig().auto_select_ipus


@pytest.mark.parametrize("category", list(CATEGORIES))
def test_categories_cannot_be_assigned_to(category: str) -> None:
    with pytest.raises(Exception, match=f"{category} is a category"):
        assign(IPUConfig(), category, {})


# Types


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("auto_select_ipus", True, r"int\(True\)"),
        ("auto_select_ipus", np.int64(4), r"int\(4\)"),
        ("auto_select_ipus", 4.0, r"int\(4.0\)"),
        ("auto_select_ipus", "4", ""),
        ("auto_select_ipus", None, ""),
        ("auto_select_ipus", [2, True], ""),
        ("auto_select_ipus", (2, "4"), ""),
        ("auto_select_ipus", {2}, ""),
        ("auto_select_ipus", [[2]], ""),
        ("auto_select_ipus", np.array([2]), ""),
        ("select_ipus", [np.int32(0)], ""),
        ("select_ipus", [[[0]]], ""),
        ("allow_recompute", 1, r"bool\(1\)"),
        ("allow_recompute", np.bool_(True), r"bool\(True\)"),
        ("selection_order", "SNAKE", r"SelectionOrder.SNAKE"),
        ("selection_order", 2, r"SelectionOrder.SNAKE"),
        ("selection_order", DeviceConnectionType.ALWAYS, r"SelectionOrder.SNAKE"),
        ("floating_point_behaviour.esr", True, r"from_bool\(True\)"),
        ("io_tiles.available_memory_proportion", 1, r"float\(1\)"),
        ("serialization_output_folder", Path("x"), ""),
        ("convolutions.poplar_options", {"a": 1}, ""),
        ("convolutions.poplar_options", {1: "a"}, ""),
        ("convolutions.poplar_options", [("a", "b")], ""),
        ("ipu_model.version", 2, ""),
        ("scheduling.maximum_scheduler_lookahead_depth", 5.0, r"int\(5.0\)"),
    ],
)
def test_types_are_strict(name: str, value: object, remedy: str) -> None:
    config = IPUConfig()
    before = str(config)
    with pytest.raises(TypeError, match=f"{name} must be of type .*{remedy}"):
        assign(config, name, value)
    assert str(config) == before


def test_subclasses_are_other_types() -> None:
    class Number(int):
        pass

    with pytest.raises(TypeError, match="Number"):
        IPUConfig().auto_select_ipus = Number(2)


def test_stochastic_rounding_from_bool() -> None:
    assert StochasticRoundingBehaviour.from_bool(True) is StochasticRoundingBehaviour.ON
    assert StochasticRoundingBehaviour.from_bool(False) is StochasticRoundingBehaviour.OFF


def test_a_deprecated_option_is_set_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = configured(optimizations__enable_fast_math=True)
    assert config.optimizations.enable_fast_math is True
    assert "optimizations.enable_fast_math has been deprecated: it is now called optimizations.math.fast" in caplog.text
    with pytest.raises(TypeError, match="enable_fast_math must be of type bool"):
        config.optimizations.enable_fast_math = 1


# Metadata, copies and files


def test_metadata() -> None:
    metadata = IPUConfig().get_attribute_metadata("optimizations.math.fast")
    assert (metadata.name, metadata.type, metadata.default) == ("optimizations.math.fast", bool, False)
    assert metadata.deprecated is False
    assert metadata.deprecated_msg is None
    assert "reorder" in str(metadata.__doc__)
    metadata.check_type(True)
    with pytest.raises(TypeError, match=r"optimizations.math.fast must be of type bool"):
        metadata.check_type(1)
    metadata.warn_if_deprecated()


def test_metadata_by_relative_and_by_full_name() -> None:
    config = IPUConfig()
    for node, name in ((config.optimizations, "math.fast"), (config.optimizations.math, "optimizations.math.fast")):
        assert node.get_attribute_metadata(name).name == "optimizations.math.fast"
    with pytest.raises(ValueError, match="Could not get attribute metadata for 'fats'"):
        config.optimizations.math.get_attribute_metadata("fats")
    with pytest.raises(ValueError, match="Could not get attribute metadata for 'optimizations'"):
        config.get_attribute_metadata("optimizations")


def test_metadata_defaults_are_copies() -> None:
    IPUConfig().get_attribute_metadata("auto_select_ipus").default.append(1)  # type: ignore[attr-defined]
    assert IPUConfig().auto_select_ipus == []


def some_config() -> IPUConfig:
    return configured(
        auto_select_ipus=(2, 4),
        selection_order=SelectionOrder.HOOF,
        floating_point_behaviour__esr=StochasticRoundingBehaviour.ON,
        convolutions__poplar_options={"partialsType": "half"},
        io_tiles__available_memory_proportion=0.5,
    )


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_equal_and_independent(duplicate: Callable[[IPUConfig], IPUConfig]) -> None:
    config = some_config()
    other = duplicate(config)
    assert type(other) is IPUConfig
    assert other == config
    other.convolutions.poplar_options["x"] = "y"
    assert config.convolutions.poplar_options == {"partialsType": "half"}
    assert other != config
    assert other != "a config"
    assert copy.deepcopy(config.io_tiles) == config.io_tiles
    assert pickle.loads(pickle.dumps(config.io_tiles)) == config.io_tiles
    assert config.io_tiles != IPUConfig().io_tiles


def test_dict_and_json_round_trips() -> None:
    config = some_config()
    as_dict = config.to_dict()
    assert list(as_dict) == list(OPTIONS)
    assert as_dict["selection_order"] == SelectionOrder.HOOF.value
    for restore in (lambda c: c.from_dict(as_dict), lambda c: c.from_json(config.to_json())):
        other = IPUConfig()
        restore(other)
        assert other == config
        assert other.selection_order is SelectionOrder.HOOF
        assert freeze(other) == freeze(config)
    as_dict["convolutions.poplar_options"]["x"] = "y"
    assert config.convolutions.poplar_options == {"partialsType": "half"}


def test_options_missing_from_a_dict_keep_their_values(caplog: pytest.LogCaptureFixture) -> None:
    config = some_config()
    config.from_dict({"allow_recompute": True})
    assert config.allow_recompute is True
    assert config.auto_select_ipus == (2, 4)
    assert "keep their values: auto_select_ipus," in caplog.text


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"allow_recompute": True, "auto_select_ipu": 1}, ValueError, "Did you mean 'auto_select_ipus'"),
        ({"allow_recompute": True, "auto_select_ipus": "1"}, TypeError, "auto_select_ipus must be"),
        ({"allow_recompute": True, "selection_order": 9}, ValueError, "9 is not a valid SelectionOrder"),
        ({"allow_recompute": True, "optimizations": {}}, ValueError, "'optimizations' is not an option"),
    ],
)
def test_a_bad_dict_changes_nothing(given: dict[str, Any], error: type[Exception], match: str) -> None:
    config = IPUConfig()
    with pytest.raises(error, match=match):
        config.from_dict(given)
    assert config == IPUConfig()


@pytest.mark.parametrize("text", ["[]", "3", "not json"])
def test_json_of_another_kind(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON object|Expecting value"):
        IPUConfig().from_json(text)


def test_text_is_one_line_per_option() -> None:
    lines = str(some_config()).splitlines()
    assert len(lines) == len(OPTIONS)
    assert "auto_select_ipus = (2, 4)" in lines
    assert "selection_order = <SelectionOrder.HOOF: 3>" in lines
    assert str(IPUConfig().optimizations.math).splitlines() == [
        "optimizations.math.dot_strength = True",
        "optimizations.math.fast = False",
    ]


# Rules at configure time


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"auto_select_ipus": 0}, "asks for 0 devices"),
        ({"auto_select_ipus": -1}, "asks for -1 devices"),
        ({"auto_select_ipus": [2, 0]}, "asks for 0 devices"),
        ({"auto_select_ipus": 1, "select_ipus": 0}, "only one of them can be set"),
        ({"auto_select_ipus": [1], "select_ipus": [0]}, "only one of them can be set"),
        ({"select_ipus": [0, 1, 0]}, r"must be unique, but it is \[0, 1, 0\]"),
        ({"select_ipus": [(0, 1), 1]}, "must be unique"),
        ({"select_ipus": -1}, "names device -1"),
        ({"select_ipus": [0, ()]}, "one system has no devices"),
        ({"device_connection__type": DeviceConnectionType.PRE_COMPILE}, "PRE_COMPILE.*version is not set"),
        ({"device_connection__type": DeviceConnectionType.NEVER}, "NEVER.*version is not set"),
        ({"device_connection__version": "ipu3"}, "'ipu3'. Use one of ipu1, ipu2, ipu21"),
        ({"experimental__multi_replica_distribution__process_count": -1}, "is -1, but it must be at least 0"),
        ({"experimental__multi_replica_distribution__process_index": 1}, "is 1, but there are 0 processes"),
        ({"experimental__multi_replica_distribution__process_count": 2,
          "experimental__multi_replica_distribution__process_index": 2}, "is 2, but there are 2 processes"),
        ({"io_tiles__place_ops_on_io_tiles": True}, "num_io_tiles is 0"),
        ({"io_tiles__num_io_tiles": -32}, "is -32, but it must be at least 0"),
        ({"io_tiles__available_memory_proportion": 0.0}, "proportion is 0.0"),
        ({"io_tiles__available_memory_proportion": 1.5}, "proportion is 1.5"),
        ({"ipu_model__version": "gpu"}, "'gpu'. Use one of"),
        ({"ipu_model__tiles_per_ipu": -1}, "is -1, but it must be at least 0"),
        ({"norms__experimental__distributed_batch_norm_replica_group_size": 0}, "is 0, but it must be at least 1"),
        ({"norms__experimental__distributed_batch_norm_replica_group_size": 2, "io_tiles__num_io_tiles": 8},
         "cannot be combined"),
        ({"optimizations__maximum_cross_replica_sum_buffer_size": -1}, "is -1, but it must be at least 0"),
        ({"serialization_output_folder": __file__}, "which is a file"),
    ],
)  # fmt: skip
def test_rules(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        configured(**options).configure_ipu_system()
    with pytest.raises(RuntimeError, match="No IPU devices configured"):
        get_ipu_config()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"select_ipus": 0}, "virtual devices, which are all alike"),
        ({"experimental__multi_replica_distribution__process_count": 2}, "process_count is 2, but --use_ipu_model"),
        ({"ipu_model__version": ""}, "ipu_model.version is ''"),
    ],
)
def test_rules_of_the_simulator(options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze(configured(**options))
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_ipu_model")
    assert ipu_config.running_on_ipu_model()
    with pytest.raises(ValueError, match=match):
        freeze(configured(**options))


def test_precompiling_needs_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = configured(device_connection__type=DeviceConnectionType.PRE_COMPILE, device_connection__version="ipu2")
    freeze(config)
    monkeypatch.setenv("OPENIPU_CACHE", "off")
    with pytest.raises(ValueError, match="the executable cache is off"):
        freeze(config)
    monkeypatch.setenv("TF_POPLAR_FLAGS", f"--executable_cache_path={tmp_path}")
    settings = freeze(config)
    assert settings.connection is DeviceConnectionType.PRE_COMPILE
    assert settings.executable_cache is not None
    assert settings.executable_cache.folder == tmp_path


def test_lists_changed_in_place_are_checked_when_configured() -> None:
    config = configured(auto_select_ipus=[1])
    config.auto_select_ipus.append("2")
    with pytest.raises(TypeError, match="auto_select_ipus must be of type"):
        config.configure_ipu_system()


# Meaning


@pytest.mark.parametrize(
    ("options", "requests", "count"),
    [
        ({}, (1,), 1),
        ({"auto_select_ipus": 3}, (3,), 3),
        ({"auto_select_ipus": [2, 4]}, (2, 4), 6),
        ({"auto_select_ipus": (8,)}, (8,), 8),
        ({"select_ipus": 0}, ((0,),), 1),
        ({"select_ipus": [3, 1]}, ((3,), (1,)), 4),
        ({"select_ipus": [(2, 3), 0]}, ((2, 3), (0,)), 4),
    ],
)
def test_requests(options: dict[str, Any], requests: tuple[Any, ...], count: int) -> None:
    settings = freeze(configured(**options))
    assert settings.requests == requests
    assert settings.device_count == count


def test_settings_carry_what_the_engine_needs(tmp_path: Path) -> None:
    settings = freeze(
        configured(
            allow_recompute=True,
            serialization_output_folder=str(tmp_path),
            norms__experimental__distributed_batch_norm_replica_group_size=2,
            compilation_poplar_options={"xla_b": "true", "xla_a": "7", "target.deterministic": "true"},
        )
    )
    assert settings.allow_recompute
    assert settings.dump_folder == tmp_path
    assert settings.batch_norm_group == 2
    assert settings.compiler_options == (("xla_a", "7"), ("xla_b", "True"))
    assert hash(settings) == hash(copy.deepcopy(settings))


def test_options_without_effect_do_not_make_a_different_configuration() -> None:
    assert freeze(configured(matmuls__clear_pass_type=True)) == freeze(IPUConfig())
    assert freeze(configured(allow_recompute=True)) != freeze(IPUConfig())


def test_what_has_no_effect_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    config = configured(
        ipu_model__tiles_per_ipu=4,
        convolutions__poplar_options={"partialsType": "half"},
        compilation_poplar_options={"target.deterministic": "true"},
        matmuls__clear_pass_type=False,
    )
    for _ in range(2):
        config.configure_ipu_system()
        reset_ipu_configuration()
    (record,) = [record for record in caplog.records if "No effect" in record.message]
    assert (record.name, record.levelno) == ("openipu", logging.WARNING)
    for name in ("ipu_model.tiles_per_ipu (", "convolutions.poplar_options (", "target.deterministic ("):
        assert name in record.message
    assert "clear_pass_type" not in record.message
    config.matmuls.clear_pass_type = True
    config.configure_ipu_system()
    assert caplog.records[-1].message.startswith("No effect here: matmuls.clear_pass_type (")
    assert "tiles_per_ipu" not in caplog.records[-1].message


# Configure, reset, query


def test_configuring_does_not_change_the_configuration() -> None:
    config = configured(auto_select_ipus=1)
    config.configure_ipu_system()
    assert config.auto_select_ipus == 1
    config.allow_recompute = True
    (active,) = get_ipu_config()
    assert active.auto_select_ipus == 1
    assert active.allow_recompute is False
    active.allow_recompute = True
    assert get_ipu_config()[0].allow_recompute is False


def test_an_equal_configuration_is_silent_and_another_one_warns(caplog: pytest.LogCaptureFixture) -> None:
    configured(auto_select_ipus=1).configure_ipu_system()
    configured(auto_select_ipus=[1]).configure_ipu_system()
    assert caplog.records == []
    configured(allow_recompute=True).configure_ipu_system()
    assert "The configuration has changed" in caplog.text
    with pytest.raises(ValueError, match="Another configuration is active"):
        configure_ipu_system(IPUConfig(), reset_configuration=False)
    configure_ipu_system(configured(allow_recompute=True), "/device:CPU:0", reset_configuration=False)


def test_reset_and_query() -> None:
    reset_ipu_configuration()
    with pytest.raises(RuntimeError, match="No IPU devices configured"):
        get_ipu_config()
    configured(auto_select_ipus=[1, 1]).configure_ipu_system()
    assert [config.auto_select_ipus for config in get_ipu_config()] == [[1, 1], [1, 1]]
    reset_ipu_configuration()
    with pytest.raises(RuntimeError, match="No IPU devices configured"):
        get_ipu_config()


def test_bad_arguments() -> None:
    for thing in (None, {}, "config", IPUConfig, IPUConfig().optimizations):
        with pytest.raises(TypeError, match=r"`config` is .* Give an `IPUConfig`"):
            configure_ipu_system(thing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device is 0"):
        IPUConfig().configure_ipu_system(0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device is '/device:IPU:0'"):
        IPUConfig().configure_ipu_system("/device:IPU:0")
    with pytest.raises(ValueError, match="there are no sessions"):
        get_ipu_config("session")  # type: ignore[arg-type]


# Environment


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--use_ipu_modle", "'--use_ipu_modle' .* Did you mean '--use_ipu_model'"),
        ("use_ipu_model", "'use_ipu_model' .* Did you mean '--use_ipu_model'"),
        ("--zzz", "'--zzz' .* The flags are: executable_cache_path, "),
        ("--executable_cache_path", "does not name a folder"),
        ("--executable_cache_path=", "does not name a folder"),
        ("--use_ipu_model=perhaps", "neither true nor false"),
    ],
)
def test_bad_flags(flags: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_POPLAR_FLAGS", flags)
    with pytest.raises(ValueError, match=match):
        IPUConfig().configure_ipu_system()


@pytest.mark.parametrize("options", ["{", "[]", '"x"', '{"a": 1}', '{"a": {"b": "c"}}'])
def test_bad_engine_options(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", options)
    with pytest.raises(ValueError, match="POPLAR_ENGINE_OPTIONS"):
        IPUConfig().configure_ipu_system()


def test_flags_that_mean_something(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TF_POPLAR_FLAGS", f"--use_ipu_model  --use_on_demand --executable_cache_path={tmp_path}")
    settings = freeze(IPUConfig())
    assert settings.on_cpu
    assert settings.connection is DeviceConnectionType.ON_DEMAND
    assert settings.executable_cache is not None
    assert settings.executable_cache.folder == tmp_path
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_ipu_model=false")
    assert not ipu_config.running_on_ipu_model()


def test_flags_without_effect_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    vain = [flag for flag, why in FLAGS.items() if why is not None]
    assert len(vain) == 21
    monkeypatch.setenv("TF_POPLAR_FLAGS", " ".join(f"--{flag}=1" for flag in vain))
    monkeypatch.setenv("POPLAR_TARGET_OPTIONS", "{}")
    IPUConfig().configure_ipu_system()
    for flag in vain:
        assert f"--{flag} (" in caplog.text
    assert "POPLAR_TARGET_OPTIONS (" in caplog.text


def test_engine_options_win(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(
        "POPLAR_ENGINE_OPTIONS", json.dumps({"xla_cpu_enable_fast_math": "false", "autoReport.all": "true"})
    )
    config = configured(
        compilation_poplar_options={"xla_cpu_enable_fast_math": "true", "xla_embed_ir_in_executable": "1"}
    )
    assert dict(freeze(config).compiler_options) == {
        "xla_cpu_enable_fast_math": "False",
        "xla_embed_ir_in_executable": "1",
    }
    IPUConfig().configure_ipu_system()
    assert "autoReport.all (not an XLA option)" in caplog.text


# Documentation


def test_the_documentation_contains_the_table(repository: Path) -> None:
    assert table() in (repository / "docs" / "config.md").read_text(encoding="utf-8"), (
        "Put the output of `python -m openipu.settings` into docs/config.md."
    )
