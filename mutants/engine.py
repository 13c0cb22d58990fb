"""Mistakes in the engine, except its pipeline and estimators."""

from __future__ import annotations

from .mutant import Mutant, mutant

SCHEDULES = "engine/schedule/test_schedules.py"
ARRAYS = "engine/schedule/test_schedule_arrays.py"
REMAINDER = "engine/loop/test_remainder.py"
KNOWN = "engine/loop/test_known_length.py"
DRIVER = "engine/loop/test_driver.py"
ACCUMULATION = "engine/core/test_accumulation.py"
CHAIN = "engine/core/test_optimizer_chain.py"
OWN_APPLY = "engine/core/test_own_apply.py"
RECOMPUTATION = "engine/core/test_recomputation.py"
SHARDED = "engine/core/test_sharded_optimizer.py"
OPTIONS = "engine/core/test_options.py"
OWN_STEP = "engine/fit/test_own_step_on_replicas.py"
EDGES = "engine/fit/test_edges_of_equality.py"
REPLICAS = "engine/fit/test_replicas.py"
FIT = "engine/fit/test_fit.py"
LABELS = "engine/fit/test_labels.py"
CALLBACKS = "engine/fit/test_callbacks.py"
LIVE = "engine/fit/test_async_callbacks.py"
SOURCES = "engine/data/test_data_sources.py"
OUTFEEDS = "engine/program/test_outfeeds.py"
FEEDS = "engine/program/test_feeds.py"
PROGRAMS = "engine/program/test_device_programs.py"
LOOPS = "engine/program/test_loops.py"
DEVICES = "engine/devices/test_devices.py"
CACHE = "engine/devices/test_program_cache.py"
FILES = "engine/checkpoint/test_files.py"
FOLDER = "engine/checkpoint/test_folder.py"
CHECKPOINT = "engine/checkpoint/test_checkpoint.py"
OTHER_SIZE = "engine/checkpoint/test_other_batch_size.py"
CONVOLUTION = "engine/convolution/test_convolution.py"
RULE = "engine/convolution/test_rule.py"
INTERRUPTS = "engine/test_interrupts.py"
BUSY = "engine/fit/test_busy.py"
GRADIENT_SUMS = "engine/convolution/test_gradient_sums.py"
PATCHES = "engine/keras_compat/test_patches.py"

SCHEDULE = [
    mutant(
        "one-f-one-b-holds-one-more",
        "engine/schedule/schedules.py",
        "held < len(progress.forwards) - action.stage",
        "held <= len(progress.forwards) - action.stage",
        SCHEDULES,
    ),
    mutant(
        "gpipe-starts-backwards-early",
        "engine/schedule/schedules.py",
        "min(progress.forwards) == progress.micro_batches",
        "max(progress.forwards) == progress.micro_batches",
        SCHEDULES,
    ),
    mutant(
        "interleaved-meets-itself",
        "engine/schedule/schedules.py",
        "if not any(offset - other in meet for other in offsets):",
        "if not any(other - offset in meet for other in offsets):",
        SCHEDULES,
    ),
    mutant(
        "mail-is-freed-when-it-is-read",
        "engine/schedule/table_arrays.py",
        "while taken and taken[0][0] < start:",
        "while taken and taken[0][0] <= start:",
        ARRAYS,
    ),
    mutant(
        "inputs-are-dropped-after-the-forward",
        "engine/schedule/table_arrays.py",
        "last = backward(consumer.stage, action.micro_batch) if table.training else consumer",
        "last = consumer",
        ARRAYS,
    ),
    mutant(
        "bubble-counts-forwards-only",
        "engine/schedule/measures.py",
        "backward: float = 2.0",
        "backward: float = 1.0",
        SCHEDULES,
    ),
]

