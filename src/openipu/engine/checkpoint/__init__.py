"""Checkpoints: the state of a training run on disk, complete or not there at all.

checkpoints.py  when to save, and which checkpoint to read
files.py        one checkpoint: its files, their digests, and the tree it holds
folder.py       whether a folder can be used, and who uses it
quiet_orbax.py  one error instead of tracebacks
"""

from .checkpoints import Checkpoints
from .files import MANIFEST, refuse_foreign
from .folder import InUseError, check_space, unusable, why

__all__ = ["MANIFEST", "Checkpoints", "InUseError", "check_space", "refuse_foreign", "unusable", "why"]
