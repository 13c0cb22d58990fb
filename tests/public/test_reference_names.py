"""Every name of the original can be reached. It either works, or says what to do when it is used."""

from __future__ import annotations

import functools
from typing import Any

import openipu
from openipu._unavailable import NAMES, Unavailable

import pytest

from reference_names import EVERY, IN_OPS


def reached(module: str, name: str) -> Any:
    """A name as an attribute of attributes of `ipu`."""
    return functools.reduce(getattr, f"{module}.{name}".lstrip(".").split("."), openipu)


@pytest.mark.parametrize(("module", "name"), EVERY)
def test_every_name(module, name):
    found = reached(module, name)
    path = f"{module}.{name}".lstrip(".")
    assert isinstance(found, Unavailable) == (path in NAMES)
    if path not in NAMES:
        assert callable(found)
        return
    with pytest.raises(NotImplementedError, match=rf"^`ipu\.{path}` is not available here: .*\. .*\.$"):
        found(1, name="x")
    with pytest.raises(NotImplementedError, match="is not available"):
        found.member  # noqa: B018
    with pytest.raises(NotImplementedError, match="is not available"):
        exec("class Own(found): ...", {"found": found})


@pytest.mark.parametrize("module", IN_OPS)
def test_operations_are_also_in_ops(module):
    assert getattr(openipu.ops, module) is getattr(openipu, module)


@pytest.mark.parametrize("path", ["nonsense", "serving.nonsense", "keras.layers.nonsense", "ops.utils", "utils.set_x"])
def test_other_names_do_not_exist(path):
    module, _, name = path.rpartition(".")
    with pytest.raises(AttributeError, match=f"no attribute {name!r}"):
        reached(module, name)


def test_models_cannot_be_exported_for_ipus(tmp_path):
    import keras

    with openipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(NotImplementedError, match=r"nothing is exported for IPUs. Save the model with"):
        model.export_for_ipu_serving(str(tmp_path), batch_size=1)