LOOP = [
    mutant(
        "known-loop-skips-the-last-update",
        "engine/loop/loop_shape.py",
        "return lax.fori_loop(0, most, again,",
        "return lax.fori_loop(0, most - 1, again,",
        KNOWN,
    ),
    mutant(
        "short-executions-take-the-known-loop",
        "engine/loop/replica_loop.py",
        " and whole.steps // size == length(slab.body) // size",
        "",
        KNOWN,
    ),
    mutant(
        "remainder-forgets-the-tail",
        "engine/loop/remainder.py",
        "rows * (left * replicas + counts.extra) + tail_rows",
        "rows * (left * replicas + counts.extra)",
        REMAINDER,
    ),
    mutant(
        "tail-goes-to-a-busy-replica",
        "engine/loop/remainder.py",
        "return replica == self.extra",
        "return replica + 1 == self.extra",
        REMAINDER,
    ),
    mutant(
        "extra-replicas-have-no-turn",
        "engine/loop/remainder.py",
        "return self.left + jnp.asarray(self.extra > 0, jnp.int32) if self.replicas > 1 else self.left",
        "return self.left",
        f"{REPLICAS}::test_a_learning_rate_divided_by_the_replicas_gives_the_weights_of_one_device",
    ),
    mutant(
        "counts-of-idle-replicas-are-kept",
        "engine/loop/replica_state.py",
        "jax.tree.map(choose, new.metrics, old.metrics),",
        "new.metrics,",
        f"{REPLICAS}::test_metrics_are_true_over_all_samples",
    ),
    mutant(
        "moving-statistics-do-not-agree",
        "engine/loop/replica_state.py",
        "found[i] = jnp.where(shares[number] > 0, means[number], old[i])",
        "found[i] = new[i]",
        f"{REPLICAS}::test_moving_statistics_are_the_mean_over_replicas",
    ),
    mutant(
        "means-of-changes-lose-large-states",
        "engine/loop/replica_state.py",
        "jnp.where(shares[number] > 0, means[number], old[i])",
        "old[i] + replicas.mean_of_active(new[i] - old[i], active)",
        f"{EDGES}::test_the_mean_of_equal_states_is_that_state",
    ),
    mutant(
        "shared-arrays-are-used-up",
        "engine/core/model_state.py",
        "copied = array.copy() if id(array) in seen else array",
        "copied = array",
        f"{REPLICAS}::test_arrays_that_two_variables_share_are_not_used_up",
    ),
    mutant(
        "seeds-of-the-tail-advance",
        "engine/loop/execution.py",
        "same_step = self._joins_tail(remainder.extra) > 0",
        "same_step = remainder.extra < 0",
        f"{REPLICAS}::test_random_layers_in_the_last_incomplete_update",
    ),
    mutant(
        "gradients-of-idle-replicas-count",
        "engine/loop/execution.py",
        "total = jax.tree.map(lambda a, b: jnp.where(mask, a, b), total, carry.total)",
        "total = jax.tree.map(lambda a, _: a, total, carry.total)",
        f"{REPLICAS}::test_a_learning_rate_divided_by_the_replicas_gives_the_weights_of_one_device",
    ),
    mutant(
        "logs-of-idle-replicas-count",
        "engine/loop/results.py",
        "logs = self.replicas.mean_of_active(*kept) if self.replicas.count > 1 else kept[0]",
        "logs = self.replicas.mean(kept[0])",
        f"{OWN_STEP}::test_reported_values_are_means_over_the_replicas_that_have_data",
    ),
    mutant(
        "predictions-keep-unused-rows",
        "engine/loop/loop.py",
        "return _joined(_joined(read(block))[: self.count])",
        "return _joined(_joined(read(block)))",
        f"{REPLICAS}::test_rows_are_in_order_and_none_is_lost",
    ),
    mutant(
        "programs-are-not-kept",
        "engine/loop/loop.py",
        "if key not in self.programs:",
        "if True:",
        f"{FIT}::test_a_second_fit_evaluate_and_predict_of_the_same_shapes_compile_nothing",
    ),
    mutant(
        "only-compiled-programs-run",
        "engine/loop/compile.py",
        "call = _never_run(lowered) if place.compile_only else compiled",
        "call = compiled",
        f"{LOOPS}::test_a_program_that_is_only_compiled_changes_nothing",
    ),
]

