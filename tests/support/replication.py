"""What the tests about replicas share: systems of 1, 2, 4 and 8 devices, and one device that stands for many."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import openipu as ipu

import jax
import keras
import numpy as np

SYSTEMS = (1, 2, 4, 8)
"""Replicas of each system. All exist at the same time, so that no test waits for a new configuration."""


def configure_all() -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = list(SYSTEMS)
    config.configure_ipu_system()


def configure(replicas: int, *, batch_norm_group: int = 1) -> None:
    """One system only, for what belongs to the whole configuration."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = replicas
    config.norms.experimental.distributed_batch_norm_replica_group_size = batch_norm_group
    config.configure_ipu_system()


def strategy(replicas: int) -> Any:
    """The strategy of the system of so many devices, after `configure_all`."""
    return ipu.ipu_strategy.IPUStrategy(f"/device:IPU:{SYSTEMS.index(replicas)}")


def amplified(optimizer: Any, strength: int) -> Any:
    """An optimizer that sees every gradient `strength` times as large, as the sum over so many micro-batches is.

    All strengths here are powers of two, so the multiplication is exact. An optimizer inside of another sees it there.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        optimizer.inner_optimizer = amplified(inner, strength)
        return optimizer

    class Amplified(type(optimizer)):  # type: ignore[misc]
        def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            return super().apply([strength * g for g in grads], trainable_variables)

    Amplified.__name__ = type(optimizer).__name__
    return Amplified.from_config(optimizer.get_config())


def in_micro_batches(model: keras.Model, rows: int) -> None:
    """Let a plain model add up the gradients of `rows` samples at a time, then update once per batch.

    The gradient of each part is rounded to half precision where the model computes in it. So half precision can only be
    compared with a device that takes the same parts.
    """
    cls = type(model)

    @jax.jit
    def gradients(trainable: Any, other: Any, optimizer: Any, metrics: Any, part: Any) -> Any:
        gradient = jax.grad(model.compute_loss_and_updates, has_aux=True)
        found, (loss, outputs, other, metrics) = gradient(
            trainable, other, metrics, *part, training=True, optimizer_variables=optimizer
        )
        x, y, weights = part
        logs, metrics = model._update_metrics_variables(metrics, loss, x, y, outputs, weights)
        return found, other, metrics, logs

    @jax.jit
    def update(optimizer: Any, total: Any, trainable: Any) -> Any:
        return model.optimizer.stateless_apply(optimizer, total, trainable)

    def train_step(self: Any, state: Any, data: Any) -> Any:
        del self
        trainable, other, optimizer, metrics = state
        data = keras.utils.unpack_x_y_sample_weight(data)
        count = len(keras.tree.flatten(data[0])[0])
        total: list[Any] = [0.0] * len(trainable)
        for start in range(0, count, rows):
            part = jax.tree.map(lambda a: a[start : start + rows], data)  # noqa: B023 - called at once
            found, other, metrics, logs = gradients(trainable, other, optimizer, metrics, part)
            share = min(rows, count - start) / count
            total = [a + share * g for a, g in zip(total, found, strict=True)]
        trainable, optimizer = update(optimizer, total, trainable)
        return logs, (trainable, other, optimizer, metrics)

    def make_train_function(self: Any, force: bool = False) -> None:
        """One program for all parts: one for each update would have a copy of the step for every part."""
        if force or self.train_function is None:
            self.train_function = self._make_function(self.train_step)

    steps = {"train_step": train_step, "make_train_function": make_train_function}
    model.__class__ = type(cls.__name__, (cls,), steps)


class Batches(keras.utils.PyDataset):
    """Arrays as batches in their order: a source that is streamed. The last batch may be partial."""

    def __init__(self, x: Any, y: Any, batch: int) -> None:
        super().__init__()
        self._data, self._batch = (x, y), batch
        self._rows = len(next(iter(keras.tree.flatten(x))))

    def __len__(self) -> int:
        return math.ceil(self._rows / self._batch)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * self._batch, (index + 1) * self._batch)
        return keras.tree.map_structure(lambda a: a[rows], self._data)


def assert_close(
    actual: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-5, what: str = "weights"
) -> None:
    """Equal up to `tolerance` times the largest number of each array, or a hundredth where all are smaller."""
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(map(np.asarray, actual), map(np.asarray, expected), strict=True)):
        assert a.shape == b.shape
        limit = tolerance * max(1e-2, np.abs(b).max(initial=0.0))
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=f"{what}[{i}]")


def assert_same_history(
    actual: dict[str, Any], expected: dict[str, Any], turned: float = 0.0, tolerance: float = 1e-5
) -> None:
    """Equal up to rounding; accuracies up to `turned` besides.

    A class is the largest output, and in half precision two outputs are often the same but for the last bit of a
    weight. So one sample may turn from right to wrong.
    """
    assert set(actual) == set(expected)
    for name, values in expected.items():
        limit = 1e-6 + turned * ("accuracy" in name)
        np.testing.assert_allclose(actual[name], values, rtol=tolerance, atol=limit, err_msg=name)


def programs(model: Any, mode: str = "train") -> list[Any]:
    """The compiled programs of a mode."""
    return [program.compiled for program in getattr(model, f"{mode}_function").loop.programs.values()]


# --- the text of a compiled program ----------------------------------------------------------------------------------

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


def computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation of a program. The one it starts with is called "ENTRY"."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$", line)
        if head:
            found[name := "ENTRY" if head[1] else head[2]] = []
        elif " = " in line:
            found[name].append(line.strip())
    return found


def collectives(instructions: list[str]) -> list[str]:
    """The kinds of the collectives among some instructions, sorted."""
    kinds = "|".join(COLLECTIVES)
    return sorted(m[1] for line in instructions if (m := re.search(rf" = .*? ({kinds})(?:-start)?\(", line)))


def reached(parts: dict[str, list[str]], start: str) -> Iterator[str]:
    """The names of all computations that `start` runs, itself included."""
    yield start
    for line in parts[start]:
        for name in re.findall(r"(?:body|condition|calls|to_apply|\w+_computation)=%?([\w.-]+)", line):
            yield from reached(parts, name)
        for names in re.findall(r"branch_computations=\{(.*?)\}", line):
            for name in re.findall(r"[\w.-]+", names):
                yield from reached(parts, name)


def loops(parts: dict[str, list[str]], start: str = "ENTRY") -> list[str]:
    """The bodies of the loops that a computation runs itself, those inside loops and branches not included."""
    return [m[1] for line in parts[start] if " while(" in line and (m := re.search(r"body=%?([\w.-]+)", line))]
