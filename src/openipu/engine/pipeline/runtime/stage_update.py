"""The update of the weights in a pipeline: each device updates the weights of its own stages.

This works with any Keras optimizer. Each device has a twin of the optimizer that only knows the device's weights.
Whatever an optimizer computes from all gradients together (a global norm to clip by, whether a scaled loss overflowed)
is computed beforehand over all devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from openipu.engine.core.optimizer_chain import unwrapped
from openipu.engine.core.optimizer_sharding import check_elementwise, share_of
from openipu.engine.core.optimizer_twin import build_twin, make_twin, stand_in
from openipu.engine.core.update_rules import check_added_up
from openipu.engine.core.wrapped_optimizer import applies_itself, by_engine, chain, loss_scale
from openipu.engine.devices.replicas import STAGE_AXIS, Replicas
from openipu.engine.keras_compat.api import drop_values, optimized_variables, rename
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras
from jax import lax

from .packing import Buffers, Spec, used
from .stages_apart import as_twin, check_stages_apart
from .variable_store import Store, make_store, zero_filled

_TOKEN = re.compile(r".*_slice(\d+)of")
"""The number of a weight in the name of its stand-in."""


class UpdateState(NamedTuple):
    """What an update reads and writes."""

    weights: Buffers
    slots: Buffers
    """The optimizer's variables that belong to weights."""
    common: list[Array]
    """The optimizer's other variables."""


class _Gradients(NamedTuple):
    """The gradients of an update, and what was computed from all of them together."""

    total: Buffers
    factor: Array | None
    """The factor that clips their global norm. None if there is no clipping."""
    finite: Array | None
    """Whether all of them are finite. None if the loss is not scaled."""


