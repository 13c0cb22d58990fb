"""The table of all options of IPUConfig: the source of the option tree, its checks, documentation and warnings."""

from typing import Final

from .enums import (
    DeviceConnectionType,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
)
from .option import Option

CATEGORIES: Final[dict[str, str]] = {
    "convolutions": "How convolutions are compiled.",
    "device_connection": "When the process attaches to devices, and to which.",
    "experimental": "Options whose form may change.",
    "experimental.multi_replica_distribution": "Several processes that train one model together.",
    "floating_point_behaviour": "What happens on exceptional floating-point results.",
    "io_tiles": "Processor tiles reserved for input and output.",
    "ipu_model": "The simulator of the original hardware.",
    "matmuls": "How matrix products are compiled.",
    "norms": "How normalisation layers compute their statistics.",
    "norms.experimental": "Options of normalisation whose form may change.",
    "optimizations": "What the compiler may do to a program.",
    "optimizations.math": "What the compiler may do to arithmetic.",
    "pooling": "How pooling is compiled.",
    "scheduling": "The order of operations inside a program.",
    "slices": "How embedding lookups and other slices are compiled.",
}

_POPLAR: Final = "XLA chooses the algorithm and the precision of its accumulators itself"
_COLLECTIVE: Final = "XLA decides when this collective runs"
_REWRITE: Final = "XLA applies its own rewrites of this kind"
_REMOTE: Final = "XLA devices have no remote memory to move tensors to"
_TILES: Final = "XLA devices have no processor tiles"
_SIMULATOR: Final = "there is no simulator; --use_ipu_model runs programs on virtual CPU devices"
_SCHEDULER: Final = "XLA has its own scheduler"
_TRAP: Final = "XLA programs cannot be stopped by a floating-point exception"

_Counts = int | list[int] | tuple[int, ...]
_Indices = int | list[int | list[int] | tuple[int, ...]] | tuple[int | list[int] | tuple[int, ...], ...]


def _buffer(name: str, collective: str, gpu: str | None = None) -> Option:
    doc = f"How many bytes of {collective} are collected and sent together; 0 leaves it to the compiler."
    if gpu is None:
        return Option(f"optimizations.{name}", int, 0, doc, no_effect=_COLLECTIVE, minimum=0)
    return Option(f"optimizations.{name}", int, 0, doc, xla={"gpu": gpu}, minimum=0)


def _poplar_options(category: str, operations: str) -> Option:
    doc = f"Hints to the original compiler for {operations}, such as availableMemoryProportion and partialsType."
    return Option(f"{category}.poplar_options", dict[str, str], {}, doc, no_effect=_POPLAR)


def _switch(name: str, default: bool, doc: str, no_effect: str) -> Option:
    return Option(name, bool, default, doc, no_effect=no_effect)


