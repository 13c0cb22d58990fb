"""Options for one stage of a pipeline that the original passes to its libraries."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate


class PipelineStageOptions:
    """Options for one stage that the original passes to its libraries. They are checked and kept, but have no effect.

    >>> options = ipu.pipelining_ops.PipelineStageOptions(matmul_options={"partialsType": "half"})

    Args:
        convolution_options: For convolutions.
        matmul_options: For matrix products.
        slice_options: For slices.
    """

    def __init__(
        self,
        convolution_options: dict[str, Any] | None = None,
        matmul_options: dict[str, Any] | None = None,
        slice_options: dict[str, Any] | None = None,
    ) -> None:
        self.convolution_options = validate.mapping("convolution_options", convolution_options, optional=True)
        self.matmul_options = validate.mapping("matmul_options", matmul_options, optional=True)
        self.slice_options = validate.mapping("slice_options", slice_options, optional=True)


def check_stage_options(name: str, value: object, stages: int | None = None) -> None:
    """Raise unless `value` is one `PipelineStageOptions` per stage, or just one for the update of the weights."""
    if name.startswith("weight_update"):
        validate.instance(name, value, PipelineStageOptions)
        return
    listed = validate.sequence(name, value)
    for number, options in enumerate(listed):
        validate.instance(f"{name}[{number}]", options, PipelineStageOptions)
    if stages is not None and len(listed) != stages:
        raise ValueError(f"`{name}` has {len(listed)} elements for {stages} stages. Give one for each stage.")
