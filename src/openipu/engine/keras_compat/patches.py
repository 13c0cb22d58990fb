"""Every place where Keras is told to do something that it has no argument for: one registry, one lock.

A patch replaces an attribute of a class, module or object of Keras. What it puts there looks up the handlers of the
calling thread and, where there are none, does what Keras does. So one thread can trace a model for several replicas
while others use plain Keras and notice nothing. The replacement is installed when the first thread enters `using` and
removed when the last one leaves, whatever happens in between.

`tracing()` is the one lock of the engine: whoever traces a model holds it. Code that is traced may change objects that
threads share (a model's layers, Python's random state), and it may trace other code: the lock is re-entrant.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import keras
from keras.src.backend.common import keras_tensor
from keras.src.backend.jax import random as keras_random
from keras.src.layers.layer import CallContext
from keras.src.ops.node import Node

Handler = Callable[..., Any]
"""Called in place of the original, which is its first argument, with the arguments of the call."""
Replacement = Callable[["Patch", Any, Any], Any]
"""Makes what is installed from a patch, its owner and the original."""

REGISTRY: list[Patch] = []
"""All patches."""

_installing = threading.RLock()
_tracing = threading.RLock()


def tracing() -> contextlib.AbstractContextManager[object]:
    """Until the block ends, no other thread traces."""
    return _tracing


@dataclass(eq=False, slots=True)
class Patch:
    """An attribute of Keras that is replaced while somebody uses the patch."""

    owner: Any
    """What has the attribute; for patches of single objects the class of these objects."""
    attribute: str
    reason: str
    lifetime: str
    """When the patch is in place."""
    replacement: Replacement | None = None
    """How to make what is installed; None for functions and methods."""
    of_objects: bool = False
    """Whether it is not the owner that is patched, but single objects of that class."""
    _installed: dict[int, _Installed] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        REGISTRY.append(self)

    @property
    def active(self) -> bool:
        """Whether the patch is in place, for whatever thread."""
        return bool(self._installed)

    def handlers(self, owner: Any = None) -> list[Handler]:
        """The handlers of this thread, the innermost last."""
        installed = self._installed.get(id(self.owner if owner is None else owner))
        return [] if installed is None else installed.handlers()

    def chain(self, original: Handler, owner: Any = None) -> Handler:
        """The handlers of this thread around `original`; without any, `original` itself."""
        for handler in self.handlers(owner):
            original = functools.partial(handler, original)
        return original

    @contextlib.contextmanager
    def using(self, handler: Handler, on: Any = None, *, once: bool = False) -> Iterator[None]:
        """Until the block ends, calls of this thread go to `handler`.

        Args:
            handler: See `Handler`.
            on: The object, for patches of objects.
            once: Whether a thread that has a handler already needs no second one.
        """
        owner = self.owner if on is None else on
        if once and self.handlers(owner):
            yield
            return
        handlers = self._enter(owner).handlers()
        handlers.append(handler)
        try:
            yield
        finally:
            handlers.remove(handler)
            self._leave(owner)

    def _enter(self, owner: Any) -> _Installed:
        with _installing:
            installed = self._installed.get(id(owner))
            if installed is None:
                installed = self._installed[id(owner)] = _Installed(owner, self.attribute)
                installed.put((self.replacement or _function)(self, owner, installed.original))
            installed.users += 1
            return installed

    def _leave(self, owner: Any) -> None:
        with _installing:
            installed = self._installed[id(owner)]
            installed.users -= 1
            if installed.users == 0:
                installed.restore()
                del self._installed[id(owner)]


class _Installed:
    """A replacement in its place, and how to take it out again."""

    def __init__(self, owner: Any, attribute: str) -> None:
        self._owner, self._attribute, self.users = owner, attribute, 0
        self._local = threading.local()
        self._is_object = not isinstance(owner, type | ModuleType)
        self._own = attribute in vars(owner)
        self._before = vars(owner).get(attribute)
        self._static = isinstance(self._before, staticmethod)
        self.original: Any = getattr(owner, attribute, None)

    def handlers(self) -> list[Handler]:
        """Those of this thread, the innermost last."""
        found: list[Handler] = vars(self._local).setdefault("handlers", [])
        return found

    def put(self, value: Any) -> None:
        """Install `value`."""
        if self._is_object:
            vars(self._owner)[self._attribute] = value  # Keras tracks what is assigned to its objects
        else:
            setattr(self._owner, self._attribute, staticmethod(value) if self._static else value)

    def restore(self) -> None:
        """Leave everything as it was before."""
        if self._own and self._is_object:
            vars(self._owner)[self._attribute] = self._before
        elif self._own:
            setattr(self._owner, self._attribute, self._before)
        elif self._is_object:
            del vars(self._owner)[self._attribute]
        else:
            delattr(self._owner, self._attribute)


# --- what is installed -----------------------------------------------------------------------------------------------


def _function(patch: Patch, owner: Any, original: Handler) -> Handler:
    # Not `functools.wraps`: Keras takes the arguments of constructors apart and must see these, not the original's.
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return patch.chain(original, owner)(self, *args, **kwargs)

    def function(*args: Any, **kwargs: Any) -> Any:
        return patch.chain(original, owner)(*args, **kwargs)

    return function if patch.of_objects else method


def _random_functions(patch: Patch, _owner: Any, original: Any) -> Any:
    """Keras' view of JAX with another `random`: handlers get a function of `jax.random` and its name."""

    class Random:
        def __getattr__(self, name: str) -> Any:
            function = getattr(jax.random, name)
            handlers = patch.handlers()
            return handlers[-1](function, name) if handlers else function

    class Jax:
        random = Random()

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    return Jax()