# Written as a table; the formatter would spread it over twice as many lines.
# fmt: off
_TABLE: Final = (
    Option("allow_recompute", bool, False,
        "Recompute activations in the backward pass instead of keeping them: less memory, about a third more work. A "
        "model without stages needs marks for that: ipu.keras.layers.RecomputationCheckpoint. In a pipeline, "
        "recomputation_mode takes effect only if this is on."),
    Option("auto_select_ipus", _Counts, [],
        "How many XLA devices to use: GPUs or TPU cores if there are any, else virtual CPU devices. A list makes "
        'several systems: [2, 4] gives "/device:IPU:0" two devices and "/device:IPU:1" four. The default is one '
        "device."),
    Option("compilation_poplar_options", dict[str, str], {},
        "Options for the XLA compiler, by name, as strings. Those whose names start with xla_ are passed on, and "
        "checked when the devices are attached. autoReport.directory and autoReport.all ask for a report. All others "
        "are for the original compiler; a warning says that they have no effect. The environment variable "
        "POPLAR_ENGINE_OPTIONS adds to them and takes precedence."),
    _poplar_options("convolutions", "convolutions"),
    Option("device_connection.enable_remote_buffers", bool, False,
        "Allow remote buffers while no device is attached.", no_effect=_REMOTE),
    Option("device_connection.type", DeviceConnectionType, DeviceConnectionType.ALWAYS,
        "When to attach the devices. ALWAYS: when configuring, so that a missing device is reported there. ON_DEMAND: "
        "when a program first needs them. PRE_COMPILE and NEVER only compile; both need device_connection.version, and "
        "PRE_COMPILE needs the executable cache."),
    Option("device_connection.version", str, "",
        '"ipu1", "ipu2" or "ipu21": what programs are compiled for without a device. PRE_COMPILE and NEVER need it.',
        no_effect="programs are compiled for the platform that JAX finds"),
    _switch("experimental.always_rearrange_copies_on_the_host", False,
        "Rearrange data on the host instead of on the device.", "XLA chooses the layout of data itself"),
    _switch("experimental.enable_prng_stability", False,
        "Use the same random numbers to round operations that are equal on all replicas.",
        "there is no stochastic rounding"),
    _switch("experimental.enable_remote_buffer_embedding", False,
        "Keep host embeddings in remote memory.", _REMOTE),
    Option("experimental.multi_replica_distribution.process_count", int, 0,
        "How many instances train one model together; 0 if this is the only one. `popdist` sets it.", minimum=0),
    Option("experimental.multi_replica_distribution.process_index", int, 0,
        "Which of them this process is, from 0. `popdist` sets it.", minimum=0),
    _switch("floating_point_behaviour.div0", False, "Stop on a division by zero.", _TRAP),
    Option("floating_point_behaviour.esr", StochasticRoundingBehaviour, StochasticRoundingBehaviour.OFF,
        "Round float16 results up or down at random.", no_effect="XLA rounds to the nearest value"),
    _switch("floating_point_behaviour.inv", False, "Stop on an invalid operation, such as 0/0.", _TRAP),
    _switch("floating_point_behaviour.nanoo", False, "Give NaN where float16 overflows.",
        "XLA gives infinity, as in IEEE 754"),
    _switch("floating_point_behaviour.oflo", False, "Stop on an overflow.", _TRAP),
    _switch("floating_point_behaviour.set_all", False, "Turn inv, div0, oflo, nanoo and esr on.", _TRAP),
    Option("gcl_poplar_options", dict[str, str], {},
        "Options of the original collectives library.", no_effect="XLA has its own collectives"),
    Option("io_tiles.available_memory_proportion", float, 0.9,
        "The share of an I/O tile's memory that data may fill; above 0 and at most 1.", no_effect=_TILES),
    Option("io_tiles.num_io_tiles", int, 0,
        "How many tiles to reserve for input and output.", no_effect=_TILES, minimum=0),
    _switch("io_tiles.place_ops_on_io_tiles", False,
        "Run input and output operations on those tiles; needs num_io_tiles.", _TILES),
    _switch("ipu_model.compile_ipu_code", True, "Compile for the simulator as for hardware.", _SIMULATOR),
    Option("ipu_model.tiles_per_ipu", int, 0,
        "Tiles of a simulated device; 0 for as many as the hardware has.",
        no_effect=_SIMULATOR, minimum=0),
    Option("ipu_model.version", str, "ipu2",
        'Which hardware to simulate: "ipu1", "ipu2" or "ipu21".', no_effect=_SIMULATOR),
    _switch("matmuls.clear_pass_type", False, "Plan forward and backward products in the same way.", _POPLAR),
    _poplar_options("matmuls", "matrix products"),
    Option("norms.experimental.distributed_batch_norm_replica_group_size", int, 1,
        "How many consecutive replicas share their batch statistics in BatchNormalization. With 1, each replica uses "
        "only its own micro-batch. It must divide the number of replicas.", minimum=1),
    _switch("norms.use_stable_statistics", False,
        "Compute the variance in a second pass, after the mean.", "Keras always does so on JAX"),
    Option("optimizations.cholesky_block_size", int, 0,
        "Block size of Cholesky factorisation.", no_effect="XLA chooses the block size", minimum=0),
    _switch("optimizations.combine_embedding_lookups", False, "Merge lookups in the same table.", _REWRITE),
    _switch("optimizations.combine_matmuls", False, "Merge matrix products that share an operand.", _REWRITE),
    _switch("optimizations.enable_dynamic_slice_replacement", True,
        "Replace dynamic slices with lookups.", _REWRITE),
    Option("optimizations.enable_fast_math", bool, False,
        "The former name of optimizations.math.fast, with the same effect.",
        xla={"cpu": "xla_cpu_enable_fast_math"}, deprecated="it is now called optimizations.math.fast"),
    _switch("optimizations.enable_gather_simplifier", True, "Rewrite gathers into simpler lookups.", _REWRITE),
    _switch("optimizations.enable_graph_outlining", True,
        "Compile repeated parts of a program once.", "XLA decides which parts become functions"),
    Option("optimizations.math.dot_strength", bool, True,
        "Turn small matrix products into multiplications and sums.", no_effect=_REWRITE),
    Option("optimizations.math.fast", bool, False,
        "Let the compiler reorder floating-point arithmetic: faster, but not bit for bit the same. On CPUs.",
        xla={"cpu": "xla_cpu_enable_fast_math"}),
    _buffer("maximum_all_gather_buffer_size", "all-gathers", "xla_gpu_all_gather_combine_threshold_bytes"),
    _buffer("maximum_cross_replica_sum_buffer_size", "sums over replicas",
        "xla_gpu_all_reduce_combine_threshold_bytes"),
    _buffer("maximum_inter_ipu_copies_buffer_size", "copies between devices"),
    _buffer("maximum_reduce_many_buffer_size", "reductions inside a device"),
    _buffer("maximum_reduce_scatter_buffer_size", "reduce-scatters",
        "xla_gpu_reduce_scatter_combine_threshold_bytes"),
    _buffer("maximum_send_recv_cluster_size", "transfers between host and device"),
    _switch("optimizations.merge_infeed_io_copies", True,
        "Copy the tensors of one batch together.", "feeds always send whole slabs of batches"),
    Option("optimizations.merge_remote_buffers", MergeRemoteBuffersBehaviour,
        MergeRemoteBuffersBehaviour.IF_BENEFICIAL, "Merge several remote buffers into one.", no_effect=_REMOTE),
    Option("optimizations.minimum_remote_tensor_size", int, 128,
        "Bytes below which a tensor is never moved to remote memory.", no_effect=_REMOTE, minimum=0),
    _switch("optimizations.prefetch_data_streams", True,
        "Fetch the next data while the current data is processed.", "feeds always do"),
    Option("optimizations.triangular_solve_expander_block_size", int, 0,
        "Block size of triangular solves.", no_effect="XLA chooses the block size", minimum=0),
    _poplar_options("pooling", "pooling"),
    Option("scheduling.algorithm", SchedulingAlgorithm, SchedulingAlgorithm.CHOOSE_BEST,
        "How the operations of a program are ordered.", no_effect=_SCHEDULER),
    Option("scheduling.maximum_scheduler_lookahead_depth", int, 5,
        "How far ahead the scheduler looks.", no_effect=_SCHEDULER, minimum=0),
    Option("scheduling.maximum_scheduler_search_space_size", int, 64,
        "How many orders the scheduler compares.", no_effect=_SCHEDULER, minimum=0),
    Option("select_ipus", _Indices, [],
        "Which XLA devices to use, by index. An int is a system of one device; a list makes one system per entry. An "
        "entry that is a tuple is a system of several devices: [(2, 3)] is one system of devices 2 and 3."),
    Option("selection_order", SelectionOrder, SelectionOrder.AUTO,
        "The order in which the devices of a system are used, seen as a grid with two columns. ZIGZAG and AUTO: 0, 1, "
        "2, 3. SNAKE: 0, 1, 3, 2. HOOF: 0, 2, 3, 1. It matters if some links between devices are faster than others."),
    Option("serialization_output_folder", str, "",
        "A folder into which the text of every compiled program is written; empty for none. Files are never replaced: "
        "a program that differs from those of earlier runs gets the next number, and one that is the same adds no "
        "file."),
    _poplar_options("slices", "slices and embedding lookups"),
)
# fmt: on

OPTIONS: Final[dict[str, Option]] = {option.name: option for option in _TABLE}
