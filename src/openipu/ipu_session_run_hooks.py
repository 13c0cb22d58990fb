"""Hooks that log tensors from inside the device loop of an estimator."""

from openipu.engine.estimator.hooks import IPULoggingTensorHook
from openipu.ipu_outfeed_queue import IPUOutfeedMode as LoggingMode

__all__ = ["IPULoggingTensorHook", "LoggingMode"]
