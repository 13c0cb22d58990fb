"""`tf.train.Checkpoint` with models, layers, optimizers, metrics and variables of Keras.

TensorFlow's own class does the work, so files have TensorFlow's format, and `CheckpointManager` and
`tf.train.latest_checkpoint` know them. Each object of Keras is one part of a checkpoint, with its variables in order.

If several instances have what is saved in common, instance 0 writes, and all of them read what it has written. Saving
does not wait for the others, because scripts often save in instance 0 only; restoring does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from openipu.engine.devices import group
from openipu.engine.devices.current_system import open_strategies

import keras
import numpy as np
import tensorflow as tf

from .model_steps import built_without_call
from .replacements import Replacements
from .second_optimizers import second_optimizers

PARTS: Final = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable)
WEIGHTS: Final = ".weights.h5"


def install(replacements: Replacements) -> None:
    """Let checkpoints have parts of Keras, and files of weights any name."""
    replacements.put(tf.train, "Checkpoint", _checkpoint(tf.train.Checkpoint))
    manager = tf.train.CheckpointManager
    replacements.put(manager, "_record_state", _by_first(manager._record_state, lambda _: None))
    replacements.put(manager, "_sweep", _by_first(manager._sweep, _forget_old))
    replacements.put(keras.Model, "save_weights", _saving(keras.Model.save_weights))
    replacements.put(keras.Model, "load_weights", _loading(keras.Model.load_weights))
    callback = keras.callbacks.ModelCheckpoint
    replacements.put(callback, "__init__", _naming(callback.__init__))


class Part(tf.__internal__.tracking.Trackable):
    """An object of Keras in a checkpoint of TensorFlow."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._kept: dict[str, Part] = {}

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
        return children | self._optimizers()

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        own = self._optimizers().get(name)
        return super()._lookup_dependency(name, cached_dependencies) if own is None else own

    def _optimizers(self) -> dict[str, Part]:
        """A compiled model is saved with its optimizers."""
        built = {name: optimizer for name, optimizer in optimizers_of(self.owner).items() if optimizer.built}
        for name, optimizer in built.items():
            if name not in self._kept or self._kept[name].owner is not optimizer:
                self._kept[name] = Part(optimizer)
        return {name: self._kept[name] for name in built}


