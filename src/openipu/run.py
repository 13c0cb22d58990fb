"""`python -m openipu.run script.py args...`: run a script that was written for TensorFlow 2 on the IPU.

The command `openipu run` does the same.
"""

from __future__ import annotations

import gc
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "run_script"]


def run_script(script: str, args: Sequence[str] = ()) -> None:
    """Run a script as `python script args...` does, but with TensorFlow's names for the IPU."""
    if not Path(script).is_file():
        raise FileNotFoundError(f"There is no script {script}. Give the path of a Python file.")
    gc.disable()  # modules are no garbage; to look for some while they load took 0.2 s of 3.7 s
    import openipu.tensorflow  # noqa: F401 - importing it puts the names in place

    gc.freeze()  # nor later: collections would go through all of them again and again
    gc.enable()
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """The command line."""
    if len(sys.argv) < 2:
        sys.exit("Usage: python -m openipu.run SCRIPT [ARGUMENT]...")
    try:
        run_script(sys.argv[1], sys.argv[2:])
    except FileNotFoundError as error:
        if Path(sys.argv[1]).is_file():
            raise
        sys.exit(str(error))


if __name__ == "__main__":
    main()
