"""`python -m openipu.run script.py args...`: run a script that was written for TensorFlow 2 on the IPU.

The command `openipu run` does the same. In both, a script is loaded first and then run from the outermost function.
TensorFlow looks at all functions on the stack at each of its operations, so ten more of them make small operations a
third slower.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

__all__ = ["Script", "check", "load"]


class Script(NamedTuple):
    """A script that is ready to run: `exec(*script)`."""

    code: CodeType
    names: dict[str, Any]


def check(path: str) -> None:
    """Raise an error unless there is such a script."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no script {path}. Give the path of a Python file.")


def load(path: str, args: Sequence[str] = ()) -> Script:
    """Make a script the main module, as `python path args...` does, but with TensorFlow's names for the IPU."""
    gc.disable()  # modules are no garbage; to look for some while they load took 0.2 s of 3.7 s
    import openipu.tensorflow  # noqa: F401 - importing it puts the names in place

    gc.freeze()  # nor later: collections would go through all of them again and again
    gc.enable()
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = loader = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    return Script(loader.source_to_code(loader.get_data(path), path), vars(module))


def _from_command_line() -> Script:
    if len(sys.argv) < 2:
        sys.exit("Usage: python -m openipu.run SCRIPT [ARGUMENT]...")
    try:
        check(sys.argv[1])
    except FileNotFoundError as error:
        sys.exit(str(error))
    return load(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    exec(*_from_command_line())
