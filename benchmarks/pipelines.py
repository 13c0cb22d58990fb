"""`python -m benchmarks.pipelines`: two stages on two virtual devices, against one device and against a Python loop.

The peers take turns in the same process: one device with the same accumulation in one program; and a pipeline as one
would write it by hand, in which Python launches one compiled function per stage and micro-batch.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from dataclasses import dataclass

os.environ["OPENIPU_CACHE"] = "off"  # otherwise compile times would be those of reading a file

import openipu as ipu

import jax
import jax.numpy as jnp
import keras
import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"
MICRO_BATCHES = 16


@dataclass(frozen=True)
class Case:
    """Dense layers of these widths; the first is that of the data."""

    name: str
    widths: tuple[int, ...]
    batch: int
    updates: int

    @property
    def cut(self) -> int:
        """Layers of the first stage."""
        return (len(self.widths) - 1) // 2


CASES = {
    "large": Case("8 x Dense(2048), micro-batch 64", (2048,) * 9, 64, 6),
    "small": Case("784-512-512-512-10, micro-batch 32", (784, 512, 512, 512, 10), 32, 30),
}


def configure(devices: int) -> object:
    """Strategies with one device and with this many."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = [1, devices]
    config.configure_ipu_system()
    return [ipu.ipu_strategy.IPUStrategy(f"/device:IPU:{i}") for i in range(2)]


class Fitted:
    """A model under `fit`; `schedule` is None for one device."""

    def __init__(self, case: Case, strategy, data, schedule: str | None) -> None:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(width, activation="relu") for width in case.widths[1:]]
            self.model = keras.Sequential([keras.Input((case.widths[0],)), *layers])
            if schedule is None:
                self.model.set_gradient_accumulation_options(MICRO_BATCHES)
            else:
                self.model.set_pipeline_stage_assignment([int(i >= case.cut) for i in range(len(layers))])
                self.model.set_pipelining_options(MICRO_BATCHES, pipeline_schedule=schedule)
            self.model.compile(keras.optimizers.SGD(1e-4), "mse", steps_per_execution=MICRO_BATCHES * case.updates)
        self._data, self._case = data, case
        self.run()
        self.program = next(iter(self.model.train_function.loop.programs.values()))

    def run(self) -> float:
        """Seconds per micro-batch."""
        start = time.perf_counter()
        self.model.fit(*self._data, batch_size=self._case.batch, shuffle=False, verbose=0)
        return (time.perf_counter() - start) / (MICRO_BATCHES * self._case.updates)


class ByHand:
    """Two jitted functions per stage and Python in between; launches are asynchronous, so both devices work."""

    def __init__(self, case: Case, devices, data) -> None:
        rng = np.random.default_rng(1)
        weights = [
            (rng.normal(size=(a, b)).astype("float32") * a**-0.5, np.zeros(b, "float32"))
            for a, b in zip(case.widths[:-1], case.widths[1:], strict=True)
        ]
        self._devices = devices
        self._weights = [
            jax.device_put(part, device)
            for part, device in zip((weights[: case.cut], weights[case.cut :]), devices, strict=True)
        ]
        self._x = [jax.device_put(x, devices[0]) for x in np.split(data[0], MICRO_BATCHES * case.updates)]
        self._y = [jax.device_put(y, devices[1]) for y in np.split(data[1], MICRO_BATCHES * case.updates)]
        self._case = case
        self._forward = jax.jit(dense)
        self._last = jax.jit(jax.value_and_grad(lambda w, h, y: jnp.mean((dense(w, h) - y) ** 2), argnums=(0, 1)))
        self._backward = jax.jit(lambda w, x, g: jax.vjp(lambda w: dense(w, x), w)[1](g)[0])
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._update = jax.jit(lambda w, g: jax.tree.map(lambda w, g: w - 1e-4 * g, w, g), donate_argnums=0)
        self.run()

    def run(self) -> float:
        """Seconds per micro-batch."""
        start = time.perf_counter()
        for update in range(self._case.updates):
            totals = [None, None]
            for m in range(update * MICRO_BATCHES, (update + 1) * MICRO_BATCHES):
                hidden = jax.device_put(self._forward(self._weights[0], self._x[m]), self._devices[1])
                _, (last, gradient) = self._last(self._weights[1], hidden, self._y[m])
                first = self._backward(self._weights[0], self._x[m], jax.device_put(gradient, self._devices[0]))
                for i, new in enumerate((first, last)):
                    totals[i] = new if totals[i] is None else self._add(totals[i], new)
            self._weights = [self._update(w, g) for w, g in zip(self._weights, totals, strict=True)]
        jax.block_until_ready(self._weights)
        return (time.perf_counter() - start) / (MICRO_BATCHES * self._case.updates)


def dense(weights, x):
    """Dense layers with relu."""
    for kernel, bias in weights:
        x = jax.nn.relu(x @ kernel + bias)
    return x


def measure(case: Case, schedules: list[str], rounds: int) -> dict[str, object]:
    """Medians over rounds in which every contender takes a turn."""
    one, two = configure(2)
    rng = np.random.default_rng(0)
    rows = case.batch * MICRO_BATCHES * case.updates
    data = [rng.normal(size=(rows, width)).astype("float32") for width in (case.widths[0], case.widths[-1])]
    runners = {"one device": Fitted(case, one, data, None), "Python loop": ByHand(case, two.system.devices, data)}
    runners |= {name: Fitted(case, two, data, name) for name in schedules}
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            times[name].append(runner.run())
    programs = {name: r.program for name, r in runners.items() if isinstance(r, Fitted)}
    return {
        "case": case.name,
        "ms": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "compile_s": {name: sum(p.seconds) for name, p in programs.items()},
        "argument_mb": {
            name: p.compiled.memory_analysis().argument_size_in_bytes / 1e6 for name, p in programs.items()
        },
        "temporary_mb": {name: p.compiled.memory_analysis().temp_size_in_bytes / 1e6 for name, p in programs.items()},
    }


def table(results: list[dict], facts: dict) -> str:
    """Markdown with ratios."""
    lines = [f"Measured {facts['date']} on {facts['machine']}; command: `{facts['command']}`.", ""]
    for result in results:
        ms = result["ms"]
        lines += [f"### {result['case']}, 2 stages, {MICRO_BATCHES} micro-batches per update", ""]
        lines += ["| who | ms per micro-batch | throughput / one device | compile, s | arguments, MB per device |"]
        lines += ["|---|---|---|---|---|"]
        for name, value in ms.items():
            compiled = f"{result['compile_s'][name]:.1f}" if name in result["compile_s"] else "-"
            size = f"{result['argument_mb'][name]:.0f}" if name in result["argument_mb"] else "-"
            lines.append(f"| {name} | {value:.2f} | {ms['one device'] / value:.2f} | {compiled} | {size} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--schedules", nargs="+", default=["Grouped", "Interleaved", "Sequential", "GPipe", "OneFOneB"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="cpu-pipelines")
    options = parser.parse_args()
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores",
        "command": " ".join(["python -m benchmarks.pipelines", *sys.argv[1:]]),
    }
    results = [measure(CASES[name], options.schedules, options.rounds) for name in options.cases]
    text = table(results, facts)
    print(text)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")
    (RESULTS / f"{options.name}.md").write_text(text)


if __name__ == "__main__":
    main()
