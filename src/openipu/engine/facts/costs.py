"""What programs cost, as frozen values: operations and bytes of each layer, buffers, and what a machine can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Part = Literal["forward", "backward", "update"]
PARTS: Final[tuple[Part, ...]] = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one part of a layer costs for one micro-batch, with its share of an update."""

    layer: str
    """The names of the layer and of those around it, with slashes. Empty for what is outside of all layers."""
    part: Part
    operations: float
    bytes: float
    """Read from and written for other parts, if what stays inside a part is never stored."""


@dataclass(frozen=True, slots=True)
class TopOperation:
    """An operation on arrays of certain shapes, wherever a layer uses it."""

    name: str
    shapes: str
    layer: str
    part: Part
    operations: float
    times: float
    """How often it runs for one micro-batch."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The operations of a program, counted in its trace: the model as written, before anything is rewritten."""

    operations: float
    """Of one device."""
    costs: tuple[Cost, ...]
    """Of all devices of a replica together."""
    top: tuple[TopOperation, ...]
    dtype: str
    """The dtype of most matrix products and convolutions; empty if there are none."""
    owners: dict[str, str]
    """The layer that reads each weight, by the weight's name in the program, such as "trainable[0]"."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A convolution that was computed in another form."""

    layer: str
    part: Part
    shapes: str
    form: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of a device's memory."""

    name: str
    kind: str
    layer: str
    """The layer that it belongs to; empty if it belongs to none."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The temporary memory at one point of a program, in bytes."""

    activations: int
    gradients: int
    temporary: int

    @property
    def whole(self) -> int:
        """All of it."""
        return self.activations + self.gradients + self.temporary


@dataclass(frozen=True, slots=True)
class Buffers:
    """How a program uses the memory of one device, by XLA's buffer assignment."""

    arguments: dict[str, int]
    """Bytes of what the program is given, by kind. They add up to XLA's size of all arguments."""
    moments: tuple[Moment, ...]
    """The temporary memory over the program, in its order, with the body of each loop once. A sample, with the peak."""
    largest: tuple[Buffer, ...]

    @property
    def peak(self) -> Moment:
        """The moment with the most temporary memory."""
        return max(self.moments, key=lambda moment: moment.whole, default=Moment(0, 0, 0))


@dataclass(frozen=True, slots=True)
class Peak:
    """What the devices of a run can do at best, all of them together, as measured after it."""

    devices: int
    dtype: str
    """Of the measured matrix product."""
    operations_per_second: float
    """Of a large matrix product."""
    bytes_per_second: float
    """Read and written while a large array is changed."""


def named(buffers: Buffers, owners: dict[str, str]) -> Buffers:
    """The buffers, with the layers that own the weights among them."""
    largest = tuple(
        Buffer(
            b.name,
            b.kind,
            next((layer for name, layer in owners.items() if b.name.endswith(f".{name}")), b.layer),
            b.bytes,
        )
        for b in buffers.largest
    )
    return Buffers(buffers.arguments, buffers.moments, largest)
