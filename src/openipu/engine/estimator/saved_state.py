"""State <-> checkpoints. A checkpoint names every variable, so it fits any number of replicas and any mode."""

from __future__ import annotations

import errno
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openipu.engine.checkpoint import Checkpoints
from openipu.engine.core.state import State

import jax.numpy as jnp
import numpy as np

from .model_steps import ModelProgram
from .model_trace import DiscoveredModel, initial_values

FOLDER = "checkpoints"
Values = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """The values of all variables by name, and how far training is."""

    global_step: int = 0
    batches: int = 0
    """Batches of the training data used so far, over all replicas."""
    variables: Values = field(default_factory=dict)
    """Weights and the states of random seeds, in the order they were made."""
    optimizer: Values = field(default_factory=dict)
    examples: int = 0
    """Examples in these batches."""
    batch_size: int = 0
    """Examples in a full batch when it was saved; 0 where nobody knows."""

    def tree(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "position": {
                "global_step": self.global_step,
                "batches": self.batches,
                "examples": self.examples,
                "batch_size": self.batch_size,
            },
            "order": "\n".join(self.variables),
            "variables": self.variables,
            "optimizer": self.optimizer,
        }


def load(checkpoints: Checkpoints, step: int | None = None) -> Saved:
    """A checkpoint, the newest intact one by default."""
    _, tree = checkpoints.restore({"position": None, "order": "", "variables": None, "optimizer": None}, step)
    position, values = tree["position"], tree["variables"]
    ordered = {name: values[name] for name in tree["order"].split("\n")}
    counts = position.get("examples", 0), position.get("batch_size", 0)
    return Saved(position["global_step"], position["batches"], ordered, tree["optimizer"], *counts)


def locate(path: str | Path) -> tuple[Path, int | None]:
    """The folder of checkpoints and the step that a path means: a model_dir, its checkpoints, or one of them."""
    folder = Path(path)
    if folder.name.isdecimal() and folder.parent.is_dir():
        return folder.parent, int(folder.name)
    return (folder / FOLDER if (folder / FOLDER).is_dir() else folder), None


def check_writable(model_dir: Path) -> None:
    """Make the folder of a training run; raises where nothing could be saved in it at all."""
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=model_dir):
            pass
    except OSError as error:
        # A full disk may have room again when it is time to save.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise PermissionError(
                f"`model_dir` is {str(model_dir)!r}, where nothing can be saved: {error}. Give a folder that can be "
                "written, or change its permissions."
            ) from None


def fresh(plan: DiscoveredModel) -> Saved:
    """Before the first step."""
    variables = _in_order(plan, initial_values(plan, "trainable") | initial_values(plan, "non_trainable"))
    return Saved(0, 0, variables, initial_values(plan, "optimizer"))


def snapshot(program: ModelProgram, state: State, global_step: int, batches: int) -> Saved:
    """The running state, by name."""
    plan, whole = program.plan, program.spread.gather(state._replace(metrics=[]))
    parts = {
        part: dict(zip([name for name, _ in plan.in_part(part)], values, strict=True))
        for part, values in (
            ("trainable", whole.trainable),
            ("non_trainable", whole.non_trainable[plan.counters :]),
            ("optimizer", whole.optimizer),
        )
    }
    variables = _in_order(plan, parts["trainable"] | parts["non_trainable"])
    return Saved(global_step, batches, variables, parts["optimizer"])


def restored(program: ModelProgram, saved: Saved, where: str) -> State:
    """The state of a program with saved values, on its devices."""
    plan = program.plan
    _check(plan, saved, where)
    optimizer = [_value(saved.optimizer, name, made) for name, made in plan.in_part("optimizer")]
    parts = {
        part: [_value(saved.variables, name, made) for name, made in plan.in_part(part)]
        for part in ("trainable", "non_trainable")
    }
    steps = [jnp.asarray(saved.global_step, jnp.int32)] * plan.counters
    state = State(parts["trainable"], [*steps, *parts["non_trainable"]], optimizer, program.metrics())
    return program.spread.spread(state)


def warm(plan: DiscoveredModel, begin: Saved, source: Saved, patterns: tuple[str, ...]) -> Saved:
    """`begin` with those weights of another training run whose names match one; the optimizer starts anew."""
    weights = {name: made for name, made in zip(plan.names, plan.made, strict=True) if made.kind == "weight"}
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in weights):
            raise ValueError(f"No weight of model_fn matches {pattern!r}. They are called {', '.join(weights)}.")
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
        variables=begin.variables | {name: source.variables[name] for name in chosen}, optimizer=begin.optimizer
    )


def _value(values: Values, name: str, made: Any) -> Any:
    """The saved value; a random seed that only this mode has begins anew."""
    return jnp.asarray(values[name] if name in values else made.initial())


def _check(plan: DiscoveredModel, saved: Saved, where: str) -> None:
    """Every weight, and in training the optimizer's variables, must be there in the same order."""
    seeds = {name for name, made in zip(plan.names, plan.made, strict=True) if made.kind == "seed"}
    mine = {name: made for name, made in zip(plan.names, plan.made, strict=True) if made.kind == "weight"}
    theirs = [name for name, value in saved.variables.items() if name not in seeds and not _is_seed(name, value)]
    for number in range(max(len(mine), len(theirs))):
        name, made = list(mine.items())[number] if number < len(mine) else (None, None)
        there = theirs[number] if number < len(theirs) else None
        shape = np.shape(saved.variables[there]) if there is not None else None
        if made is None or name != there or made.shape != shape:
            here = "missing" if made is None else f"{name!r} {list(made.shape)}"
            found = "missing" if there is None or shape is None else f"{there!r} {list(shape)}"
            raise ValueError(
                f"model_fn makes other variables than those in {where}: weight {number} is {found} there and {here} "
                f"for {plan.mode!r}. Make the same layers in the same order, or use another `model_dir`."
            )
    slots = dict(plan.in_part("optimizer"))
    for name in [*slots, *(saved.optimizer if slots else ())]:
        if name not in saved.optimizer or name not in slots or np.shape(saved.optimizer[name]) != slots[name].shape:
            raise ValueError(
                f"The optimizer of model_fn is another one than in {where}: the first difference is {name!r}. Use the "
                "same optimizer, another `model_dir`, or `warm_start_from` to take over the weights only."
            )


def _is_seed(name: str, value: Any) -> bool:
    return name.rpartition("/")[2].startswith("seed_generator_state") and np.shape(value) == (2,)


def _in_order(plan: DiscoveredModel, values: Values) -> Values:
    return {name: values[name] for name in plan.names if name in values}