CORE = [
    mutant(
        "mean-is-a-sum",
        "engine/core/accumulation.py",
        "return self.add_scaled(total, gradients, 1 / self.steps)",
        "return self.add_scaled(total, gradients, 1)",
        f"{ACCUMULATION}::test_reductions",
    ),
    mutant(
        "running-mean-begins-late",
        "engine/core/accumulation.py",
        "share = 1 / (position + 1)",
        "share = 1 / (position + 2)",
        f"{ACCUMULATION}::test_reductions",
    ),
    mutant(
        "accumulates-in-the-weights-dtype",
        "engine/core/accumulation.py",
        "return [jnp.zeros(w.shape, d or w.dtype)",
        "return [jnp.zeros(w.shape, w.dtype)",
        f"{ACCUMULATION}::test_means_do_not_overflow_where_a_sum_does",
    ),
    mutant(
        "strength-forgets-replicas",
        "engine/core/accumulation.py",
        "return replicas * (self.steps if self.method is Reduction.SUM else 1)",
        "return self.steps if self.method is Reduction.SUM else 1",
        f"{REPLICAS}::test_a_learning_rate_divided_by_the_replicas_gives_the_weights_of_one_device",
    ),
    mutant(
        "maps-are-skipped-in-own-steps",
        "engine/core/keras_steps.py",
        "gradients = reduced(map_gradients(optimizer, gradients, weights, state))",
        "gradients = reduced(gradients)",
        f"{OWN_STEP}::test_each_replica_maps_its_gradients_before_they_are_added_up",
    ),
    mutant(
        "maps-after-the-reduction-in-own-steps",
        "engine/core/keras_steps.py",
        "gradients = reduced(map_gradients(optimizer, gradients, weights, state))",
        "gradients = map_gradients(optimizer, reduced(gradients), weights, state)",
        f"{OWN_STEP}::test_each_replica_maps_its_gradients_before_they_are_added_up",
    ),
    mutant(
        "counts-are-averaged-over-replicas",
        "engine/core/keras_steps.py",
        "return metric_results(model, state._replace(metrics=replicas.sum(state.metrics)))",
        "return metric_results(model, state._replace(metrics=replicas.mean(state.metrics)))",
        f"{REPLICAS}::test_counts_in_batch_logs_are_those_of_all_replicas",
    ),
    mutant(
        "incomplete-own-steps-are-weak",
        "engine/core/keras_steps.py",
        "return [g if averaged else replicas.count * g for g in",
        "return [g for g in",
        f"{OWN_STEP}::test_train_on_batch_makes_one_update_as_strong_as_a_full_one",
    ),
    mutant(
        "evaluation-trains",
        "engine/core/keras_steps.py",
        "state.trainable, state.non_trainable, state.metrics, x, y, sample_weight, training=False",
        "state.trainable, state.non_trainable, state.metrics, x, y, sample_weight, training=True",
        "engine/fit/test_parity.py::test_same_as_plain_keras[batchnorm_dropout-remainder-7]",
    ),
    mutant(
        "maps-see-scaled-gradients",
        "engine/core/optimizer_chain.py",
        "scale = loss_scale(optimizer, state)",
        "scale = 1.0",
        CHAIN,
    ),
    mutant(
        "maps-hide-an-overflow",
        "engine/core/optimizer_chain.py",
        "keep = any(isinstance(link, keras.optimizers.LossScaleOptimizer) for link in links)",
        "keep = False",
        CHAIN,
    ),
    mutant(
        "own-apply-is-ignored",
        "engine/core/wrapped_optimizer.py",
        "        if applies_itself(self):\n            if not self.built:",
        "        if False:\n            if not self.built:",
        f"{OWN_APPLY}::test_one_device",
    ),
    mutant(
        "own-apply-inside-a-wrapper-is-ignored",
        "engine/core/optimizer_chain.py",
        "if not isinstance(link, IpuOptimizer) or applies_itself(link)",
        "if not isinstance(link, IpuOptimizer)",
        f"{OWN_APPLY}::test_pipelines",
    ),
    mutant(
        "lost-variables-are-not-noticed",
        "engine/core/wrapped_optimizer.py",
        "    if lost:",
        "    if lost < 0:",
        f"{OWN_APPLY}::test_mistakes",
    ),
    mutant(
        "branches-are-not-followed",
        "engine/core/gradient_dependence.py",
        "return [True, *(any(used) for used in zip(*each, strict=True))]",
        "return [True, *(False for _ in each[0])]",
        "engine/core/test_gradient_dependence.py",
    ),
    mutant(
        "parts-are-kept",
        "engine/core/recomputation.py",
        "if last or _acts(part) else",
        "if last or part.jaxpr.eqns else",
        f"{RECOMPUTATION}::test_marks_save_memory",
    ),
    mutant(
        "host-calls-are-repeated",
        "engine/core/recomputation.py",
        "if last or _acts(part) else",
        "if last else",
        f"{RECOMPUTATION}::test_what_calls_the_host_is_done_once",
    ),
    mutant(
        "outer-mean-is-forgotten",
        "engine/core/wrapped_optimizer.py",
        '"mean" if "mean" in (self.replica_reduction, inner.replica_reduction) else "sum",',
        "inner.replica_reduction,",
        CHAIN,
    ),
    mutant(
        "shares-are-cut-in-the-wrong-place",
        "engine/core/optimizer_sharding.py",
        "return -(-size // replicas)",
        "return size // replicas + 1",
        f"{SHARDED}::test_shares_are_as_small_as_they_can_be",
    ),
    mutant(
        "all-replicas-update-the-first-share",
        "engine/core/optimizer_sharding.py",
        "        me = self.replicas.index()\n",
        "        me = 0\n",
        f"{SHARDED}::test_more_replicas_than_elements",
    ),
    mutant(
        "shares-are-not-constrained",
        "engine/core/optimizer_sharding.py",
        "return constrained(self.constraints, whole)",
        "return whole",
        f"{SHARDED}::test_constraints_act_on_whole_weights",
    ),
    mutant(
        "divided-optimizers-decay-excluded-weights",
        "engine/core/optimizer_twin.py",
        "_innermost(twin).exclude_from_weight_decay(steady)",
        "_innermost(twin).exclude_from_weight_decay([])",
        f"{SHARDED}::test_weights_that_the_user_excludes_do_not_decay",
    ),
    mutant(
        "averaged-shares-are-summed",
        "engine/core/trainer.py",
        "gradients = [g / shards.replicas.count for g in gradients]",
        "gradients = [g / 1 for g in gradients]",
        "public/test_optimizers.py::test_the_engine_does_what_wrappers_declare",
    ),
    mutant(
        "statistics-of-a-group-lose-their-spread",
        "engine/core/replicated_step.py",
        "return whole, average(variance + jnp.square(mean - whole))",
        "return whole, average(variance)",
        f"{REPLICAS}::test_batch_statistics_are_shared_by_a_group",
    ),
    mutant(
        "masked-replicas-weigh-the-same",
        "engine/core/replicated_step.py",
        "average = over_group if mask is None else functools.partial(by_weight, jnp.sum(mask, dtype=mean.dtype))",
        "average = over_group",
        f"{EDGES}::test_batch_statistics_of_a_group_weigh_replicas_by_what_their_masks_leave",
    ),
    mutant(
        "sums-are-taken-for-means",
        "engine/core/keras_steps.py",
        'return reductions == {"sum"}',
        "return False",
        f"{EDGES}::test_a_sum_over_samples_is_a_sum_in_incomplete_updates_too",
    ),
    mutant(
        "counts-differ-without-a-word",
        "engine/fit/state_in_flight.py",
        "if isinstance(self._spread, ReplicaLayout):",
        "if not isinstance(self._spread, ReplicaLayout):",
        f"{EDGES}::test_counts_that_differ_between_replicas_are_mentioned",
    ),
    mutant(
        "replicas-draw-the-same-numbers",
        "engine/core/replicated_step.py",
        "return lax.dynamic_slice_in_dim(function(*values.args, **values.kwargs), spot.first, rows)",
        "return lax.dynamic_slice_in_dim(function(*values.args, **values.kwargs), 0, rows)",
        f"{REPLICAS}::test_random_layers_do_not_depend_on_the_number_of_replicas",
    ),
    mutant(
        "loops-count-once",
        "engine/core/operation_count.py",
        'turns = times * int(equation.params["length"]) if name == "scan" else times',
        "turns = times",
        "engine/pipeline/partition/test_balance.py::test_turns_of_a_loop_are_counted",
    ),
    mutant(
        "stopped-gradients-count",
        "engine/core/gradient_dependence.py",
        'if any(wanted) and (eqn.primitive.name != "stop_gradient" or counts is _is_variable):',
        "if any(wanted):",
        "engine/fit/test_replica_errors.py::test_a_weight_without_gradient_is_named",
    ),
    mutant(
        "incomplete-executions-are-allowed",
        "engine/core/update_rules.py",
        "if steps % size:",
        "if steps < size:",
        "engine/fit/test_replica_errors.py::test_an_execution_is_a_whole_number_of_updates",
    ),
    mutant(
        "options-lose-the-opening",
        "engine/core/options.py",
        "            opening=opening,\n",
        "",
        OPTIONS,
    ),
    mutant(
        "metrics-go-on-from-every-replica",
        "engine/core/state_layout.py",
        "return [jnp.zeros((count, *m.shape), m.dtype).at[0].set(m) for m in metrics]",
        "return [jnp.broadcast_to(m, (count, *m.shape)) for m in metrics]",
        f"{CHECKPOINT}::test_a_run_moves_between_devices",
    ),
]

