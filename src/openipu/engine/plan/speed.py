"""How fast a device of this machine computes a model, in counted operations per second."""

from __future__ import annotations

from dataclasses import replace

from openipu.engine.core.keras_steps import make_step
from openipu.engine.core.model_state import values_of, variables_of
from openipu.engine.core.state import State
from openipu.engine.core.trainer import make_trainer
from openipu.engine.data.slab import Slab
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.speed import best_seconds
from openipu.engine.loop.arrays import is_float
from openipu.engine.loop.replica_loop import make_replica_loop
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import numpy as np

from .first_fit import FirstFit
from .values import Cut

STEPS, REPEATS = 8, 5
"""About how many steps an execution has, and how many executions are timed. The fastest counts."""


def measured_speed(found: FirstFit, whole: Cut) -> float:
    """Counted operations per second of one device: the model's own training step, compiled and timed here."""
    [counts] = whole.stages
    size = found.options.updates.steps
    each = counts.forward + counts.backward + counts.update / size
    return each / step_seconds(found, size * -(-STEPS // size))


def step_seconds(found: FirstFit, steps: int) -> float:
    """The seconds of one training step on one device, as a part of an execution of `steps` steps."""
    model, options = found.model, replace(found.options, pipelining=None, unpipelined=found.options.updates)
    place = replace(found.place, replicas=Replicas(found.place.replicas.devices[:1]), compile_only=False)
    trainer = make_trainer(model.optimizer, model.trainable_variables, place, options)
    loop, layout = make_replica_loop(
        f"{model.name}_speed", make_step(model, "train", place, options, trainer), place, trainer
    )
    state = layout.spread(jax.tree.map(jnp.array, values_of(variables_of(model, "train"))))
    slab = Slab(0, steps, place.replicas.send(_body(found.batch, steps), 1), None)

    def execute() -> State:
        nonlocal state
        _, state = loop.execute(state, None, slab)
        return state

    return best_seconds(execute, REPEATS) / steps


def _body(batch: Tree, steps: int) -> Tree:
    """So many micro-batches of these shapes: numbers between 0 and 1, and zeros where whole numbers are wanted."""
    random = np.random.default_rng(0)

    def filled(spec: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = (steps, 1, *spec.shape)
        return random.random(shape, "float32").astype(spec.dtype) if is_float(spec) else np.zeros(shape, spec.dtype)

    return jax.tree.map(filled, batch)
