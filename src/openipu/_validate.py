"""Checks of user input: one function and one wording for each kind of check.

A check takes the name of an option and the value given. It returns the value in the form that the code works with, or
raises an error that names the option, the value and the remedy:

>>> count("epochs", 0)
Traceback (most recent call last):
ValueError: `epochs` is 0. Give a whole number of 1 or more.
"""

from __future__ import annotations

import difflib
import logging
import math
import numbers
import operator
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

logger = logging.getLogger("openipu")

T = TypeVar("T")
Member = TypeVar("Member", bound=Enum)

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""How a URL begins, also as a `Path`, which makes one slash of two. The letter of a Windows drive stands alone."""
_named: set[str] = set()
_lock = threading.Lock()


# --- numbers and switches --------------------------------------------------------------------------------------------


@overload
def count(name: str, value: object, *, least: int | None = ..., most: int | None = ...) -> int: ...
@overload
def count(
    name: str, value: object, *, optional: Literal[True], least: int | None = ..., most: int | None = ...
) -> int | None: ...
def count(
    name: str, value: object, *, optional: bool = False, least: int | None = 1, most: int | None = None
) -> int | None:
    """`value` as an int. Any whole number will do, NumPy's included, but never True or False."""
    if optional and value is None:
        return None
    found = _whole(value)
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        bounds = f" from {least} to {most}" if most is not None else f" of {least} or more" if least is not None else ""
        raise ValueError(_message(name, _shown(value), f"a whole number{bounds}", optional))
    return found


@overload
def flag(name: str, value: object) -> bool: ...
@overload
def flag(name: str, value: object, *, optional: Literal[True]) -> bool | None: ...
def flag(name: str, value: object, *, optional: bool = False) -> bool | None:
    """`value` as a bool: True or False, NumPy's included, but nothing that is merely truthy."""
    if optional and value is None:
        return None
    if not _is_bool(value):
        raise ValueError(_message(name, _shown(value), "True or False", optional))
    return bool(value)