DATA = [
    mutant(
        "resuming-takes-the-rest-for-read",
        "engine/data/position.py",
        "    if rest:\n",
        "    if rest and whole == 0:\n",
        OTHER_SIZE,
    ),
    mutant(
        "an-epochs-end-moves-with-the-batch-size",
        "engine/data/position.py",
        "return ends.get(batches) or _rescale(batches, *sizes)",
        "return batches * sizes[0] // sizes[1]",
        OTHER_SIZE,
    ),
    mutant(
        "an-ended-epoch-goes-on-in-larger-batches",
        "engine/data/position.py",
        "done = steps if ended and steps else rescaled(self.done)",
        "done = rescaled(self.done)",
        "engine/checkpoint/test_other_steps.py",
    ),
    mutant(
        "other-data-in-other-batches-goes-unnoticed",
        "engine/data/position.py",
        "    if least > most:",
        "    if sizes[0] == sizes[1] and least > most:",
        "engine/checkpoint/test_other_steps.py",
    ),
    mutant(
        "a-look-at-the-data-does-not-count-as-an-opening",
        "engine/data/sources.py",
        "number = position.openings or position.passes + self.openings - ahead",
        "number = position.passes + self.openings - ahead",
        "engine/checkpoint/test_checkpoint.py",
    ),
    mutant(
        "optimizers-are-told-apart-by-their-class-alone",
        "engine/core/state_names.py",
        'if there != now and not (there and now and now.startswith(f"{there} (")):',
        'if there != now and str(there).partition(" ")[0] != str(now).partition(" ")[0]:',
        "engine/checkpoint/test_other_model.py",
    ),
    mutant(
        "a-smaller-batch-is-dropped",
        "engine/data/sources.py",
        "has_tail = len(self._tail) > 0 and self._position <= len(self._full) < self._position + steps",
        "has_tail = len(self._tail) > 0 and self._position < len(self._full) < self._position + steps",
        f"{SOURCES}::test_arrays_hand_out_every_row_once",
    ),
    mutant(
        "batches-are-dealt-in-blocks",
        "engine/data/slab.py",
        "return stacked.reshape(len(stacked) // replicas, replicas, *stacked.shape[1:])",
        "return stacked.reshape(replicas, len(stacked) // replicas, *stacked.shape[1:]).swapaxes(0, 1)",
        f"{REPLICAS}::test_rows_are_in_order_and_none_is_lost",
    ),
    mutant(
        "shuffling-by-batch-mixes-batches",
        "engine/data/sources.py",
        "np.random.permutation(n) + s for s, n in",
        "np.random.permutation(n) for s, n in",
        f"{FIT}::test_arguments_mean_what_they_mean_in_keras",
    ),
    mutant(
        "changed-arrays-are-not-sent-again",
        "engine/data/sources.py",
        "if self._sent != _sample(keras_api.adapted_arrays(self._adapter)):",
        "if not self._sent:",
        f"{SOURCES}::test_arrays_that_callbacks_change_in_place",
    ),
    mutant(
        "elements-share-their-memory",
        "engine/data/dataset_reader.py",
        "lambda a: a.copy() if a.flags.writeable else a",
        "lambda a: a",
        "engine/program/test_feeds.py::test_a_dataset_may_use_the_memory_of_one_element_for_the_next",
    ),
    mutant(
        "batches-of-other-shapes-are-dropped",
        "engine/data/sources.py",
        "            self._waiting = other\n",
        "            self._waiting = None\n",
        f"{SOURCES}::test_batches_of_changing_shape_run_in_their_order",
    ),
    mutant(
        "epochs-begin-anew-in-the-middle",
        "engine/data/feed.py",
        "if resume is None and self.steps_per_epoch is None:",
        "if resume is None:",
        f"{SOURCES}::test_an_endless_generator_goes_on_over_epochs",
        f"{FIT}::test_arguments_mean_what_they_mean_in_keras",
    ),
    mutant(
        "resumed-data-has-another-order",
        "engine/data/feed.py",
        "        set_random(resume.opened)\n",
        "",
        f"{CHECKPOINT}::test_fit_goes_on_in_the_middle_of_an_epoch",
    ),
    mutant(
        "narrow-slabs-cut-updates",
        "engine/data/make_feed.py",
        "most = max(unit, most - most % unit)",
        "most = max(unit, most)",
        f"{SOURCES}::test_slabs_that_would_not_fit_are_made_narrower",
    ),
    mutant(
        "reads-one-further-ahead",
        "engine/data/prefetch.py",
        "while len(self._ready) < self._depth",
        "while len(self._ready) <= self._depth",
        DRIVER,
    ),
]

