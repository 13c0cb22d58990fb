"""The pipelining methods of a model: they check their arguments and store them in the model's options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.accumulation import Accumulation, Reduction, check_divided, dtype_option
from openipu.engine.core.options import CLOSED
from openipu.engine.core.pipelining import (
    PipelineSchedule,
    Pipelining,
    RecomputationMode,
    schedule_of,
)
from openipu.engine.core.updates import Updates
from openipu.engine.fit.session import Session
from openipu.engine.pipeline.build.stage_options import check_stage_options
from openipu.engine.pipeline.partition import assignment as assign
from openipu.engine.pipeline.partition import automatic, split
from openipu.engine.pipeline.partition.nodes import Graph, Node
from openipu.engine.pipeline.partition.recorded_calls import has_graph
from openipu.engine.pipeline.partition.traced_call import note_inputs
from openipu.engine.schedule.schedules import Schedule
from openipu.engine.types import DTypeOption, Tree

import keras

from . import pipeline_stage_assignment as objects
from .stage_summary import summary


class PipeliningExtension:
    """The stages of a model: which layers they hold, and how they run."""

    _ipu_session: Session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and remember its inputs' shapes: the `call` of a subclassed model is traced with them."""
        note_inputs(self, args[0] if args else next(iter(kwargs.values()), None))
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def get_pipeline_stage_assignment(self) -> list[Any]:
        """The stage of each layer call, in the order in which they run, as objects that you can change and set.

        Calls without a stage have None, or the stage that was set on a nested model itself.

        >>> stages = model.get_pipeline_stage_assignment()
        >>> stages[0].pipeline_stage = 0
        >>> stages[1].pipeline_stage = 1
        >>> model.set_pipeline_stage_assignment(stages)
        """
        graph, calls = _calls(self)
        stages = assign.current_stages(calls, self._ipu_session.options.stages, self)
        return objects.assignments(self, graph, calls, _with_defaults(calls, stages))

    def set_pipeline_stage_assignment(
        self,
        pipeline_stage_assignment: list[objects.Assignment] | list[int] | str,
        *,
        stages: int | None = None,
        inputs: Tree = None,
        print_fn: Callable[[str], object] | None = print,
    ) -> None:
        """Set the stage of each layer call.

        >>> model.set_pipeline_stage_assignment([0, 1])  # a Sequential model: one number per layer
        >>> model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        >>> model.compile("sgd", "mse", steps_per_execution=4)
        >>> history = model.fit(x, y, batch_size=8, verbose=0)  # two devices, one update of four micro-batches

        Args:
            pipeline_stage_assignment: The list that `get_pipeline_stage_assignment` returns, with stages filled in; for
                a Sequential model also a list of whole numbers, one per layer; or "auto".
            stages: With "auto": how many stages to split the model into, so that they take about the same time.
            inputs: With "auto": a micro-batch of inputs, or the same structure of objects with `shape` and `dtype`. By
                default, 32 rows of the shapes that the model declares.
            print_fn: With "auto": prints the balance of the stages; None prints nothing.
        """
        if isinstance(pipeline_stage_assignment, str) and pipeline_stage_assignment == "auto":
            found = automatic.balanced(self, stages, inputs)
            if print_fn:
                print_fn(str(found))
            self._set_ipu_options(stages=_table(found.calls, found.stages), opening=found.opening)
            return
        if not isinstance(pipeline_stage_assignment, list):
            raise ValueError(
                f"`pipeline_stage_assignment` is {pipeline_stage_assignment!r}. Give the list that "
                '`get_pipeline_stage_assignment` returns, with stages filled in, or "auto" with the number of `stages`.'
            )
        graph, calls = _calls(self, inputs)
        if stages is not None:
            raise ValueError(f'`stages` is {stages}, but the assignment is a list. Give `stages` only with "auto".')
        numbers = objects.collected(self, calls, pipeline_stage_assignment)
        _check_order(self, graph, calls, numbers)
        self._set_ipu_options(stages=_table(calls, numbers))

    def reset_pipeline_stage_assignment(self) -> None:
        """Remove all stages, including those of `PipelineStage`: the model is no longer pipelined.

        >>> model.set_pipeline_stage_assignment([0, 1])
        >>> model.reset_pipeline_stage_assignment()
        >>> [one.pipeline_stage for one in model.get_pipeline_stage_assignment()]
        [None, None]
        """
        self._set_ipu_options(stages=(), opening=CLOSED)

    def print_pipeline_stage_assignment_summary(
        self, line_length: int | None = None, print_fn: Callable[[str], object] | None = None
    ) -> None:
        """Print a table with the stage of each layer call.

        >>> model.set_pipeline_stage_assignment([0, 1])
        >>> model.print_pipeline_stage_assignment_summary(line_length=60)
        Model: "model"
        ____________________________________________________________
        Layer (type)                  Pipeline Stage
        ============================================================
        hidden (Dense)                0
        ____________________________________________________________
        output (Dense)                1
        ============================================================

        Args:
            line_length: The width of the table.
            print_fn: Called with each line, in place of `print`.
        """
        graph, calls = _calls(self)
        stages = assign.current_stages(calls, self._ipu_session.options.stages, self)
        for line in summary(self, graph, calls, stages, line_length):
            (print_fn or print)(line)

    def set_pipelining_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        device_mapping: Sequence[int] | None = None,
        accumulate_outfeed: bool | None = None,
        gradient_accumulation_reduction_method: Reduction | str | None = None,
        *,
        pipeline_schedule: PipelineSchedule | Schedule | str | None = None,
        recomputation_mode: RecomputationMode | None = None,
        gradient_accumulation_dtype: DTypeOption = None,
        replicated_optimizer_state_sharding: bool | None = None,
        offload_weight_update_variables: bool | None = None,
        **more: Any,
    ) -> None:
        """Set how the stages of the model run. Options that are None keep their previous values.

        >>> model.set_pipeline_stage_assignment([0, 1])
        >>> model.set_pipelining_options(gradient_accumulation_steps_per_replica=4, pipeline_schedule="OneFOneB")

        Args:
            gradient_accumulation_steps_per_replica: Micro-batches per update. Some schedules need a multiple: Grouped
                of twice the number of stages, Interleaved of the number of stages.
            device_mapping: The device of each stage, numbered within a replica; several stages can share one. By
                default, each stage has its own.
            accumulate_outfeed: Whether to report one sum of the results of an update instead of all results.
            gradient_accumulation_reduction_method: "sum" (initially), "mean" or "running_mean".
            pipeline_schedule: A member of `ipu.ops.pipelining_ops.PipelineSchedule`, its name, or a schedule of your
                own (see `openipu.schedules`). Initially Grouped.
            recomputation_mode: What the backward pass recomputes if `IPUConfig.allow_recompute` is on.
            gradient_accumulation_dtype: The dtype of accumulated gradients, or a function that returns it for a
                variable.
            replicated_optimizer_state_sharding: Whether each replica keeps only its share of the optimizer's state.
            offload_weight_update_variables: Whether the optimizer's state lives in host memory.
            **more: Options of the original that have no effect here. They are checked, and a warning names them once.
        """
        _refuse(more)
        _check_more(more)
        old = self._ipu_session.options
        known = old.pipelining or Pipelining()
        before = known.updates.accumulation
        count = validate.count(
            "gradient_accumulation_steps_per_replica", gradient_accumulation_steps_per_replica, optional=True
        )
        method, dtype = gradient_accumulation_reduction_method, gradient_accumulation_dtype
        flags = {
            "accumulate_outfeed": accumulate_outfeed,
            "replicated_optimizer_state_sharding": replicated_optimizer_state_sharding,
            "offload_weight_update_variables": offload_weight_update_variables,
        }
        accumulate, shard, offload = (validate.flag(name, value, optional=True) for name, value in flags.items())
        shard = known.updates.shard_optimizer if shard is None else shard
        offload = known.updates.offload_optimizer if offload is None else offload
        check_divided(shard, offload)
        if method is not None:
            method = validate.member("gradient_accumulation_reduction_method", method, Reduction)
        accumulation = Accumulation(
            count or before.steps,
            before.method if method is None else method,
            before.dtype if dtype is None else dtype_option(dtype, "gradient_accumulation_dtype"),
        )
        mode = known.recomputation_mode
        if recomputation_mode is not None:
            given = recomputation_mode
            mode = validate.member("recomputation_mode", given, RecomputationMode, by_name=False, error=TypeError)
        self._set_ipu_options(
            pipelining=Pipelining(
                known.schedule if pipeline_schedule is None else schedule_of(pipeline_schedule),
                known.device_mapping if device_mapping is None else _mapping(device_mapping),
                mode,
                known.accumulate_outfeed if accumulate is None else accumulate,
                Updates(accumulation, shard, offload),
            ),
        )

    def _set_ipu_options(self, **changes: Any) -> None:
        session = self._ipu_session
        session.set_options(dataclasses.replace(session.options, **changes))


