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


def _options(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"`{name}` is {value!r}. Give a dictionary of options.")
    return dict(value or {})
