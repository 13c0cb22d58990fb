"""Where names of TensorFlow, Keras 2 and the IPU's packages are now.

`new_name` is about names that are the same thing everywhere. Operations, whose arguments differ, are in `ops.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .exports import exists
from .reasons import without_successor

_KERAS: Final = r"(?:tensorflow(?:\.python|\.compat\.v[12])?\.)?keras"
_PREFIXES: Final = (
    (rf"tensorflow(?:\.python)?\.ipu\b|{_KERAS}\.ipu\.keras\b", "openipu"),
    (rf"{_KERAS}\.ipu\b|ipu_tensorflow_addons\.keras\b", "openipu.keras"),
    (r"popdist\b", "openipu.popdist"),
    (rf"{_KERAS}\b", "keras"),
    (r"tensorflow(?:\.compat\.v1)?\.estimator\b", "openipu.estimator"),
    (r"tensorflow\.(losses|metrics|optimizers|initializers)\b", r"keras.\1"),
)
"""Packages and modules that moved as a whole. The first that fits counts."""

_MOVES: Final = (
    (r"keras\.optimizers\.(?:legacy|experimental)\b", "keras.optimizers"),
    (r"keras\.optimizer_v[12]\.optimizer_v2\.OptimizerV2$", "keras.optimizers.Optimizer"),
    (r"keras\.optimizer_v[12]\.(?!learning_rate_schedule)\w+\.", "keras.optimizers."),
    (r"keras\.(?:optimizer_v[12]\.learning_rate_schedule|experimental)\b", "keras.optimizers.schedules"),
    (r"keras\.layers\.experimental(?:\.preprocessing)?\b", "keras.layers"),
    (r"keras\.mixed_precision\.experimental\.set_policy$", "keras.mixed_precision.set_global_policy"),
    (r"keras\.mixed_precision\.experimental\b", "keras.mixed_precision"),
    (r"keras\.backend\.random_(uniform|normal)$", r"keras.random.\1"),
    (r"keras\.losses\.Reduction\.(?:AUTO|SUM_OVER_BATCH_SIZE)$", '"sum_over_batch_size"'),
    (r"keras\.losses\.Reduction\.SUM$", '"sum"'),
    (r"keras\.losses\.Reduction\.NONE$", '"none"'),
    (r"tensorflow\.random\.set_seed$", "keras.utils.set_random_seed"),
    (
        r"tensorflow(?:\.compat\.v1)?\.(zeros|ones|constant)_initializer$",
        lambda found: f"keras.initializers.{found[1].title()}",
    ),
    (r"tensorflow\.random_(normal|uniform)_initializer$", lambda found: f"keras.initializers.Random{found[1].title()}"),
    (
        r"tensorflow\.compat\.v1\.glorot_(normal|uniform)_initializer$",
        lambda f: f"keras.initializers.Glorot{f[1].title()}",
    ),
    (r"tensorflow\.compat\.v1\.train\.(?:GradientDescent|Momentum)Optimizer$", "keras.optimizers.SGD"),
    (r"tensorflow\.compat\.v1\.train\.(SessionRun\w+|CheckpointSaverListener)$", r"openipu.estimator.\1"),
)
"""Names that moved or were renamed, after the prefixes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a name: its new form, which may be text in quotes, or the reason why it has none."""

    new: str = ""
    reason: str = ""


def new_name(name: str) -> Verdict | None:
    """What becomes of a name, or None if it is none of ours, such as `tensorflow.data`."""
    new = moved(name)
    if new.startswith('"'):
        return Verdict(new)
    if new.partition(".")[0] not in ("openipu", "keras"):
        return None
    if exists(new):
        return Verdict(new)
    for other in (new.replace("openipu.keras.optimizers.", "openipu.optimizers."),):
        if other != new and exists(other):
            return Verdict(other)
    return Verdict(reason=without_successor(new))


def moved(name: str) -> str:
    """The name after all that moved as a whole, whether it exists or not."""
    for pattern, new in _PREFIXES:
        name, found = re.subn(f"^(?:{pattern})", new, name, count=1)
        if found:
            break
    for pattern, replacement in _MOVES:
        name = re.sub(f"^{pattern}", replacement, name, count=1)
    return name
