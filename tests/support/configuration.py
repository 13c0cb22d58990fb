"""Configurations by the names of their options."""

from typing import Any

from openipu.config import (
    IPUConfig,
)


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
