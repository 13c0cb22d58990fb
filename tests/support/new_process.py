"""Scripts in a Python process of their own, for what a process does only once."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path


def in_a_new_process(script: str, tmp_path: Path, **environment: str) -> str:
    """Run a script that has `ipu`, `devices`, `jax` and `configure(**options)`, and give what it prints."""
    prelude = """
        import openipu as ipu

        def configure(**options):
            config = ipu.config.IPUConfig()
            for name, value in options.items():
                setattr(config, name, value)
            config.configure_ipu_system()
            from openipu.engine.devices import systems
            return systems.system()

        def total(system):
            import numpy as np, jax
            from jax.sharding import Mesh, PartitionSpec as P
            mesh = Mesh(np.array(system.devices), "replica")
            add = jax.shard_map(lambda x: jax.lax.psum(x, "replica"), mesh=mesh, in_specs=P("replica"), out_specs=P())
            return jax.jit(add)(np.arange(len(system.devices), dtype="float32")).item()
    """
    inherited = {name: value for name, value in os.environ.items() if name != "TF_POPLAR_FLAGS"}
    inherited["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", inherited.get("XLA_FLAGS", ""))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        env={**inherited, "OPENIPU_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