HOST = [
    mutant(
        "the-last-elements-stay-on-the-device",
        "engine/host_io/outfeed_buffer.py",
        "return self._leave(waiting, waiting.filled > 0, replica, here)",
        "return self._leave(waiting, waiting.filled > 1, replica, here)",
        f"{OUTFEEDS}::test_shapes_of_what_is_dequeued",
    ),
    mutant(
        "last-keeps-everything",
        "engine/host_io/outfeed_buffer.py",
        "                    self._ready.clear()\n                self._ready.append(",
        "                    pass\n                self._ready.append(",
        f"{OUTFEEDS}::test_only_the_latest_element_takes_memory",
    ),
    mutant(
        "unequal-replicas-are-silent",
        "engine/host_io/outfeed_buffer.py",
        "if len(set(counts)) > 1:",
        "if len(set(counts)) > 2:",
        f"{OUTFEEDS}::test_replicas_that_enqueue_unequally_often_are_an_error",
    ),
    mutant(
        "a-reader-is-not-waited-for",
        "engine/host_io/outfeed_buffer.py",
        "len(self._ready) + len(self._coming[replica]) >= self._depth and not self._only_last",
        "len(self._ready) + len(self._coming[replica]) > 3 * self._depth and not self._only_last",
        f"{OUTFEEDS}::test_a_slow_reader_gets_everything_in_order_and_holds_the_program_up",
    ),
    mutant(
        "live-logs-come-late",
        "engine/host_io/step_logs.py",
        "step = self._slab.begin + self._told",
        "step = self._told",
        f"{LIVE}::test_every_step_is_told_and_nothing_else_changes",
    ),
    mutant(
        "errors-of-live-callbacks-are-lost",
        "engine/host_io/step_logs.py",
        "            self.error = error\n        self._execution = None",
        "            del error\n        self._execution = None",
        f"{LIVE}::test_an_error_in_a_callback_is_raised_and_the_model_lives_on",
    ),
]

