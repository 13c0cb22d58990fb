"""What instances that train together have in common during a call of `fit`: one bar, one set of files, one end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openipu.engine.devices import group

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


def one_end(callbacks: keras.callbacks.CallbackList, stopped: Callable[[], bool]) -> Callable[[], bool]:
    """Whether any process has stopped. Asked after each execution, if callbacks of the user may stop one alone."""
    foreign = [c for c in callbacks.callbacks if not type(c).__module__.startswith(("keras.", "openipu."))]
    if not group.any_of("callbacks that may stop", bool(foreign)):
        return stopped
    return lambda: group.any_of("the end of an execution", stopped())
