"""A second optimizer with the settings of a first one, for a part of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openipu.optimizers.base import chain

from .model import decays


def make_twin(optimizer: Any, problem: str, otherwise: str = "") -> Any:
    """An optimizer made from another one's configuration; it has no variables yet.

    Where that fails, the error begins with `problem` and its remedy ends with `otherwise`.
    """
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"{problem}: a second one cannot be made from its configuration ({error}). Give it, or its learning-rate "
            f"schedule, a complete `get_config`{otherwise}."
        ) from error


def build_twin(twin: Any, optimizer: Any, stand_ins: Sequence[Any], weights: Sequence[Any]) -> None:
    """Make the twin's variables for `stand_ins`, which decay where the optimizer's `weights` do.

    Users exclude some weights from decay, and no configuration tells.
    """
    inner = _innermost(optimizer)
    steady = [stand_in for stand_in, w in zip(stand_ins, weights, strict=True) if not decays(inner, w)]
    _innermost(twin).exclude_from_weight_decay(steady)
    twin.build(list(stand_ins))


def _innermost(optimizer: Any) -> Any:
    return list(chain(optimizer))[-1]
