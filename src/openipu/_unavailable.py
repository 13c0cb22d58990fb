"""Names of the original that OpenIPU does not have. They can be imported, and say what to do when they are used.

Public modules pass to `unavailable` the names that they do not know. Modules that would have nothing else in them are
made here, when they are asked for.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Final, NoReturn

_EXPORT: Final = "nothing is exported for IPUs", "Save the model with `model.save` or `model.export`"
_EXECUTABLE: Final = (
    "executables for IPUs cannot be made or run",
    "Use `model.export`, or `strategy.run` in this process",
)
_USER_OP: Final = "it runs code that was compiled for IPUs", "Write the operation with `keras.ops` or JAX"
_F8: Final = "the 8-bit floats of IPUs do not exist", "Use float16 or bfloat16, or JAX's own `jnp.float8_e4m3fnuz`"
_HOST_TABLE: Final = "no table is kept and trained on the host", "Use `ipu.keras.layers.Embedding`"
_CAPTURE: Final = (
    "gradients of activations are not captured",
    "Look at gradients of weights, with `ipu.optimizers.MapGradientOptimizer` and an outfeed",
)
_SLICES: Final = "there is no such operation", "Use `jax.lax.dynamic_slice` under `jax.vmap`"
_FILES: Final = "it writes the binary files of IPUs", "Use `numpy.savez`, or `dataset.save` for a `tf.data.Dataset`"
_VARIABLES: Final = "there are no sessions", "Use `model.save_weights` and `model.load_weights`"
_OLD_OPTIONS: Final = "it belongs to old SDKs", "Set the option of `ipu.config.IPUConfig` (docs/config.md)"
_OLD_MODEL: Final = (
    "it belongs to old SDKs",
    "Make the model with the class of `keras` inside `strategy.scope()`, and call `set_pipelining_options` or "
    "`set_gradient_accumulation_options`",
)

_NAMES: Final[dict[str, tuple[str, str]]] = {
    "keras.Model.export_for_ipu_serving": _EXPORT,
    **dict.fromkeys(("serving.export_keras", "serving.export_pipeline", "serving.export_single_step"), _EXPORT),
    "application_compile_op.experimental_application_compile_op": _EXECUTABLE,
    **dict.fromkeys(
        (
            "embedded_runtime.RuntimeContext", "embedded_runtime.embedded_runtime_call",
            "embedded_runtime.embedded_runtime_start", "embedded_runtime.embedded_runtime_start_and_call",
            "embedded_runtime.embedded_runtime_stop",
        ),
        _EXECUTABLE,
    ),
    "custom_ops.precompiled_user_op": _USER_OP,
    "custom_ops.cpu_user_operation": (
        "it runs a compiled library", "Call the host with `jax.pure_callback`, or write the operation with `keras.ops`"
    ),
    **dict.fromkeys(
        (
            "f8_ops.Format", "f8_ops.QuarterTensor", "f8_ops.convert_from_f8", "f8_ops.convert_to_f8",
            "f8_ops.create_metadata", "f8_ops.f8_conv_1d", "f8_ops.f8_conv_2d", "f8_ops.f8_conv_3d",
            "f8_ops.f8_matmul", "keras.layers.ConvertFromF8", "keras.layers.ConvertToF8",
        ),
        _F8,
    ),
    "keras.layers.Dense": ("the 8-bit floats of IPUs do not exist", "Use `keras.layers.Dense`"),
    "keras.layers.EffectiveTransformer": (
        "there is no such layer", "Use `keras.layers.MultiHeadAttention` with a mask for the padding"
    ),
    **dict.fromkeys(
        (
            "embedding_ops.HostEmbedding", "embedding_ops.HostEmbeddingOptimizerSpec",
            "embedding_ops.HostEmbeddingSGDGAOptimizerSpec", "embedding_ops.create_host_embedding",
        ),
        _HOST_TABLE,
    ),
    **dict.fromkeys(
        (
            "eager.backprop.GradientCaptureContext", "eager.backprop.GradientCaptureTape",
            "grad_util_ops.capture_upstream_gradients", "keras.layers.CaptureActivationGradients",
            "keras.layers.CaptureUpstreamGradients",
        ),
        _CAPTURE,
    ),
    "internal_ops.fifo": ("values are not kept from one step to the next", "Keep them in a `keras.Variable`"),
    "internal_ops.get_current_iteration_counter": (
        "a step does not know its number", "Count them in a `keras.Variable`"
    ),
    **dict.fromkeys(
        ("slicing_ops.sequence_slice", "slicing_ops.sequence_slice_pack", "slicing_ops.sequence_slice_unpack"), _SLICES
    ),
    "data.ops.dataset_ops.BufferDataset": (
        "datasets need no buffer for IPUs",
        "Use `dataset.batch(n, drop_remainder=True).unbatch()` for a multiple of `n` elements",
    ),
    **dict.fromkeys(("utils.export_dataset_to_file", "utils.export_inputs_to_file"), _FILES),
    **dict.fromkeys(
        (
            "utils.export_variables_from_live_model", "utils.export_variables_from_live_session",
            "utils.import_data_in_live_session",
        ),
        _VARIABLES,
    ),
    "utils.extract_all_strings_from_event_trace": (
        "there are no event traces", "Read what a run did from a report (docs/reports.md)"
    ),
    **dict.fromkeys(
        (
            "utils.set_compilation_options", "utils.set_convolution_options",
            "utils.set_floating_point_behaviour_options", "utils.set_gcl_options", "utils.set_io_tile_options",
            "utils.set_ipu_connection_type", "utils.set_ipu_model_options", "utils.set_matmul_options",
            "utils.set_norm_options", "utils.set_optimization_options", "utils.set_pooling_options",
            "utils.set_report_options", "utils.set_serialization_options",
        ),
        _OLD_OPTIONS,
    ),
    **dict.fromkeys(
        ("keras.Model", "keras.PipelineModel", "keras.PipelineSequential", "keras.Sequential"), _OLD_MODEL
    ),
}  # fmt: skip
"""Names below `ipu`: why each is not there, and what to do."""
NAMES: Final = frozenset(_NAMES)


class Unavailable:
    """Something of the original that cannot be used here."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<ipu.{self._name}, which is not available>"

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Raise the error."""
        raise self.error()

    def __getattr__(self, name: str) -> NoReturn:
        # Python and tools that look at modules ask for special names.
        if name.startswith("__"):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        raise self.error()

    def __mro_entries__(self, _bases: tuple[object, ...]) -> NoReturn:
        """Raise the error: classes cannot derive from it."""
        raise self.error()

    def error(self) -> NotImplementedError:
        """What is raised."""
        reason, remedy = _NAMES[self._name]
        return NotImplementedError(f"`ipu.{self._name}` is not available here: {reason}. {remedy}.")


@functools.cache
def unavailable(module: str, name: str) -> Unavailable | ModuleType:
    """What stands for a name that a module of OpenIPU does not know; an AttributeError if the original has none.

    Args:
        module: The module without `openipu`; empty for the package itself.
        name: The name in it.
    """
    path = f"{module}.{name}".lstrip(".")
    if path in _NAMES:
        return Unavailable(path)
    if any(known.startswith(f"{path}.") for known in _NAMES):
        found = ModuleType(f"openipu.{path}", "Names of the original that are not available here.")
        found.__path__ = []
        found.__dict__["__getattr__"] = lambda name: unavailable(path, name)
        return found
    raise AttributeError(f"module {f'openipu.{module}'.rstrip('.')!r} has no attribute {name!r}")
