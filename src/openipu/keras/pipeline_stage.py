"""`PipelineStage`: puts the layers that are created or called in a `with` block into a stage."""

from __future__ import annotations

import contextlib
from types import TracebackType

from openipu import _validate as validate
from openipu.engine.devices.current_system import open_strategies
from openipu.engine.pipeline.partition.stage_marks import current_stage, in_own_call, marking


class PipelineStage:
    """Puts the layers that are created or called inside its `with` block into a stage of the pipeline.

    >>> with strategy.scope():
    ...     inputs = keras.Input((784,))
    ...     with ipu.keras.PipelineStage(0):
    ...         hidden = keras.layers.Dense(512, "relu")(inputs)
    ...     with ipu.keras.PipelineStage(1):
    ...         outputs = keras.layers.Dense(10)(hidden)
    ...     model = keras.Model(inputs, outputs)

    The stage in which a layer is called takes precedence over the one in which it was created. The call of a nested
    model counts for all calls inside it. You can use `PipelineStage` in the code that builds a Functional model, and in
    `__init__` and `call` of a subclass.

    Args:
        stage: The number of the stage, from 0.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._open: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> PipelineStage:
        stage = validate.count("stage", self._stage, least=0)
        if not (open_strategies() or in_own_call()):
            raise RuntimeError(
                f"PipelineStage({stage}) is used outside of an IPUStrategy. Put it inside `with strategy.scope():`."
            )
        outer = current_stage()
        if outer is not None:
            raise RuntimeError(
                f"PipelineStage({stage}) is inside PipelineStage({outer}), but pipeline stages must not be "
                "nested. Close the outer one first."
            )
        self._open = marking(stage)
        self._open.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.__exit__(kind, error, trace)
            self._open = None
