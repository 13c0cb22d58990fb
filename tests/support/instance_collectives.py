"""A script for `openipu launch`: what instances tell each other, and what each knows about all of them.

python instance_collectives.py FOLDER DEVICES SHARD
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import openipu as ipu
from openipu import popdist

import numpy as np


def main(folder: str, devices: str, shard: str) -> None:
    popdist.init()
    config = ipu.config.IPUConfig()
    popdist.tensorflow.set_ipu_config(config)
    assert config.auto_select_ipus == int(devices)
    config.configure_ipu_system()
    me = popdist.getInstanceIndex()
    own = {"a": np.array([1.0, 10.0]) * (me + 1), "b": np.int32(me)}
    values = {
        "sum": ipu.distributed.allreduce(own, "SUM"),
        "mean": ipu.distributed.allreduce(own, "MEAN"),
        "of_last": ipu.distributed.broadcast(own, root_rank=popdist.getNumInstances() - 1),
        "all": ipu.distributed.allgather(own),
        "replicas": {"total": popdist.getNumTotalReplicas(), "local": popdist.getNumLocalReplicas()},
    }
    flat = {f"{name}_{part}": value for name, parts in values.items() for part, value in parts.items()}
    np.savez(Path(folder) / f"collectives-{shard}-{me}.npz", **flat)


if __name__ == "__main__":
    main(*sys.argv[1:])
