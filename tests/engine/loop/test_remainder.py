"""What is left over after whole updates, against a count by dealing out one batch after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from openipu.engine.core.accumulation import Accumulation, Reduction
from openipu.engine.loop.remainder import Counts, Remainder

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass(frozen=True)
class Dealt:
    """The micro-batches of a slab, each as (step, replica, rows), and the step with which the remainder begins."""

    whole: list[tuple[int, int, int]]
    left: list[tuple[int, int, int]]
    tail: list[tuple[int, int, int]]
    updates: int


def deal(batches: int, tail_rows: int, *, replicas: int, size: int, rows: int) -> Dealt:
    """Batch i goes to replica i mod R; an update is whole when every replica has `size` of them."""
    steps = [(i // replicas, i % replicas, rows) for i in range(batches)]
    updates = 0
    while sum(step < (updates + 1) * size for step, _, _ in steps) == (updates + 1) * size * replicas:
        updates += 1
    whole = [batch for batch in steps if batch[0] < updates * size]
    left = [batch for batch in steps if batch[0] >= updates * size]
    tail = [(batches // replicas, batches % replicas, tail_rows)] if tail_rows else []
    return Dealt(whole, left, tail, updates)


def counted(batches: int, tail_rows: int, accumulation: Accumulation, *, replicas: int, rows: int) -> Remainder:
    counts = Counts(0, *divmod(batches, replicas))
    strength = accumulation.strength(replicas)
    return Remainder.of(counts, accumulation.steps, replicas, strength, rows, tail_rows)


def check(batches: int, tail_rows: int, accumulation: Accumulation, replicas: int, rows: int) -> None:
    size = accumulation.steps
    found = counted(batches, tail_rows, accumulation, replicas=replicas, rows=rows)
    dealt = deal(batches, tail_rows, replicas=replicas, size=size, rows=rows)
    rest = [*dealt.left, *dealt.tail]
    by_replica = [[step for step, owner, _ in dealt.left if owner == replica] for replica in range(replicas)]

    assert found.updates == dealt.updates
    assert found.first == dealt.updates * size
    assert found.samples == sum(count for _, _, count in rest)
    assert found.turns == max(map(len, by_replica))
    for replica, steps in enumerate(by_replica):
        assert found.turns_of(replica) == len(steps)
        for turn in range(int(found.turns)):
            assert bool(found.is_active(turn, replica)) == (dealt.updates * size + turn in steps)
    whole, left = Counts(0, *divmod(batches, replicas)).split(size)
    assert whole == (0, dealt.updates * size, 0)
    assert left == (dealt.updates * size, found.left, found.extra)
    assert left.batches(replicas) == batches
    alone = Remainder.of(left, size, replicas, found.strength, rows, tail_rows)
    assert alone == replace(found, updates=0), "the rest is the same if it runs in a program of its own"
    for _, owner, _ in dealt.tail:
        assert [r for r in range(replicas) if found.takes_tail(r)] == [owner]
    if rest:
        shares = [float(found.share(count)) for _, _, count in rest]
        # As strong as a whole update, in which each gradient counts once (sum) or 1/size times (mean) per replica...
        assert sum(shares) == pytest.approx(accumulation.strength(replicas))
        # ... and each sample counts the same.
        each = [share / count for share, (_, _, count) in zip(shares, rest, strict=True)]
        assert each == pytest.approx([each[0]] * len(each))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_grid_of_sizes(replicas: int, size: int) -> None:
    accumulation = Accumulation(size)
    for batches in range(2 * replicas * size + replicas + 1):
        for tail_rows in (0, 3):
            check(batches, tail_rows, accumulation, replicas, rows=4)


@settings(max_examples=60, deadline=None)
@given(
    batches=st.integers(0, 60),
    tail_rows=st.integers(0, 31),
    size=st.integers(1, 9),
    method=st.sampled_from(Reduction),
    replicas=st.integers(1, 8),
)
def test_any_size(batches: int, tail_rows: int, size: int, method: Reduction, replicas: int) -> None:
    check(batches, tail_rows, Accumulation(size, method), replicas, rows=32)


def test_one_replica_with_single_step_updates_leaves_only_a_tail() -> None:
    one = Accumulation()
    assert counted(7, 3, one, replicas=1, rows=4).samples == 3
    assert counted(7, 0, one, replicas=1, rows=4).samples == 0


def test_counts_travel_as_one_array() -> None:
    packed = Counts(2, 5, 1).pack()
    assert packed.shape == (3,)
    assert tuple(map(int, Counts.unpack(packed))) == (2, 5, 1)
    assert Counts(2, 5, 1).batches(replicas=3) == 22


def test_it_is_the_same_inside_a_program() -> None:
    def turns_and_share(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = Remainder.of(Counts.unpack(packed), 4, 2, 8, 16, 5)
        return found.turns, found.share(16)

    turns, share = jax.jit(turns_and_share)(Counts(0, 10, 1).pack())
    assert int(turns) == 3, "2 steps are left after 2 updates of 4, and one replica has a micro-batch more"
    assert float(share) == pytest.approx(16 * 8 / (5 * 16 + 5))
