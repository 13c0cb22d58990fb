"""`python -m benchmarks.plans`: how far the predictions of `openipu plan` are from what 1, 2 and 4 devices take.

Every split trains the same model with the same effective batch. All of them take turns in one process, and the fastest
round of each counts. Virtual CPU devices share the cores, which one device already uses in full, so no split can be
faster than one device. What devices with cores of their own would take is therefore made of actions that were timed
alone, as in reports: the column "by timed actions" is what the predicted one is to be compared with.
"""

import argparse
import json
import pathlib
import tempfile
import time
from dataclasses import dataclass

import openipu as ipu
from openipu.engine.core.pipelining import Recompute
from openipu.engine.devices.systems import cores
from openipu.engine.plan.counts import Counter
from openipu.engine.plan.predict import predict
from openipu.engine.plan.values import Machine, Split
from openipu.engine.report import files

import jax
import keras
import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"
MICRO_BATCHES, UPDATES, BATCH, WIDTH, LAYERS = 16, 1, 64, 512, 8
SPLITS = (
    Split(1, 1, 16, ""), Split(2, 1, 8, ""), Split(1, 2, 16, "Grouped"), Split(1, 2, 16, "OneFOneB"),
    Split(1, 2, 16, "Sequential"), Split(4, 1, 4, ""), Split(2, 2, 8, "Grouped"), Split(1, 4, 16, "Grouped"),
    Split(1, 4, 16, "GPipe"), Split(1, 4, 16, "Sequential"),
)  # fmt: skip


@dataclass
class Trained:
    """A model under `fit` in one split."""

    split: Split

    def __post_init__(self) -> None:
        ordinal = {1: 0, 2: 1, 4: 2}[self.split.devices]
        with ipu.ipu_strategy.IPUStrategy(f"/device:IPU:{ordinal}").scope():
            dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
            self.model = keras.Sequential([keras.Input((WIDTH,)), *dense])
            if self.split.stages == 1:
                self.model.set_gradient_accumulation_options(self.split.accumulation)
            else:
                self.model.set_pipeline_stage_assignment("auto", stages=self.split.stages, print_fn=None)
                self.model.set_pipelining_options(self.split.accumulation, pipeline_schedule=self.split.schedule)
            steps = self.split.accumulation * UPDATES
            self.model.compile(keras.optimizers.SGD(1e-4), "mse", steps_per_execution=steps)
        self.data = [
            np.random.default_rng(i).random((BATCH * MICRO_BATCHES * UPDATES, WIDTH), "float32") for i in (0, 1)
        ]
        self.seconds()

    def seconds(self) -> float:
        """Seconds of one update."""
        began = time.perf_counter()
        self.model.fit(*self.data, batch_size=BATCH, shuffle=False, verbose=0)
        return (time.perf_counter() - began) / UPDATES

    def by_actions(self) -> float | None:
        """The time of an update by actions that are timed alone, as a share of all actions one after the other."""
        if self.split.stages == 1:
            return None
        with tempfile.TemporaryDirectory() as folder:
            with ipu.report(folder):
                self.seconds()
            [run] = files.read(pathlib.Path(folder)).runs
        measured = run.pipeline.measured
        return measured.seconds / (MICRO_BATCHES * sum((*measured.forward, *measured.backward)))

    def memory(self) -> int:
        """Bytes that the program needs on each device, without its data, by XLA's analysis."""
        program = next(iter(self.model.train_function.loop.programs.values()))
        found = program.compiled.memory_analysis()
        data = sum(array.nbytes for array in self.data)
        needed = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        return needed + found.temp_size_in_bytes - data


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--name", default="cpu-plans")
    given = parser.parse_args()
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = [1, 2, 4]
    config.configure_ipu_system()
    trained = [Trained(split) for split in SPLITS]
    times = [[one.seconds() for one in trained] for _ in range(given.rounds)]
    best = [min(column) for column in zip(*times, strict=True)]
    model = trained[0].model
    batch = tuple(jax.ShapeDtypeStruct((BATCH, WIDTH), "float32") for _ in range(2))
    counter = Counter(model, batch, model._ipu_session.place("train"), Recompute.NOTHING)
    whole = counter.cut_into(1)
    # The speed is such that the prediction for one device is right. What is compared are ratios to it.
    speed = predict(whole, SPLITS[0], Machine(1, 1.0)).time.total / best[0]
    rows = []
    for one, seconds in zip(trained, best, strict=True):
        split = one.split
        found = predict(counter.cut_into(split.stages), split, Machine(split.devices, speed))
        rows.append({
            "split": str(split), "predicted": found.time.total / best[0], "measured": seconds / best[0],
            "by actions": one.by_actions(),
            "memory predicted": found.memory.total, "memory measured": one.memory(),
        })  # fmt: skip
    (RESULTS / f"{given.name}.json").write_text(
        json.dumps({"cores": cores(), "ms": 1e3 * best[0], "rows": rows}, indent=1)
    )
    (RESULTS / f"{given.name}.md").write_text(table(rows, best[0]))
    print(table(rows, best[0]))


def table(rows: list[dict[str, float]], seconds: float) -> str:
    """The results in Markdown."""
    lines = [
        f"Measured on {cores()} cores; command: `python -m benchmarks.plans`.",
        "",
        f"### Predictions of `openipu plan`: {LAYERS} x Dense({WIDTH}), micro-batch {BATCH}",
        "",
        f"Time of an update, as a share of that of one device ({1e3 * seconds:.1f} ms).",
        "",
        "| replicas x stages x accumulation | predicted | by timed actions | in the run | memory, predicted | by XLA |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['split']} | {row['predicted']:.2f} | {_number(row['by actions'])} | {row['measured']:.2f} "
        f"| {row['memory predicted'] / 1e6:.1f} MB | {row['memory measured'] / 1e6:.1f} MB |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
