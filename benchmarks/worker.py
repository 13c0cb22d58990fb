"""One measurement in one process: prints a line of JSON with microseconds per step for each epoch after the first.

    python -m benchmarks.worker openipu cnn --steps-per-execution 100
"""

import argparse
import json
import os
import time

import numpy as np

from benchmarks.models import CASES, compile_model, data, keras_model


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=["openipu", "keras", "scan"])
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("--steps-per-execution", default="epoch")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    case = CASES[options.model]
    batch, steps = options.batch or case.batch, options.steps or case.steps
    if options.who == "scan":
        seconds, first = by_hand(case, batch, steps, options.epochs)
    else:
        per_execution = steps if options.steps_per_execution == "epoch" else int(options.steps_per_execution)
        seconds, first = with_fit(options.who, case, batch, steps, options.epochs, per_execution)
    print(json.dumps({"us_per_step": [s / steps * 1e6 for s in seconds], "first_execution_s": first}))


def with_fit(
    who: str, case: object, batch: int, steps: int, epochs: int, per_execution: int
) -> tuple[list[float], float]:
    """Time `fit` epoch by epoch, in plain Keras (backend from KERAS_BACKEND) or under the strategy."""
    if who == "openipu":
        import openipu as ipu
    import keras

    if who == "openipu":
        with ipu.ipu_strategy.IPUStrategy().scope():
            model = keras_model(case.name)
    else:
        model = keras_model(case.name)
    compile_model(model, case, per_execution)
    x, y = data(case, batch, steps)

    class Clock(keras.callbacks.Callback):
        epochs: list[float] = []
        first = 0.0
        async_safe = True

        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            if not self.first:
                float(logs["loss"])
                Clock.first = time.perf_counter() - begin

        def on_epoch_end(self, epoch, logs=None):
            float(logs["loss"])
            self.epochs.append(time.perf_counter() - self.start)

    begin = time.perf_counter()
    model.fit(x, y, batch_size=batch, epochs=epochs + 1, verbose=0, callbacks=[Clock()])
    return Clock.epochs[1:], Clock.first


def by_hand(case: object, batch: int, steps: int, epochs: int) -> tuple[list[float], float]:
    """Time the hand-written loop."""
    import jax

    from benchmarks.by_hand import carry, epoch

    x, y = data(case, batch, steps)
    run, state, x, y = epoch(case), carry(case), jax.device_put(x), jax.device_put(y)
    seconds = []
    for _ in range(epochs + 1):
        start = time.perf_counter()
        order = np.random.permutation(batch * steps).reshape(steps, batch).astype(np.int32)
        state = jax.block_until_ready(run(state, x, y, order))
        seconds.append(time.perf_counter() - start)
    return seconds[1:], seconds[0]


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
