"""Every place where Keras is made to do something that it has no argument for: one registry, one lock.

A patch replaces an attribute of a Keras class, module or object. The replacement calls the handlers of the current
thread; without any, it does what Keras does. So one thread can trace a model for several replicas while others use
plain Keras and notice nothing. The replacement is installed when the first thread enters `using` and removed when the
last one leaves, whatever happens in between.

`tracing()` is the engine's only lock. A thread holds it while it traces a model, because traced code may change objects
that threads share (a model's layers, Python's random state). Traced code may also trace other code, so the lock is
re-entrant.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import keras
from keras.src.backend.common import keras_tensor
from keras.src.backend.jax import random as keras_random
from keras.src.layers.layer import CallContext
from keras.src.ops.node import Node

Handler = Callable[..., Any]
"""Called in place of the original, with the original and then the arguments of the call."""
Replacement = Callable[["Patch", object, Any], Any]
"""Makes what is installed, from a patch, its owner and the original."""

REGISTRY: list[Patch] = []
"""All patches."""

_installing = threading.RLock()
_tracing = threading.RLock()


def tracing() -> contextlib.AbstractContextManager[object]:
    """Until the block ends, no other thread traces."""
    return _tracing


@dataclass(eq=False, slots=True)
class Patch:
    """An attribute of Keras that is replaced while the patch is in use."""

    owner: object
    """What has the attribute. For patches of single objects, their class."""
    attribute: str
    reason: str
    lifetime: str
    """When the patch is in place."""
    replacement: Replacement | None = None
    """Makes what is installed; None for functions and methods."""
    of_objects: bool = False
    """Whether single objects of the class are patched, not the class itself."""
    in_all_threads: bool = False
    """Whether handlers are called in all threads, not only in the one that entered `using`."""
    _installed: dict[int, _Installed] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        REGISTRY.append(self)

    @property
    def active(self) -> bool:
        """Whether the patch is in place for any thread."""
        return bool(self._installed)

    def handlers(self, owner: object = None) -> list[Handler]:
        """The handlers of this thread, innermost last."""
        installed = self._installed.get(id(self.owner if owner is None else owner))
        return [] if installed is None else installed.handlers()

    def chain(self, original: Handler, owner: object = None) -> Handler:
        """`original` wrapped in the handlers of this thread; `original` itself if there are none."""
        for handler in self.handlers(owner):
            original = functools.partial(handler, original)
        return original

    @contextlib.contextmanager
    def using(self, handler: Handler, on: object = None, *, once: bool = False) -> Iterator[None]:
        """Until the block ends, calls in this thread go to `handler`.

        Args:
            handler: See `Handler`.
            on: The object to patch, for patches of single objects.
            once: Whether to do nothing if this thread has a handler already.
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

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Until the block ends, this thread has no handlers, except those that the block itself puts in place."""
        handlers = self.handlers()
        held = handlers[:]
        handlers.clear()
        try:
            yield
        finally:
            handlers[:] = held

    def _enter(self, owner: object) -> _Installed:
        with _installing:
            installed = self._installed.get(id(owner))
            if installed is None:
                installed = self._installed[id(owner)] = _Installed(owner, self.attribute, self.in_all_threads)
                installed.put((self.replacement or _function)(self, owner, installed.original))
            installed.users += 1
            return installed

    def _leave(self, owner: object) -> None:
        with _installing:
            installed = self._installed[id(owner)]
            installed.users -= 1
            if installed.users == 0:
                installed.restore()
                del self._installed[id(owner)]


class _Installed:
    """An installed replacement, and how to remove it."""

    def __init__(self, owner: object, attribute: str, in_all_threads: bool) -> None:
        self._owner, self._attribute, self.users = owner, attribute, 0
        self._local = SimpleNamespace() if in_all_threads else threading.local()
        self._is_object = not isinstance(owner, type | ModuleType)
        self._own = attribute in vars(owner)
        self._before = vars(owner).get(attribute)
        self._static = isinstance(self._before, staticmethod)
        self.original: Any = getattr(owner, attribute, None)

    def handlers(self) -> list[Handler]:
        """The handlers of this thread, innermost last."""
        found: list[Handler] = vars(self._local).setdefault("handlers", [])
        return found

    def put(self, value: Any) -> None:
        """Install `value`."""
        self._set(staticmethod(value) if self._static else value)

    def restore(self) -> None:
        """Put everything back as it was."""
        if self._own:
            self._set(self._before)
        elif self._is_object:
            del vars(self._owner)[self._attribute]
        else:
            delattr(self._owner, self._attribute)

    def _set(self, value: Any) -> None:
        if self._is_object:
            vars(self._owner)[self._attribute] = value  # not `setattr`: Keras tracks what is assigned to its objects
        else:
            setattr(self._owner, self._attribute, value)


# --- what is installed -----------------------------------------------------------------------------------------------


def _function(patch: Patch, owner: object, original: Handler) -> Handler:
    # Not `functools.wraps`: Keras inspects the arguments of constructors and must see these, not the original's.
    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        return patch.chain(original, owner)(self, *args, **kwargs)

    def function(*args: Any, **kwargs: Any) -> Any:
        return patch.chain(original, owner)(*args, **kwargs)

    return function if patch.of_objects else method


def _random_functions(patch: Patch, _owner: object, original: ModuleType) -> object:
    """Keras' view of JAX with another `random`. Handlers get a function of `jax.random` and its name."""

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


