"""Who wants to know that a `fit` is about to train. `openipu plan` does, and lets it go no further."""

from __future__ import annotations

from collections.abc import Callable

from openipu.engine.data.feed import Feed

from .session import Session

told: list[Callable[[Session, Feed], None]] = []
"""Each is called before the first epoch of every `fit`, when the model is built and its data is known."""


def tell(session: Session, feed: Feed) -> None:
    """Tell everybody who wants to know. They may end the call with an exception."""
    for wants in told:
        wants(session, feed)
