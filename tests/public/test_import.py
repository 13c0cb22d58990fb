"""What `import openipu` does to a fresh process, so every test runs one."""

import os
import subprocess
import sys
from importlib import metadata

import openipu

import pytest


def python(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter; a variable set to None is absent there."""
    merged = {**os.environ, **environment}
    env = {name: value for name, value in merged.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_import_loads_nothing_heavy():
    heavy = ("keras", "jax", "jaxlib", "numpy", "tensorflow", "torch", "rich", "typer", "orbax")
    result = python(f"import sys, openipu; print([name for name in {heavy} if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr


def test_import_is_quick():
    code = "import time; start = time.perf_counter(); import openipu; print(time.perf_counter() - start)"
    # The best of three, because the machine may be busy; it takes about a hundredth of a second.
    assert min(float(python(code).stdout) for _ in range(3)) < 0.1


def test_import_puts_keras_on_jax():
    result = python("import openipu, keras; print(keras.config.backend())", KERAS_BACKEND=None)
    assert result.stdout.strip() == "jax", result.stderr
    assert result.stderr == ""


def test_another_backend_in_the_environment_is_replaced_with_a_warning():
    code = "import openipu, os; print(os.environ['KERAS_BACKEND'])"
    result = python(code, KERAS_BACKEND="torch")
    assert result.stdout.strip() == "jax"
    assert "KERAS_BACKEND is torch, but OpenIPU runs Keras on JAX" in result.stderr
    assert "<string>:1: RuntimeWarning" in result.stderr, "the warning must point at the user's import"


@pytest.mark.parametrize("value", ["jax", ""])
def test_the_right_backend_in_the_environment_is_silent(value):
    result = python("import openipu, os; print(os.environ['KERAS_BACKEND'])", KERAS_BACKEND=value)
    assert (result.stdout.strip(), result.stderr) == ("jax", "")


def test_keras_loaded_on_jax_before_is_fine():
    result = python("import keras, openipu; print(openipu.__version__)", KERAS_BACKEND="jax")
    assert result.stdout.strip() == openipu.__version__, result.stderr


@pytest.mark.parametrize("first", ["keras", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_keras_loaded_on_another_backend_is_an_error_with_the_remedy(first):
    if first == "tensorflow":
        pytest.importorskip("tensorflow")
    result = python(f"import {first}, openipu", KERAS_BACKEND=None if first == "tensorflow" else "numpy")
    assert result.returncode != 0
    backend = "tensorflow" if first == "tensorflow" else "numpy"
    assert f"ImportError: OpenIPU runs Keras on JAX, but Keras is already loaded on its '{backend}'" in result.stderr
    assert "Put `import openipu` above the first import of keras or tensorflow" in result.stderr


def test_every_public_submodule_loads_and_is_listed():
    for name in openipu.__all__:
        found = getattr(openipu, name)
        if name in openipu._FUNCTIONS:
            assert callable(found)
        else:
            assert found.__name__ in (f"openipu.{name}", f"openipu.ops.{name}")
        assert name in dir(openipu)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'openipu' has no attribute 'nonsense'"):
        _ = openipu.nonsense


def test_version_is_the_one_of_the_package():
    assert openipu.__version__ == metadata.version("openipu")
