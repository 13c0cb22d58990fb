"""Configurations by the names of their options, and tests that begin and end without one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openipu.config import IPUConfig, reset_ipu_configuration

import pytest


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No configuration before and after, and a clean environment, for modules that import this."""
    for variable in ("TF_POPLAR_FLAGS", "POPLAR_ENGINE_OPTIONS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OPENIPU_CACHE", str(tmp_path / "cache"))
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
