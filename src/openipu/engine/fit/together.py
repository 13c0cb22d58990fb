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
ACTORS = keras.callbacks.LambdaCallback, keras.callbacks.TensorBoard, keras.callbacks.TerminateOnNaN
"""Callbacks of Keras that stop or look at the model between executions. Others do so if they have a `save_freq`."""


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
    """Whether a callback may do such a thing: those of the user, and some of Keras."""
    if isinstance(callback, ACTORS):
        return True
    ours = type(callback).__module__.startswith(("keras.", "openipu."))
    return getattr(callback, "save_freq", "epoch") != "epoch" if ours else True


def one_end(place: Placement, alone: bool, stopped: Callable[[], bool]) -> Callable[[], bool]:
    """Whether this process has stopped, or one that it runs together with. To be asked after each execution."""
    if place.replicas.is_local:
        return stopped
    return (lambda: group.any_of("the end of an execution", stopped())) if alone else _AgreedEnd(stopped)


class _AgreedEnd:
    """The end of a call that may be stopped in one process, not by a callback but by a signal or a thread.

    [Note: an end without waiting] A process that is to stop after execution n proposes the end of n + 2 to all, and
    goes on. Nobody misses that: an execution ends in no process before all of them have launched it, and at most two
    are under way. So whoever has launched n + 2 knows that n + 1 has ended, which was launched after the proposal.
    """

    AHEAD = 2

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped, self._key = stopped, f"end/{group.occasion()}"
        self._done = 0
        self._proposed = False

    def __call__(self) -> bool:
        self._done += 1
        if not self._proposed and self._stopped():
            self._proposed = True
            group.propose(self._key, self._done + self.AHEAD)
        end = group.proposed(self._key)
        return end is not None and self._done >= end
