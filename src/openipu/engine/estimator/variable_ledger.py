"""Variables that a function makes anew each time it is traced, found again by the order in which they are made."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat.patches import NEW_VARIABLES, OPTIMIZER_MINIMIZE, TRAINING_FLAG, Handler, Patch

import jax
import keras

Kind = Literal["weight", "seed", "optimizer", "metric"]


@dataclass(frozen=True, slots=True)
class Made:
    """A variable that was made inside a `Ledger`. `initial()` computes the value it is to begin with."""

    variable: Any
    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    initial: Callable[[], Any]


class Ledger(keras.StatelessScope):
    """A scope for code that makes its layers, optimizers and metrics anew each time it is traced.

    `bind(made, number)` gives the value of each variable as it is made, in order. New values end in the ledger, so the
    code is a pure function of what `bind` gives. Names start from scratch, so they are the same in every trace.
    Variables from outside are constants inside: training or changing one is an error. Layers that are not told take
    `training` from here.
    """

    def __init__(self, bind: Callable[[Made, int], Any], minimize: Callable[..., Any], training: bool) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._bind, self._minimize, self.training = bind, minimize, training
        self.made: list[Made] = []
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
        """How often each automatic name has been given so far."""
        return keras_api.given_names()

    def go_on_naming(self, names: dict[str, int]) -> None:
        """Give names as if these had been given before."""
        keras_api.go_on_naming(names)

    def add(self, variable: Any, initial: Callable[[], Any]) -> None:
        """Called for each variable after it was made."""
        dtype = keras_api.stored_dtype(variable)
        made = Made(variable, variable.path, tuple(variable.shape), dtype, _kind(), initial)
        self.made.append(made)
        self.state_mapping[id(variable)] = self._bind(made, len(self.made) - 1)

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable inside; None makes Keras take the one it has outside."""
        value = super().get_current_value(variable)
        if value is None and variable.trainable and keras_api.has_value(variable):
            raise ValueError(
                f"model_fn uses the trainable variable {variable.path!r}, which was made outside of it, so it would "
                "never be trained. Make the layer inside model_fn, or set `trainable = False` on it."
            )
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
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
    """What the outermost layer call was told, else what the ledger says."""
    ledger = current_ledger()
    return ledger.training if told is None and ledger is not None else told


def _minimize(optimizer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    ledger = current_ledger()
    assert ledger is not None
    return ledger._minimize(optimizer, loss, *args, **kwargs)


def _reporting_init(
    init: Callable[..., None],
    variable: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Keras' own constructor; inside a ledger, initial values are computed by whoever asks for them later.

    Keras allows no initial values (only initializers) in a stateless scope, though optimizers are made from them.
    """
    ledger = current_ledger()
    if ledger is None:
        init(variable, initializer, shape, dtype, *args, **kwargs)
        return
    make = keras.initializers.get(initializer) if isinstance(initializer, str) else initializer
    if not callable(make):
        if isinstance(make, jax.core.Tracer):
            raise ValueError("A variable was made from a value that is computed inside model_fn. Give an initializer.")
        with jax.ensure_compile_time_eval():
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
        shape, dtype, make = value.shape, value.dtype, lambda *_, **__: value

    def bound(*_: Any, **__: Any) -> Any:
        return ledger.state_mapping[id(variable)]

    init(variable, bound, shape, dtype, *args, **kwargs)
    ledger.add(variable, functools.partial(make, tuple(variable.shape), dtype=keras_api.stored_dtype(variable)))


def _kind() -> Kind:
    """What the variable that is being made belongs to: Keras' name scopes know who opened them."""
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
"""What an open ledger changes for its thread: variables report to it, and layers and optimizers ask it."""
