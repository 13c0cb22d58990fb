"""Names for the parts of a model's state, by which a checkpoint is compared with a model.

[Note: names without counters] Keras numbers what has no name of its own over the whole process: the layers of a second
model are `dense_2` and `dense_3`. Here they are numbered within the model, in an order that does not depend on
`trainable`. So a model that the same script builds again has the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

from openipu.engine.keras_compat.api import all_layers, prefix_of_names

import keras

from .model_state import carried_by
from .state import State
from .wrapped_optimizer import chain

Names = dict[str, list[str]]
"""For each part of a `State`: the names of its variables or, of the optimizers, their classes and what they keep."""

_WEIGHTS: Final = {"trainable": "trainable", "non_trainable": "not trainable"}


# --- names of what is here -------------------------------------------------------------------------------------------


def names_of(model: keras.Model, owners: State) -> Names:
    """The names of variables of a model. See [Note: names without counters]."""
    weights, metrics = _weight_names(model, owners), _metric_names(model)
    return {
        "trainable": [weights[id(v)] for v in owners.trainable],
        "non_trainable": [weights[id(v)] for v in owners.non_trainable],
        "optimizer": [_optimizer_name(o, owners) for o in _optimizers(model)],
        "metrics": [metrics.get(id(v), v.path) for v in owners.metrics],
    }


def _optimizer_name(optimizer: Any, owners: State) -> str:
    """The class of an optimizer, and what it keeps: `SGD (iteration, learning_rate, momentum)`."""
    known = [*owners.trainable, *owners.non_trainable]
    weights = sorted((v.path.replace("/", "_") for v in known), key=len, reverse=True)

    def kind(slot: str) -> str:
        of_weight = (slot.removeprefix(f"{weight}_") for weight in weights if slot.startswith(f"{weight}_"))
        return next(of_weight, re.sub(r"_\d+", "", slot))

    kinds = dict.fromkeys(kind(v.name) for v in optimizer.variables)
    return f"{type(list(chain(optimizer))[-1]).__name__} ({', '.join(kinds)})"


class _Numbering:
    """Gives each object its name, with a number if another object has that name already."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._used: set[str] = set()

    def name(self, thing: object, wanted: str) -> str:
        """The name of an object."""
        if id(thing) not in self._names:
            name, number = wanted, 0
            while name in self._used:
                number += 1
                name = f"{wanted}_{number}"
            self._used.add(name)
            self._names[id(thing)] = name
        return self._names[id(thing)]


def _weight_names(model: keras.Model, owners: State) -> dict[int, str]:
    """The names of all weights and seeds, by the `id` of the variable. A class of the user may add some of its own."""
    # A layer comes before the layers in it, so the innermost one is left.
    layers = {id(v): layer for layer in all_layers(model) for v in layer.variables}
    known = [*model.variables, *owners.trainable, *owners.non_trainable]
    owned = [(layers.get(id(v), model), v) for v in known]
    return _numbered([(layer, _plain(layer.name, layer), v) for layer, v in owned])


def _metric_names(model: keras.Model) -> dict[int, str]:
    """The names of all variables of a model's metrics, by their `id`."""
    outputs = getattr(model, "output_names", None) or ()  # named after layers, with the numbers of these
    losses = {f"{name}_loss": f"loss of output {i}" for i, name in enumerate(outputs)}
    return _numbered(
        [(m, losses.get(m.name, _plain(m.name, m)), v) for m in _metrics(model.metrics) for v in m.variables]
    )


def _numbered(owned: list[tuple[Any, str, Any]]) -> dict[int, str]:
    """The names of variables by their `id`, given their owners and the names of these."""
    owners, variables = _Numbering(), _Numbering()
    return {id(v): variables.name(v, f"{owners.name(owner, name)}/{_plain(v.name, v)}") for owner, name, v in owned}


def _metrics(metrics: list[Any]) -> Iterator[Any]:
    """The metrics, with those that were given to `compile` one by one."""
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        if isinstance(inner, list):
            yield from _metrics(inner)
        else:
            yield metric


def _plain(name: str, thing: object) -> str:
    """A name, without the number that Keras appends to names that it makes."""
    made = re.fullmatch(rf"((?:forward_|backward_)?{re.escape(prefix_of_names(type(thing)))})_\d+", name)
    return made[1] if made else name


def _optimizers(model: keras.Model) -> list[Any]:
    own = getattr(model, "optimizer", None)
    return [*([] if own is None else [own]), *carried_by(model).optimizers]


# --- what was saved, compared with what is here ----------------------------------------------------------------------


def check_names(saved: Names, here: Names, place: str) -> None:
    """Raise an error that names the first difference, if training cannot resume. `place` is where it was saved."""
    _check_same_weights(saved, here, place)
    _check_same_parts(saved, here, place)
    for part, what, remedy in (
        ("trainable", "trainable variable", "Build the model with its layers in the same order"),
        ("non_trainable", "other variable", "Build the model with its layers in the same order"),
        ("optimizer", "optimizer", "Compile the model with the same optimizer"),
        ("metrics", "metric variable", "Compile the model with the same metrics"),
    ):
        for i, (there, now) in enumerate(zip_longest(saved[part], here[part]), 1):
            # Older checkpoints have only the class of an optimizer.
            if there != now and not (there and now and now.startswith(f"{there} (")):
                raise ValueError(
                    f"{place} does not match: {what} {i} is {_quoted(there)} in the checkpoint and {_quoted(now)} "
                    f"in the model. {remedy}, or use another folder."
                )


def in_saved_order(saved: Names, here: Names, owners: State, place: str) -> State:
    """The variables of a model in the parts and the order of a checkpoint, where other layers may have been frozen."""
    _check_same_weights(saved, here, place)
    found = dict(zip(_weights(here), [*owners.trainable, *owners.non_trainable], strict=True))
    return owners._replace(**{part: [found[name] for name in saved[part]] for part in _WEIGHTS})


def _check_same_weights(saved: Names, here: Names, place: str) -> None:
    there, now = _weights(saved), _weights(here)
    common = set(there) & set(now)
    missing = next((name for name in [*now, *there] if name not in common), None)
    if missing is not None:
        only, other = ("the model", "the checkpoint") if missing in now else ("the checkpoint", "the model")
        raise ValueError(
            f"{place} does not match: only {only} has the variable `{missing}`, and {other} does not. Use a model with "
            "the same layers and names, or another folder."
        )


def _check_same_parts(saved: Names, here: Names, place: str) -> None:
    there, now = _part_of(saved), _part_of(here)
    for name, part in now.items():
        if there[name] != part:
            raise ValueError(
                f"{place} does not match: `{name}` is {_WEIGHTS[there[name]]} in the checkpoint and {_WEIGHTS[part]} "
                "in the model. Freeze the same layers, or use another folder."
            )


def _weights(names: Names) -> list[str]:
    return [name for part in _WEIGHTS for name in names[part]]


def _part_of(names: Names) -> dict[str, str]:
    return {name: part for part in _WEIGHTS for name in names[part]}


def _quoted(name: str | None) -> str:
    return "missing" if name is None else f"`{name}`"
