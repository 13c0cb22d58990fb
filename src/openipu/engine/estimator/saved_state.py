"""State <-> checkpoints. A checkpoint stores variables by name, so it fits any number of replicas and any mode."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from openipu.engine.checkpoint import Checkpoints, InUseError, check_space, refuse_foreign, unusable
from openipu.engine.core.state import State
from openipu.engine.devices import group
from openipu.engine.devices.placement import Placement
from openipu.engine.types import Array

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .model_steps import ModelProgram
from .model_trace import DiscoveredModel, initial_values
from .variable_ledger import Made

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
Values = dict[str, Any]
"""The values of variables, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """The values of all variables by name, and how far training has come."""

    global_step: int = 0
    batches: int = 0
    """Batches of training data used so far, over all replicas."""
    variables: Values = field(default_factory=dict)
    """Weights and the states of seed generators, in the order in which they were made."""
    optimizer: Values = field(default_factory=dict)
    examples: int = 0
    """The number of examples in these batches."""
    batch_size: int = 0
    """The number of examples in a full batch at that time; 0 if unknown."""
    parts: tuple[int, ...] = ()
    """The batches that each instance has read of its own data, if they had any."""
    rates: dict[str, float] = field(default_factory=dict)
    """The learning rates that model_fn has given to optimizers, by name. Their values now are in `optimizer`."""

    @property
    def nbytes(self) -> int:
        """The size of all values."""
        return sum(value.nbytes for value in (*self.variables.values(), *self.optimizer.values()))

    def own(self, place: Placement) -> Saved:
        """The same with the position in the data of this process, if it has data of its own."""
        if not place.own_data:
            return self
        known = len(self.parts) == group.count()
        batches = self.parts[group.index()] if known else self.batches // group.count()
        return replace(self, batches=batches, examples=batches * self.batch_size)

    def _counts(self) -> dict[str, int]:
        names = ("global_step", "batches", "examples", "batch_size")
        return {name: getattr(self, name) for name in names}

    def tree(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        return {
            "position": {**self._counts(), "parts": ",".join(map(str, self.parts))},
            "rates": self.rates,
            "order": "\n".join(self.variables),
            "variables": self.variables,
            "optimizer": self.optimizer,
        }


def of_first(found: Saved | None) -> Saved | None:
    """What instance 0 has found, without its values: those go to all instances when they are sent to the devices."""
    here = None if found is None else [found._counts(), found.parts]
    counts = group.of_first("the newest checkpoint", here)
    return found if counts is None or found is not None else Saved(**counts[0], parts=tuple(counts[1]))


def load(checkpoints: Checkpoints, step: int | None = None) -> Saved:
    """The checkpoint of `step`, by default the newest one that is intact."""
    like = {"position": None, "order": "", "variables": None, "optimizer": None, "rates": None}
    at, tree = checkpoints.restore(like, step)
    values, names = tree["variables"], tree["order"].split("\n")
    position = {name: tree["position"].get(name, 0) for name in ("global_step", "batches", "examples", "batch_size")}
    missing = [name for name in names if name not in values] + [
        name for name in ("global_step", "batches") if name not in tree["position"]
    ]
    wrong = [name for name, value in position.items() if type(value) is not int]
    if missing or wrong:
        found = f"{missing[0]!r} is missing" if missing else f"{wrong[0]!r} is {position[wrong[0]]!r}"
        raise ValueError(
            f"The checkpoint of step {at} in {checkpoints.folder} has contents that estimators do not write: {found}. "
            "Use another `model_dir`, or move this checkpoint elsewhere."
        )
    parts = tuple(int(part) for part in str(tree["position"].get("parts", "")).split(",") if part.isdecimal())
    variables = {name: values[name] for name in names}
    return Saved(variables=variables, optimizer=tree["optimizer"], parts=parts, rates=tree["rates"], **position)


def load_from(name: str, path: str | Path) -> Saved:
    """The checkpoint that a user's path means. `name` is what the path is called in errors."""
    folder, step = locate(path)
    checkpoints = Checkpoints(folder)
    if checkpoints.latest() is None:
        given = Path(path)
        prefix = given.with_name(f"{given.name}.index").exists()  # as TensorFlow names its checkpoints
        refuse_foreign(name, given.parent if prefix else given)
    return load(checkpoints, step)


def locate(path: str | Path) -> tuple[Path, int | None]:
    """The folder of checkpoints and the step that a path means: a model_dir, its checkpoint folder or a checkpoint."""
    folder = Path(path)
    if folder.name.isdecimal() and folder.parent.is_dir():
        return folder.parent, int(folder.name)
    return (folder / FOLDER if (folder / FOLDER).is_dir() else folder), None


def fresh(model: DiscoveredModel) -> Saved:
    """The initial values, before the first step."""
    variables = _in_order(model, initial_values(model, "trainable") | initial_values(model, "non_trainable"))
    return Saved(0, 0, variables, initial_values(model, "optimizer"), rates=_rates(model))


def snapshot(program: ModelProgram, state: State, global_step: int, batches: int) -> Saved:
    """The state of a running program, by name."""
    model, whole = program.model, program.layout.gather(state._replace(metrics=[]))
    parts = {
        part: dict(zip([name for name, _ in model.in_part(part)], values, strict=True))
        for part, values in (
            ("trainable", whole.trainable),
            ("non_trainable", whole.non_trainable[model.counters :]),
            ("optimizer", whole.optimizer),
        )
    }
    variables = _in_order(model, parts["trainable"] | parts["non_trainable"])
    return Saved(global_step, batches, variables, parts["optimizer"], rates=_rates(model))


def restored(program: ModelProgram, saved: Saved, where: str) -> State:
    """The state of a program with saved values, on its devices. `where` names the source of the values in errors."""
    model = program.model
    _check(model, saved, where)
    slots = saved.optimizer | _new_rates(model, saved, where)
    optimizer = [_value(slots, name, made) for name, made in model.in_part("optimizer")]
    parts = {
        part: [_value(saved.variables, name, made) for name, made in model.in_part(part)]
        for part in ("trainable", "non_trainable")
    }
    steps = [jnp.asarray(saved.global_step, jnp.int32)] * model.counters
    state = State(parts["trainable"], [*steps, *parts["non_trainable"]], optimizer, program.metrics())
    return program.layout.spread(state)


def warm(model: DiscoveredModel, start: Saved, source: Saved, patterns: tuple[str, ...]) -> Saved:
    """`start` with weights from `source` whose names match a pattern. The optimizer keeps its initial state."""
    weights = {name: made for name, made in zip(model.names, model.made, strict=True) if made.kind == "weight"}
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in weights):
            raise ValueError(f"No weight of model_fn matches {pattern!r}. Its weights are called {', '.join(weights)}.")
    chosen = [name for name in weights if any(re.search(pattern, name) for pattern in patterns)]
    for name in chosen:
        found = source.variables.get(name)
        if found is None or np.shape(found) != weights[name].shape:
            there = "missing" if found is None else f"of shape {np.shape(found)}"
            raise ValueError(
                f"The weight {name!r} of shape {weights[name].shape} is {there} in the checkpoint to warm-start from. "
                "Choose other weights with `WarmStartSettings(vars_to_warm_start=...)`."
            )
    return Saved(
        variables=start.variables | {name: source.variables[name] for name in chosen}, optimizer=start.optimizer
    )


