"""The options of IPUConfig as a tree of attributes, each checked when it is set."""

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NoReturn, Self, TypeVar

from openipu import _validate as validate
from openipu._validate import logger

from .option import Option, Type
from .option_table import CATEGORIES, OPTIONS

Tree = TypeVar("Tree", bound="OptionTree")


class AttributeMetadata:
    """What is known about an option: `name`, `type`, `default`, `deprecated`, `deprecated_msg` and `__doc__`.

    >>> about = ipu.config.IPUConfig().get_attribute_metadata("allow_recompute")
    >>> about.type, about.default
    (<class 'bool'>, False)
    """

    def __init__(self, option: Option) -> None:
        self._option = option
        self.name: str = option.name
        self.type: Type = option.type
        self.default: object = copy.deepcopy(option.default)
        self.deprecated: bool = option.deprecated is not None
        self.deprecated_msg: str | None = option.deprecated
        self.__doc__ = option.doc

    def check_type(self, value: object) -> None:
        """Raise TypeError unless the option could be set to `value`."""
        self._option.check_type(value)

    def warn_if_deprecated(self) -> None:
        """Log a warning if the option is deprecated."""
        if self.deprecated:
            logger.warning("%s has been deprecated: %s.", self.name, self.deprecated_msg)


class Category:
    """A branch of the option tree. It reads and writes the values of the IPUConfig it belongs to."""

    __slots__ = ("_prefix", "_values")
    _values: dict[str, Any]
    _prefix: str

    def __init__(self, values: dict[str, Any], prefix: str) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_prefix", prefix)

    def __getattr__(self, name: str) -> Any:
        # No option starts with an underscore, but copy, pickle and notebooks look up such names and expect an
        # AttributeError.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        full = self._prefix + name
        if full in self._values:
            return self._values[full]
        if full in CATEGORIES:
            return Category(self._values, f"{full}.")
        raise ValueError(_unknown(full))

    def __setattr__(self, name: str, value: object) -> None:
        full = self._prefix + name
        if full in CATEGORIES:
            raise ValueError(
                f"{full} is a category of options and cannot be assigned to. Set an option inside it, for example "
                f"{next(option for option in OPTIONS if option.startswith(f'{full}.'))}."
            )
        if full not in OPTIONS:
            raise ValueError(_unknown(full))
        metadata = AttributeMetadata(OPTIONS[full])
        metadata.check_type(value)
        metadata.warn_if_deprecated()
        self._values[full] = value

    def __delattr__(self, name: str) -> NoReturn:
        raise ValueError(f"The option {self._prefix}{name} cannot be deleted. Set it to its default instead.")

    def __dir__(self) -> list[str]:
        start = len(self._prefix)
        return [*super().__dir__(), *{name[start:].split(".")[0] for name in self._names()}]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Category) and self._encoded() == other._encoded()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}\n{self}>"

    def __str__(self) -> str:
        return "\n".join(f"{name} = {self._values[name]!r}" for name in self._names())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Category":
        return Category(copy.deepcopy(self._values, memo), self._prefix)

    def __reduce__(self) -> tuple[Any, ...]:
        return Category, (self._values, self._prefix)

    def get_attribute_metadata(self, attr: str) -> AttributeMetadata:
        """What is known about an option, by its full name or its name inside this category.

        >>> ipu.config.IPUConfig().get_attribute_metadata("optimizations.math.fast").default
        False
        """
        for name in (self._prefix + attr, attr):
            if name in OPTIONS:
                return AttributeMetadata(OPTIONS[name])
        raise ValueError(f"Could not get attribute metadata for {attr!r}: {_unknown(self._prefix + attr)}")

    def _names(self) -> Iterator[str]:
        return (name for name in self._values if name.startswith(self._prefix))

    def _encoded(self) -> dict[str, Any]:
        return {name: _encode(self._values[name]) for name in self._names()}


class OptionTree(Category):
    """All options with their values. `openipu.config.IPUConfig` is this tree plus the method that applies it."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({name: copy.deepcopy(option.default) for name, option in OPTIONS.items()}, "")

    def to_dict(self) -> dict[str, Any]:
        """All options by full name, in types that JSON has: enums as ints, tuples as lists."""
        return self._encoded()

    def from_dict(self, dct: Mapping[str, Any]) -> None:
        """Set the options from the result of `to_dict`. Missing options keep their values, with a warning."""
        given = validate.mapping("dct", dct)
        decoded = {name: _decode(name, value) for name, value in given.items()}
        missing = [name for name in OPTIONS if name not in decoded]
        self._values.update(decoded)
        if missing:
            logger.warning(
                "These options are missing in the given configuration and keep their values: %s.", ", ".join(missing)
            )

    def to_json(self) -> str:
        """All options as a JSON object."""
        return json.dumps(self.to_dict())

    def from_json(self, json_cfg: str) -> None:
        """Set the options from the result of `to_json`."""
        validate.instance("json_cfg", json_cfg, str, bytes)
        try:
            loaded = json.loads(json_cfg)
        except ValueError:
            loaded = None
        if not isinstance(loaded, dict):
            raise ValueError(
                f"A configuration must be a JSON object, but this is {json_cfg[:40]!r}. Give the result of to_json()."
            )
        self.from_dict(loaded)

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # so that changing a list or dict in the copy does not change this one

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return _restore(type(self), copy.deepcopy(self._values, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self._values)


def _restore(cls: type[Tree], values: dict[str, Any]) -> Tree:
    config = cls()
    config._values.update(values)
    return config


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_encode(part) for part in value]
    return dict(value) if isinstance(value, dict) else value


def _decode(name: str, value: Any) -> Any:
    if name not in OPTIONS:
        raise ValueError(_unknown(name))
    option = OPTIONS[name]
    if isinstance(option.type, type) and issubclass(option.type, Enum) and type(value) is int:
        value = option.type(value)
    option.check_type(value)
    return copy.deepcopy(value)


def _unknown(name: str) -> str:
    """The error message for an unknown option, with the one that was probably meant."""
    leaves = {option.rsplit(".", 1)[-1]: option for option in OPTIONS}
    leaf = name.rsplit(".", 1)[-1]
    near = [leaves[leaf]] if leaf in leaves else []  # the right name in the wrong place
    near += difflib.get_close_matches(name, [*OPTIONS, *CATEGORIES], n=1, cutoff=0.75)
    near += [leaves[close] for close in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    hint = f"Did you mean {near[0]!r}?" if near else "print(IPUConfig()) lists all options."
    return f"{name!r} is not an option of IPUConfig. {hint}"
