"""The methods that a model made inside a strategy's scope has instead of, or in addition to, Keras' own.

Thin: each call is handed to the engine together with the model's `Session`.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from openipu.engine import model as keras_model
from openipu.engine import run


class ModelExtension:
    """Trains, evaluates and predicts through compiled device loops."""

    _ipu_session: run.Session

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train the model; `steps_per_execution` steps are one launch of one compiled program."""
        return run.fit(self._ipu_session, *args, **kwargs)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Compute losses and metrics over the data."""
        return run.evaluate(self._ipu_session, *args, **kwargs)

    @functools.wraps(keras.Model.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs for every row of the data, in its order."""
        return run.predict(self._ipu_session, *args, **kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        """Prepare the program behind `fit` and `train_on_batch`."""
        return self._ipu_session.function("train", force)

    def make_test_function(self, force: bool = False) -> Any:
        """Prepare the program behind `evaluate` and `test_on_batch`."""
        return self._ipu_session.function("test", force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Prepare the program behind `predict` and `predict_on_batch`."""
        return self._ipu_session.function("predict", force)

    def jax_state_sync(self) -> None:
        """Put the state of a running execution into the model's variables; Keras' callbacks call this."""
        self._ipu_session.sync()
        super().jax_state_sync()  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Pickle as the plain model; like a loaded one, it belongs to the scope in which it is opened."""
        return keras_model.pickled(super().__reduce__())


@functools.cache
def extended(cls: type) -> type:
    """`cls` with the methods above; itself if it has them already."""
    return cls if issubclass(cls, ModelExtension) else keras_model.subclass_as(cls, ModelExtension)
