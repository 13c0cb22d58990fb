"""A script for tests of `openipu plan`: what comes after its first `fit` must not run."""

import sys
from pathlib import Path

import openipu as ipu

import keras
import numpy as np

config = ipu.config.IPUConfig()
config.auto_select_ipus = 2
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    layers = [keras.layers.Dense(16, use_bias=False, name=f"layer{i}") for i in range(4)]
    model = keras.Sequential([keras.Input((16,)), *layers], name="<net>")
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=4)
    model.compile("adam", "mse", steps_per_execution=4)
if "wrong" in sys.argv:
    raise KeyError("a mistake of the script")
if "early" in sys.argv:
    sys.exit(0)
x = np.ones((64, 16), "float32")
try:
    model.fit(x, x, batch_size=8, verbose=0)
except Exception:
    print("scripts may do this")
Path(sys.argv[-1]).touch()
