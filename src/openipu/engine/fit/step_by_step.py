"""Models whose steps are not compiled: Keras' own loop runs them one by one, for debugging on one device."""

from __future__ import annotations

import logging

from openipu import _validate as validate
from openipu.engine.core.options import Options
from openipu.engine.core.state import Mode
from openipu.engine.devices.placement import Placement
from openipu.engine.keras_compat.api import layers_without_jit

import keras

log = logging.getLogger("openipu")


def uncompiled_by(model: keras.Model) -> str | None:
    """The setting that keeps the steps of `model` from being compiled, as users write it, or None.

    With random augmentation among its layers, a model has `jit_compile=False` by default, though JAX can compile it. So
    there the setting says nothing about what the user wants.
    """
    if model.run_eagerly:
        return "run_eagerly=True"
    if model.compiled and model.jit_compile:
        return None
    layers, harmless = layers_without_jit(model)
    real = [layer.name for layer in layers if layer not in harmless]
    if real:
        return f"supports_jit=False of layer {real[0]!r}"
    return "jit_compile=False" if model.compiled and not harmless else None


def mention_compiled(model: keras.Model) -> None:
    """Say that steps are compiled that Keras would not compile."""
    layers, harmless = ([], []) if model.compiled and model.jit_compile else layers_without_jit(model)
    if harmless and len(harmless) == len(layers):
        log.info(
            "%s: its steps are compiled, though Keras would not do that with %s; `run_eagerly=True` prevents it",
            model.name, ", ".join(layer.name for layer in harmless),
        )  # fmt: skip


def check_step_by_step(model: keras.Model, mode: Mode, setting: str, place: Placement | None, options: Options) -> None:
    """Raise if Keras' own loop cannot do what the model is to do; else say once that it runs the model.

    `place` is where the model runs, or None if it is pipelined.
    """
    because = _obstacle(mode, place, options)
    if because is not None:
        eager = "cannot run eagerly" if model.run_eagerly else "cannot run uncompiled"
        raise RuntimeError(
            f"Model {model.name!r} {eager} (`{setting}`), because {because}. Change that setting, use one device "
            "without these options, or make the model outside the strategy's scope to debug it step by step."
        )
    validate.notice(
        f"{model.name}: Keras' own loop runs this model step by step on one device, because of {setting}. This is for "
        "debugging: nothing is compiled, so it is slow."
    )
    if options.live_callbacks:
        validate.no_effect({f"asynchronous callbacks with {setting}": "Keras calls them once per execution"})


def _obstacle(mode: Mode, place: Placement | None, options: Options) -> str | None:
    """What the options ask for that Keras' own loop cannot do, or None."""
    if place is None:
        return "its pipeline stages are compiled into one program"
    if place.replicas.count > 1:
        return f"its {place.replicas.count} replicas are compiled into one program"
    if place.compile_only:
        return "the configuration says that programs are only compiled, not run"
    steps = options.updates.steps if mode == "train" else 1
    return f"each update accumulates {steps} micro-batches, which Keras' loop does not" if steps > 1 else None
