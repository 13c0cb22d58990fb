"""What instances that train together have in common during a call of `fit`: one bar, one set of files, one end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openipu.engine.devices import group
from openipu.engine.devices.placement import Placement

import keras
from keras.callbacks import Callback

WRITERS = tuple(
    getattr(keras.callbacks, name) for name in ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "TensorBoard")
)
"""Callbacks of Keras that write files. Only those of instance 0 run."""


def without_writers(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """The callbacks that run in other instances than the first one."""
    listed = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    return [callback for callback in listed if not isinstance(callback, WRITERS)]


def may_act_alone(place: Placement, callbacks: keras.callbacks.CallbackList) -> bool:
    """Whether callbacks may stop, read or change the model between executions in some of its processes only."""
    return not place.replicas.is_local and group.any_of(
        "callbacks that act alone", any(map(_acts, callbacks.callbacks))
    )


def _acts(callback: Callback) -> bool:
    """Whether a callback may do such a thing: those of the user, and those of Keras that save between executions."""
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return True
    ours = type(callback).__module__.startswith(("keras.", "openipu."))
    return getattr(callback, "save_freq", "epoch") != "epoch" if ours else True


def one_end(alone: bool, stopped: Callable[[], bool]) -> Callable[[], bool]:
    """Whether this process has stopped, or any process if callbacks may stop one alone. Asked after each execution."""
    return (lambda: group.any_of("the end of an execution", stopped())) if alone else stopped
