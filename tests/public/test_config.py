"""Configuring: the rules of IPUConfig, what settings mean, the environment, and what is said when it is wrong."""

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

from openipu import config as ipu_config
from openipu.config import (
    DeviceConnectionType,
    IPUConfig,
    configure_ipu_system,
    get_ipu_config,
    reset_ipu_configuration,
)
from openipu.settings.environment import FLAGS
from openipu.settings.frozen import freeze

import pytest

from configuration import configured, unconfigured  # noqa: F401 - a fixture of this module

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
        ({"io_tiles__available_memory_proportion": -0.5}, "proportion is -0.5"),
        ({"io_tiles__available_memory_proportion": math.nextafter(1, 2)}, "proportion is 1.0000000000000002"),
        ({"io_tiles__available_memory_proportion": 1.5}, "proportion is 1.5"),
        ({"io_tiles__available_memory_proportion": math.nan}, "proportion is nan"),
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


@pytest.mark.parametrize("proportion", [1.0, math.nextafter(0, 1)])
def test_all_of_the_memory_or_the_least_part_of_it_may_be_available(proportion: float) -> None:
    configured(io_tiles__available_memory_proportion=proportion).configure_ipu_system()
    assert [config.io_tiles.available_memory_proportion for config in get_ipu_config()] == [proportion]


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
        "POPLAR_ENGINE_OPTIONS",
        json.dumps({"xla_cpu_enable_fast_math": "false", "target.hostSyncTimeout": "64"}),
    )
    config = configured(
        compilation_poplar_options={"xla_cpu_enable_fast_math": "true", "xla_embed_ir_in_executable": "1"}
    )
    assert dict(freeze(config).compiler_options) == {
        "xla_cpu_enable_fast_math": "False",
        "xla_embed_ir_in_executable": "1",
    }
    IPUConfig().configure_ipu_system()
    assert "target.hostSyncTimeout (not an XLA option)" in caplog.text
