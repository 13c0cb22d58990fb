"""Cuts data into slabs, epoch by epoch.

Who does what:
- Keras' data adapters read every kind of source (arrays, tf.data, grain, PyDataset, DataLoader, generators).
- A source (sources.py) hands out passes over that data. The arrays of an `ArraySource` are resident on the device, so
  its passes only hold the order of samples; those of a `StreamSource` hold the batches themselves.
- `Feed` cuts passes into epochs and epochs into slabs of at most `steps_per_execution` batches.
- The loop (loop/loop.py) runs one slab per launch.
- `Position` (position.py) says where a feed is, so that a feed in another process can continue from there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .position import Position, random, set_random
from .slab import Slab
from .sources import Pass, Source


@dataclass
class Feed:
    """The slabs of each epoch. With `steps_per_epoch`, an epoch continues where the last one stopped.

    `width` (the most batches in a slab), `steps_per_epoch` and the steps of slabs count batches over all replicas.
    """

    source: Source
    width: int
    steps_per_epoch: int | None = None
    labels_checked: bool = field(default=False, repr=False)
    """Whether the labels have been compared with the model's classes."""
    _pass: Pass | None = field(default=None, repr=False)
    _here: Position = field(default_factory=Position, repr=False)
    _resume: Position | None = field(default=None, repr=False)

    @property
    def num_steps(self) -> int | None:
        """Steps in an epoch, or None if that is not known yet."""
        return self.steps_per_epoch or self.source.num_batches

    def restart(self) -> None:
        """Let the next epoch begin at the first batch."""
        self._pass = None

    def position(self) -> Position:
        """Where the feed is: just after the latest slab."""
        source = self.source
        here = replace(self._here, batch_size=source.batch_size, num_batches=source.num_batches, steps=self.num_steps)
        return replace(here, opened=source.opened, openings=source.openings, ahead=random(), read=None)

    def read_since(self, position: Position) -> Position:
        """The same position, which knows how many batches have been read since."""
        return replace(position, read=self._here.taken - position.taken)

    def resume(self, position: Position) -> None:
        """Let the next epoch begin at `position`, which another feed over the same data had reached."""
        self._resume = position.for_data(self.source.batch_size, self.source.num_batches, self.num_steps)

    def epoch(self) -> Iterator[Slab]:
        """The slabs of the next epoch."""
        resume, self._resume = self._resume, None
        self._here = replace(self._here, done=0) if resume is None else resume
        if resume is not None:
            self.source.replay(resume)
        self.source.begin_epoch()
        try:
            yield from self._slabs(resume)
        finally:
            if self.source.changes:
                self._here = replace(self._here, ends=(*self._here.ends, random()))
            self.source.end_epoch()
        if resume is not None and resume.step == self._here.step:
            set_random(resume.now)

    def _slabs(self, resume: Position | None) -> Iterator[Slab]:
        if resume is None and self.steps_per_epoch is None:
            self._pass = None
        slab = self._next() if resume is None else self._reopen(resume)
        while slab is not None:
            yield slab
            slab = self._next()
        if self.steps_per_epoch is not None and self._here.done < self.steps_per_epoch:
            warnings.warn(
                f"The data ended after {self._here.done} of the {self.steps_per_epoch} steps of this epoch. Give a "
                "source that repeats (for example `tf.data.Dataset.repeat()` or `openipu.data.repeat`), or a smaller "
                "`steps_per_epoch`.",
                stacklevel=2,
            )

    def _reopen(self, resume: Position) -> Slab | None:
        """Return to a position within a pass, and read the first slab after it."""
        set_random(resume.opened)
        self._pass = self.source.start(self.width)
        self._pass.skip(resume.taken)
        set_random(resume.ahead)
        if resume.read:
            self._pass.read_apart(resume.read)
            set_random(resume.now)
            return self._next()
        slab = self._next()  # there is none if the epoch has ended; an older checkpoint does not say
        if slab is not None:
            set_random(resume.now)
        return slab

    def _next(self) -> Slab | None:
        """The next slab of the epoch. Nothing is read beyond its last batch: that could draw another order."""
        here, ends = self._here, self.num_steps
        wanted = self.width if ends is None else min(self.width, ends - here.done)
        slab = self._take(here.done, wanted) if wanted > 0 else None
        if slab is not None:
            steps, here = slab.steps, self._here
            taken = here.taken + (steps if slab.own is None else slab.own)
            self._here = replace(here, done=here.done + steps, taken=taken, step=here.step + steps)
        return slab

    def _take(self, done: int, wanted: int) -> Slab | None:
        """The next slab. If the last pass ended exactly with the last epoch, a new pass starts."""
        if self._pass is not None:
            slab = self._pass.take(done, wanted)
            if slab is not None:
                return slab
            self._pass = None
            if done:
                return None
        if done == 0:
            self._pass = self.source.start(self.width)
            self._here = replace(self._here, passes=self._here.passes + 1, taken=0)
            return self._pass.take(done, wanted)
        return None