def optimizers_of(owner: object) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model by the names of its attributes: that of `compile`, and others."""
    if not isinstance(owner, keras.Model):
        return {}
    first = getattr(owner, "optimizer", None)
    return ({} if first is None else {"optimizer": first}) | second_optimizers(owner)


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
            _build(self._owners().values())
            if is_written_here(self):
                return super().save(file_prefix, options)
            self.save_counter.assign_add(1)
            return self.write(f"{file_prefix}-{int(self.save_counter)}", options)

        def _write(self, file_prefix: Any, options: Any = None) -> Any:  # `save`, `write` and managers call it
            _build(self._owners().values())
            if is_written_here(self):
                return super()._write(file_prefix, options)
            for owner in self._owners().values():
                if isinstance(owner, keras.Model):
                    owner.jax_state_sync()  # as in the instance that writes
            path = str(file_prefix)
            for callback in getattr(options, "experimental_write_callbacks", None) or ():
                callback(*([path] if inspect.signature(callback).parameters else []))
            return path

        def read(self, save_path: Any, options: Any = None) -> Any:  # `restore` calls it
            if is_common(self):  # instance 0 is here when it has written its files
                save_path = group.of_first("restoring a checkpoint", None if save_path is None else str(save_path))
            if save_path is not None:
                _build(self._owners().values())
                _build_as_saved(self._owners(), save_path)
                _check_built(self._owners(), save_path)
            return super().read(save_path, options)

        def _owners(self) -> dict[str, Any]:
            children = self._trackable_children()
            return {name: part.owner for name, part in children.items() if isinstance(part, Part)}

    return Checkpoint


def is_common(checkpoint: Any) -> bool:
    """Whether several instances have what is in a checkpoint in common."""
    if group.count() == 1:
        return False
    owners = (part.owner for part in checkpoint._trackable_children().values() if isinstance(part, Part))
    sessions = [vars(owner)["_ipu_session"] for owner in owners if "_ipu_session" in vars(owner)]
    return any(strategy.shared for strategy in (*open_strategies()[-1:], *(s.strategy for s in sessions)))


def is_written_here(checkpoint: Any) -> bool:
    """Whether this instance writes a checkpoint."""
    return group.index() == 0 or not is_common(checkpoint)


def _by_first(original: Callable[[Any], None], otherwise: Callable[[Any], None]) -> Callable[[Any], None]:
    """What a manager of checkpoints does with files, in the instance that writes them."""

    def method(self: tf.train.CheckpointManager) -> None:
        (original if is_written_here(self.checkpoint) else otherwise)(self)

    return method


def _forget_old(manager: Any) -> None:
    while manager._max_to_keep and len(manager._maybe_delete) > manager._max_to_keep:
        manager._maybe_delete.popitem(last=False)


# --- variables of optimizers -----------------------------------------------------------------------------------------


def _build(owners: Iterable[Any]) -> None:
    """Make the variables of optimizers whose models are in the same checkpoint, so that it always has them."""
    owners = list(owners)
    for owner in owners:
        if isinstance(owner, keras.Model):
            built_without_call(owner)
    layers = [owner for owner in owners if isinstance(owner, keras.Layer)]
    alone = [owner for owner in owners if isinstance(owner, keras.optimizers.Optimizer)]
    pairs = [(optimizers_of(layer).get("optimizer"), layer) for layer in layers]
    if len(layers) == 1:
        pairs += [(optimizer, layers[0]) for optimizer in alone]
    for optimizer, layer in pairs:
        weights = layer.trainable_variables
        if optimizer is not None and not optimizer.built and weights and layer.built:
            optimizer.build(weights)


def _unbuilt(owners: dict[str, Any]) -> dict[str, keras.optimizers.Optimizer]:
    """Optimizers without variables, by their names in the checkpoint."""
    found = {name: owner for name, owner in owners.items() if isinstance(owner, keras.optimizers.Optimizer)}
    for name, owner in owners.items():
        found |= {f"{name}/{attribute}": optimizer for attribute, optimizer in optimizers_of(owner).items()}
    return {name: optimizer for name, optimizer in found.items() if not optimizer.built}


def _build_as_saved(owners: dict[str, Any], save_path: Any) -> None:
    """Make the variables of optimizers that train only some of the layers: those whose shapes were saved."""
    unbuilt = _unbuilt(owners)
    if not unbuilt:
        return
    layers = [owner for owner in owners.values() if isinstance(owner, keras.Layer) and owner.built]
    inner = [value for layer in layers for value in vars(layer).values() if isinstance(value, keras.Layer)]
    groups = [layer.trainable_variables for layer in (*layers, *inner)]
    groups.append([v for layer in layers for v in layer.trainable_variables])
    candidates = list({tuple(map(id, weights)): weights for weights in groups if weights}.values())
    saved = tf.train.list_variables(save_path)
    for name, optimizer in unbuilt.items():
        shapes = [tuple(shape) for path, shape in sorted(saved) if path.startswith(f"{name}/") and "/." in path]
        fitting = [weights for weights in candidates if shapes and _shapes(optimizer, weights) == shapes]
        if len(fitting) == 1:
            optimizer.build(fitting[0])


def _shapes(optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]) -> list[tuple[int, ...]]:
    twin = type(optimizer).from_config(optimizer.get_config())
    twin.build(weights)
    return [tuple(v.shape) for v in twin.variables]


def _check_built(owners: dict[str, Any], save_path: Any) -> None:
    """Raise if something has no variables that could get the values of a checkpoint."""
    saved = {path for path, _ in tf.train.list_variables(save_path)}
    second = {n: o for n, o in _unbuilt(owners).items() if "/" in n and any(p.startswith(f"{n}/") for p in saved)}
    for owner in (*owners.values(), *second.values()):
        if getattr(owner, "built", True):
            continue
        if isinstance(owner, keras.optimizers.Optimizer):
            remedy = (
                "Put the model that it trains, after it has been built, into the same checkpoint, or call "
                "`optimizer.build(variables)` first."
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
