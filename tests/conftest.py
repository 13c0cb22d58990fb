"""Keras on JAX, no network, and home folders of their own, before any test module imports anything heavy."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The C++ parts of TensorFlow and XLA report to stderr, where tests of command lines look for our own words.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Compiling small programs is most of the work of these tests. Without optimizations and in one piece it takes a third
# of the time, for the same numbers. `make test-all` sets the flags to nothing and so compiles as users do.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jax").split(".")[:2] == ["0", "10"]:  # a later XLA does not know the flag, and would end the process
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
# A test must not depend on what the machine has downloaded before, nor load anything.
os.environ["OPENIPU_DATA"] = "stand-in"
_home = tempfile.TemporaryDirectory(prefix="openipu-tests-")
os.environ["KERAS_HOME"] = str(Path(_home.name) / "keras")
# One cache of compiled programs per worker: empty at first, so that compile counts mean something.
os.environ["OPENIPU_CACHE"] = str(Path(_home.name) / "xla")

# Shells let background jobs ignore Ctrl-C, and nohup lets them ignore SIGHUP. Processes started by tests would inherit
# that, and never hear what a test sends.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A first example compiles, so timing single examples says nothing.
settings.register_profile("openipu", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("openipu")


@pytest.fixture
def repository() -> Path:
    """The root of the checkout, where examples and command lines start."""
    return Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="module")
def _no_system_left() -> Iterator[None]:
    """What a module configures ends with it: a model of the next one would have more replicas than it says."""
    yield
    if config := sys.modules.get("openipu.config"):
        config.reset_ipu_configuration()
    # What is left now stays: JAX keeps the traces of all programs. Going through it again and again takes minutes.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_said_before() -> None:
    """Notices are given once per process. A test that waits for one must not depend on those before it."""
    if validate := sys.modules.get("openipu._validate"):
        validate._named.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many random cases ran (tests/support/fuzz.py)."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "random cases" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
