"""Keras models the IPU way: whole training loops compiled into one program, on the hardware you have.

>>> import openipu as ipu

gives you the `ipu` namespace and puts Keras on its JAX backend, so import it before Keras. The import takes
milliseconds: nothing heavy is loaded until you use a submodule.
"""

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from openipu import _host_memory

if TYPE_CHECKING:
    from openipu import (
        callbacks,
        config,
        data,
        dataset_benchmark,
        datasets,
        distributed,
        errors,
        estimator,
        gradient_accumulation,
        ipu_compiler,
        ipu_estimator,
        ipu_infeed_queue,
        ipu_multi_worker_strategy,
        ipu_outfeed_queue,
        ipu_pipeline_estimator,
        ipu_run_config,
        ipu_session_run_hooks,
        ipu_strategy,
        keras,
        loops,
        normalization_ops,
        ops,
        optimizers,
        popdist,
        reports,
        schedules,
        scopes,
        training,
        utils,
    )
    from openipu.ops import (
        all_to_all_op,
        control_flow_ops,
        cross_replica_ops,
        custom_ops,
        embedding_ops,
        functional_ops,
        image_ops,
        internal_ops,
        math_ops,
        nn_ops,
        pipelining_ops,
        rand_ops,
        reduce_scatter_op,
        replication_ops,
        statistics_ops,
        within_replica_ops,
    )
    from openipu.ops.functional_ops import outlined_function
    from openipu.reports import report

__version__ = "0.1.0"
__all__ = [
    "all_to_all_op",
    "callbacks",
    "config",
    "control_flow_ops",
    "cross_replica_ops",
    "custom_ops",
    "data",
    "dataset_benchmark",
    "datasets",
    "distributed",
    "embedding_ops",
    "errors",
    "estimator",
    "functional_ops",
    "gradient_accumulation",
    "image_ops",
    "internal_ops",
    "ipu_compiler",
    "ipu_estimator",
    "ipu_infeed_queue",
    "ipu_multi_worker_strategy",
    "ipu_outfeed_queue",
    "ipu_pipeline_estimator",
    "ipu_run_config",
    "ipu_session_run_hooks",
    "ipu_strategy",
    "keras",
    "loops",
    "math_ops",
    "nn_ops",
    "normalization_ops",
    "ops",
    "optimizers",
    "outlined_function",
    "pipelining_ops",
    "popdist",
    "rand_ops",
    "reduce_scatter_op",
    "replication_ops",
    "report",
    "reports",
    "schedules",
    "scopes",
    "statistics_ops",
    "training",
    "utils",
    "within_replica_ops",
]
_IN_OPS = {
    "all_to_all_op",
    "control_flow_ops",
    "cross_replica_ops",
    "custom_ops",
    "embedding_ops",
    "functional_ops",
    "image_ops",
    "internal_ops",
    "math_ops",
    "nn_ops",
    "pipelining_ops",
    "rand_ops",
    "reduce_scatter_op",
    "replication_ops",
    "statistics_ops",
    "within_replica_ops",
}
"""Modules of `openipu.ops` that are also available at the top level, as in the original."""
_FUNCTIONS = {"outlined_function": "ops.functional_ops", "report": "reports"}
"""Functions, and the modules that they are in."""


def _use_jax_backend() -> None:
    """Make Keras run on JAX, or say why it cannot."""
    loaded = sys.modules.get("keras")
    if loaded is not None:
        backend = loaded.config.backend()
        if backend != "jax":
            raise ImportError(
                f"OpenIPU runs Keras on JAX, but Keras is already loaded on its {backend!r} backend. "
                "Put `import openipu` above the first import of keras or tensorflow (importing TensorFlow loads "
                "Keras), or set the environment variable KERAS_BACKEND=jax."
            )
        return
    asked = os.environ.get("KERAS_BACKEND")
    if asked not in (None, "", "jax"):
        # Overridden rather than refused: the variable usually comes from a shell profile and was not meant for this
        # script, which cannot run on any other backend anyway. The warning makes sure that the change is not silent.
        warnings.warn(
            f"KERAS_BACKEND is {asked}, but OpenIPU runs Keras on JAX, so it is changed to jax in this process. Set "
            "KERAS_BACKEND=jax to silence this warning.",
            RuntimeWarning,
            stacklevel=3,
        )
    os.environ["KERAS_BACKEND"] = "jax"


_use_jax_backend()
_host_memory.keep_host_memory()


def __getattr__(name: str) -> Any:
    """Load a public submodule on first use."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.ops.{name}" if name in _IN_OPS else f"{__name__}.{name}")
    return importlib.import_module(f"{__name__}._unavailable").unavailable("", name)


def __dir__() -> list[str]:
    """List the public names, whether loaded yet or not."""
    return sorted({*globals(), *__all__})


if "OPENIPU_COORDINATOR" in os.environ:  # set by `openipu launch`; the group has to be formed before JAX is used
    importlib.import_module(f"{__name__}.engine.devices.group").join()
if os.environ.get("OPENIPU_REPORT"):  # the module starts a report on everything that this process runs
    importlib.import_module(f"{__name__}.reports")