def _symbolic_class(patch: Patch, _owner: object, original: type) -> type:
    """The class of symbolic tensors as `isinstance` sees it. Handlers decide what else counts as one."""

    class Asked(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original) or any(test(value) for test in patch.handlers())

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

    return Asked("KerasTensor", (), {})


def _training_property(patch: Patch, _owner: object, _original: object) -> property:
    """The training mode that layers read. Handlers get the mode that the outermost call was given."""

    def get(context: CallContext) -> bool | None:
        told: bool | None = vars(context).get("training")
        handlers = patch.handlers()
        return handlers[-1](told) if handlers else told

    def set_(context: CallContext, value: bool | None) -> None:
        vars(context)["training"] = value

    return property(get, set_)


def _added_method(patch: Patch, _owner: object, original: Handler | None) -> property:
    """A method that Keras does not have. Unless something else adds it, it exists only in threads with a handler."""

    def get(self: object) -> Any:
        found = [original, *patch.handlers()][-1]
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {patch.attribute!r}")
        return functools.partial(found, self)

    return property(get)


# --- the patches -----------------------------------------------------------------------------------------------------

NEW_MODELS = Patch(
    keras.Model, "__new__", lifetime="while a strategy's scope is open",
    reason="Every way of making a model passes through here; a strategy's models get a class with its methods.",
)  # fmt: skip
NODES = Patch(
    Node, "__init__", lifetime="while a `PipelineStage` is open, and while a model's `call` is traced",
    reason="Calls of layers remember their pipeline stage and are recorded; Keras has no hook for them.",
)  # fmt: skip
OPERATIONS = Patch(
    keras.Operation, "__init__", lifetime="while a `PipelineStage` is open, and while a model's `call` is traced",
    reason="Layers remember the pipeline stage in which they were made.",
)  # fmt: skip
LAYER_CALLS = Patch(
    keras.Layer, "__call__", lifetime="while a model's `call` is traced",
    reason="Calls of layers on constants are recorded, too; Keras would just compute them.",
)  # fmt: skip
SYMBOLIC_TENSORS = Patch(
    keras_tensor, "KerasTensor", lifetime="while a model's `call` is traced", replacement=_symbolic_class,
    reason="Operations on variables (tied weights) are recorded; Keras would just compute them.",
)  # fmt: skip
SEEDS = Patch(
    keras.random.SeedGenerator, "next", lifetime="while a model's graph is run on shapes",
    reason="Counts how often each stage draws from a seed that several stages share.",
)  # fmt: skip
RANDOM_FUNCTIONS = Patch(
    keras_random, "jax", replacement=_random_functions,
    lifetime="while a step is traced for several replicas, and while variables may be made",
    reason="Random numbers are drawn for the batch of all replicas, so that dropout does not depend on their number; "
    "initial values compile quickly.",
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
    reason="The same for the only Keras optimizer with an `apply` of its own.",
)  # fmt: skip
OPTIMIZER_MINIMIZE = Patch(
    keras.optimizers.Optimizer, "minimize", lifetime="while a model_fn is traced", replacement=_added_method,
    reason="Scripts for estimators call `minimize`, which Keras 3 does not have.",
)  # fmt: skip
NEW_VARIABLES = Patch(
    keras.Variable, "__init__", lifetime="while a model_fn is traced",
    reason="A model_fn makes new variables each time it is traced; their values come from the state, in order.",
)  # fmt: skip
TRAINING_FLAG = Patch(
    CallContext, "training", lifetime="while a model_fn is traced", replacement=_training_property,
    reason="Layers that are not given a mode take the estimator's.",
)  # fmt: skip
COMPILE = Patch(
    keras.Model, "compile", lifetime="while `fit` or another call uses the model", of_objects=True, in_all_threads=True,
    reason="It would drop the optimizer and the programs that are in use. Keras looks whether a class overrides it.",
)  # fmt: skip
STATELESS_CALL = Patch(
    keras.Model, "stateless_call", lifetime="while the last stage of a pipeline is traced", of_objects=True,
    reason="Keras' own step computes loss and metrics from the outputs of the stages.",
)  # fmt: skip
OWN_APPLY = Patch(
    keras.optimizers.Optimizer, "apply", lifetime="while a user's `train_step` with a tape is traced", of_objects=True,
    reason="An update by assignment becomes `stateless_apply`, where gradients are mapped and reduced over replicas.",
)  # fmt: skip
OWN_APPLY_GRADIENTS = Patch(
    keras.optimizers.Optimizer, "apply_gradients", of_objects=True,
    lifetime="while a user's `train_step` with a tape is traced",
    reason="The same; an optimizer may override either of them.",
)  # fmt: skip
STATELESS_APPLY = Patch(
    keras.optimizers.Optimizer, "stateless_apply", lifetime="while a user's `train_step` is traced", of_objects=True,
    reason="Gradients are mapped and reduced over replicas where a user's own step applies them.",
)  # fmt: skip
ADDED_LOSSES = Patch(
    keras.Layer, "add_loss", lifetime="while a user's function or a part of a program is traced",
    reason="Losses leave loops and conditionals as other values, and Keras does not say whose they are.",
)  # fmt: skip
LOSS_CALLS = Patch(
    keras.losses.Loss, "__call__", lifetime="while labels are compared with the model's outputs",
    reason="Which labels meet which output is decided inside Keras' compiled loss.",
)  # fmt: skip
CHECK_FINITE = Patch(
    keras.optimizers.LossScaleOptimizer, "check_finite", lifetime="while a stage's update is traced", of_objects=True,
    reason="Whether a scaled loss has overflowed is decided from the gradients of all stages.",
)  # fmt: skip
