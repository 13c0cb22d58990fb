"""`pipeline`: run plain functions as the stages of one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.accumulation import Reduction
from openipu.engine.core.pipelining import PipelineSchedule, RecomputationMode
from openipu.engine.devices.current_system import current_ordinal
from openipu.engine.pipeline.build.arguments import OPTIONS, arguments
from openipu.engine.pipeline.build.function_pipeline import Request, runner
from openipu.engine.pipeline.build.function_stages import Functions
from openipu.engine.pipeline.build.stage_options import PipelineStageOptions
from openipu.engine.program.call_arguments import as_input
from openipu.engine.program.program_trace import NotInProgram, current
from openipu.engine.program.user_program import Operation, check_same_arguments
from openipu.engine.schedule.schedules import Schedule
from openipu.engine.shapes import specs_of
from openipu.engine.types import Array, DTypeOption, Tree
from openipu.ipu_infeed_queue import IPUInfeedQueue
from openipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue

import jax
import keras
import numpy as np
from numpy.typing import DTypeLike


def pipeline(
    computational_stages: Sequence[Callable[..., Any]],
    gradient_accumulation_count: int | None = None,
    gradient_accumulation_dtype: DTypeOption = None,
    gradient_accumulation_for_captured_grads: bool = True,
    repeat_count: int = 1,
    batch_serialization_iterations: int = 1,
    inputs: Sequence[Any] | None = None,
    infeed_queue: IPUInfeedQueue | None = None,
    outfeed_queue: IPUOutfeedQueue | None = None,
    optimizer_function: Callable[..., Any] | None = None,
    device_mapping: Sequence[int] | None = None,
    pipeline_schedule: PipelineSchedule | Schedule | str | None = None,
    recomputation_mode: RecomputationMode | None = None,
    forward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None,
    backward_propagation_stages_poplar_options: Sequence[PipelineStageOptions] | None = None,
    weight_update_poplar_options: PipelineStageOptions | None = None,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool = False,
    offload_activations: bool | None = None,
    offload_gradient_accumulation_buffers: bool | None = None,
    replicated_weight_sharding: bool | None = None,
    offload_weights: bool | None = None,
    continuous_weight_updates: bool = False,
    outfeed_loss: bool = False,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: DTypeLike | None = None,
    outfeed_mask: Sequence[bool] | None = None,
    reduction_method: Reduction | str = Reduction.SUM,
    name: str | None = None,
) -> Operation:
    """Run functions as the stages of a pipeline, with all micro-batches in one program.

    Each stage gets what the one before it returned. Create the Keras layers, models and variables that the functions
    use beforehand; they are updated. Call this directly, or in a function that does nothing else and that you give to
    `strategy.run` or `ipu.ipu_compiler.compile`.

    >>> hidden, output = model.layers  # they are built, so that the stages can use them
    >>> def first(inputs, targets):
    ...     return hidden(inputs), targets
    >>> def second(values, targets):
    ...     return keras.ops.mean((output(values)[:, 0] - targets) ** 2)
    >>> def update(loss):
    ...     return ipu.pipelining_ops.OptimizerFunctionOutput(model.optimizer, loss)
    >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(input_fn())
    >>> losses = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> _ = ipu.pipelining_ops.pipeline(
    ...     [first, second], 4, infeed_queue=infeed, outfeed_queue=losses, optimizer_function=update
    ... )
    >>> losses.dequeue().shape  # four micro-batches
    (4,)

    Args:
        computational_stages: Two or more functions.
        gradient_accumulation_count: Micro-batches per update, or per run if nothing is trained.
        gradient_accumulation_dtype: The dtype of accumulated gradients; None for that of each weight.
        gradient_accumulation_for_captured_grads: Ignored.
        repeat_count: How many updates the program makes.
        batch_serialization_iterations: Must be 1: micro-batches are not split further here.
        inputs: The first arguments of the first stage, the same for all micro-batches.
        infeed_queue: Delivers the other arguments of the first stage; a dict becomes keyword arguments.
        outfeed_queue: Receives the outputs of the last stage for each micro-batch.
        optimizer_function: Turns the outputs of the last stage into an `OptimizerFunctionOutput`. Without it, nothing
            is trained.
        device_mapping: The device of each stage; by default each has its own.
        pipeline_schedule: A `PipelineSchedule`, its name, or a schedule of your own.
        recomputation_mode: See `RecomputationMode`. Takes effect if `IPUConfig.allow_recompute` is on.
        forward_propagation_stages_poplar_options: Has no effect.
        backward_propagation_stages_poplar_options: Has no effect.
        weight_update_poplar_options: Has no effect.
        offload_weight_update_variables: Has no effect.
        replicated_optimizer_state_sharding: Whether each replica keeps only its share of the optimizer's state.
        offload_activations: Has no effect.
        offload_gradient_accumulation_buffers: Has no effect.
        replicated_weight_sharding: Has no effect.
        offload_weights: Has no effect.
        continuous_weight_updates: Must be False.
        outfeed_loss: Whether to enqueue the loss instead of the outputs.
        accumulate_outfeed: Whether to enqueue one sum over the micro-batches of an update instead of all results.
        accumulate_outfeed_dtype: The dtype of that sum.
        outfeed_mask: For each output, True if it should not be enqueued.
        reduction_method: How the gradients of micro-batches are combined: sum, mean or running_mean.
        name: Ignored.
    """
    given = locals()
    if current() is not None:
        raise NotInProgram
    validate.function("optimizer_function", optimizer_function, optional=True)
    validate.flag("gradient_accumulation_for_captured_grads", gradient_accumulation_for_captured_grads)
    training = optimizer_function is not None
    stages, pipelining = arguments(training, **{option: given[option] for option in OPTIONS})
    repeats = validate.count("repeat_count", repeat_count)
    outfeed_loss = validate.flag("outfeed_loss", outfeed_loss)
    accumulate_outfeed = validate.flag("accumulate_outfeed", accumulate_outfeed)
    sum_dtype = _outfeed_dtype(accumulate_outfeed_dtype)
    results = _results(training, infeed_queue, outfeed_queue, outfeed_loss, outfeed_mask, accumulate_outfeed)
    ordinal = current_ordinal() or 0
    shown = (outfeed_loss, tuple(outfeed_mask or ()), outfeed_queue is None)
    key = (stages, pipelining, optimizer_function, ordinal, shown)
    request = Request(Functions(stages, optimizer_function, results, _element), pipelining, ordinal, key)
    rows, own = _run(request, repeats * pipelining.updates.steps, inputs or (), infeed_queue)
    if outfeed_queue is not None:
        if accumulate_outfeed:
            rows = jax.tree.map(lambda a: _summed(a, repeats, sum_dtype), rows)
        outfeed_queue.extend(jax.tree.map(lambda a: a[:, own], rows))
    return Operation()


def _run(request: Request, count: int, inputs: Sequence[Any], infeed: IPUInfeedQueue | None) -> tuple[Tree, list[int]]:
    """The results of all micro-batches by replica, and the replicas of this process."""
    constants = tuple(np.asarray(as_input(value)) for value in inputs)
    spec = infeed.element_spec if infeed is not None else ()
    one = jax.ShapeDtypeStruct((1,), np.int32)
    element = (one, specs_of(constants), spec)
    ready = runner(request, element)
    replicas = ready.place.replicas
    if not replicas.is_local:
        check_same_arguments("pipeline", constants)
    front = (count, replicas.count)
    tiled = jax.tree.map(lambda a: np.broadcast_to(a, (*front, *a.shape)), constants)
    data = infeed.take(count, ready.place) if infeed is not None else ()
    numbers = np.zeros((*front, 1), np.int32)
    given = replicas.send((numbers, tiled), 1)
    return ready.run((*given, data), count), replicas.own


def _element(element: tuple[Tree, ...]) -> tuple[Sequence[Any], Tree]:
    """The inputs of the whole run, and the data. The number in front only makes sure that no element is empty."""
    _, inputs, data = element
    return inputs, data


def _summed(rows: np.ndarray, repeats: int, dtype: DTypeLike | None) -> np.ndarray:
    return np.asarray(rows.reshape(repeats, -1, *rows.shape[1:]).sum(1, dtype=dtype))


def _outfeed_dtype(value: object) -> str | None:
    """The dtype in which outputs are added up. Results belong to no variable, so a function cannot choose it."""
    if value is None:
        return None
    try:
        return str(keras.backend.standardize_dtype(value))
    except (TypeError, ValueError):
        raise ValueError(
            f"`accumulate_outfeed_dtype` is {value!r}, which is no dtype. Give one for all outputs, such as 'float32'."
        ) from None


# --- arguments -------------------------------------------------------------------------------------------------------


def _results(
    training: bool,
    infeed: IPUInfeedQueue | None,
    outfeed: IPUOutfeedQueue | None,
    outfeed_loss: bool,
    mask: Sequence[bool] | None,
    accumulate: bool,
) -> Callable[[list[Any], Any, Tree], Tree]:
    """A function that chooses what leaves the last stage for each micro-batch."""
    validate.instance("infeed_queue", infeed, IPUInfeedQueue, optional=True)
    validate.instance("outfeed_queue", outfeed, IPUOutfeedQueue, optional=True)
    if outfeed_loss and mask is not None:
        raise ValueError("`outfeed_loss` and `outfeed_mask` cannot be combined. Give one of them.")
    if (outfeed_loss or mask is not None) and not training:
        raise ValueError("`outfeed_loss` and `outfeed_mask` need an `optimizer_function`. Give one, or leave them out.")
    if (outfeed_loss or accumulate) and outfeed is None:
        raise ValueError("`outfeed_loss` and `accumulate_outfeed` need an `outfeed_queue`. Give one.")
    if accumulate and outfeed is not None and outfeed.outfeed_mode is not IPUOutfeedMode.ALL:
        raise ValueError("`accumulate_outfeed` needs an outfeed queue in mode ALL. Create one.")

    def results(outputs: list[Tree], loss: Array | None, _data: Tree) -> Tree:
        if outfeed_loss:
            return loss
        if mask is not None and len(mask) != len(outputs):
            raise ValueError(f"`outfeed_mask` has {len(mask)} entries for {len(outputs)} outputs. Give one for each.")
        shown = [o for o, hidden in zip(outputs, mask or [False] * len(outputs), strict=True) if not hidden]
        if shown and outfeed is None and not training:
            raise ValueError(
                f"The last stage has {len(shown)} outputs, but there is no `outfeed_queue` for them. Give one."
            )
        if outfeed is None:
            return ()
        if not shown:
            raise ValueError(
                "The `outfeed_queue` gets nothing: the last stage has no outputs, or `outfeed_mask` hides all of them. "
                "Leave the queue out."
            )
        return shown[0] if len(shown) == 1 else tuple(shown)

    return results
