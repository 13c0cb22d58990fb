"""Convolutions and poolings that are fast inside a compiled loop: `rewrite(fn, platform)`."""

from .interpreter import rewrite

__all__ = ["rewrite"]
