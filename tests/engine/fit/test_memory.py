"""What data costs in memory, measured in processes of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COMMON = """
import threading, time
from pathlib import Path
import openipu as ipu
import keras, numpy as np

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

def settled():
    '''The least within two seconds: XLA gives inputs back in a thread of its own, after the results are there.'''
    sizes = [resident()]
    for _ in range(20):
        time.sleep(0.1)
        sizes.append(resident())
    return min(sizes)

class Peak(threading.Thread):
    '''The largest resident size seen while the block runs.'''
    def __enter__(self):
        self.most, self.going = resident(), True
        self.start()
        return self
    def run(self):
        while self.going:
            self.most = max(self.most, resident())
            time.sleep(0.002)
    def __exit__(self, *_):
        self.going = False
        self.join()

def model(width, steps_per_execution):
    with ipu.ipu_strategy.IPUStrategy().scope():
        made = keras.Sequential([keras.Input((width,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        made.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    return made
"""


def measure(code: str) -> list[float]:
    """The numbers that a program prints, in its own process without a share of other tests' memory."""
    if not Path("/proc/self/status").exists():
        pytest.skip("resident memory is read from /proc")
    env = {**os.environ, "OPENIPU_CACHE": "off", "MALLOC_TRIM_THRESHOLD_": "0"}
    source = COMMON + textwrap.dedent(code)
    command = [sys.executable, "-W", "ignore", "-c", source]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


# Bytes are the stricter case: as numbers of another type they would take four times as much.
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "uint8"])
def test_a_resident_dataset_costs_at_most_its_bytes_and_a_tenth(dtype):
    size, first, before, peak, after = measure(f"""
        m = model(1000, 50)
        m.fit(np.zeros((3200, 1000), "{dtype}"), np.zeros(3200, "float32"), batch_size=32, verbose=0)
        x = np.ones((200_000_000 // 1000 // np.dtype("{dtype}").itemsize, 1000), "{dtype}")
        y = np.zeros(len(x), "float32")
        first = resident()
        # Compiling takes tens of megabytes of its own, whatever the size of the data.
        m.fit(x, y, batch_size=32, verbose=0)
        before = resident()
        with Peak(daemon=True) as peak:
            m.fit(x, y, batch_size=32, epochs=2, verbose=0)
        print(x.nbytes, first, before, peak.most, settled())
    """)
    assert peak - before < 1.1 * size, f"{(peak - before) / size:.2f} times its bytes at the peak"
    assert after - first < 0.3 * size, f"{(after - first) / size:.2f} times its bytes stay after training"


@pytest.mark.slow
def test_a_streamed_fit_does_not_grow_with_the_number_of_steps():
    warm, few, many = measure("""
        m = model(20_000, 4)
        batch = np.ones((32, 20_000), "float32"), np.zeros((32, 1), "float32")
        def batches():
            while True:
                yield batch[0].copy(), batch[1].copy()
        def most(executions):
            with Peak(daemon=True) as peak:
                m.fit(batches(), steps_per_epoch=4 * executions, verbose=0, shuffle=False)
            return peak.most
        print(most(5), most(50), most(500))
    """)
    slab = 4 * 32 * 20_000 * 4
    assert many - few < 3 * slab, f"450 more executions took {(many - few) / slab:.1f} slabs"
    assert few - warm < 6 * slab


def test_predictions_of_a_long_stream_are_kept_once():
    size, before, peak = measure("""
        m = model(50, 20)
        m.predict(np.zeros((640, 50), "float32"), batch_size=32, verbose=0)
        with ipu.ipu_strategy.IPUStrategy().scope():
            wide = keras.Sequential([keras.Input((50,)), keras.layers.Dense(1000)])
        wide.compile(steps_per_execution=20)
        wide.predict(np.zeros((640, 50), "float32"), batch_size=32, verbose=0)
        before = resident()
        with Peak(daemon=True) as peak:
            out = wide.predict(np.zeros((25_600, 50), "float32"), batch_size=32, verbose=0)
        print(out.nbytes, before, peak.most)
    """)
    # The blocks of the executions and, at the end, the array that they are joined into.
    assert peak - before < 2.4 * size, f"{(peak - before) / size:.2f} times the predictions"
