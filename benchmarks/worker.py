"""One measurement in one process: prints a line of JSON with microseconds per step for each epoch after the first.

python -m benchmarks.worker openipu cnn --steps-per-execution 100
"""

import argparse
import json
import os
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.models import CASES, Case, compile_model, data, keras_api


class Times(NamedTuple):
    """What was measured."""

    epochs: list[float]
    """The seconds of each epoch but the first."""
    made: float
    """The seconds in which the model was made and compiled by Keras."""
    first: float
    """The seconds until the end of the first execution."""
    first_at: float
    """The time of day at which it ended."""


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=["openipu", "keras", "scan"])
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("--steps-per-execution", default="epoch")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--ipus", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--tail", type=int, default=0, help="samples in a smaller last batch")
    options = parser.parse_args()
    if options.who != "keras":
        os.environ["KERAS_BACKEND"] = "jax"
    case = CASES[options.model]
    batch, steps = options.batch or case.batch, options.steps or case.steps
    if options.who == "scan":
        times = by_hand(case, batch, steps, options.epochs)
    else:
        per_execution = steps if options.steps_per_execution == "epoch" else int(options.steps_per_execution)
        times = with_fit(options, case, batch, steps, per_execution)
    per_step = [seconds / steps * 1e6 for seconds in times.epochs]
    seconds = {"made_s": times.made, "first_execution_s": times.first, "first_at": times.first_at}
    print(json.dumps({"us_per_step": per_step, **seconds}))


def with_fit(options: argparse.Namespace, case: Case, batch: int, steps: int, per_execution: int) -> Times:
    """Time `fit` epoch by epoch, in plain Keras (backend from KERAS_BACKEND) or under the strategy.

    A step is one micro-batch of one replica, so an execution on R replicas takes 1/R of the steps.
    """
    import keras  # noqa: F401 - takes a second, which is not part of making a model

    begin = time.perf_counter()
    if options.who == "openipu":
        import openipu as ipu

        config = ipu.config.IPUConfig()
        config.auto_select_ipus = options.ipus
        config.configure_ipu_system()
        instances = ipu.popdist.getNumInstances()
        together = ipu.distributed.popdist_strategy.PopDistStrategy
        strategy = together(shard="auto") if instances > 1 else ipu.ipu_strategy.IPUStrategy()
        with strategy.scope():
            model = keras_api(case.name)
        model.set_gradient_accumulation_options(options.accumulate)
        compile_model(model, case, max(per_execution // (options.ipus * instances), options.accumulate))
    else:
        model = keras_api(case.name)
        compile_model(model, case, per_execution, options.accumulate)
    made = time.perf_counter() - begin
    x, y = data(case, batch, steps, options.tail)

    clock = make_clock()
    begin = time.perf_counter()
    model.fit(x, y, batch_size=batch, epochs=options.epochs + 1, verbose=0, callbacks=[clock])
    return Times(clock.epochs[1:], made, clock.first - begin, clock.first_at)


def make_clock() -> Any:
    """A callback that keeps the seconds of each epoch and the time at which the first execution ended."""
    import keras

    class Clock(keras.callbacks.Callback):
        async_safe = True

        def __init__(self) -> None:
            super().__init__()
            self.epochs: list[float] = []
            self.first = self.first_at = 0.0

        def on_epoch_begin(self, _epoch: int, _logs: Any = None) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, _batch: int, logs: Any = None) -> None:
            if not self.first:
                float(logs["loss"])
                self.first, self.first_at = time.perf_counter(), time.time()

        def on_epoch_end(self, _epoch: int, logs: Any = None) -> None:
            float(logs["loss"])
            self.epochs.append(time.perf_counter() - self.start)

    return Clock()


def by_hand(case: Case, batch: int, steps: int, epochs: int) -> Times:
    """Time the hand-written loop."""
    import jax

    from benchmarks.by_hand import carry, epoch

    x, y = data(case, batch, steps)
    run, state, x, y = epoch(case), carry(case), jax.device_put(x), jax.device_put(y)
    seconds: list[float] = []
    first_at = 0.0
    for _ in range(epochs + 1):
        start = time.perf_counter()
        order = np.random.permutation(batch * steps).reshape(steps, batch).astype(np.int32)
        state = jax.block_until_ready(run(state, x, y, order))
        seconds.append(time.perf_counter() - start)
        first_at = first_at or time.time()
    return Times(seconds[1:], 0, seconds[0], first_at)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
