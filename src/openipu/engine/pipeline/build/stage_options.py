"""Options of the original's libraries for one stage of a pipeline."""

from __future__ import annotations

from typing import Any


class PipelineStageOptions:
    """Options of the original's libraries for one stage. They are kept and checked; XLA has no such options.

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
        self.convolution_options = _options("convolution_options", convolution_options)
        self.matmul_options = _options("matmul_options", matmul_options)
        self.slice_options = _options("slice_options", slice_options)


def check_stage_options(name: str, value: Any, stages: int | None = None) -> None:
    """Raise unless `value` holds options for each of the stages, or for the update of the weights."""
    listed = not name.startswith("weight_update")
    values = value if listed and isinstance(value, list | tuple) else [value]
    if (listed and not isinstance(value, list | tuple)) or not all(isinstance(v, PipelineStageOptions) for v in values):
        wanted = "a list of `PipelineStageOptions`, one per stage" if listed else "one `PipelineStageOptions`"
        raise TypeError(f"`{name}` is {value!r}. Give {wanted}.")
    if listed and stages is not None and len(values) != stages:
        raise ValueError(f"`{name}` has {len(values)} elements for {stages} stages. Give one for each stage.")


def _options(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"`{name}` is {value!r}. Give a dictionary of options.")
    return dict(value or {})
