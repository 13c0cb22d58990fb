"""The sizes of one convolution, read off its equation.

`Geometry.of(params, lhs_shape, rhs_shape, itemsize)` names every count by its role instead of its axis number. This
covers every layout (channels first or last) and every purpose (forward, input gradient, weight gradient: JAX writes all
three as the same primitive with the roles of the axes exchanged).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is multiplied with what.

    `out[n, o, f]` is the sum over k and c of `lhs[n, i, c] * rhs[k, c, f]` where
    `i * lhs_dilation = o * stride + k * rhs_dilation - low`. Terms for which there is no such i are zero.

    Counts are per group: there are `groups` independent convolutions side by side. `group_axis` says which axis of the
    left operand the groups divide: "c" (feature groups) or "n" (batch groups, as in the weight gradient of a grouped
    convolution).
    """

    lhs_spec: Shape
    rhs_spec: Shape
    out_spec: Shape
    batch: int
    features_in: int
    features_out: int
    spatial: Shape
    kernel: Shape
    out: Shape
    strides: Shape
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Shape
    rhs_dilation: Shape
    groups: int
    group_axis: str
    itemsize: int

    @classmethod
    def of(cls, params: Mapping[str, Any], lhs: Sequence[int], rhs: Sequence[int], itemsize: int) -> Geometry:
        """The geometry of one `conv_general_dilated` equation."""
        numbers = params["dimension_numbers"]
        lhs_spec, rhs_spec, out_spec = map(tuple, (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
        feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
        groups = feature_groups * batch_groups
        spatial = tuple(lhs[axis] for axis in lhs_spec[2:])
        kernel = tuple(rhs[axis] for axis in rhs_spec[2:])
        padding = tuple((int(low), int(high)) for low, high in params["padding"])
        strides, lhs_dilation, rhs_dilation = (
            tuple(params[k]) for k in ("window_strides", "lhs_dilation", "rhs_dilation")
        )
        out = tuple(
            output_size(i, k, *steps)
            for i, k, *steps in zip(spatial, kernel, strides, padding, lhs_dilation, rhs_dilation, strict=True)
        )
        return cls(
            lhs_spec=lhs_spec,
            rhs_spec=rhs_spec,
            out_spec=out_spec,
            batch=lhs[lhs_spec[0]] // batch_groups,
            features_in=lhs[lhs_spec[1]] // feature_groups,
            features_out=rhs[rhs_spec[0]] // groups,
            spatial=spatial,
            kernel=kernel,
            out=out,
            strides=strides,
            padding=padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            groups=groups,
            group_axis="n" if batch_groups > 1 else "c",
            itemsize=itemsize,
        )

    @property
    def multiplications(self) -> int:
        """The number of multiply-adds, not counting those with the zeros of a dilation."""
        places = min(prod(self.out) * prod(self.kernel), prod(self.spatial) * prod(self.kernel))
        return self.groups * self.batch * places * self.features_in * self.features_out

    @property
    def is_weight_gradient(self) -> bool:
        """Whether batch and features are exchanged, as in the gradient of a kernel."""
        return self.lhs_spec[0] > self.lhs_spec[1]

    @property
    def empty(self) -> bool:
        """Whether some axis has no elements."""
        return not prod((self.batch, self.features_in, self.features_out, *self.spatial, *self.kernel, *self.out))


def dilated(size: int, dilation: int) -> int:
    """The length of an axis after putting `dilation - 1` zeros between neighbours."""
    return (size - 1) * dilation + 1 if size else 0


def output_size(
    size: int, window: int, stride: int, padding: tuple[int, int], base_dilation: int, window_dilation: int
) -> int:
    """How many windows fit."""
    room = dilated(size, base_dilation) + sum(padding) - dilated(window, window_dilation)
    return max(room // stride + 1, 0)
