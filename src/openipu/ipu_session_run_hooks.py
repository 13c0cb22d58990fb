"""Hooks that look into the device loop of an estimator."""

from openipu.engine.estimator.hooks import IPULoggingTensorHook, LoggingMode

__all__ = ["IPULoggingTensorHook", "LoggingMode"]