def saved_stages(model: keras.Model, stages: assign.Stages | None) -> assign.Stages | None:
    """The stages to save with a model, including those of `PipelineStage`, which a saved graph does not hold."""
    if stages is not None or not assign.is_pipelined(model, stages) or not has_graph(model):
        return stages
    _, calls = _calls(model)
    if any(node.stage is None for node in calls):
        return None
    return tuple((node.operation.name, node.stage or 0) for node in calls)


# --- stages ----------------------------------------------------------------------------------------------------------


def _table(calls: Sequence[Node], stages: Sequence[int]) -> assign.Stages:
    return tuple((node.operation.name, stage) for node, stage in zip(calls, stages, strict=True))


def _calls(model: keras.Model, inputs: Tree = None) -> tuple[Graph | None, tuple[Node, ...]]:
    graph = assign.graph_for_stages(model, inputs, model._ipu_session.options.opening)
    return graph, assign.layer_calls(model, graph)


def _with_defaults(calls: Sequence[Node], stages: list[int | None]) -> list[int | None]:
    """The stages; a layer call without one takes the stage that was set on its nested model itself."""
    inside: dict[Any, list[int]] = {}
    for i, node in enumerate(calls):
        for nested in node.within:
            inside.setdefault((id(nested.model), nested.call), []).append(i)
    models = {(id(nested.model), nested.call): nested.model for node in calls for nested in node.within}
    for call, numbers in inside.items():
        own = getattr(getattr(models[call], "_ipu_session", None), "options", None)
        if own is not None and own.stages and len(own.stages) == len(numbers):
            for i, (_, stage) in zip(numbers, own.stages, strict=True):
                stages[i] = stage if stages[i] is None else stages[i]
    return stages


