"""The options of IPUConfig as a tree: names, types, metadata, copies, files and documentation."""

import copy
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from openipu.config import (
    OPTIONS,
    DeviceConnectionType,
    IPUConfig,
    SelectionOrder,
    StochasticRoundingBehaviour,
)
from openipu.settings.__main__ import table
from openipu.settings.frozen import freeze
from openipu.settings.option_table import CATEGORIES

import numpy as np
import pytest

from configuration import assign, configured, read, unconfigured  # noqa: F401 - a fixture of this module

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
    with pytest.raises(ValueError, match="must be a JSON object, but this is"):
        IPUConfig().from_json(text)


@pytest.mark.parametrize("given", [None, 3, "allow_recompute", [("allow_recompute", True)], {1: True}])
def test_a_configuration_is_a_dict_with_names(given: object) -> None:
    config = IPUConfig()
    with pytest.raises(TypeError, match=r"`dct` .*Give a dict with strings as keys"):
        config.from_dict(given)  # type: ignore[arg-type]
    assert config == IPUConfig()


@pytest.mark.parametrize("given", [None, 3, {"allow_recompute": True}])
def test_json_is_text(given: object) -> None:
    with pytest.raises(TypeError, match=r"`json_cfg` is (None|an int|a dict)\. Give a str or a bytes"):
        IPUConfig().from_json(given)  # type: ignore[arg-type]


def test_text_is_one_line_per_option() -> None:
    lines = str(some_config()).splitlines()
    assert len(lines) == len(OPTIONS)
    assert "auto_select_ipus = (2, 4)" in lines
    assert "selection_order = <SelectionOrder.HOOF: 3>" in lines
    assert str(IPUConfig().optimizations.math).splitlines() == [
        "optimizations.math.dot_strength = True",
        "optimizations.math.fast = False",
    ]


# Documentation


def test_the_documentation_contains_the_table(repository: Path) -> None:
    assert table() in (repository / "docs" / "config.md").read_text(encoding="utf-8"), (
        "Put the output of `python -m openipu.settings` into docs/config.md."
    )
