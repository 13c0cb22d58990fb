"""Warnings that are worth giving once: what a user has set that changes nothing here."""

import logging
import threading
from collections.abc import Mapping

logger = logging.getLogger("openipu")

_named: set[str] = set()
_lock = threading.Lock()


def name_once(without_effect: Mapping[str, str]) -> None:
    """Name settings that have no effect, with the reasons, in one warning; each setting once per process."""
    with _lock:
        new = {name: why for name, why in without_effect.items() if name not in _named}
        _named.update(new)
    if new:
        listed = "; ".join(f"{name} ({why})" for name, why in new.items())
        logger.warning("Without effect here: %s.", listed)