def _check_order(model: keras.Model, graph: Graph | None, calls: Sequence[Node], stages: Sequence[int]) -> None:
    if isinstance(model, keras.Sequential) and not any(node.within for node in calls):
        before = -1
        for node, stage in zip(calls, stages, strict=True):
            if stage not in (before, before + 1) or stage < 0:
                other = f"the layer before it is in stage {before}" if before >= 0 else "it is the first layer"
                raise ValueError(
                    f"Layer {str(node)!r} of the Sequential model {model.name!r} is in stage {stage}, but {other}. Put "
                    "the first layer into stage 0, and each other layer into the stage of the layer before it or the "
                    "next stage."
                )
            before = stage
    elif graph is not None:
        known = {id(node): stage for node, stage in zip(calls, stages, strict=True)}
        split.check_order(graph, split.complete(graph, [known.get(id(node), node.stage) for node in graph.nodes]))


# --- options ---------------------------------------------------------------------------------------------------------

_INSTEAD = {
    "gradient_accumulation_count": "gradient_accumulation_steps_per_replica",
    "reduction_method": "gradient_accumulation_reduction_method",
    "experimental_normalize_gradients": "gradient_accumulation_reduction_method",
}
_BY_KERAS = ("computational_stages", "repeat_count", "inputs", "infeed_queue", "outfeed_queue", "optimizer_function")
_NOT_KERAS = ("outfeed_loss", "outfeed_mask", "batch_serialization_iterations")
_FLAGS = {
    "offload_activations": "activations stay in device memory",
    "offload_gradient_accumulation_buffers": "accumulated gradients stay in device memory",
    "offload_weights": "weights stay in device memory",
    "replicated_weight_sharding": "every replica keeps all weights",
    "gradient_accumulation_for_captured_grads": "there are no layers that capture gradients",
}
_OTHERS = {
    "accumulate_outfeed_dtype": "results are added up in their own dtype",
    "forward_propagation_stages_poplar_options": "XLA has no such options",
    "backward_propagation_stages_poplar_options": "XLA has no such options",
    "weight_update_poplar_options": "XLA has no such options",
}


def _refuse(more: dict[str, Any]) -> None:
    for name in more:
        if name in _INSTEAD:
            raise ValueError(f"`{name}` is called `{_INSTEAD[name]}` here. Use that name.")
        if name in _BY_KERAS:
            raise ValueError(f"`{name}` is set by the model itself when it is trained. Leave it out.")
        if name in _NOT_KERAS:
            raise ValueError(
                f"`{name}` cannot be used with Keras models, which report a loss and metrics. Leave it out, or use "
                "`ipu.ops.pipelining_ops.pipeline`."
            )
    own = inspect.signature(PipeliningExtension.set_pipelining_options).parameters
    validate.options(more, [*(set(own) - {"self", "more"}), *_FLAGS, *_OTHERS, "continuous_weight_updates", "name"])


def _check_more(more: dict[str, Any]) -> None:
    """Check options that have no effect here, and warn about those that ask for something."""
    asked = {name: _FLAGS[name] for name in _FLAGS if validate.flag(name, more.get(name), optional=True)}
    if validate.flag("continuous_weight_updates", more.get("continuous_weight_updates", False)):
        raise NotImplementedError(
            "`continuous_weight_updates` is True, but weights are updated once per `gradient_accumulation_steps_per_"
            "replica` micro-batches, as in the original. Leave it out."
        )
    for name, why in _OTHERS.items():
        if more.get(name) is not None:
            if name.endswith("poplar_options"):
                check_stage_options(name, more[name])
            asked[name] = why
    validate.no_effect(asked)


def _mapping(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"`device_mapping` is {value!r}. Give a list with the device of each stage, from 0.")
    return tuple(validate.count(f"device_mapping[{stage}]", device, least=0) for stage, device in enumerate(value))
