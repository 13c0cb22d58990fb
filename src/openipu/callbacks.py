"""Callbacks for `fit` of models created in a strategy's scope."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from openipu import _validate as validate
from openipu.engine.checkpoint import Checkpoints, refuse_foreign, unusable, why
from openipu.engine.core.model_state import assign, values_of, variables_of
from openipu.engine.core.state import Logs, State
from openipu.engine.core.state_names import Names, check_names, in_saved_order, names_of
from openipu.engine.data import position as positions
from openipu.engine.data.position import Position
from openipu.engine.devices import group
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.transfer import of_first_process
from openipu.engine.facts.calls import join
from openipu.engine.fit.callback_counters import counters_of, put_back
from openipu.engine.fit.session import ResumePoint
from openipu.engine.report.folder import FolderReport

import keras
import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Checkpoint", "Report"]
log = logging.getLogger("openipu")

_LIKE_FIT: Final = {"epoch": 0, "ended": False, "position": "", "history": "", "callbacks": ""}
"""The part of a checkpoint that is neither state nor logs, with values of the right types."""


class Checkpoint(keras.callbacks.Callback):
    """Saves everything that training depends on. The same `fit`, called in a new process, resumes from there.

    >>> history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[ipu.callbacks.Checkpoint("run")])

    It can resume in the middle of an epoch, and gives bit for bit the result of a run that was never interrupted. A
    checkpoint holds the weights, optimizer, metrics, random state, position in the data, history, and the counters of
    Keras' callbacks. A folder belongs to one run, which may take several calls of `fit`; use another folder to start
    over. `initial_epoch` only matters when a run starts. When it resumes, `initial_epoch` must not skip any epochs.

    Args:
        dir: The folder for the checkpoints. It is created when it is needed.
        every_n_executions: How many executions lie between checkpoints. The last execution of the last epoch is
            always saved.
        keep: How many of the newest checkpoints to keep; None keeps all.
        every_seconds: If given, the minimum time between checkpoints.
        max_share: The share of the time that writing may take. If executions are so short that writing would take a
            larger share, the next checkpoint waits. 1 sets no limit.
        required: Whether `fit` raises an error when it begins and nothing can be saved in `dir`: because it is a file,
            read-only, or on a full disk. If False, it trains without checkpoints until one can be saved.
    """

    _place: Placement
    """Where the model trains. Known from the beginning of the training."""
    _names: Names
    """What the parts of the model's state are called. Known from then, too."""

    def __init__(
        self,
        dir: str | Path,
        every_n_executions: int = 1,
        keep: int | None = 5,
        every_seconds: float | None = None,
        max_share: float = 0.03,
        required: bool = True,
    ) -> None:
        super().__init__()
        folder = validate.path("dir", dir)
        self._every = validate.count("every_n_executions", every_n_executions)
        self._required = validate.flag("required", required)
        self._checkpoints = Checkpoints(folder, keep=keep, every_seconds=every_seconds, max_share=max_share)
        self._epoch, self._waiting = 0, 0
        self._pending: Callable[[], None] | None = None

    def load_weights(self, model: keras.Model) -> int:
        """Load the weights of the newest intact checkpoint into a built Keras model with the same variables.

        They are found by the names of layers and variables, so other layers may be frozen.

        Returns:
            The step at which it was saved: the number of batches trained on, over all replicas.
        """
        owners = variables_of(model, "predict")
        here, parts = names_of(model, owners), owners

        def like(saved: dict[str, Any], place: str) -> dict[str, Any]:
            nonlocal parts
            names = _saved_names(saved)
            parts = in_saved_order(names, here, owners, place) if names else owners
            return _tree(values_of(parts), "trainable", "non_trainable")

        step, tree = self._checkpoints.restore(like)
        assign(parts, State(tree["trainable"], tree["non_trainable"], [], []))
        return step

    # --- what Keras calls

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Take the folder for this run, and resume from its newest intact checkpoint, if there is one."""
        session = getattr(self.model, "_ipu_session", None)
        if session is None:
            raise ValueError(
                f"`Checkpoint` saves models of a strategy, but {self.model.name!r} was created outside its scope. "
                "Create it inside `strategy.scope()`, or use `keras.callbacks.BackupAndRestore`."
            )
        if session.left_to_keras("train"):
            raise ValueError(
                f"`Checkpoint` saves between compiled executions, but Keras' own loop runs {self.model.name!r} step by "
                "step (`run_eagerly=True` or `jit_compile=False`). Use `keras.callbacks.BackupAndRestore` while you "
                "debug."
            )
        if session.keeper is not None:
            raise ValueError("`fit` was given two `Checkpoint` callbacks, but a run resumes from one folder. Give one.")
        self._place = session.place("train")
        self._names = names_of(self.model, variables_of(self.model, "train"))
        if self._writes:
            if self._checkpoints.latest() is None:
                refuse_foreign("`dir`", self._checkpoints.folder)
            self._open()
        session.keeper = self
        self._waiting, self._pending = 0, None
        if self._place.of_first(
            "whether there is a checkpoint", self._writes and self._checkpoints.latest() is not None
        ):
            session.resume = self._restore()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Complete the history of a run that had nothing left to do."""
        self._resumed()

    # --- instances that train together

    @property
    def _writes(self) -> bool:
        """Whether this process reads and writes the folder. Of instances that train together, only the first one does.

        So they need no disk in common. Its values become those of the others when they go to the devices.
        """
        return self._place.speaks

    def _shared_state(
        self, owners: State, step: int, fit: dict[str, Any], logs: Logs, state: State
    ) -> tuple[int, dict[str, Any], Logs, State]:
        """What instance 0 has read. The metrics are those of each replica, so they are sent here."""
        if self._place.replicas.is_local:
            return step, fit, logs, state
        shapes = [list(np.shape(metric)) for metric in state.metrics]
        plain = {name: _as_list(value) for name, value in logs.items()}
        step, fit, logs, shapes = group.of_first("a checkpoint", [step, fit, plain, shapes])
        metrics = [
            np.asarray(metric, owner.dtype) if self._writes else np.zeros(shape, owner.dtype)
            for metric, shape, owner in zip(state.metrics, shapes, owners.metrics, strict=True)
        ]
        return step, fit, logs, state._replace(metrics=of_first_process(metrics))

    # --- what the engine calls

    def executed(self, position: Position, state: Callable[[], State], logs: Logs, last: bool) -> None:
        """Save a checkpoint if one is due."""
        self._waiting += 1
        final = last and self._epoch + 1 == self.params["epochs"]
        due = final or (self._waiting >= self._every and self._checkpoints.due(position.step))
        if self._place.of_first("whether a checkpoint is due", due):
            self._waiting = 0
            parts, fit = _tree(state(), *State._fields), self._fit(position, last)
            if self._writes:
                names = {part: json.dumps(listed) for part, listed in self._names.items()}
                self._checkpoints.save(position.step, {"fit": fit, "logs": logs, "names": names, **parts})

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        self._checkpoints.close()

    # --- saving and restoring

    def _open(self) -> None:
        """Take the folder, unless nothing can be saved in it and that is allowed."""
        folder = self._checkpoints.folder
        size = sum(variable.nbytes for part in values_of(variables_of(self.model, "train")) for variable in part)
        try:
            self._checkpoints.open(size)
        except OSError as error:
            if self._required:
                raise unusable("`dir`", folder, error) from None
            log.warning("Nothing can be saved in %s: %s. Training begins without checkpoints.", folder, why(error))

    def _fit(self, position: Position, ended: bool) -> dict[str, Any]:
        """The part of a checkpoint that is neither state nor logs."""
        history = self.model.history
        here = replace(position, now=positions.random()).to_json()
        return {
            "epoch": self._epoch,
            "ended": ended,
            "position": json.dumps(group.exchange("the position in the data", here)) if self._place.own_data else here,
            "history": json.dumps({"epoch": history.epoch, "history": history.history}, default=_as_list),
            "callbacks": json.dumps([counters_of(callback) for callback in self._callbacks()]),
        }

    def _restore(self) -> ResumePoint:
        """The newest intact checkpoint. It is also loaded into the model, for callbacks that read it before it runs."""
        owners = variables_of(self.model, "train")
        step, fit, logs, state = self._shared_state(owners, *self._read(owners))
        try:
            position, history, callbacks = _parsed(fit, group.index() if self._place.own_data else None)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"The checkpoint of step {step} in {self._checkpoints.folder} has contents that `Checkpoint` does not "
                f"write ({type(error).__name__}: {error}). Use another folder, or move this checkpoint elsewhere."
            ) from error
        assign(owners, state)
        self._pending = partial(self._put_back, history, callbacks)
        resume = ResumePoint(fit["epoch"], fit["ended"], position, state, logs, self._resumed)
        log.info(
            "%s: resumes from the checkpoint of step %d in %s: epoch %d, step %d",
            self.model.name, step, self._checkpoints.folder, resume.epoch + 1, resume.position.done,
        )  # fmt: skip
        return resume

    def _read(self, owners: State) -> tuple[int, dict[str, Any], Logs, State]:
        """The step of the newest intact checkpoint, what it says about `fit`, its logs, and its state."""
        values = values_of(owners)
        if not self._writes:
            return 0, {}, {}, values

        def like(saved: dict[str, Any], place: str) -> dict[str, Any]:
            names = _saved_names(saved)
            if names:
                check_names(names, self._names, place)
            parts = _tree(values, "trainable", "non_trainable", "optimizer")
            return parts | {"fit": _LIKE_FIT, "logs": None, "metrics": None}

        step, tree = self._checkpoints.restore(like)
        metrics = _metrics(
            tree["metrics"], owners.metrics, f"The checkpoint of step {step} in {self._checkpoints.folder}"
        )
        return (
            step,
            tree["fit"],
            tree["logs"],
            State(tree["trainable"], tree["non_trainable"], tree["optimizer"], metrics),
        )

    def _resumed(self) -> None:
        """Restore what Keras and its callbacks reset when training begins."""
        if self._pending is not None:
            self._pending()
            self._pending = None

    def _put_back(self, history: dict[str, Any], callbacks: list[dict[str, Any]]) -> None:
        self.model.history.epoch[:] = history["epoch"]
        self.model.history.history.update(history["history"])
        here = [counters for counters in callbacks if self._writes or not counters.get("writes")]
        put_back(self._callbacks(), here)

    def _callbacks(self) -> list[Any]:
        """The callbacks of the running `fit` whose counters are saved; none when it has ended."""
        running = self.model._ipu_session.callbacks
        kinds = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
        return [c for c in running.callbacks if isinstance(c, kinds)] if running else []


