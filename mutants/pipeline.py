"""Mistakes in pipelines and estimators."""

from __future__ import annotations

from .mutant import Mutant, mutant

PAIRS = "engine/pipeline/test_feature_pairs.py"
EDGES = "engine/fit/test_edges_of_equality.py"
IN_FIT = "engine/fit/test_outfeeds_in_fit.py"
PIPELINE = "engine/pipeline/test_pipeline.py"
SPLIT = "engine/pipeline/partition/test_split.py"
BALANCE = "engine/pipeline/partition/test_balance.py"
ASSIGNMENT = "engine/pipeline/partition/test_assignment.py"
MARKS = "engine/pipeline/partition/test_stage_marks.py"
OPTIONS = "engine/pipeline/test_pipelining_options.py"
ESTIMATOR = "engine/estimator/test_estimator.py"
HOOKS = "engine/estimator/test_estimator_hooks.py"
STAGED = "engine/estimator/test_pipeline_estimator.py"
ERRORS = "engine/estimator/test_estimator_errors.py"
STATISTICS = f"{PAIRS}::test_statistics_of_replicas_in_an_incomplete_update_inside_a_full_execution"

RUNTIME = [
    mutant(
        "frozen-layers-do-not-count-in-pipelines-of-functions",
        "engine/pipeline/build/function_pipeline.py",
        "return runner.trainable == runner.variables.trainable",
        "return True",
        "public/test_pipelining_ops.py::test_layers_that_are_frozen_between_two_runs",
    ),
    mutant(
        "each-stage-decides-about-an-overflow",
        "engine/pipeline/runtime/stage_update.py",
        "finite = lax.psum(wrong, STAGE_AXIS) == 0",
        "finite = wrong == 0",
        f"{PAIRS}::test_an_overflow_in_one_stage_skips_the_update_of_all",
    ),
    mutant(
        "the-norm-of-scaled-gradients",
        "engine/pipeline/runtime/stage_update.py",
        "norm = norm / loss_scale(self.optimizer, zero_filled(self.optimizer.variables, self.common, common))",
        "norm = norm / 1",
        f"{PAIRS}::test_clipping_by_global_norm_inside_loss_scaling",
    ),
    mutant(
        "tied-weights-count-twice-in-the-norm",
        "engine/pipeline/runtime/stage_update.py",
        "                seen.update(once)\n",
        "",
        f"{PAIRS}::test_a_tied_weight_counts_once_in_the_global_norm",
    ),
    mutant(
        "each-stage-clips-by-its-own-norm",
        "engine/pipeline/runtime/stage_update.py",
        "norm = jnp.sqrt(lax.psum(squares, STAGE_AXIS))",
        "norm = jnp.sqrt(squares)",
        f"{PAIRS}::test_clipping_by_global_norm_inside_loss_scaling",
    ),
    mutant(
        "tied-gradients-are-not-summed",
        "engine/pipeline/runtime/stage_update.py",
        "whole = lax.psum(mine, STAGE_AXIS)",
        "whole = mine",
        f"{PAIRS}::test_a_tied_weight_counts_once_in_the_global_norm",
    ),
    mutant(
        "statistics-of-an-incomplete-update-do-not-agree",
        "engine/pipeline/runtime/ticks.py",
        "value: Array = lax.cond(whole, lambda: new, settled)",
        "value: Array = lax.cond(whole, lambda: new, lambda: jnp.where(active, new, old))",
        STATISTICS,
    ),
    mutant(
        "statistics-do-not-agree-before-an-incomplete-update",
        "engine/pipeline/runtime/staged_execution.py",
        "state = lax.cond(whole, lambda s: s, lambda s: agree(replicas, s, self.begin), state)",
        "state = lax.cond(whole, lambda s: s, lambda s: s, state)",
        STATISTICS,
    ),
    mutant(
        "gradients-of-missing-micro-batches-count",
        "engine/pipeline/runtime/ticks.py",
        "after = jax.tree.map(partial(jnp.where, m < flow.mine), after, before)",
        "after = jax.tree.map(partial(jnp.where, m < flow.most), after, before)",
        STATISTICS,
    ),
    mutant(
        "metrics-of-missing-micro-batches-count",
        "engine/pipeline/runtime/ticks.py",
        "metrics = [jnp.where(active, new, old) for new, old in zip(results.metrics, context.metrics, strict=True)]",
        "metrics = results.metrics",
        f"{PIPELINE}::test_statistics_and_dropout_are_those_of_replicas_without_stages",
    ),
    mutant(
        "a-mean-is-a-sum-in-stages",
        "engine/pipeline/runtime/staged_execution.py",
        "return accumulation.strength(1) / accumulation.steps",
        "return accumulation.strength(1)",
        f"{PAIRS}::test_penalties_and_added_losses_of_all_stages_count",
    ),
    mutant(
        "stages-do-not-average-over-replicas",
        "engine/pipeline/runtime/stage_update.py",
        "total = self.replicas.reduced(total, self.average)",
        "total = self.replicas.sum(total)",
        f"{PAIRS}::test_gradients_are_averaged_over_replicas_of_a_pipeline",
    ),
    mutant(
        "idle-devices-miss-the-count-of-updates",
        "engine/pipeline/runtime/stage_update.py",
        "shared: list[Array] = from_device(busy[0], me, common)",
        "shared: list[Array] = common",
        f"{PAIRS}::test_a_device_without_weights_counts_updates",
    ),
    mutant(
        "divided-stages-do-not-average-over-replicas",
        "engine/pipeline/runtime/sharded_update.py",
        "mine = mine / replicas.count if self.average else mine",
        "mine = mine / 1",
        f"{PAIRS}::test_gradients_are_averaged_over_replicas_of_a_pipeline",
    ),
    mutant(
        "divided-stages-do-not-sum-tied-gradients",
        "engine/pipeline/runtime/sharded_update.py",
        "        total = self._sum_tied(me, total)\n",
        "",
        f"{PAIRS}::test_tied_weights_and_divided_optimizer_state",
    ),
    mutant(
        "stages-do-not-map-gradients",
        "engine/pipeline/build/keras_stages.py",
        "change = gradient_map(optimizer, common)",
        "change = None",
        f"{PAIRS}::test_gradients_of_stages_are_mapped_without_the_loss_scale",
    ),
    mutant(
        "arrays-share-a-place",
        "engine/pipeline/runtime/packing.py",
        "            room[buffer] += spec.size\n",
        "            room[buffer] += spec.size - 1\n",
        f"{PAIRS}::test_clipping_by_global_norm_inside_loss_scaling",
        f"{PIPELINE}::test_single_batches",
    ),
    mutant(
        "letters-are-read-from-the-start",
        "engine/pipeline/runtime/mailbox.py",
        "            taken[name] = first + spec.size\n",
        "            taken[name] = 0\n",
        f"{PIPELINE}::test_statistics_and_dropout_are_those_of_replicas_without_stages",
    ),
    mutant(
        "recomputation-keeps-everything",
        "engine/core/recomputation.py",
        "if what is Recompute.NOTHING:",
        "if what is not None:",
        f"{PIPELINE}::test_what_is_kept_between_forward_and_backward",
    ),
    mutant(
        "rows-end-with-the-forwards",
        "engine/pipeline/runtime/table_rows.py",
        "for actions in (table.forward, table.backward) if actions is not None]",
        "for actions in (table.forward,) if actions is not None]",
        f"{PAIRS}::test_clipping_by_global_norm_inside_loss_scaling",
    ),
    mutant(
        "constraints-are-dropped-in-divided-stages",
        "engine/pipeline/runtime/sharded_update.py",
        "whole = constrained([self.constraints[n] for n in self.weights.held[device]], whole)",
        "whole = list(whole)",
        f"{PIPELINE}::test_constraints",
    ),
]

