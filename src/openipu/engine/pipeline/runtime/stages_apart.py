"""Whether an optimizer can update the stages of a pipeline apart from each other.

Keras' optimizers update each weight by itself. An `apply` of the user's own may compute something from all gradients,
such as their norm. Each device would then compute it from its own gradients alone, so this is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from openipu.engine.core.enqueued import ignored
from openipu.engine.core.gradient_dependence import needed_inputs
from openipu.engine.core.optimizer_chain import update
from openipu.engine.core.wrapped_optimizer import applies_itself, chain
from openipu.engine.keras_compat.patches import CHECK_FINITE
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import keras


@contextlib.contextmanager
def as_twin(twin: keras.optimizers.Optimizer, finite: Array | None) -> Iterator[None]:
    """While active, a twin does not enqueue, as the optimizer itself does so beside it (watched_update.py).

    With loss scaling, it uses `finite` instead of checking its own gradients. It still checks those that come out of an
    `apply` of the user's own.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(ignored())
        for link in chain(twin):
            if applies_itself(link):
                break
            if isinstance(link, keras.optimizers.LossScaleOptimizer):
                stack.enter_context(CHECK_FINITE.using(lambda *_: finite, on=link))
        yield


def check_stages_apart(
    twin: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    gradients: Sequence[jax.ShapeDtypeStruct],
    owners: Sequence[int | None],
    held: Sequence[Sequence[int]],
) -> None:
    """Raise if the update of one device's weights depends on gradients, weights or slots of others.

    `twin` updates all weights, with gradients of these shapes. `owners` has the number of the weight to which each of
    its variables belongs, if any, and `held` the numbers of each device's weights.
    """
    own = [link for link in chain(twin) if applies_itself(link)]
    if not own:
        return
    weights = [jax.ShapeDtypeStruct(g.shape, v.dtype) for g, v in zip(gradients, variables, strict=True)]
    state = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in twin.variables]

    def run(slots: list[Array], gradients: list[Array], values: list[Array]) -> tuple[list[Array], list[Array]]:
        with as_twin(twin, jnp.ones((), bool)):
            return update(twin, slots, gradients, values)

    jaxpr = jax.make_jaxpr(run)(state, list(gradients), weights).jaxpr
    numbers = range(len(variables))
    results, inputs = [*numbers, *owners], [*owners, *numbers, *numbers]
    groups: list[set[int | None]] = [{*on_device} for on_device in held if on_device]
    groups.append({None})
    for group in groups:
        used = needed_inputs(jaxpr, [owner in group for owner in results])
        foreign = {n for n, is_used in zip(inputs, used, strict=True) if is_used and n is not None} - group
        if foreign:
            mine = [variables[n].path for n in group if n is not None]
            raise _together(own[0], variables[min(foreign)].path, mine)


def _together(optimizer: keras.optimizers.Optimizer, other: str, mine: Sequence[str]) -> ValueError:
    what = f"the update of the weight {mine[0]!r}" if mine else "a variable that belongs to no weight"
    return ValueError(
        f"{optimizer.name!r} has its own `apply`, which computes {what} from {other!r} as well. But in a pipeline, "
        "each device updates the weights of its own stages, and these are on different devices. Let `apply` treat each "
        "weight by itself, or train without stages. To clip by the norm of all gradients, use the `global_clipnorm` of "
        "a Keras optimizer without such a wrapper."
    )