class Report(keras.callbacks.Callback):
    """Reports on `fit`, `evaluate` or `predict`, as `ipu.report` does on everything.

    >>> history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[ipu.callbacks.Report("out")])

    The files are written every few seconds and at the end, even if the call fails. If one callback is given to several
    calls, its report has all of them.

    Args:
        dir: The folder for `report.html`, `report.json` and `trace.json`. It is made if it does not exist; files of
            an earlier report are replaced.
    """

    def __init__(self, dir: str | Path) -> None:
        super().__init__()
        self._report = FolderReport(validate.path("dir", dir))

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Begin to record a `fit`."""
        self._join("fit")

    def on_test_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Begin to record an `evaluate`, unless it is a part of a `fit`."""
        self._join("evaluate")

    def on_predict_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        """Begin to record a `predict`."""
        self._join("predict")

    def _join(self, call: str) -> None:
        if not hasattr(self.model, "_ipu_session"):
            raise ValueError(
                f"`Report` tells about models of a strategy, but {self.model.name!r} was created outside its scope. "
                "Create it inside `strategy.scope()`, or leave the callback out."
            )
        join(self._report, call, self.model.name)


def _saved_names(values: dict[str, Any]) -> Names | None:
    """What the parts of a saved state are called; None if the checkpoint does not say, because it is an old one."""
    saved = {part: values.get(f"names.{part}") for part in State._fields}
    return None if None in saved.values() else {part: json.loads(str(names)) for part, names in saved.items()}


