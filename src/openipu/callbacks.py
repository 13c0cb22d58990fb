"""Callbacks for `fit` of models that were made in a strategy's scope."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from openipu import _validate as validate
from openipu.engine.checkpoint import Checkpoints
from openipu.engine.core.model_state import assign, values_of, variables_of
from openipu.engine.core.state import Logs, State
from openipu.engine.data import position as positions
from openipu.engine.data.position import Position
from openipu.engine.fit.session import ResumePoint

import keras
import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Checkpoint"]
log = logging.getLogger("openipu")

COUNTERS = ("best", "best_epoch", "cooldown_counter", "stopped_epoch", "wait")
"""What EarlyStopping, ReduceLROnPlateau and ModelCheckpoint call what they decide by."""


class Checkpoint(keras.callbacks.Callback):
    """Saves all that training depends on; the same `fit`, called again in a new process, goes on from there.

    >>> model.fit(x, y, epochs=10, callbacks=[ipu.callbacks.Checkpoint("run")])

    It goes on also in the middle of an epoch, and ends with the same bits as a run that was never stopped. A checkpoint
    holds weights, optimizer, metrics, random state, the position in the data, the history, and the counters of Keras'
    callbacks. One folder belongs to one run, which may take several `fit`s: use another one to begin anew. So
    `initial_epoch` says where a run begins; in one that goes on, it must only not leave epochs out.

    Args:
        dir: Folder of the checkpoints. It is made when it is needed.
        every_n_executions: Executions from one checkpoint to the next. The last execution is always saved.
        keep: How many of the newest checkpoints stay; None keeps all.
        every_seconds: If given, the least time from one checkpoint to the next.
        max_share: The share of the time that writing may take. With executions so short that it would take more, the
            next checkpoint waits. 1 lets it take what it needs.
    """

    def __init__(
        self,
        dir: str | Path,
        every_n_executions: int = 1,
        keep: int | None = 5,
        every_seconds: float | None = None,
        max_share: float = 0.03,
    ) -> None:
        super().__init__()
        folder = validate.path("dir", dir)
        self._every = validate.count("every_n_executions", every_n_executions)
        self._checkpoints = Checkpoints(folder, keep=keep, every_seconds=every_seconds, max_share=max_share)
        self._epoch, self._waiting = 0, 0
        self._pending: Callable[[], None] | None = None

    def load_weights(self, model: keras.Model) -> int:
        """Put the weights of the newest intact checkpoint into any built Keras model like the one it was saved from.

        Returns:
            The step it was saved at: batches trained on, over all replicas.
        """
        owners = variables_of(model, "predict")
        step, tree = self._checkpoints.restore(_tree(values_of(owners), "trainable", "non_trainable"))
        assign(owners, State(tree["trainable"], tree["non_trainable"], [], []))
        return step

    # --- what Keras calls

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Go on from the newest intact checkpoint, if there is one."""
        session = getattr(self.model, "_ipu_session", None)
        if session is None:
            raise ValueError(
                f"`Checkpoint` saves models of a strategy, but {self.model.name!r} was made outside of its scope. Make "
                "it inside `strategy.scope()`, or use `keras.callbacks.BackupAndRestore`."
            )
        if session.keeper is not None:
            raise ValueError("Two `Checkpoint` callbacks were given, but a run goes on from one place. Give one.")
        session.keeper = self
        self._waiting, self._pending = 0, None
        self._checkpoints.wait()
        if self._checkpoints.latest() is not None:
            session.resume = self._restore()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Note the epoch."""
        self._epoch = epoch

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Complete the history of a run that had nothing left to do."""
        self._resumed()

    # --- what the engine calls

    def executed(self, position: Position, state: Callable[[], State], logs: Logs, last: bool) -> None:
        """Save, if it is time to."""
        self._waiting += 1
        final = last and self._epoch + 1 == self.params["epochs"]
        if final or (self._waiting >= self._every and self._checkpoints.due(position.step)):
            self._waiting = 0
            parts = _tree(state(), *State._fields)
            self._checkpoints.save(position.step, {"fit": self._fit(position, last), "logs": logs, **parts})

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        self._checkpoints.close()

    # --- saving and restoring

    def _fit(self, position: Position, ended: bool) -> dict[str, Any]:
        """What is neither state nor logs."""
        history = self.model.history
        return {
            "epoch": self._epoch,
            "ended": ended,
            "position": replace(position, now=positions.random()).to_json(),
            "history": json.dumps({"epoch": history.epoch, "history": history.history}, default=_as_list),
            "callbacks": json.dumps([_counters(callback) for callback in self._callbacks()]),
        }

    def _restore(self) -> ResumePoint:
        """The newest intact checkpoint, also put into the model, for callbacks that look at it before it runs."""
        owners = variables_of(self.model, "train")
        like = _tree(values_of(owners), "trainable", "non_trainable", "optimizer")
        step, tree = self._checkpoints.restore(like | {"fit": None, "logs": None, "metrics": None})
        metrics = [tree["metrics"][str(i)] for i in range(len(tree["metrics"]))]
        if len(metrics) != len(owners.metrics):
            raise ValueError(
                f"The checkpoint of step {step} in {self._checkpoints.folder} has {len(metrics)} metric variables, "
                f"the model {len(owners.metrics)}. Compile it with the same metrics, or use another folder."
            )
        state = State(tree["trainable"], tree["non_trainable"], tree["optimizer"], metrics)
        assign(owners, state)
        fit = tree["fit"]
        self._pending = partial(self._put_back, json.loads(fit["history"]), json.loads(fit["callbacks"]))
        moment = ResumePoint(
            fit["epoch"], fit["ended"], Position.from_json(fit["position"]), state, tree["logs"], self._resumed
        )
        log.info(
            "%s: goes on from the checkpoint of step %d in %s: epoch %d, step %d",
            self.model.name, step, self._checkpoints.folder, moment.epoch + 1, moment.position.done,
        )  # fmt: skip
        return moment

    def _resumed(self) -> None:
        """Put back what Keras and callbacks forget when training begins."""
        if self._pending is not None:
            self._pending()
            self._pending = None

    def _put_back(self, history: dict[str, Any], callbacks: list[dict[str, float]]) -> None:
        self.model.history.epoch[:] = history["epoch"]
        self.model.history.history.update(history["history"])
        for callback, counters in zip(self._callbacks(), callbacks, strict=False):
            vars(callback).update({n: v for n, v in counters.items() if hasattr(callback, n)})

    def _callbacks(self) -> list[Any]:
        """Those of the running `fit` that stop it, change the learning rate or save; none when it is over."""
        running = self.model._ipu_session.callbacks
        kinds = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
        return [c for c in running.callbacks if isinstance(c, kinds)] if running else []


def _counters(callback: keras.callbacks.Callback) -> dict[str, float]:
    """What a callback of Keras has counted and seen."""
    values = {name: vars(callback).get(name) for name in COUNTERS}
    return {name: float(v) if isinstance(v, np.floating) else v for name, v in values.items() if v is not None}


def _tree(state: State, *parts: str) -> dict[str, Any]:
    return {part: getattr(state, part) for part in parts}


def _as_list(value: ArrayLike) -> Any:
    """An array among the logs as JSON knows it."""
    return np.asarray(value).tolist()
