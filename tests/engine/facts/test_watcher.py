"""The thread that watches executions."""

import subprocess
import sys
import time

from openipu.engine.facts import watcher

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


class Busy:
    """A run that another thread launches again just after each look."""

    def __init__(self) -> None:
        self.until = time.monotonic() + 5 * watcher._IDLE
        self.last = 0.0

    def look(self) -> None:
        self.last = time.monotonic()
        if self.last < self.until:
            watcher.watch(self)


def test_a_launch_between_a_look_and_falling_asleep_is_not_missed() -> None:
    run = Busy()
    watcher.watch(run)
    deadline = time.monotonic() + 20
    while run.last < run.until and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.last >= run.until, "the thread stopped looking"