def _symbolic_class(patch: Patch, _owner: Any, original: Any) -> Any:
    """The class of symbolic tensors as `isinstance` sees it: handlers say what else is one."""

    class Asked(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original) or any(test(value) for test in patch.handlers())

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

    return Asked("KerasTensor", (), {})


def _training_property(patch: Patch, _owner: Any, _original: Any) -> Any:
    """The mode that layers look at: handlers get what the outermost call was told."""

    def get(context: Any) -> bool | None:
        told: bool | None = vars(context).get("training")
        handlers = patch.handlers()
        return handlers[-1](told) if handlers else told

    def set_(context: Any, value: bool | None) -> None:
        vars(context)["training"] = value

    return property(get, set_)


def _added_method(patch: Patch, _owner: Any, _original: Any) -> Any:
    """A method that Keras does not have; other threads do not have it either."""

    def get(self: Any) -> Any:
        handlers = patch.handlers()
        if not handlers:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {patch.attribute!r}")
        return functools.partial(handlers[-1], self)

    return property(get)


# --- the patches -----------------------------------------------------------------------------------------------------

NEW_MODELS = Patch(
    keras.Model, "__new__", lifetime="while a strategy's scope is open",
    reason="Every way of making a model passes through here; models of a strategy get a class with its methods.",
)  # fmt: skip
NODES = Patch(
    Node, "__init__", lifetime="while a `PipelineStage` is open, and while a model's `call` is traced",
    reason="Calls of layers remember their pipeline stage and are recorded; Keras tells nobody of them.",
)  # fmt: skip
OPERATIONS = Patch(
    keras.Operation, "__init__", lifetime="while a `PipelineStage` is open, and while a model's `call` is traced",
    reason="Layers remember the pipeline stage in which they were made.",
)  # fmt: skip
LAYER_CALLS = Patch(
    keras.Layer, "__call__", lifetime="while a model's `call` is traced",
    reason="Calls of layers on constants are recorded, too; Keras computes them.",
)  # fmt: skip
SYMBOLIC_TENSORS = Patch(
    keras_tensor, "KerasTensor", lifetime="while a model's `call` is traced", replacement=_symbolic_class,
    reason="Operations on variables (tied weights) are recorded; Keras computes them.",
)  # fmt: skip
SEEDS = Patch(
    keras.random.SeedGenerator, "next", lifetime="while a model's graph is run on shapes",
    reason="How often each stage draws from a seed that several stages share.",
)  # fmt: skip
RANDOM_FUNCTIONS = Patch(
    keras_random, "jax", lifetime="while a step is traced for several replicas", replacement=_random_functions,
    reason="Random numbers are drawn for the batch of all replicas, so that dropout does not depend on their number.",
)  # fmt: skip
BATCH_MOMENTS = Patch(
    keras.layers.BatchNormalization, "_moments", lifetime="while a step is traced for groups of replicas",
    reason="Statistics are taken over the replicas of a group.",
)  # fmt: skip
OPTIMIZER_APPLY = Patch(
    keras.optimizers.Optimizer, "apply", lifetime="while a user's function is traced",
    reason="Gradients are mapped and reduced over replicas where a user's own code applies them.",
)  # fmt: skip
LOSS_SCALE_APPLY = Patch(
    keras.optimizers.LossScaleOptimizer, "apply", lifetime="while a user's function is traced",
    reason="The same, for the one optimizer of Keras with an `apply` of its own.",
)  # fmt: skip
OPTIMIZER_MINIMIZE = Patch(
    keras.optimizers.Optimizer, "minimize", lifetime="while a model_fn is traced", replacement=_added_method,
    reason="Scripts for estimators call `minimize`, which Keras 3 does not have.",
)  # fmt: skip
NEW_VARIABLES = Patch(
    keras.Variable, "__init__", lifetime="while a model_fn is traced",
    reason="A model_fn makes its variables anew each time; their values come from the state, by order.",
)  # fmt: skip
TRAINING_FLAG = Patch(
    CallContext, "training", lifetime="while a model_fn is traced", replacement=_training_property,
    reason="Layers that are not told the mode take that of the estimator.",
)  # fmt: skip
STATELESS_CALL = Patch(
    keras.Model, "stateless_call", lifetime="while the last stage of a pipeline is traced", of_objects=True,
    reason="Keras' own step computes loss and metrics from outputs that the stages have computed.",
)  # fmt: skip
STATELESS_APPLY = Patch(
    keras.optimizers.Optimizer, "stateless_apply", lifetime="while a user's `train_step` is traced", of_objects=True,
    reason="Gradients are mapped and reduced over replicas where a user's own step applies them.",
)  # fmt: skip
CHECK_FINITE = Patch(
    keras.optimizers.LossScaleOptimizer, "check_finite", lifetime="while a stage's update is traced", of_objects=True,
    reason="Whether a scaled loss overflowed is decided over the gradients of all stages.",
)  # fmt: skip