def _metrics(saved: dict[str, Any], owners: list[Any], where: str) -> list[Any]:
    """The saved values of metric variables, in order. With replicas, each has one more axis."""
    metrics = [saved[str(i)] for i in range(len(saved)) if str(i) in saved]
    if len(metrics) != len(owners):
        raise ValueError(
            f"{where} has {len(metrics)} metric variables, but the model has {len(owners)}. Compile it with the same "
            "metrics, or use another folder."
        )
    for value, variable in zip(metrics, owners, strict=True):
        shape = tuple(variable.shape)
        if np.shape(value) != shape and np.shape(value)[1:] != shape:
            raise ValueError(
                f"{where} has a metric variable of shape {list(np.shape(value))}, where {variable.path!r} has shape "
                f"{list(shape)}. Compile the model with the same metrics, or use another folder."
            )
    return metrics


def _parsed(fit: dict[str, Any], instance: int | None) -> tuple[Position, dict[str, Any], list[dict[str, Any]]]:
    """The position, the history, and the counters of callbacks that `Checkpoint._fit` has saved.

    Instances with data of their own have each saved a position.
    """
    history, callbacks = json.loads(fit["history"]), json.loads(fit["callbacks"])
    if not isinstance(history["epoch"], list) or not isinstance(history["history"], dict):
        raise TypeError("`history` is not a history")
    if not isinstance(callbacks, list) or not all(isinstance(counters, dict) for counters in callbacks):
        raise TypeError("`callbacks` is not a list of counters")
    position = json.loads(fit["position"])
    if isinstance(position, list) != (instance is not None) or (
        instance is not None and len(position) != group.count()
    ):
        saved = f"{len(position)} instances with data of their own" if isinstance(position, list) else "shared data"
        raise ValueError(
            f"it was saved with {saved}, so this run, with {validate.counted(group.count(), 'instance')}, cannot find "
            "its place in the data; `Checkpoint.load_weights` loads the weights alone"
        )
    return Position.from_json(fit["position"] if instance is None else position[instance]), history, callbacks


def _tree(state: State, *parts: str) -> dict[str, Any]:
    return {part: getattr(state, part) for part in parts}


def _as_list(value: ArrayLike) -> Any:
    """An array in the logs, in a form that JSON has."""
    return np.asarray(value).tolist()
