"""Memory of the process is kept between launches (openipu/_host_memory.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, resource
import openipu as ipu
import keras, numpy as np

keras.utils.set_random_seed(0)
config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
x = np.ones((16, 96, 96, 16), "float32")
with ipu.ipu_strategy.IPUStrategy().scope():
    layers = keras.layers
    parts = [layers.Input(x.shape[1:]), layers.Conv2D(32, 3), layers.ReLU(), layers.Flatten(), layers.Dense(1)]
    model = keras.Sequential(parts)
    model.compile("sgd", "mse")  # a launch for every step
model.fit(x, x[:, 0, 0, :1], batch_size=8, epochs=20, verbose=0)  # each of JAX's threads needs memory once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
history = model.fit(x, x[:, 0, 0, :1], batch_size=8, epochs=3, verbose=0)
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, history.history["loss"][-1]]))
"""

glibc = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")


def trained(**variables: str) -> tuple[int, float]:
    """Page faults and loss of a small run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=inherited | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    faults, loss = json.loads(done.stdout.splitlines()[-1])
    return faults, loss


@glibc
def test_launches_use_the_memory_of_earlier_ones() -> None:
    kept, loss = trained()
    given_back, same_loss = trained(OPENIPU_KEEP_MEMORY="off")
    assert kept < 0.2 * given_back
    assert loss == same_loss


HEAPS = """
import ctypes, sys
import openipu
import jax

jax.jit(lambda x: x + 1)(1)
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
file = library.fopen(sys.argv[1].encode(), b"w")
library.malloc_info(0, ctypes.c_void_p(file))
library.fclose(ctypes.c_void_p(file))
"""


@glibc
def test_threads_of_the_compiler_do_not_share_one_heap(tmp_path: Path) -> None:
    """With one for all of them, a U-Net compiles for twice as long on six cores."""
    subprocess.run([sys.executable, "-c", HEAPS, tmp_path / "heaps.xml"], check=True)
    assert (tmp_path / "heaps.xml").read_text(encoding="utf-8").count("<heap nr=") > 1


@glibc
@pytest.mark.slow
def test_variables_of_the_c_library_take_precedence() -> None:
    kept, _ = trained()
    asked, _ = trained(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept < 0.2 * asked


def test_other_values_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import openipu"],
        env=os.environ | {"OPENIPU_KEEP_MEMORY": "no"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "OPENIPU_KEEP_MEMORY is 'no', but must be on or off" in done.stderr
