"""Convolutions, poolings and sums of gradients that are fast in a compiled loop: `rewrite(fn, platform)`."""

from .interpreter import rewrite
from .tuning import counted

__all__ = ["counted", "rewrite"]
