"""How XLA compiles a program with replaced convolutions.

On GPUs, XLA tries several Triton kernels for every matrix product, which takes 0.1 s for each. A replaced convolution
is a matrix product, so a network with many of them would be tuned for longer than it takes to compile. From `MANY` on,
such programs use the matrix products of NVIDIA's library instead. On an H200, seconds to the first step and
milliseconds per step of networks for 64x64 images in batches of 8:

| | with Triton | without | plain Keras |
|---|---|---|---|
| U-Net, 12 convolutions | 9.5 s, 1.1 ms | 4.0 s, 1.1 ms | 4.9 s, 2.8 ms |
| ResNet-50 | 24 s, 3.2 ms | 10 s, 3.7 ms | 11 s, 6.2 ms |

Small networks keep Triton: it makes the steps of the tutorial CNN faster by a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from openipu.engine.facts.costs import Rewritten

MANY = 24
"""From this many replaced convolutions on (a layer has three, with its gradients), Triton is not used."""


@dataclass(slots=True)
class Replaced:
    """The convolutions that were replaced in a program."""

    convolutions: list[Rewritten] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.convolutions)

    def compiler_options(self, platform: str) -> dict[str, str]:
        """The XLA options with which the program should be compiled."""
        return {"xla_gpu_enable_triton_gemm": "False"} if platform == "gpu" and self.count >= MANY else {}


_current: ContextVar[Replaced | None] = ContextVar("replaced", default=None)


@contextmanager
def counted() -> Iterator[Replaced]:
    """Note the convolutions that are replaced inside, in this thread."""
    replaced = Replaced()
    token = _current.set(replaced)
    try:
        yield replaced
    finally:
        _current.reset(token)


def note(convolution: Rewritten) -> None:
    """A convolution was replaced."""
    replaced = _current.get()
    if replaced is not None:
        replaced.convolutions.append(convolution)
