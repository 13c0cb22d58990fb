"""Runs a script up to its first `fit`: the model is built, options and data are known, and nothing is trained."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openipu.engine.core.options import Options
from openipu.engine.data.feed import Feed
from openipu.engine.devices.placement import Placement
from openipu.engine.fit import about_to_train
from openipu.engine.fit.session import Session
from openipu.engine.shapes import specs_of
from openipu.engine.types import Tree

import keras


@dataclass(frozen=True, slots=True, eq=False)
class FirstFit:
    """What a script is about to train."""

    model: keras.Model
    options: Options
    place: Placement
    batch: Tree
    """The shapes of a micro-batch."""
    batch_size: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all replicas in one update, as the script has it."""
        return self.options.updates.steps * self.place.replicas.count


class ScriptError(Exception):
    """A script has failed before its first `fit`. The cause is its own error."""


class _Reached(BaseException):
    """Ends a script that has reached its first `fit`. Not an `Exception`, which scripts may catch."""

    def __init__(self, found: FirstFit) -> None:
        super().__init__()
        self.found = found


def first_fit(script: Path, arguments: Sequence[str] = ()) -> FirstFit:
    """Run a script up to its first `fit` of a model under a strategy. Raises a `ValueError` if there is none."""
    about_to_train.told.append(_reached)
    try:
        with _as_main(script, arguments):
            runpy.run_path(str(script), run_name="__main__")
    except _Reached as reached:
        return reached.found
    except SystemExit:
        pass
    except Exception as error:
        raise ScriptError(f"{script} has failed before its first `fit`: {error}") from error
    finally:
        about_to_train.told.remove(_reached)
    raise ValueError(
        f"{script} has ended without a `fit` of a model that was made in a strategy's scope, so there is nothing to "
        "plan. Estimators and loops of your own cannot be planned."
    )


def _reached(session: Session, feed: Feed) -> None:
    batch = specs_of(feed.source.first_batch())
    size = feed.source.batch_size or specs_of(keras.tree.flatten(batch))[0].shape[0]
    raise _Reached(FirstFit(session.model, session.effective_options, session.place("train"), batch, size))


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Until the block ends, the command line is that of the script."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
