"""Stands in for ssh and for the network to another host: `fake_ssh.py OPTIONS HOST COMMAND` runs here.

Like ssh, it gives the command to a shell, with an environment and a session of its own, and the command hears of a lost
connection by the end of its input only. The host "nowhere" cannot be reached.
"""

import os
import subprocess
import sys
import threading

host, command = sys.argv[-2:]
if host == "nowhere":
    sys.stderr.write("ssh: Could not resolve hostname nowhere\n")
    sys.exit(255)
print("Welcome to", host, flush=True)  # shells of other hosts say such things
remote = subprocess.Popen(
    ["sh", "-c", command],
    env={"PATH": os.defpath, "REMOTE_HOST": host},
    cwd="/",
    stdin=subprocess.PIPE,
    start_new_session=True,
)


def carry_input() -> None:
    with remote.stdin as connection:
        while data := os.read(0, 1024):
            os.write(connection.fileno(), data)


threading.Thread(target=carry_input, daemon=True).start()
code = remote.wait()
os._exit(code if code >= 0 else 255)
