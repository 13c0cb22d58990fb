"""Numbers with units, as people write them: `80GiB`, `50GB/s`, `300TFLOP/s`."""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kKMGTP]?)(i?)(B|B/s|FLOP/s|FLOPS)\s*")
_POWERS: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_EXAMPLES: Final = {"B": "80GiB", "B/s": "50GB/s", "FLOP/s": "300TFLOP/s"}


def parse(option: str, text: str, unit: str) -> float:
    """The number that a user gave for an option, in `unit`: "B", "B/s" or "FLOP/s"."""
    found = _NUMBER.fullmatch(text)
    if found is None or found[4].replace("FLOPS", "FLOP/s") != unit or float(found[1]) <= 0:
        raise ValueError(f"{option} {text} is not a positive number of {unit}. Write it like {_EXAMPLES[unit]}.")
    return float(found[1]) * float(1024 if found[3] else 1000) ** _POWERS[found[2]]


def rate(value: float, unit: str) -> str:
    """A number in a unit in which it is short."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.4g} {prefix}{unit}"
        value /= 1000
    return f"{value:.4g} P{unit}"
