"""The classes of models that are made under a strategy: the user's own with our methods put underneath."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from .api import model_opener, take_names
from .patches import NEW_MODELS


def extend_new_models(
    extend: Callable[[type], type | None], made: Callable[[Any], None]
) -> contextlib.AbstractContextManager[None]:
    """Until the block ends, `extend(cls)` may swap the class of each Keras model that this thread makes.

    Keras' `Model.__new__` is the one place that every way of making a model passes through: Sequential, Functional,
    subclasses, `from_config`, `clone_model` and loading. `made` is shown each model whose class was swapped.
    """

    def new(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        # `Model(inputs, outputs)` makes a Functional, whose own __new__ comes back here.
        extended = None if cls is keras.Model else extend(cls)
        model = original(extended or cls, *args, **kwargs)
        if extended is not None:
            made(model)
        return model

    return NEW_MODELS.using(new)


def pickled(parts: Any) -> tuple[Any, ...]:
    """What Keras pickles a model to, without a reference to its swapped class, which has no importable name."""
    return (model_opener(), *parts[1:])


def subclass_as(cls: type, extension: type) -> Any:
    """A class that behaves as `cls` with `extension`'s methods put between the user's classes and Keras'.

    It keeps the name, module and registered name, so that a saved model names the user's class and opens anywhere.
    Keras rewrites the bases of functional subclasses in place, hence one private copy of the extension per class.
    """
    between = type(extension.__name__, (extension, keras.Model), {"__module__": extension.__module__})

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        # Cloning a model of a strategy outside of any scope ends here, and gives a plain one.
        model = super(extended, kind).__new__(kind, *args, **kwargs)
        return model if "_ipu_session" in model.__dict__ else cls(*args, **kwargs)

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__new__": new}
    extended: Any = type(cls.__name__, (cls, between), namespace)
    take_names(extended, cls)
    return extended
