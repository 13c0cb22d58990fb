"""The classes of models made under a strategy: the user's own class with our methods put underneath."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from .api import model_opener, take_names
from .patches import NEW_MODELS


def extend_new_models(
    extend: Callable[[type], type | None], made: Callable[[keras.Model], None]
) -> contextlib.AbstractContextManager[None]:
    """Until the block ends, `extend(cls)` may swap the class of each Keras model that this thread makes.

    Every way of making a model passes through Keras' `Model.__new__`: Sequential, Functional, subclasses,
    `from_config`, `clone_model` and loading. `made` is called with each model whose class was swapped.
    """

    def new(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        # `Model(inputs, outputs)` makes a Functional, whose own __new__ leads back here.
        extended = None if cls is keras.Model else extend(cls)
        model = original(extended or cls, *args, **kwargs)
        if extended is not None:
            made(model)
        return model

    return NEW_MODELS.using(new)


def pickled(parts: Sequence[Any]) -> tuple[Any, ...]:
    """What Keras pickles of a model, without the reference to its swapped class, which cannot be imported."""
    return (model_opener(), *parts[1:])


def subclass_as(cls: type, extension: type) -> Any:
    """A class that behaves like `cls`, with `extension`'s methods put between the user's classes and Keras'.

    It keeps the name, module and registered name, so a saved model names the user's class and loads anywhere.
    Keras rewrites the bases of functional subclasses in place, hence one private copy of the extension per class.
    """
    between = type(extension.__name__, (extension, keras.Model), {"__module__": extension.__module__})

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        # Cloning a strategy's model outside any scope leads here, and makes a plain model.
        model = super(extended, kind).__new__(kind, *args, **kwargs)
        return model if "_ipu_session" in model.__dict__ else cls(*args, **kwargs)

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__new__": new}
    extended: Any = type(cls.__name__, (cls, between), namespace)
    take_names(extended, cls)
    return extended