@dataclass(frozen=True, slots=True)
class Update:
    """The twins of a model's optimizer, and where their variables are."""

    optimizer: keras.optimizers.Optimizer
    weights: Store
    slots: Store
    """The optimizer's variables that belong to weights."""
    common: tuple[int, ...]
    """The numbers of the optimizer's other variables, such as the count of updates. All devices have them."""
    twins: tuple[keras.optimizers.Optimizer, ...]
    """One for each device."""
    orders: tuple[tuple[int, ...], ...]
    """For each twin, the numbers of its variables among those of the optimizer."""
    constraints: tuple[keras.constraints.Constraint | None, ...]
    """The constraint of each weight, which is applied after an update."""
    average: bool
    """Whether gradients are averaged over replicas instead of summed."""
    replicas: Replicas

    @property
    def divided(self) -> bool:
        """Whether each replica only has its share of the slots."""
        return False

    def apply(self, weights: Buffers, slots: Buffers, common: list[Array], total: Buffers) -> UpdateState:
        """The state after an update with the gradients in `total`."""
        me = lax.axis_index(STAGE_AXIS)
        total = self._sum_tied(me, total)
        total = self.replicas.reduced(total, self.average)
        norm, finite = self._over_all(me, total)
        gradients = _Gradients(total, self._clip_factor(norm, common), finite)
        state = UpdateState(weights, slots, common)
        for device in range(len(self.twins)):
            state = self._on(device, me, state, gradients)
        return state._replace(common=self._on_all(me, state.common))

    def _on_all(self, me: Array, common: list[Array]) -> list[Array]:
        """The common variables on all devices. Devices without weights get them from one that has some, if any has."""
        busy = [device for device, held in enumerate(self.weights.held) if held]
        if not busy or len(busy) == len(self.twins):
            return common
        shared: list[Array] = from_device(busy[0], me, common)
        return shared

    def _on(self, device: int, me: Array, state: UpdateState, gradients: _Gradients) -> UpdateState:
        """The state after this device has updated its own weights. All other devices keep theirs."""
        weight_at, slot_at = self.weights.slots(device), self.slots.slots(device)
        if not weight_at:
            return state

        def run(writes: tuple[Buffers, Buffers, list[Array]]) -> tuple[Buffers, Buffers, list[Array]]:
            own, own_slots, common = writes
            values = self.weights.packing.read(gradients.total, weight_at)
            if gradients.factor is not None:
                values = [g * gradients.factor.astype(g.dtype) for g in values]
            with as_twin(self.twins[device], gradients.finite):
                old = self.weights.packing.read(own, weight_at)
                new, own_slots, common = self._by_twin(device, own_slots, common, values, old)
            return self.weights.packing.write(own, weight_at, new), own_slots, common

        writes = used(state.weights, weight_at), used(state.slots, slot_at), state.common
        new_weights, new_slots, common = lax.cond(me == device, run, lambda w: w, writes)
        return UpdateState(state.weights | new_weights, state.slots | new_slots, common)

    def _by_twin(
        self, device: int, slots: Buffers, common: list[Array], gradients: list[Array], weights: list[Array]
    ) -> tuple[list[Array], Buffers, list[Array]]:
        """Weights, slots and common variables after an update by a device's twin, on that device."""
        at, held, order = self.slots.slots(device), self.slots.held[device], self.orders[device]
        values = dict(zip(self.common, common, strict=True))
        values |= zip(held, self.slots.packing.read(slots, at), strict=True)
        with by_engine():
            new, state = self.twins[device].stateless_apply([values[n] for n in order], gradients, weights)
        values |= zip(order, state, strict=True)
        return (
            list(new),
            self.slots.packing.write(slots, at, [values[n] for n in held]),
            [jnp.asarray(values[n], old.dtype) for n, old in zip(self.common, common, strict=True)],
        )

    def _sum_tied(self, me: Array, total: Buffers) -> Buffers:
        """The gradients, with those of weights on several devices summed over these devices."""
        for number in self.weights.shared():
            holders = [d for d, held in enumerate(self.weights.held) if number in held]
            at = {device: self.weights.slots(device, [number]) for device in holders}
            spec = at[holders[0]][0].spec
            mine = jnp.zeros(spec.shape, total[at[holders[0]][0].buffer].dtype)
            for device in holders:
                mine = jnp.where(me == device, self.weights.packing.read(total, at[device])[0], mine)
            whole = lax.psum(mine, STAGE_AXIS)
            for device in holders:
                mine_too = used(total, at[device])
                with_it = self.weights.packing.write(mine_too, at[device], [whole])
                total = total | {b: jnp.where(me == device, with_it[b], mine_too[b]) for b in with_it}
        return total

    def _over_all(self, me: Array, total: Buffers) -> tuple[Array | None, Array | None]:
        """The norm of all gradients, and whether all of them are finite. Each is None if it is not needed."""
        norm = finite = None
        if self._clip() is not None:
            squares = jnp.zeros(())
            seen: set[int] = set()
            for device, held in enumerate(self.weights.held):
                once = [number for number in held if number not in seen]
                seen.update(once)
                arrays = self.weights.packing.read(total, self.weights.slots(device, once))
                own = sum((jnp.sum(jnp.square(a.astype(jnp.float32))) for a in arrays), jnp.zeros(()))
                squares = jnp.where(me == device, own, squares)
            norm = jnp.sqrt(lax.psum(squares, STAGE_AXIS))
        if any(isinstance(link, keras.optimizers.LossScaleOptimizer) for link in chain(self.optimizer)):
            wrong = sum(jnp.any(~jnp.isfinite(buffer)).astype(jnp.int32) for buffer in total.values())
            finite = lax.psum(wrong, STAGE_AXIS) == 0
        return norm, finite

    def _clip(self) -> float | None:
        """The global norm to clip gradients to before the twins get them, if any."""
        if any(map(applies_itself, chain(self.optimizer))):
            return None
        limit = getattr(list(chain(self.optimizer))[-1], "global_clipnorm", None)
        return float(limit) if limit else None

    def _clip_factor(self, norm: Array | None, common: list[Array]) -> Array | None:
        limit = self._clip()
        if limit is None or norm is None:
            return None
        norm = norm / loss_scale(self.optimizer, zero_filled(self.optimizer.variables, self.common, common))
        # The second term is 0, or NaN if the norm is not finite.
        return jnp.minimum(limit / norm, 1.0) + (norm - norm)


def from_device(device: int, me: Array, tree: Tree) -> Tree:
    """The values of one device, on all devices. `me` is the number of the device that runs this."""
    return jax.tree.map(lambda a: _sum(jnp.where(me == device, a, jnp.zeros_like(a))), tree)


def _sum(array: Array) -> Array:
    is_flag = array.dtype == bool
    total: Array = lax.psum(array.astype(jnp.int32) if is_flag else array, STAGE_AXIS)
    return total > 0 if is_flag else total


