"""Random models: graphs with skips, shared layers, tied weights, nested models and layers made of layers."""
# Keras decides the arguments of `call` and `build`.

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend

import keras
import numpy as np
from keras import layers, ops

import composite_zoo as composites
from pipeline_zoo import Block
from zoo import Scaled

WIDTH = 6
"""Every value has this width, so that any layer can take any of them."""


class Tied(layers.Layer):
    """Multiplies by the kernel of another layer, transposed."""

    def __init__(self, other: layers.Dense, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.other = other

    def call(self, inputs: Any) -> Any:
        return ops.matmul(inputs, ops.transpose(self.other.kernel))


def _activation(detail: int) -> str:
    return ("tanh", "linear", "gelu", "sigmoid")[detail % 4]


def _sequential(detail: int) -> layers.Layer:
    middle = layers.Dropout(0.2) if detail % 2 else layers.LayerNormalization()
    return keras.Sequential([layers.Dense(WIDTH, _activation(detail)), middle, layers.Dense(WIDTH)])


def _functional(detail: int) -> layers.Layer:
    """A skip connection inside; every other one normalises the batch."""
    x = layers.Dense(WIDTH, "tanh")(inputs := keras.Input((WIDTH,)))
    x = layers.BatchNormalization(momentum=0.8)(x) if detail % 2 else layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(WIDTH)(x) + inputs)


def _convolution(detail: int) -> layers.Layer:
    kernel = 1 + detail % 3
    return keras.Sequential(
        [layers.Reshape((WIDTH, 1)), layers.Conv1D(2, kernel, padding="same"), layers.Flatten(), layers.Dense(WIDTH)]
    )


def _attention(detail: int) -> layers.Layer:
    del detail
    sequence = keras.Input((3, 2))
    attend = layers.MultiHeadAttention(1, 2, use_bias=False)
    inner = keras.Model(sequence, attend(sequence, sequence))
    return keras.Sequential([layers.Reshape((3, 2)), inner, layers.Reshape((WIDTH,))])


LAYERS: dict[str, Callable[[int], layers.Layer]] = {
    "dense": lambda d: layers.Dense(WIDTH, _activation(d)),
    "penalised": lambda d: layers.Dense(WIDTH, "tanh", kernel_regularizer="l2", bias_regularizer=("l1", None)[d % 2]),
    "activity": lambda _: layers.Dense(WIDTH, "tanh", activity_regularizer=keras.regularizers.L2(0.1)),
    "norm": lambda _: layers.LayerNormalization(),
    "group_norm": lambda _: layers.GroupNormalization(2),
    "batch_norm": lambda d: layers.BatchNormalization(momentum=0.7 + 0.1 * (d % 3)),
    "dropout": lambda d: layers.Dropout(0.3, seed=d if d % 2 else None),
    "noise": lambda _: layers.GaussianNoise(0.1),
    "scaled": lambda _: Scaled(),
    "constrained": lambda _: layers.Dense(WIDTH, kernel_constraint=keras.constraints.MaxNorm(0.8)),
    "frozen": lambda _: layers.Dense(WIDTH, "tanh", trainable=False),
    "sequential": _sequential,
    "functional": _functional,
    "block": lambda _: Block(),
    "convolution": _convolution,
    "attention": _attention,
    "own_weight": lambda _: composites.OwnWeight(),
    "composite_noise": lambda _: composites.Noise(),
    "composite_norm": lambda _: composites.Normed(),
    "composite_outer": lambda _: composites.Outer(),
    "composite_losses": lambda _: composites.Losses(),
    "concatenate": lambda _: layers.Dense(WIDTH),
}
JOINS = ("add", "multiply", "operation", "concatenate")
"""Take two values. All but the last are without weights."""
LINKS = ("again", "tied", "tied_operation")
"""Use an earlier layer, or its kernel."""
MIXING = ("activity", "batch_norm", "dropout", "noise", "scaled", "sequential", "functional", "block",
          "composite_noise", "composite_norm", "composite_outer", "composite_losses")  # fmt: skip
"""Depend on how samples are put together."""
NORMALIZING = ("batch_norm", "functional", "block", "composite_norm", "composite_outer")
"""Have, or may have, statistics of the batch."""


@dataclass(frozen=True)
class Step:
    """One layer or operation. `first` and `second` say how many values back its inputs are; `detail` varies it."""

    kind: str
    first: int = 0
    second: int = 1
    detail: int = 0


@dataclass(frozen=True)
class Recipe:
    """A model that can be written down."""

    steps: tuple[Step, ...]
    inputs: int = 1
    outputs: int = 1
    named: bool = False
    subclassed: bool = False

    @property
    def mixes(self) -> bool:
        return any(step.kind in MIXING for step in self.steps)

    @property
    def normalizes(self) -> bool:
        return any(step.kind in NORMALIZING for step in self.steps)


