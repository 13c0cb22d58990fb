"""A port for the coordinator that no other launcher takes.

    python ports.py

prints a port of this machine and holds it until its standard input ends.

[Note: a held port] The launcher binds a free port and keeps it bound without listening. With SO_REUSEPORT, instance 0
can bind the same port for its server. Only that one listens, so all connections reach it. The system never gives a port
that is held in this way to a process that asks for any free port, and other users cannot bind it at all.
"""

import re
import socket
import sys


def hold(address: str) -> socket.socket:
    """A socket that holds a free port of an address of this machine. Close it to give the port back."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, 0))
    return held


def read(line: bytes) -> int | None:
    """The port in a line that this file has printed. Shells may print lines of their own when they start."""
    found = re.fullmatch(rb"openipu holds port (\d+)\n", line)
    return found and int(found[1])


if __name__ == "__main__":
    with hold("") as held:
        sys.stdout.write(f"openipu holds port {held.getsockname()[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()
