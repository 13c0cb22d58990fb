"""The memory of this process, kept for the next launch.

XLA allocates the working memory of a CPU program anew at every launch, and hosts gather a slab of batches for each. The
GNU C library gives blocks of that size back to the system as soon as they are free, and the system hands them out again
page by page: 13,000 page faults per step of the CIFAR-10 network, which is a third of its time. So the library is told
to keep memory for the next allocation, as the allocators of TensorFlow and PyTorch do.
"""

import contextlib
import ctypes
import os

VARIABLE = "OPENIPU_KEEP_MEMORY"
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Parameters of `mallopt`, as numbered by the library's malloc.h."""
HEAP = 64 * 2**20
"""The size of the pieces in which threads get memory. What does not fit into one is always given back."""
SETTINGS = ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, HEAP))
"""No block of its own for a large allocation, nothing given back, and a reserve so large that no piece is unmapped.

One heap for all threads would keep larger blocks too. But compiling was then a fifth slower on two cores, and half as
fast on six, presumably because the compiler's threads wait for each other.
"""


def keep_host_memory() -> None:
    """Let the C library keep memory that is free, unless one of the library's own variables is set."""
    asked = os.environ.get(VARIABLE) or "on"
    if asked not in ("on", "off"):
        raise ValueError(f"The environment variable {VARIABLE} is {asked!r}, but must be on or off.")
    decided = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if asked == "off" or decided or "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()):
        return
    with contextlib.suppress(AttributeError, OSError):  # another library in its place, which may know that name too
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in SETTINGS:
            mallopt(parameter, value)