def draw(rng: random.Random) -> Recipe:
    # Plain layers, joins and links come up as often as all the others together.
    kinds = (tuple(LAYERS), ("dense", "dense", *JOINS, *LINKS))
    steps = tuple(
        Step(rng.choice(rng.choice(kinds)), rng.choice((0, 0, 0, 1, 2, 3)), rng.randint(0, 4), rng.randint(0, 5))
        for _ in range(rng.randint(3, 8))
    )
    return Recipe(steps, rng.randint(1, 2), rng.randint(1, 3), rng.random() < 0.5, rng.random() < 0.3)


class Parts:
    """The layers of a recipe, and its graph."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.made: list[layers.Layer | None] = []
        self.kernels: set[int] = set()
        """Steps that are a product with the kernel of a layer."""
        for step in recipe.steps:
            self.made.append(self._layer(step))
        self.heads = [layers.Dense(1, name=f"out{i}") for i in range(recipe.outputs)]

    def _layer(self, step: Step) -> layers.Layer | None:
        if step.kind in LAYERS:
            return LAYERS[step.kind](step.detail)
        if step.kind in JOINS:
            return None
        # What takes two values has another width.
        before = zip(self.made, self.recipe.steps, strict=False)
        usable = [layer for layer, its in before if layer is not None and its.kind != "concatenate"]
        if step.kind != "again":
            usable = [layer for layer in usable if isinstance(layer, layers.Dense)]
        if not usable:
            return layers.Dense(WIDTH, "tanh")
        chosen = usable[step.detail % len(usable)]
        if step.kind == "tied_operation":
            self.kernels.add(len(self.made))
        return Tied(chosen) if step.kind == "tied" else chosen

    @property
    def layers(self) -> list[layers.Layer]:
        """Each layer once."""
        return list({id(layer): layer for layer in (*self.made, *self.heads) if layer is not None}.values())

    def shares_state(self) -> bool:
        """Whether a layer that changes variables, other than seeds, is called several times."""
        changing = [
            layer
            for i, layer in enumerate(self.made)
            if layer is not None
            and i not in self.kernels
            and any(v.dtype != "uint32" for v in layer.non_trainable_variables)
        ]
        return len(changing) > len({id(layer) for layer in changing})

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs. What no step uses goes into one of them."""
        values, used = list(inputs), set()
        for i, step in enumerate(self.recipe.steps):
            at = [len(values) - 1 - back % len(values) for back in (step.first, step.second)]
            used |= set(at if step.kind in JOINS else at[:1])
            values.append(self._value(i, values[at[0]], values[at[1]]))
        leaves = [value for i, value in enumerate(values) if i not in used]
        found = []
        for i, head in enumerate(self.heads):
            mine = leaves[i :: len(self.heads)] or [values[-1 - i % len(values)]]
            found.append(head(sum(mine[1:], mine[0])))
        return found

    def _value(self, i: int, a: Any, b: Any) -> Any:
        kind, layer = self.recipe.steps[i].kind, self.made[i]
        if kind == "add":
            return a + b
        if kind == "multiply":
            return ops.tanh(a) * b
        if kind == "operation":
            return ops.relu(a) + 0.5 * b
        if kind == "concatenate":
            return layer(ops.concatenate([a, b], axis=-1))
        if i in self.kernels:
            return ops.matmul(a, ops.transpose(layer.kernel))
        value = layer(a)
        return value["x"] + value["early"] if isinstance(value, dict) else value


class Interpreted(keras.Model):
    """A subclassed model whose `call` goes through the steps."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.parts = Parts(recipe)
        self.every = self.parts.layers

    def call(self, inputs: Any) -> Any:
        return structure("out", self.parts.run(keras.tree.flatten(inputs)), self.recipe)


def structure(prefix: str, values: Sequence[Any], recipe: Recipe) -> Any:
    """One value by itself, several as a dictionary or a list."""
    if len(values) == 1:
        return values[0]
    return {f"{prefix}{i}": value for i, value in enumerate(values)} if recipe.named else list(values)


def make(recipe: Recipe) -> tuple[keras.Model, bool]:
    """The model, built, and whether several of its calls change the same variables."""
    if recipe.subclassed:
        model = Interpreted(recipe)
        model(data(recipe, 2)[0])
        return model, model.parts.shares_state()
    inputs = [keras.Input((WIDTH,), name=f"in{i}") for i in range(recipe.inputs)]
    outputs = (parts := Parts(recipe)).run(inputs)
    return keras.Model(structure("in", inputs, recipe), structure("out", outputs, recipe)), parts.shares_state()


def data(recipe: Recipe, rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    x = [rng.normal(size=(rows, WIDTH)).astype("float32") for _ in range(recipe.inputs)]
    y = [rng.normal(size=(rows, 1)).astype("float32") for _ in range(recipe.outputs)]
    return structure("in", x, recipe), structure("out", y, recipe)
