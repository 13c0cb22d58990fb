"""Puts everything in place, once, and takes it away again."""

from __future__ import annotations

import importlib.util
import threading

from . import names
from .replacements import Replacements

_lock = threading.Lock()
_replacements: Replacements | None = None


def installed() -> bool:
    """Whether scripts for TensorFlow on the IPU can run in this process."""
    return _replacements is not None


def install() -> None:
    """Let scripts for TensorFlow on the IPU run in this process."""
    global _replacements
    with _lock:
        if _replacements is not None:
            return
        check()
        replacements = Replacements()
        names.install(replacements)
        # Here, because they load TensorFlow.
        from . import (
            bridge,
            checkpoints,
            control_flow,
            control_functions,
            converted_calls,
            datasets,
            estimator,
            functions,
            gradient_tape,
            idioms,
            keras_backend,
            model_steps,
            shapes,
            values,
        )

        for part in (
            idioms, keras_backend, datasets, values, shapes, bridge, gradient_tape, control_flow, control_functions,
            functions, converted_calls, model_steps, checkpoints, estimator,
        ):  # fmt: skip
            part.install(replacements)
        _replacements = replacements


def uninstall() -> None:
    """Leave TensorFlow and Keras as they were."""
    global _replacements
    with _lock:
        if _replacements is not None:
            _replacements.undo()
            names.forget()
            _replacements = None


def check() -> None:
    """Raise if TensorFlow is not there."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "Scripts for TensorFlow need TensorFlow itself, which is not installed. Install it with "
            '`pip install "openipu[tensorflow]"`.'
        )