PARTITION = [
    mutant(
        "operations-go-to-the-first-input",
        "engine/pipeline/partition/split.py",
        "latest = max((made[id(tensor)]",
        "latest = min((made[id(tensor)]",
        f"{SPLIT}::test_operations_go_where_the_latest_of_their_inputs_is",
    ),
    mutant(
        "later-stages-may-be-used",
        "engine/pipeline/partition/split.py",
        "            if at > stage:\n",
        "            if at > stage + 1:\n",
        f"{ASSIGNMENT}::test_an_earlier_stage_cannot_use_a_later_one",
    ),
    mutant(
        "gaps-are-allowed",
        "engine/pipeline/partition/split.py",
        "missing = [stage for stage in range(last) if stage not in present]",
        "missing = [stage for stage in range(0) if stage not in present]",
        f"{ASSIGNMENT}::test_gaps_are_found_when_the_model_is_cut",
    ),
    mutant(
        "balance-ignores-boundaries",
        "engine/pipeline/partition/balance.py",
        "begins = cuts(costs, traffic * BYTE * LINK, stages)",
        "begins = cuts(costs, traffic * 0, stages)",
        f"{BALANCE}::test_cuts_avoid_large_boundaries",
    ),
    mutant(
        "balance-by-the-mean",
        "engine/pipeline/partition/balance.py",
        "best = np.maximum(best[:, None], stage).min(0)",
        "best = np.minimum(best[:, None], stage).min(0)",
        BALANCE,
    ),
    mutant(
        "masks-do-not-travel",
        "engine/pipeline/partition/split.py",
        "return tuple((value, keras_api.get_keras_mask(value)) for value in sent)",
        "return tuple((value, None) for value in sent)",
        f"{SPLIT}::test_masks_are_leaves_of_the_boundary",
    ),
]