@overload
def number(
    name: str, value: object, *, above: float = ..., least: float = ..., below: float = ..., most: float = ...
) -> float: ...
@overload
def number(
    name: str,
    value: object,
    *,
    optional: Literal[True],
    above: float = ...,
    least: float = ...,
    below: float = ...,
    most: float = ...,
) -> float | None: ...
def number(
    name: str,
    value: object,
    *,
    optional: bool = False,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> float | None:
    """`value` as a float within bounds: `least` and `most` belong to the range, `above` and `below` do not."""
    if optional and value is None:
        return None
    found = float(value) if isinstance(value, numbers.Real) and not _is_bool(value) else float("nan")
    bounds = [
        (words.format(bound), inside(found, bound))
        for bound, words, inside in (
            (above, "above {}", operator.gt),
            (least, "of {} or more", operator.ge),
            (below, "below {}", operator.lt),
            (most, "at most {}", operator.le),
        )
        if bound is not None
    ]
    if math.isnan(found) or not all(inside for _, inside in bounds):
        wanted = " and ".join(words for words, _ in bounds)
        raise ValueError(_message(name, _shown(value), f"a number {wanted}", optional))
    return found


def _whole(value: Any) -> int | None:
    if _is_bool(value):
        return None
    try:
        return operator.index(value)
    except TypeError:  # not a number, or an array of several
        return None


def _is_bool(value: object) -> bool:
    # By name, because this module must not load NumPy.
    return isinstance(value, bool) or (str(getattr(value, "dtype", "")) == "bool" and not getattr(value, "shape", ()))


# --- choices ---------------------------------------------------------------------------------------------------------


def choice(name: str, value: T, choices: Iterable[Any]) -> T:
    """`value`, which is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(_message(name, _shown(value), f"one of {', '.join(map(repr, choices))}"))
    return value


def member(
    name: str, value: object, kind: type[Member], *, by_name: bool = True, error: type[Exception] = ValueError
) -> Member:
    """The member of an enum that was given: itself or, with `by_name`, its name in any case."""
    if isinstance(value, kind):
        return value
    if by_name and isinstance(value, str):
        for found in kind:
            if found.name.lower() == value.lower():
                return found
    names = (found.name if by_name else f"{kind.__name__}.{found.name}" for found in kind)
    raise error(_message(name, _shown(value), f"one of {', '.join(names)}"))


# --- kinds of objects ------------------------------------------------------------------------------------------------


@overload
def path(name: str, value: object) -> Path: ...
@overload
def path(name: str, value: object, *, optional: Literal[True]) -> Path | None: ...
def path(name: str, value: object, *, optional: bool = False) -> Path | None:
    """`value` as a `Path`. A URL is refused: it would become a local folder of a strange name."""
    if optional and value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        found = "empty" if value == "" else a(value)
        raise ValueError(_message(name, found, "a path, as a string or a `Path`", optional))
    if _URL.match(os.fspath(value)):
        raise ValueError(_message(name, f"{value!r}, a URL", "the path of something on this machine", optional))
    return Path(value)


def function(name: str, value: T, *, optional: bool = False, error: type[Exception] = TypeError) -> T:
    """`value`, which can be called."""
    if not callable(value) and not (optional and value is None):
        raise error(_message(name, a(value), "a function", optional))
    return value


def instance(name: str, value: T, *kinds: type, optional: bool = False, error: type[Exception] = TypeError) -> T:
    """`value`, which is an instance of one of the classes."""
    if not isinstance(value, kinds) and not (optional and value is None):
        wanted = " or ".join(_class(kind) for kind in kinds)
        raise error(_message(name, a(value), wanted, optional))
    return value


def mapping(name: str, value: object, *, optional: bool = False, error: type[Exception] = TypeError) -> dict[str, Any]:
    """`value` as a new dict, whose keys are strings; empty for None if that is allowed."""
    if optional and value is None:
        return {}
    if not isinstance(value, Mapping):
        raise error(_message(name, a(value), "a dict with strings as keys", optional))
    odd = next((key for key in value if not isinstance(key, str)), None)
    if odd is not None:
        raise error(f"`{name}` has the key {odd!r}. Give a dict with strings as keys.")
    return dict(value)


def sequence(name: str, value: object, *, optional: bool = False) -> tuple[Any, ...]:
    """`value`, a list or tuple, as a tuple; empty for None if that is allowed."""
    if optional and value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(_message(name, a(value), "a list or tuple, even for a single one"))
    return tuple(value)


# --- options without effect ------------------------------------------------------------------------------------------


def no_effect(why: Mapping[str, str]) -> None:
    """Say in one warning which of the options a user has set have no effect here, and why; each once per process."""
    with _lock:
        new = {name: reason for name, reason in why.items() if name not in _named}
        _named.update(new)
    if new:
        logger.warning("No effect here: %s.", "; ".join(f"{name} ({reason})" for name, reason in new.items()))


def notice(text: str) -> None:
    """Log a warning, once per process for each text."""
    with _lock:
        new = text not in _named
        _named.add(text)
    if new:
        logger.warning("%s", text)


# --- wording ---------------------------------------------------------------------------------------------------------


def a(value: object) -> str:
    """The type of `value` for a sentence: "an int", "a dict"; None is just "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{_article(name)} {name}"


def options(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise if `given` has the name of an option that is not among the known ones, and say what was probably meant."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"Did you mean `{near[0]}`?" if near else f"The options are {', '.join(names)}."
            raise ValueError(f"There is no option `{name}`. {hint}")


def counted(number: int, noun: str) -> str:
    """A number and its noun for a sentence: "1 replica", "2 replicas"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _class(kind: type) -> str:
    name = kind.__name__ if kind.__module__ == "builtins" else f"`{kind.__name__}`"
    return f"{_article(kind.__name__)} {name}"


def _article(noun: str) -> str:
    return "an" if noun.lower().startswith(("a", "e", "i", "o", "nd")) else "a"  # an ndarray, a uint8


def _shown(value: object) -> str:
    """The value as Python writes it, on one line and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def _message(name: str, found: str, wanted: str, optional: bool = False) -> str:
    return f"`{name}` is {found}. Give {wanted}{', or None' if optional else ''}."
