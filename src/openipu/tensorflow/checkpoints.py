"""`tf.train.Checkpoint` with models, layers, optimizers, metrics and variables of Keras.

TensorFlow's own class does the work, so files have TensorFlow's format, and `CheckpointManager` and
`tf.train.latest_checkpoint` know them. Each object of Keras is one part of a checkpoint, with its variables in order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from .replacements import Replacements

PARTS: Final = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable)
WEIGHTS: Final = ".weights.h5"


def install(replacements: Replacements) -> None:
    """Let checkpoints have parts of Keras, and files of weights any name."""
    replacements.put(tf.train, "Checkpoint", _checkpoint(tf.train.Checkpoint))
    replacements.put(keras.Model, "save_weights", _saving(keras.Model.save_weights))
    replacements.put(keras.Model, "load_weights", _loading(keras.Model.load_weights))
    callback = keras.callbacks.ModelCheckpoint
    replacements.put(callback, "__init__", _naming(callback.__init__))


class Part(tf.__internal__.tracking.Trackable):
    """An object of Keras in a checkpoint of TensorFlow."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._kept: Part | None = None

    def _variables(self) -> dict[str, keras.Variable]:
        owner = self.owner
        if isinstance(owner, keras.Model):
            owner.jax_state_sync()
        if isinstance(owner, keras.Layer):
            found = [*owner.trainable_variables, *owner.non_trainable_variables]
        else:
            found = [owner] if isinstance(owner, keras.Variable) else list(owner.variables)
        return {f"{number:04d}": variable for number, variable in enumerate(found)}

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {name: tf.convert_to_tensor(np.asarray(v.value)) for name, v in self._variables().items()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        for name, variable in self._variables().items():
            variable.assign(restored_tensors[name].numpy())

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children: dict[str, Any] = super()._trackable_children(save_type, **kwargs)
        optimizer = self._optimizer()
        return children if optimizer is None else children | {"optimizer": optimizer}

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        return self._optimizer() if name == "optimizer" else super()._lookup_dependency(name, cached_dependencies)

    def _optimizer(self) -> Part | None:
        """A compiled model is saved with its optimizer."""
        optimizer = _optimizer_of(self.owner)
        if optimizer is None or not optimizer.built:
            return None
        if self._kept is None or self._kept.owner is not optimizer:
            self._kept = Part(optimizer)
        return self._kept


def _optimizer_of(owner: object) -> keras.optimizers.Optimizer | None:
    return getattr(owner, "optimizer", None) if isinstance(owner, keras.Model) else None


def _checkpoint(original: Any) -> type:
    class Checkpoint(original):
        __doc__ = original.__doc__

        def __init__(self, root: Any = None, **kwargs: Any) -> None:
            if isinstance(root, PARTS):
                raise TypeError(
                    f"A checkpoint was given a {type(root).__name__} without a name. Give it one: "
                    "`tf.train.Checkpoint(model=model)`."
                )
            own = {name: value for name, value in kwargs.items() if isinstance(value, PARTS)}
            super().__init__(root, **{name: value for name, value in kwargs.items() if name not in own})
            for name, value in own.items():
                setattr(self, name, value)

        def __setattr__(self, name: str, value: Any) -> None:
            if not isinstance(value, PARTS):
                super().__setattr__(name, value)
                return
            self._track_trackable(Part(value), name=name, overwrite=True)
            object.__setattr__(self, name, value)

        def save(self, file_prefix: Any, options: Any = None) -> Any:
            _build(self._owners())
            return super().save(file_prefix, options)

        def write(self, file_prefix: Any, options: Any = None) -> Any:
            _build(self._owners())
            return super().write(file_prefix, options)

        def read(self, save_path: Any, options: Any = None) -> Any:  # `restore` calls it
            if save_path is not None:
                _build(self._owners())
                _check_built(self._owners(), save_path)
            return super().read(save_path, options)

        def _owners(self) -> list[Any]:
            return [part.owner for part in self._trackable_children().values() if isinstance(part, Part)]

    return Checkpoint


def _build(owners: list[Any]) -> None:
    """Make the variables of optimizers whose models are in the same checkpoint, so that it always has them."""
    layers = [owner for owner in owners if isinstance(owner, keras.Layer)]
    compiled = [(_optimizer_of(layer), [layer]) for layer in layers]
    alone = [(owner, layers) for owner in owners if isinstance(owner, keras.optimizers.Optimizer)]
    for optimizer, trained in (*compiled, *alone):
        weights = [v for layer in trained for v in layer.trainable_variables]
        if optimizer is not None and not optimizer.built and weights and all(layer.built for layer in trained):
            optimizer.build(weights)


def _check_built(owners: list[Any], save_path: Any) -> None:
    """Raise if something has no variables that could get the values of a checkpoint."""
    for owner in owners:
        if getattr(owner, "built", True):
            continue
        if isinstance(owner, keras.optimizers.Optimizer):
            remedy = (
                "Put the model that it trains into the same checkpoint, or call `optimizer.build(variables)` first."
            )
        else:
            remedy = "Call it on a batch, or its `build` with a shape, before `restore`."
        raise ValueError(f"{owner.name!r} has no variables yet that could be restored from {save_path}. {remedy}")


# --- files of weights ------------------------------------------------------------------------------------------------


def _named(filepath: str | Path) -> str:
    """The name of a file of weights: with the ending that Keras 3 asks for, unless it has one of Keras'."""
    name = str(filepath)
    return name if name.endswith((".h5", ".keras", ".weights.json")) else name + WEIGHTS


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_weights(self: keras.Model, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        from tensorflow.python.checkpoint import checkpoint_management

        name = _named(filepath)
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        original(self, name, *args, **kwargs)
        if name != str(filepath):  # `tf.train.latest_checkpoint` finds it, as it did
            checkpoint_management.update_checkpoint_state_internal(str(Path(name).parent), name)

    save_weights.__doc__ = original.__doc__
    return save_weights


class Loaded:
    """What `load_weights` returned: Keras has loaded all weights, or raised an error."""

    def expect_partial(self) -> Loaded:
        """Nothing is left."""
        return self

    assert_consumed = assert_existing_objects_matched = assert_nontrivial_match = expect_partial


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_weights(self: keras.Model, filepath: str | Path, *args: Any, **kwargs: Any) -> Loaded:
        original(self, _named(filepath), *args, **kwargs)
        return Loaded()

    load_weights.__doc__ = original.__doc__
    return load_weights


def _naming(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: keras.callbacks.ModelCheckpoint, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        weights_only = kwargs.get("save_weights_only", len(args) > 3 and args[3])
        original(self, _named(filepath) if weights_only else filepath, *args, **kwargs)
        if weights_only:
            self.filepath = str(filepath)  # `save_weights` completes it

    return init