DEVICES_AND_FIT = [
    mutant(
        "hoof-does-not-turn-back",
        "engine/devices/systems.py",
        "return positions[::2] + positions[1::2][::-1]",
        "return positions[::2] + positions[1::2]",
        f"{DEVICES}::test_orders",
    ),
    mutant(
        "systems-share-devices",
        "engine/devices/systems.py",
        "            start += request\n",
        "            start += 0\n",
        f"{DEVICES}::test_a_list_makes_systems_of_their_own",
    ),
    mutant(
        "the-group-may-write-programs",
        "engine/devices/program_cache.py",
        "not path.stat().st_mode & 0o022",
        "not path.stat().st_mode & 0o002",
        f"{CACHE}::test_a_cache_that_others_can_write_to_is_not_used",
    ),
    mutant(
        "damaged-programs-stay",
        "engine/devices/program_cache.py",
        "elif new and not _is_intact(entry):",
        "elif incomplete and not _is_intact(entry):",
        f"{CACHE}::test_damaged_entries_are_replaced",
    ),
    mutant(
        "planted-programs-run",
        "engine/devices/program_cache.py",
        "if not (_is_own(entry) if closed else is_private(entry)):",
        "if not _is_own(entry):",
        f"{CACHE}::test_a_planted_program_runs_only_if_nobody_else_could_have_planted_it",
    ),
    mutant(
        "an-idle-group-divides-by-zero",
        "engine/devices/replicas.py",
        "number = jnp.maximum(total(jnp.asarray(active, jnp.float32)), 1)",
        "number = total(jnp.asarray(active, jnp.float32))",
        "engine/devices/test_reductions.py",
    ),
    mutant(
        "joined-sums-are-cut-in-the-wrong-place",
        "engine/devices/replicas.py",
        "ends = np.cumsum([leaves[i].size for i in group])",
        "ends = np.cumsum([leaves[0].size for i in group])",
        f"{REPLICAS}::test_a_learning_rate_divided_by_the_replicas_gives_the_weights_of_one_device",
    ),
    mutant(
        "logs-of-the-whole-launches-are-told",
        "engine/fit/epoch.py",
        "return results[-1].value",
        "return results[0].value",
        f"{CALLBACKS}::test_logs_of_an_execution_are_those_of_the_steps_so_far",
        f"{FIT}::test_arguments_mean_what_they_mean_in_keras",
    ),
    mutant(
        "callbacks-hear-of-the-first-step",
        "engine/data/slab.py",
        "return self.begin + self.steps - 1",
        "return self.begin",
        f"{CALLBACKS}::test_lambda_callback_and_the_order_of_all_hooks",
    ),
    mutant(
        "a-failed-launch-loses-the-state",
        "engine/fit/state_in_flight.py",
        "self._state = None if state is self._shown else state",
        "self._state = None if state is self._shown else locals().get('result') and state",
        "engine/fit/test_bad_input.py::test_an_error_in_a_users_step",
    ),
    mutant(
        "labels-may-be-one-too-large",
        "engine/fit/labels.py",
        "bad = (block < 0) | (block >= use.classes)",
        "bad = (block < 0) | (block > use.classes)",
        f"{LABELS}::test_the_first_bad_row_is_named",
    ),
    mutant(
        "weightless-labels-are-refused",
        "engine/fit/labels.py",
        "            bad &= counts\n",
        "            bad |= False\n",
        f"{LABELS}::test_labels_without_weight",
    ),
    mutant(
        "averages-are-not-written-back",
        "engine/fit/fit.py",
        "        model.optimizer.finalize_variable_values(model.trainable_weights)\n",
        "        pass\n",
        "engine/fit/test_parity.py::test_same_as_plain_keras[averaged_weights_and_schedule-remainder-7]",
    ),
]

