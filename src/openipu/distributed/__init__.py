"""Several instances of a script that train one model."""

from . import popdist_strategy

__all__ = ["popdist_strategy"]