BUILD = [
    mutant(
        "penalties-are-forgotten",
        "engine/pipeline/build/keras_stages.py",
        "[*losses[1], *_penalties(self.stage.variables)]",
        "[*losses[1]]",
        f"{PAIRS}::test_penalties_and_added_losses_of_all_stages_count",
    ),
    mutant(
        "losses-of-earlier-stages-are-dropped",
        "engine/pipeline/build/keras_stages.py",
        "losses = [*losses[0], *scope.losses],",
        "losses = [*scope.losses],",
        f"{PAIRS}::test_penalties_and_added_losses_of_all_stages_count",
    ),
    mutant(
        "own-losses-see-one-sum",
        "engine/pipeline/build/keras_stages.py",
        'if not overrides(self.model, "compute_loss"):',
        "if True:",
        f"{EDGES}::test_a_loss_of_the_users_own_sees_each_loss_that_layers_add",
    ),
    mutant(
        "stages-outlive-compile",
        "engine/fit/session.py",
        "tuple(map(id, self.model.layers)), variables, compilation(self.model))",
        "tuple(map(id, self.model.layers)), variables)",
        f"{EDGES}::test_stages_follow_a_call_that_has_changed_before_compile",
    ),
    mutant(
        "a-pipeline-needs-weights-to-train",
        "engine/pipeline/runtime/stage_update.py",
        "if not busy or len(busy) == len(self.twins):",
        "if len(busy) == len(self.twins):",
        f"{EDGES}::test_a_pipeline_without_trainable_weights_trains_nothing",
    ),
    mutant(
        "losses-may-read-other-stages",
        "engine/pipeline/build/keras_stages.py",
        "        if names:\n",
        "        if names and not names:\n",
        f"{PIPELINE}::test_a_loss_that_reads_an_earlier_stage_is_refused",
    ),
    mutant(
        "statistics-on-two-devices-are-allowed",
        "engine/pipeline/build/keras_stages.py",
        "if device != here}",
        "if device < here - 9}",
        f"{PIPELINE}::test_moving_statistics_on_two_devices",
    ),
    mutant(
        "complex-numbers-between-stages-have-no-gradient",
        "engine/shapes.py",
        "jnp.issubdtype(array.dtype, jnp.inexact)",
        "jnp.issubdtype(array.dtype, jnp.floating)",
        "engine/pipeline/test_state_apart.py::test_complex_numbers_between_stages",
    ),
    mutant(
        "a-users-name-is-taken-for-the-engines",
        "engine/pipeline/runtime/stage_update.py",
        're.compile(r".*_slice(\\d+)of")',
        're.compile(r".*?_slice(\\d+)of")',
        "engine/pipeline/test_state_apart.py::test_names_of_layers_that_look_like_those_of_the_engine",
    ),
    mutant(
        "devices-may-be-left-out",
        "engine/pipeline/build/rules.py",
        "unused = sorted(set(range(max(devices))) - set(devices))",
        "unused = sorted(set(range(min(devices))) - set(devices))",
        OPTIONS,
    ),
]

