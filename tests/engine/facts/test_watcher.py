"""The thread that watches executions."""

import subprocess
import sys

PROGRAM = """
import jax.numpy as jnp
from openipu.engine.facts.recorder import RunRecorder

logs = {str(number): jnp.float32(number) for number in range(200)}
for _ in range(20):
    run = RunRecorder("fit", "model")
    run.enter()
    for _ in range(20):
        run.launched(run.launching(), logs, None, steps=1, samples=1, own=True)
"""


def test_a_process_may_end_while_logs_are_read() -> None:
    """Python ends other threads by force. JAX cannot be ended that way: it would abort the process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
