"""TensorFlow's names and operations as scripts under `openipu run` see them, and everything as it was afterwards."""

from collections.abc import Iterator

import pytest

pytest.importorskip("tensorflow")


@pytest.fixture(autouse=True, scope="module")
def _scripts_can_run() -> Iterator[None]:
    from openipu import tensorflow as bridge

    bridge.install()
    yield
    bridge.uninstall()
