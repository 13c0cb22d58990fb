"""The checks of what users give: what each takes, what it refuses, and the one message it has."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from openipu import _validate as validate

import jax.numpy as jnp
import numpy as np
import pytest

WHOLE = [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)]
BOOLS = [True, np.True_, np.array(True), jnp.array(True)]


class Colour(Enum):
    RED = 1
    DARK_BLUE = 2


def refused(message: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=f"^{re.escape(message)}$")


# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_a_count_is_any_whole_number(value: Any) -> None:
    found = validate.count("epochs", value)
    assert (type(found), found) == (int, 3)


@pytest.mark.parametrize("value", [0, -1, 3.0, np.float32(3), "3", None, [3], np.array([3, 4]), *BOOLS], ids=repr)
def test_what_is_no_count(value: Any) -> None:
    with refused(f"`epochs` is {value!r}. Give a whole number of 1 or more."):
        validate.count("epochs", value)


def test_bounds_of_counts() -> None:
    assert validate.count("epochs", 0, least=0) == 0
    assert validate.count("seed", -5, least=None) == -5
    assert validate.count("depth", 255, most=255) == 255
    assert validate.count("depth", None, optional=True) is None
    with refused("`epochs` is -1. Give a whole number of 0 or more."):
        validate.count("epochs", -1, least=0)
    with refused("`seed` is 1.5. Give a whole number."):
        validate.count("seed", 1.5, least=None)
    with refused("`depth` is 256. Give a whole number from 1 to 255, or None."):
        validate.count("depth", 256, most=255, optional=True)


def test_long_values_are_shortened() -> None:
    with pytest.raises(ValueError, match=r"^`epochs` is array\(\[\[0., 0., .*\.\.\.\. Give a whole number") as caught:
        validate.count("epochs", np.zeros((30, 30)))
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


# --- flags and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*BOOLS, False, np.False_], ids=repr)
def test_a_flag_is_true_or_false(value: Any) -> None:
    assert validate.flag("shuffle", value) is bool(value)


@pytest.mark.parametrize("value", [0, 1, "yes", "", None, [], np.int64(1), np.array([True])], ids=repr)
def test_what_is_no_flag(value: Any) -> None:
    with refused(f"`shuffle` is {value!r}. Give True or False."):
        validate.flag("shuffle", value)


def test_a_flag_may_be_optional() -> None:
    assert validate.flag("shuffle", None, optional=True) is None
    with refused("`shuffle` is 1. Give True or False, or None."):
        validate.flag("shuffle", 1, optional=True)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5)], ids=repr)
def test_a_number_is_a_float(value: Any) -> None:
    found = validate.number("share", value, above=0, most=1)
    assert (type(found), found) == (float, 0.5)
    assert type(validate.number("seconds", np.int64(3), above=0)) is float


@pytest.mark.parametrize("value", [0, 1.01, -1, float("nan"), "0.5", None, True], ids=repr)
def test_what_is_no_share(value: Any) -> None:
    with refused(f"`share` is {value!r}. Give a number above 0 and at most 1."):
        validate.number("share", value, above=0, most=1)


def test_bounds_of_numbers() -> None:
    assert validate.number("split", 0, least=0, below=1) == 0.0
    assert validate.number("seconds", None, optional=True, above=0) is None
    with refused("`split` is 1. Give a number of 0 or more and below 1."):
        validate.number("split", 1, least=0, below=1)
    with refused("`seconds` is 0. Give a number above 0, or None."):
        validate.number("seconds", 0, optional=True, above=0)


# --- choices ---------------------------------------------------------------------------------------------------------


def test_a_choice_is_one_of_several() -> None:
    assert validate.choice("mode", "eval", ("train", "eval")) == "eval"
    with refused("`mode` is 'evall'. Give one of 'train', 'eval'."):
        validate.choice("mode", "evall", ("train", "eval"))


@pytest.mark.parametrize("value", [Colour.DARK_BLUE, "DARK_BLUE", "dark_blue", "Dark_Blue"])
def test_a_member_goes_by_its_name_in_any_case(value: Any) -> None:
    assert validate.member("colour", value, Colour) is Colour.DARK_BLUE


@pytest.mark.parametrize("value", ["green", "", None, 1], ids=repr)
def test_what_is_no_member(value: Any) -> None:
    with refused(f"`colour` is {value!r}. Give one of RED, DARK_BLUE."):
        validate.member("colour", value, Colour)


def test_members_only() -> None:
    assert validate.member("colour", Colour.RED, Colour, by_name=False) is Colour.RED
    with refused("`colour` is 'RED'. Give one of Colour.RED, Colour.DARK_BLUE.", TypeError):
        validate.member("colour", "RED", Colour, by_name=False, error=TypeError)


# --- kinds of objects ------------------------------------------------------------------------------------------------


def test_a_path_is_a_string_or_a_path() -> None:
    assert validate.path("dir", "runs/1") == validate.path("dir", Path("runs", "1")) == Path("runs/1")
    assert validate.path("dir", None, optional=True) is None


@pytest.mark.parametrize(("value", "found"), [(3, "an int"), (None, "None"), ("", "empty"), (b"runs", "a bytes")])
def test_what_is_no_path(value: Any, found: str) -> None:
    with refused(f"`dir` is {found}. Give a path, as a string or a `Path`."):
        validate.path("dir", value)
    if value is not None:
        with refused(f"`dir` is {found}. Give a path, as a string or a `Path`, or None."):
            validate.path("dir", value, optional=True)


def test_a_function_can_be_called() -> None:
    assert validate.function("input_fn", len) is len
    assert validate.function("input_fn", None, optional=True) is None
    with refused("`input_fn` is an ndarray. Give a function.", TypeError):
        validate.function("input_fn", np.ones(3))
    with refused("`input_fn` is None. Give a function."):
        validate.function("input_fn", None, error=ValueError)


def test_an_instance_of_a_class() -> None:
    assert validate.instance("colour", Colour.RED, Colour) is Colour.RED
    assert validate.instance("colour", None, Colour, optional=True) is None
    with refused("`colour` is a str. Give a `Colour`, or None.", TypeError):
        validate.instance("colour", "red", Colour, optional=True)
    with refused("`tensors` is an int. Give a list or a dict."):
        validate.instance("tensors", 3, list, dict, error=ValueError)


def test_a_mapping_has_strings_as_keys() -> None:
    given = {"a": 1}
    found = validate.mapping("params", given)
    assert found == given
    assert found is not given, "it is a copy"
    assert validate.mapping("params", None, optional=True) == {}
    with refused("`params` is a list. Give a dict with strings as keys.", TypeError):
        validate.mapping("params", [1])
    with refused("`params` is an int. Give a dict with strings as keys, or None."):
        validate.mapping("params", 3, optional=True, error=ValueError)
    with refused("`params` has the key 1. Give a dict with strings as keys.", TypeError):
        validate.mapping("params", {"a": 1, 1: 2})


@pytest.mark.parametrize("value", [[1, 2], (1, 2)])
def test_a_sequence_becomes_a_tuple(value: Any) -> None:
    assert validate.sequence("hooks", value) == (1, 2)


@pytest.mark.parametrize(
    ("value", "found"), [(3, "an int"), ("ab", "a str"), (np.ones(2), "an ndarray"), (None, "None")]
)
def test_what_is_no_sequence(value: Any, found: str) -> None:
    with refused(f"`hooks` is {found}. Give a list or tuple, even for a single one.", TypeError):
        validate.sequence("hooks", value)
    assert validate.sequence("hooks", None, optional=True) == ()


# --- options without effect ------------------------------------------------------------------------------------------


def test_an_option_without_effect_is_named_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(validate, "_named", set())
    validate.no_effect({})
    validate.no_effect({"tiles": "there are none", "cycles": "nobody counts them"})
    validate.no_effect({"tiles": "there are none", "speed": "it is fast anyway"})
    validate.no_effect({"speed": "it is fast anyway"})
    assert [(r.name, r.levelno, r.message) for r in caplog.records] == [
        ("openipu", logging.WARNING, "No effect here: tiles (there are none); cycles (nobody counts them)."),
        ("openipu", logging.WARNING, "No effect here: speed (it is fast anyway)."),
    ]


def test_checks_load_nothing_heavy() -> None:
    code = "import openipu._validate, sys; assert not {'numpy', 'jax', 'keras'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
