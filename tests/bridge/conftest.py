"""TensorFlow's names and operations as scripts under `openipu run` see them, and everything as it was afterwards.

TensorFlow is loaded when the first of these tests runs, not when they are collected, and put where a module has `tf`.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _scripts_can_run(request: pytest.FixtureRequest) -> Iterator[None]:
    if not hasattr(request.module, "tf"):
        yield
        return
    tensorflow = pytest.importorskip("tensorflow")
    from openipu import tensorflow as bridge

    bridge.install()
    request.module.tf = tensorflow
    yield
    bridge.uninstall()