ESTIMATORS = [
    mutant(
        "means-by-batch",
        "engine/estimator/outbox.py",
        "return [kept[0] + jnp.reshape(value, ()).astype(jnp.float32) * rows, kept[1] + rows]",
        "return [kept[0] + jnp.reshape(value, ()).astype(jnp.float32), kept[1] + 1]",
        f"{ESTIMATOR}::test_every_source_and_its_end",
        f"{ESTIMATOR}::test_training_equals_fit",
    ),
    mutant(
        "evaluation-counts-one-replica",
        "engine/estimator/model_steps.py",
        "metrics = place.replicas.sum(state.metrics)\n",
        "metrics = state.metrics\n",
        f"{HOOKS}::test_metrics_that_are_no_means_over_replicas",
    ),
    mutant(
        "steps-are-not-counted",
        "engine/estimator/model_steps.py",
        "return new._replace(non_trainable=[step + 1, *rest], optimizer=optimizer), gradients, ()",
        "return new._replace(non_trainable=[step, *rest], optimizer=optimizer), gradients, ()",
        f"{ESTIMATOR}::test_model_fn_sees_the_number_of_every_step",
    ),
    mutant(
        "learning-rates-of-model-functions-are-lost",
        "engine/estimator/model_steps.py",
        "[rates.get(position, value) for",
        "[value for",
        f"{ESTIMATOR}::test_model_fn_computes_the_learning_rate",
    ),
    mutant(
        "other-optimizers-are-restored",
        "engine/estimator/saved_state.py",
        "        if name not in saved.optimizer or name not in slots or np.shape",
        "        if name in saved.optimizer and name in slots and np.shape",
        f"{ERRORS}::test_another_optimizer_than_the_checkpoint",
    ),
    mutant(
        "warm-starts-by-whole-names",
        "engine/estimator/saved_state.py",
        "chosen = [name for name in weights if any(re.search(pattern, name) for pattern in patterns)]",
        "chosen = [name for name in weights if any(re.fullmatch(pattern, name) for pattern in patterns)]",
        f"{ESTIMATOR}::test_warm_start_and_variables",
    ),
    mutant(
        "tensors-of-the-first-replica",
        "engine/estimator/outbox.py",
        "array = np.moveaxis(array, 0, 1)[: counts.min()]",
        "array = np.moveaxis(array, 0, 1)[: counts.max()]",
        "engine/estimator/test_outbox.py",
    ),
]

OUTFEEDS = [
    mutant(
        "elements-of-incomplete-steps",
        "engine/loop/execution.py",
        "active, complete = remainder.is_active(i, me), i < remainder.left",
        "active, complete = remainder.is_active(i, me), i >= 0",
        f"{IN_FIT}::test_layers_in_fit",
    ),
    mutant(
        "elements-of-a-tail-in-stages",
        "engine/pipeline/runtime/staged_execution.py",
        "m < jnp.where(whole, size, remainder.left))",
        "m < jnp.where(whole, size, remainder.turns))",
        f"{IN_FIT}::test_layers_in_stages",
    ),
    mutant(
        "gradients-from-every-device",
        "engine/pipeline/runtime/staged_execution.py",
        "first = lax.axis_index(STAGE_AXIS) == 0",
        "first = lax.axis_index(STAGE_AXIS) >= 0",
        f"{IN_FIT}::test_the_optimizer_of_a_pipeline",
    ),
    mutant(
        "gradients-of-one-replica",
        "engine/pipeline/runtime/watched_update.py",
        "update.replicas.reduced(_of_all(update.weights, total, tied=True), update.average)",
        "_of_all(update.weights, total, tied=True)",
        f"{IN_FIT}::test_the_optimizer_of_a_pipeline",
    ),
    mutant(
        "layers-enqueue-while-they-are-built",
        "ipu_outfeed_queue.py",
        "        if in_symbolic_scope():\n            return Operation()\n",
        "",
        f"{IN_FIT}::test_the_latest_element",
    ),
]

MUTANTS: tuple[Mutant, ...] = (*RUNTIME, *PARTITION, *BUILD, *ESTIMATORS, *OUTFEEDS)
