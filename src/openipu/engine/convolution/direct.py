"""XLA's own convolution, in the one layout that its fast library takes.

[Note: convolutions in loops] XLA:CPU hands a convolution to its library only if batch, places and features come in that
order in every operand. A pass of XLA brings them into this order, but only outside of loops. Inside, the gradient of a
kernel, in which batch and features are exchanged, runs on plain loops instead, up to 90 times slower (jax issue 12868).
"""

from __future__ import annotations

import jax
from jax import lax
from jax.typing import DTypeLike

from .arrays import arrange
from .geometry import Geometry
from .roles import finish, lhs_axes, rhs_axes, spatial_axes


def direct(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, chunk: int = 0
) -> jax.Array:
    """The same convolution with its axes in the library's order. It is never cut into chunks."""
    del chunk
    spatial = spatial_axes(geo)
    x = arrange(lhs.astype(dtype), lhs_axes(geo), ("n", *spatial, "c"))
    w = arrange(rhs.astype(dtype), rhs_axes(geo), (*spatial, "c", "f"))
    places = "HWD"[: len(spatial)]
    out = lax.conv_general_dilated(
        x,
        w,
        geo.strides,
        geo.padding,
        geo.lhs_dilation,
        geo.rhs_dilation,
        dimension_numbers=(f"N{places}C", f"{places}IO", f"N{places}C"),
        precision=precision,
    )
    return finish(out, ("n", *spatial, "f"), geo)