CHECKPOINTS = [
    mutant(
        "the-newest-is-removed",
        "engine/checkpoint/checkpoints.py",
        "for old in steps[: -self._keep] if self._keep else []:",
        "for old in steps[self._keep :] if self._keep else []:",
        f"{FILES}::test_the_newest_stay",
    ),
    mutant(
        "saving-copies-nothing",
        "engine/checkpoint/files.py",
        "host = {name: np.array(a) for name, a in arrays.items() if name not in on_device}",
        "host = {name: np.asarray(a) for name, a in arrays.items() if name not in on_device}",
        f"{FILES}::test_a_save_holds_the_values_of_its_moment",
    ),
    mutant(
        "damage-is-not-seen",
        "engine/checkpoint/files.py",
        'if record["files"].get(name) != found.get(name):',
        'if name not in record["files"]:',
        f"{FILES}::test_a_damaged_checkpoint_is_named_and_passed_over",
    ),
    mutant(
        "any-folder-is-a-checkpoint",
        "engine/checkpoint/files.py",
        'return has_manifest(path) or (path / _ARRAYS / "_METADATA").is_file()',
        "return path.is_dir()",
        f"{FILES}::test_folders_of_the_user_are_left_alone",
    ),
    mutant(
        "damaged-ones-count",
        "engine/checkpoint/checkpoints.py",
        "intact = [step for step in self.all_steps() if step not in self._damaged]",
        "intact = self.all_steps()",
        f"{FOLDER}::test_damaged_checkpoints_do_not_displace_good_ones",
    ),
    mutant(
        "due-one-step-late",
        "engine/checkpoint/checkpoints.py",
        "step - self._last_step >= self._every_steps",
        "step - self._last_step > self._every_steps",
        f"{FILES}::test_when_one_is_due",
    ),
]

CONVOLUTIONS = [
    mutant(
        "windows-one-too-few",
        "engine/convolution/geometry.py",
        "return max(room // stride + 1, 0)",
        "return max(-(-room // stride), 0)",
        f"{CONVOLUTION}::test_convolution_layers",
    ),
    mutant(
        "winograd-forgets-the-scale-of-a-mirrored-kernel",
        "engine/convolution/winograd.py",
        "_rows(gradient[order] * scale)",
        "_rows(gradient[order])",
        f"{CONVOLUTION}::test_convolution_layers",
        f"{CONVOLUTION}::test_winograd_is_as_exact_as_promised",
    ),
    mutant(
        "winograd-tiles-do-not-reach-the-next",
        "engine/convolution/winograd.py",
        "(past, reach - past, 0)",
        "(0, reach, 0)",
        f"{CONVOLUTION}::test_winograd_is_as_exact_as_promised",
    ),
    mutant(
        "winograd-with-any-number-of-channels",
        "engine/convolution/rule.py",
        "WINOGRAD_TILES = {6: 64, 4: 4096}",
        "WINOGRAD_TILES = {6: 4096, 4: 4096}",
        RULE,
    ),
    mutant(
        "direct-for-cut-inputs",
        "engine/convolution/rule.py",
        "if min(low for pair in geo.padding for low in pair) < 0:",
        "if min(low for pair in geo.padding for low in pair) < -99:",
        RULE,
    ),
    mutant(
        "sums-of-gradients-are-computed-again",
        "engine/convolution/gradient_sums.py",
        "if readers[v] > 1",
        "if readers[v] > 9",
        GRADIENT_SUMS,
    ),
]

KERAS_COMPAT = [
    mutant(
        "patches-stay",
        "engine/keras_compat/patches.py",
        "            if installed.users == 0:\n                installed.restore()",
        "            if installed.users == 0:\n                pass",
        PATCHES,
    ),
    mutant(
        "patches-end-too-early",
        "engine/keras_compat/patches.py",
        "            if installed.users == 0:",
        "            if installed.users <= 1:",
        PATCHES,
    ),
    mutant(
        "handlers-of-all-threads",
        "engine/keras_compat/patches.py",
        'found: list[Handler] = vars(self._local).setdefault("handlers", [])',
        'found: list[Handler] = vars(self).setdefault("_handlers", [])',
        PATCHES,
    ),
]

