"""Convolutions and poolings that are fast inside a compiled loop: `rewrite(fn, platform)`."""

from .interpreter import rewrite
from .tuning import counted

__all__ = ["counted", "rewrite"]
