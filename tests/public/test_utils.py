"""`ipu.utils`: small helpers, and the configuration of old scripts."""

from __future__ import annotations

import openipu as ipu

import keras
import numpy as np
import pytest

from replication import SYSTEMS, configure_all
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True, scope="module")
def systems():
    configure_all()


def test_utils():
    utils = ipu.utils
    assert [utils.get_num_of_ipus_in_device(f"/device:IPU:{i}") for i in range(4)] == list(SYSTEMS)
    assert utils.IPUConfig is ipu.config.IPUConfig
    utils.reset_ipu_seed(5)
    first = keras.layers.Dense(2)(np.ones((1, 2), "float32"))
    utils.reset_ipu_seed(5)
    np.testing.assert_array_equal(first, keras.layers.Dense(2)(np.ones((1, 2), "float32")))
    with pytest.raises(ValueError, match=r"`seed` is 1\.5"):
        utils.reset_ipu_seed(1.5)
    utils.move_variable_initialization_to_cpu()
    with pytest.raises(ValueError, match="no graphs"):
        utils.move_variable_initialization_to_cpu(object())


def test_the_configuration_of_old_scripts(caplog):
    opts = ipu.utils.create_ipu_config(profiling=True, use_poplar_text_report=True, prefetch_data_streams=True)
    assert "profiling" in caplog.text
    chosen = ipu.utils.set_recomputation_options(ipu.utils.auto_select_ipus(opts, 2))
    assert (chosen.auto_select_ipus, chosen.allow_recompute) == (2, True)
    assert opts.allow_recompute is False, "a copy is changed"
    assert list(ipu.utils.select_ipus(opts, [1, 0]).select_ipus) == [1, 0]
    with pytest.raises(TypeError, match="no arguments"):
        ipu.utils.create_ipu_config(nonsense=1)