PROGRAM = [
    mutant(
        "frozen-layers-do-not-count-in-device-programs",
        "engine/program/user_program.py",
        "if known is None or known.trainable != known.needs.trainable:",
        "if known is None:",
        f"{PROGRAMS}::test_layers_that_are_frozen_between_two_runs",
    ),
    mutant(
        "counts-of-device-programs-may-differ",
        "engine/program/user_program.py",
        "        if replicas.count > 1:\n            mention",
        "        if replicas.count > 9:\n            mention",
        f"{PROGRAMS}::test_counts_that_differ_between_replicas_are_mentioned",
    ),
    mutant(
        "a-feed-that-ends-costs-the-others-their-elements",
        "engine/program/infeed.py",
        "        for source, elements in reversed(taken):\n",
        "        for source, elements in reversed(taken[:0]):\n",
        FEEDS,
    ),
    mutant(
        "arguments-stay-where-they-are",
        "engine/program/call_arguments.py",
        "return replicas.send(array) if elsewhere else array",
        "return array",
        f"{PROGRAMS}::test_results_and_arrays_on_other_devices_are_arguments",
    ),
    mutant(
        "a-python-number-is-like-any-other",
        "engine/program/call_arguments.py",
        'getattr(a, "weak_type", False)',
        "False",
        f"{PROGRAMS}::test_a_python_number_takes_the_dtype_of_what_it_meets_and_others_do_not",
    ),
    mutant(
        "replicas-take-the-same-elements",
        "engine/program/infeed.py",
        "return np.stack(rows).reshape(-1, fed, *rows[0].shape)",
        "return np.stack(rows).reshape(fed, -1, *rows[0].shape).swapaxes(0, 1)",
        FEEDS,
        f"{PROGRAMS}::test_moving_statistics_and_metrics_agree_over_replicas",
    ),
    mutant(
        "the-end-of-the-data-loses-elements",
        "engine/program/infeed.py",
        "            self.elements.put_back(elements)\n            whose",
        "            whose",
        f"{FEEDS}::test_elements_left_at_the_end_can_still_be_taken",
        f"{FEEDS}::test_the_end_of_the_data_is_an_error_that_loses_nothing",
    ),
]

UNDER_PRESSURE = [
    mutant(
        "two-signals-at-once-are-two-presses",
        "engine/interrupts.py",
        "again = now - self.last < TWICE",
        "again = False",
        INTERRUPTS,
    ),
    mutant(
        "a-press-that-waits-is-lost",
        "engine/interrupts.py",
        "            self.held, self.since = number, now\n",
        "            self.since = now\n",
        INTERRUPTS,
    ),
    mutant(
        "a-second-press-waits-for-ever",
        "engine/interrupts.py",
        "now - self.since >= region.patience",
        "now - self.since >= 100",
        INTERRUPTS,
    ),
    mutant(
        "a-model-is-never-busy",
        "engine/devices/running.py",
        "        refuse_elsewhere(owner, name)\n        _running.append(call)\n",
        "        _running.append(call)\n",
        BUSY,
    ),
    mutant(
        "a-forked-process-goes-on",
        "engine/devices/running.py",
        "    if _forked:\n",
        "    if False:\n",
        f"{BUSY}::test_a_forked_process_says_what_to_do",
    ),
    mutant(
        "a-checkpoint-of-orbax-is-ours",
        "engine/checkpoint/files.py",
        "    return (path / MANIFEST).is_file()\n",
        '    return (path / MANIFEST).is_file() or (path / _ARRAYS / "_METADATA").is_file()\n',
        "engine/checkpoint/test_files.py",
    ),
    mutant(
        "pipelines-of-functions-accept-weights-without-gradients",
        "engine/core/gradient_dependence.py",
        "    if missing:\n",
        "    if len(missing) == len(weights):\n",
        "public/test_pipelining_ops.py::test_a_variable_without_a_gradient_is_an_error",
    ),
]

MUTANTS: tuple[Mutant, ...] = (
    *SCHEDULE,
    *LOOP,
    *CORE,
    *DATA,
    *HOST,
    *DEVICES_AND_FIT,
    *CHECKPOINTS,
    *CONVOLUTIONS,
    *KERAS_COMPAT,
    *PROGRAM,
    *UNDER_PRESSURE,
)
