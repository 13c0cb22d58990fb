"""Where a run is in its data, and the random states that shuffle the data: NumPy's, Python's, and torch's if loaded.

Keras' own random numbers (dropout) are not covered here: their seeds are variables of the model.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import random as python
import sys
from typing import Any

from openipu.engine.devices import group

import numpy as np

Random = dict[str, Any]
"""The state of each random number generator, by the name of its package."""


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """How much of its data a feed has handed out, and how to get there again.

    `done` counts the steps of this epoch, `passes` the started passes over the data, `taken` the batches that this
    process has taken from the last pass, and `step` all steps. A batch has `batch_size` rows, a pass `num_batches`
    batches, and an epoch `steps` steps, if that is known.

    `openings` counts how often the data was opened until then: once for each pass, and perhaps to look at a batch.
    `opened`, `ahead` and `now` are random states: when the last pass was opened, before the next slab was read (which
    happens while the last one still runs), and now. `read` counts the batches of this process that were read from
    `ahead` to `now`: none if the epoch has ended. `ends` has the random states at the ends of earlier epochs, for data
    that changes then.
    """

    done: int = 0
    passes: int = 0
    taken: int = 0
    step: int = 0
    batch_size: int | None = None
    num_batches: int | None = None
    opened: Random | None = None
    ahead: Random | None = None
    now: Random | None = None
    ends: tuple[Random, ...] = ()
    read: int | None = None
    """None in checkpoints of older versions, as `steps` and `openings`."""
    steps: int | None = None
    openings: int | None = None

    def for_data(self, batch_size: int | None, num_batches: int | None, steps: int | None) -> Position:
        """The same position in data that may be cut into other batches and epochs.

        Raises an error if there is none: between two batches of other sizes, or in the middle of other data.
        """
        old, ended = self.batch_size, self.read == 0
        sizes = (1, 1) if batch_size is None or old is None else (old, batch_size)
        ends = {self.num_batches: num_batches}  # the last batch of each size may be smaller

        def rescaled(batches: int) -> int:
            return ends.get(batches) or _rescale(batches, *sizes)

        if self.num_batches not in (self.taken, self.done):
            _check_same("batches of the data", self.taken, (self.num_batches, num_batches), sizes)
        if not ended:
            _check_same("steps of an epoch", self.done, (self.steps, steps), sizes)
        done = steps if ended and steps else rescaled(self.done)
        taken = rescaled(self.taken)
        read = None if self.read is None else self.read * sizes[0] // sizes[1]
        return dataclasses.replace(
            self, done=done, taken=taken, batch_size=batch_size, num_batches=num_batches, steps=steps, read=read
        )

    def to_json(self) -> str:
        """The position as text that `from_json` reads."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        random: dict[str, Any] = {name: _text(fields[name]) for name in ("opened", "ahead", "now")}
        return json.dumps(fields | random | {"ends": [_text(state) for state in self.ends]})

    @classmethod
    def from_json(cls, text: str) -> Position:
        """The inverse of `to_json`. Raises one of Python's errors for any other text."""
        fields: dict[str, Any] = json.loads(text)
        if any(type(fields[name]) is not int for name in ("done", "passes", "taken", "step")):
            raise TypeError("a position has numbers of steps and batches")
        random: dict[str, Any] = {name: _state(fields[name]) for name in ("opened", "ahead", "now")}
        return cls(**fields | random | {"ends": tuple(map(_state, fields["ends"]))})


def random() -> Random:
    """The current random state."""
    state: Random = {"numpy": np.random.get_state(), "python": python.getstate()}
    if "torch" in sys.modules:
        # Not `sys.modules`: another thread may be importing it, and half of it crashes. This waits for the whole.
        state["torch"] = importlib.import_module("torch").get_rng_state().numpy()
    return state


def set_random(state: Random | None) -> None:
    """Let random numbers continue from `state`."""
    assert state is not None, "only a saved position has all random states"
    np.random.set_state(state["numpy"])
    python.setstate(state["python"])
    if "torch" in state and "torch" in sys.modules:
        torch = importlib.import_module("torch")
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))


def follow_first() -> None:
    """Let the random numbers of this process continue as those of instance 0 do, so that all shuffle alike."""
    state = group.of_first("the random state", _text(random()))
    set_random(_state(state))


def _check_same(what: str, after: int, numbers: tuple[int | None, int | None], sizes: tuple[int, int]) -> None:
    """Raise if a checkpoint lies in the middle of other data.

    `numbers` are those of batches or steps then and now, `sizes` the rows in each. The last one may have fewer rows.
    """
    old, new = numbers
    if old is None or new is None:
        return
    most = min(old * sizes[0], new * sizes[1])
    least = max((old - 1) * sizes[0], (new - 1) * sizes[1]) + 1
    if least > most:
        of_rows = ("", "") if sizes[0] == sizes[1] else tuple(f", of {size} rows each" for size in sizes)
        raise ValueError(
            f"The checkpoint was saved after {after} of {old} {what}{of_rows[0]}, but now there are {new}{of_rows[1]}. "
            "Give the same data and `steps_per_epoch` as before, at least until the epoch has ended; or use another "
            "folder."
        )


def _rescale(batches: int, old: int, new: int) -> int:
    whole, rest = divmod(batches * old, new)
    if rest:
        raise ValueError(
            f"The checkpoint was saved after {batches} batches of {old} rows, which is in the middle of a batch of "
            f"{new} rows. Use batch_size={old}, or a divisor of {batches * old}."
        )
    return whole


def _text(state: Random) -> dict[str, Any]:
    """A random state in types that JSON can hold."""
    name, keys, *rest = state["numpy"]
    version, words, gauss = state["python"]
    text = {"numpy": [name, _encode(keys), *rest], "python": [version, _encode(np.asarray(words, np.uint32)), gauss]}
    return text | {n: _encode(v) for n, v in state.items() if n == "torch"}


def _state(text: dict[str, Any]) -> Random:
    """The inverse of `_text`."""
    name, keys, *rest = text["numpy"]
    version, words, gauss = text["python"]
    state: Random = {
        "numpy": (name, _decode(keys, np.uint32), *rest),
        "python": (version, tuple(_decode(words, np.uint32).tolist()), gauss),
    }
    return state | {n: _decode(v, np.uint8) for n, v in text.items() if n == "torch"}


def _encode(words: np.ndarray) -> str:
    return base64.b64encode(words.tobytes()).decode("ascii")


def _decode(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)
