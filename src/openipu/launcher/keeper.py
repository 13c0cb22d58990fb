"""Runs next to each instance, on its machine: starts it, passes signals on, and ends it if the launcher goes away.

    python keeper.py COMMAND ...

It is a file of its own without imports from OpenIPU, because every instance waits for it to load.

The launcher holds the other end of standard input. Each byte is the number of a signal for the instance and all that it
has started (its process group). The end of the input means that the launcher has ended or was killed, or that the
connection was lost. This needs no terminal (`ssh -tt`), which would mix the output with the errors. On Linux, the
instance also ends with its keeper.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

STARTED = b"\0openipu instance\0"
"""Written to the output before anything else. What comes earlier is from the shell of that machine."""
GRACE_SECONDS = 3.0
PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Run the instance. Returns its exit code, which is 128 + n if signal n has ended it."""
    os.write(1, STARTED)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def end_with_keeper() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        instance = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_keeper,  # noqa: PLW1509 - this process has no other thread yet
        )
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())
        return 127
    threading.Thread(target=_obey, args=(instance.pid,), daemon=True).start()
    code = instance.wait()
    _send(instance.pid, signal.SIGKILL)  # what it has left behind
    return code if code >= 0 else 128 - code


def _obey(group: int) -> None:
    while number := os.read(0, 1):
        _send(group, number[0])
    _send(group, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    _send(group, signal.SIGKILL)


def _send(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(group, number)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Without Python's own end, which would wait for the thread that reads.
    os._exit(code)