def _value(values: Values, name: str, made: Made) -> Array:
    """The saved value. A seed that was not saved, because only this mode has it, gets its initial value."""
    return jnp.asarray(values[name] if name in values else made.initial())


def _rates(model: DiscoveredModel) -> dict[str, float]:
    """The learning rates that model_fn gives to optimizers, by name. Schedules are not among them."""
    slots = model.in_part("optimizer")
    return {name: float(made.initial()) for name, made in slots if name.rpartition("/")[2] == "learning_rate"}


def _new_rates(model: DiscoveredModel, saved: Saved, where: str) -> dict[str, np.ndarray]:
    """The learning rates that model_fn has changed since `saved`. They replace the saved ones."""
    new = {name: rate for name, rate in _rates(model).items() if saved.rates.get(name, rate) != rate}
    for name, rate in new.items():
        log.info("model_fn sets the learning rate to %s; it was %s for %s.", rate, saved.rates[name], where)
    return {name: np.asarray(rate, np.asarray(saved.optimizer[name]).dtype) for name, rate in new.items()}


def _check(model: DiscoveredModel, saved: Saved, where: str) -> None:
    """Raise unless `saved` has the same weights in the same order and, in training, the same optimizer variables."""
    seeds = {name for name, made in zip(model.names, model.made, strict=True) if made.kind == "seed"}
    mine = {name: made for name, made in zip(model.names, model.made, strict=True) if made.kind == "weight"}
    theirs = [name for name, value in saved.variables.items() if name not in seeds and not _is_seed(name, value)]
    for number in range(max(len(mine), len(theirs))):
        name, made = list(mine.items())[number] if number < len(mine) else (None, None)
        there = theirs[number] if number < len(theirs) else None
        shape = np.shape(saved.variables[there]) if there is not None else None
        if made is None or name != there or made.shape != shape:
            here = "missing" if made is None else f"{name!r} {list(made.shape)}"
            found = "missing" if there is None or shape is None else f"{there!r} {list(shape)}"
            raise ValueError(
                f"model_fn makes different variables than {where} has: weight {number} is {found} there and {here} "
                f"for {model.mode!r}. Make the same layers in the same order, or use another `model_dir`."
            )
    slots = dict(model.in_part("optimizer"))
    for name in [*slots, *(saved.optimizer if slots else ())]:
        if name not in saved.optimizer or name not in slots or np.shape(saved.optimizer[name]) != slots[name].shape:
            raise ValueError(
                f"The optimizer of model_fn differs from that of {where}: the first difference is {name!r}. Use the "
                "same optimizer, another `model_dir`, or `warm_start_from` to take over only the weights."
            )


def _is_seed(name: str, value: ArrayLike) -> bool:
    return name.rpartition("/")[2].startswith("seed_generator_state") and np.shape(value) == (2,)


def _in_order(model: DiscoveredModel, values: Values) -> Values:
    return {name: values[name] for name in model.names if name in values}


def open_for_run(checkpoints: Checkpoints, model_dir: Path) -> Exception | None:
    """Take the folder of checkpoints for a run. Returns why it cannot, which matters only if something is trained."""
    try:
        checkpoints.open()
    except OSError as error:
        return unusable("`model_dir`", model_dir, error)
    except InUseError as error:
        return error
    return None


def check_room(checkpoints: Checkpoints, model_dir: Path, start: Saved) -> None:
    """Raise if the disk has no room for a checkpoint, before anything is trained."""
    try:
        check_space(checkpoints.folder, start.nbytes)
    except OSError as error:
        raise unusable("`model_dir`", model_dir, error) from None
