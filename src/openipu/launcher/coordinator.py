"""The address at which the instances meet. Its port is held while they run (see [Note: a held port] in ports.py)."""

import select
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from .job import Job, address, port_holder
from .ports import hold, read
from .process import Ended, exit_code

_LOOK_SECONDS: Final = 0.2


@contextmanager
def coordinator(job: Job, stop: Callable[[], bool]) -> Iterator[str | Ended | None]:
    """Hold a port on the host of instance 0, and give its address.

    Gives None if `stop` says so before there is one, and how instance 0 failed if its host cannot be reached.
    """
    host = job.host(0)
    if host is None:
        with hold("127.0.0.1") as held:
            yield address(None, held.getsockname()[1])
        return
    with subprocess.Popen(
        port_holder(host), bufsize=0, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as holder:  # fmt: skip
        try:
            port = _wait_for_port(holder, stop)
            yield address(host, port) if isinstance(port, int) else port
        finally:
            holder.kill()


def _wait_for_port(holder: subprocess.Popen[bytes], stop: Callable[[], bool]) -> int | Ended | None:
    assert holder.stdout is not None, "the holder was started with pipes"
    assert holder.stderr is not None, "the holder was started with pipes"
    while not stop():
        if not select.select([holder.stdout], [], [], _LOOK_SECONDS)[0]:
            continue
        line = holder.stdout.readline()
        if not line:
            last = tuple(holder.stderr.read().splitlines())
            return Ended(0, exit_code(holder), started=False, last=last, shown=False)
        if (port := read(line)) is not None:
            return port
    return None
