"""Variables that a function makes again in each trace. They are identified by the order in which they are made."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat.patches import NEW_VARIABLES, OPTIMIZER_MINIMIZE, TRAINING_FLAG, Handler, Patch
from openipu.engine.types import Array

import jax
import keras
from jax.typing import ArrayLike, DTypeLike

Kind = Literal["weight", "seed", "optimizer", "metric"]


@dataclass(frozen=True, slots=True)
class Made:
    """A variable that was made inside a `Ledger`. `initial()` computes its initial value."""

    variable: keras.Variable
    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    initial: Callable[[], Array]


class Ledger(keras.StatelessScope):
    """A scope for code that makes new layers, optimizers and metrics each time it is traced.

    `bind(made, number)` returns the value of each variable when it is made; `number` counts them. Assigned values are
    kept in the ledger, so the code is a pure function of what `bind` returns. Automatic names start from scratch, so
    they are the same in every trace. Variables from outside are constants inside: training or changing one is an error.
    Layers that are called without `training` take it from the ledger.
    """

    def __init__(self, bind: Callable[[Made, int], Array], minimize: Callable[..., Any], training: bool) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._bind, self._minimize, self.training = bind, minimize, training
        self.made: list[Made] = []
        self._builds_optimizer = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Ledger:
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_api.fresh_names())
            stack.enter_context(_current(self))
            for patch, handler in _HANDLERS:
                stack.enter_context(patch.using(handler, once=True))
            super().__enter__()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *args: Any, **kwargs: Any) -> None:
        with self._stack:
            super().__exit__(*args, **kwargs)

    def names(self) -> dict[str, int]:
        """How often each automatic name has been used so far."""
        return keras_api.given_names()

    def go_on_naming(self, names: dict[str, int]) -> None:
        """Make automatic names as if these had been used before."""
        keras_api.go_on_naming(names)

    @contextlib.contextmanager
    def building_optimizer(self) -> Iterator[None]:
        """Until the block ends, new variables belong to an optimizer. Some of Keras' make theirs without a scope."""
        self._builds_optimizer = True
        try:
            yield
        finally:
            self._builds_optimizer = False

    def add(self, variable: keras.Variable, initial: Callable[[], Array]) -> None:
        """Register a variable that was just made."""
        dtype = keras_api.stored_dtype(variable)
        kind = "optimizer" if self._builds_optimizer else _kind()
        made = Made(variable, variable.path, tuple(variable.shape), dtype, kind, initial)
        self.made.append(made)
        self.state_mapping[id(variable)] = self._bind(made, len(self.made) - 1)

    def get_current_value(self, variable: keras.Variable) -> Array | None:
        """The value of a variable inside this scope. None makes Keras use the value outside."""
        value: Array | None = super().get_current_value(variable)
        if value is None and variable.trainable and keras_api.has_value(variable):
            raise ValueError(
                f"model_fn uses the trainable variable {variable.path!r}, which was made outside of it, so it would "
                "never be trained. Make the layer inside model_fn, or set `trainable = False` on it."
            )
        return value

    def add_update(self, update: tuple[keras.Variable, Array]) -> None:
        """Keep a variable's new value."""
        if id(update[0]) not in self.state_mapping:
            raise ValueError(
                f"model_fn changes the variable {update[0].path!r}, which was made outside of it, so the change would "
                "be lost. Make the layer, metric or seed generator inside model_fn."
            )
        super().add_update(update)


_ledgers = threading.local()


def current_ledger() -> Ledger | None:
    """The ledger of the code that is being traced in this thread."""
    stack = getattr(_ledgers, "stack", None)
    return stack[-1] if stack else None


@contextlib.contextmanager
def _current(ledger: Ledger) -> Iterator[None]:
    _ledgers.__dict__.setdefault("stack", []).append(ledger)
    try:
        yield
    finally:
        _ledgers.stack.pop()


def _training(told: bool | None) -> bool | None:
    """The `training` of the outermost layer call, or the ledger's if it has none."""
    ledger = current_ledger()
    return ledger.training if told is None and ledger is not None else told


def _minimize(optimizer: keras.optimizers.Optimizer, loss: Array, *args: Any, **kwargs: Any) -> Any:
    ledger = current_ledger()
    assert ledger is not None
    return ledger._minimize(optimizer, loss, *args, **kwargs)


def _reporting_init(
    init: Callable[..., None],
    variable: keras.Variable,
    initializer: str | ArrayLike | Callable[..., Array],
    shape: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Keras' own constructor. Inside a ledger, it registers the variable and leaves its initial value for later.

    In a stateless scope Keras accepts only initializers, but optimizers make variables from values.
    """
    ledger = current_ledger()
    if ledger is None:
        init(variable, initializer, shape, dtype, *args, **kwargs)
        return
    make = keras.initializers.get(initializer) if isinstance(initializer, str) else initializer
    if not callable(make):
        if isinstance(make, jax.core.Tracer):
            raise ValueError("A variable was made from a value that is computed inside model_fn. Use an initializer.")
        with jax.ensure_compile_time_eval():
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
        shape, dtype, make = value.shape, value.dtype, lambda *_, **__: value

    def bound(*_: Any, **__: Any) -> Array:
        value: Array = ledger.state_mapping[id(variable)]
        return value

    init(variable, bound, shape, dtype, *args, **kwargs)
    ledger.add(variable, functools.partial(make, tuple(variable.shape), dtype=keras_api.stored_dtype(variable)))


def _kind() -> Kind:
    """What kind of object is making a variable. Keras' name scopes know who opened them."""
    callers = keras_api.name_scopes()
    if callers and isinstance(callers[-1], keras.random.SeedGenerator):
        return "seed"
    for caller in callers:
        if isinstance(caller, keras.optimizers.Optimizer):
            return "optimizer"
        if isinstance(caller, keras.metrics.Metric):
            return "metric"
    return "weight"


_HANDLERS: tuple[tuple[Patch, Handler], ...] = (
    (NEW_VARIABLES, _reporting_init),
    (TRAINING_FLAG, _training),
    (OPTIMIZER_MINIMIZE, _minimize),
)
"""The patches of an open ledger in its thread: variables report to it, and layers and optimizers ask it."""