def make_update(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    weights: Store,
    average: bool,
    replicas: Replicas,
    kind: type[Update] | None = None,
    dtype: str | None = None,
) -> Update:
    """The update of the model's trainable `variables` by a built optimizer.

    If `kind` is `ShardedUpdate`, each replica has its share of the optimizer's state. `dtype` is that of gradients;
    None means the dtype of each variable.
    """
    _check_stages(optimizer, variables)
    shapes = [tuple(v.shape) for v in variables]
    if kind is not None:
        check_elementwise(unwrapped(optimizer))
        shapes = [(share_of(math.prod(shape), replicas.count),) for shape in shapes]
    whole = _twin(optimizer, variables, shapes, range(len(variables)))
    keys = _keys(whole, range(len(variables)))
    if len(keys) != len(optimizer.variables):
        raise ValueError(
            f"A copy of {type(optimizer).__name__} made from its `get_config` has {len(keys)} variables instead of "
            f"{len(optimizer.variables)}, so the optimizer cannot be divided over the stages. Make `get_config` "
            "complete."
        )
    number = {key: i for i, key in enumerate(keys)}
    common = tuple(i for i, (owner, _) in enumerate(keys) if owner is None)
    gradients = [jax.ShapeDtypeStruct(s, dtype or v.dtype) for s, v in zip(shapes, variables, strict=True)]
    check_stages_apart(whole, variables, gradients, [key[0] for key in keys], weights.held)
    twins = [_twin(optimizer, variables, shapes, held) for held in weights.held]
    orders = []
    for twin, held in zip(twins, weights.held, strict=True):
        own = _keys(twin, held)
        if sum(owner is None for owner, _ in own) != len(common):
            raise ValueError(
                f"The variables of {type(optimizer).__name__} are not named after the weights they belong to, so it "
                "cannot be divided over the stages. Create them with `add_variable_from_reference`."
            )
        orders.append(tuple(number[key] for key in own))
    specs = [Spec.of(v) for v in whole.variables]
    slots = make_store(specs, [[n for n in order if n not in common] for order in orders])
    constraints = tuple(v.constraint for v in variables)
    return (kind or Update)(
        optimizer, weights, slots, common, tuple(twins), tuple(orders), constraints, average, replicas
    )


def _check_stages(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Raise if an update of stages would not be the update of the whole model."""
    check_added_up(variables, "the stages of a pipeline add up the gradients of their micro-batches")
    inner = list(chain(optimizer))[-1]
    built = len(optimized_variables(inner))
    if built != len(variables):
        raise ValueError(
            f"{inner.name!r} was built for {built} trainable weights, but there are {len(variables)} now. Call "
            "`compile` again, or make a new optimizer, after freezing or unfreezing layers."
        )
    if inner.global_clipnorm and inner.gradient_accumulation_steps:
        raise ValueError(
            f"{inner.name!r} clips by the global norm of what it accumulates itself over "
            f"{inner.gradient_accumulation_steps} updates (`gradient_accumulation_steps`), but stages accumulate on "
            "different devices. Remove `gradient_accumulation_steps` from the optimizer and multiply "
            "`gradient_accumulation_steps_per_replica` in `set_pipelining_options` by it instead, or use `clipnorm`."
        )


def _twin(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    shapes: Sequence[tuple[int, ...]],
    numbers: Sequence[int],
) -> keras.optimizers.Optimizer:
    """An optimizer with the same settings for some of the variables.

    It is built for stand-ins of these shapes, whose names contain the numbers of the variables.
    """
    plain = unwrapped(optimizer)
    twin = make_twin(plain, f"{type(plain).__name__} cannot update the stages of a pipeline")
    owned = [variables[n] for n in numbers]
    stand_ins = [stand_in(v, shapes[n], f"_slice{n}of") for n, v in zip(numbers, owned, strict=True)]
    build_twin(twin, plain, stand_ins, owned)
    # Gradients are clipped beforehand, over all devices, unless the user's own code comes first.
    if not any(map(applies_itself, chain(twin))):
        list(chain(twin))[-1].global_clipnorm = None
    # An `apply` of the user's own may look at names.
    for own, v in zip(stand_ins, owned, strict=True):
        rename(own, v)
    # The values always come from the state.
    drop_values([*stand_ins, *twin.variables])
    return twin


def _keys(twin: keras.optimizers.Optimizer, numbers: Sequence[int]) -> list[tuple[int | None, int]]:
    """For each variable of a twin: the number of the weight it belongs to, if any, and its index among that weight's
    variables."""
    counts: dict[int | None, int] = {}
    keys = []
    for variable in twin.variables:
        found = _TOKEN.match(variable.path)  # the last one: users' names may contain another
        owner = int(found[1]) if found else None
        assert owner is None or owner in numbers
        counts[owner] = counts.get(owner, -1) + 1
        keys.append((owner, counts[owner]))
    return keys
