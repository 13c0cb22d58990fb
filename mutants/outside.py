"""Mistakes in the settings, the command line, the checks of arguments, and the public modules."""

from __future__ import annotations

from .mutant import Mutant, mutant

VALIDATE = "test_validate.py"
CONFIG = "public/test_config.py"
TREE = "settings/test_option_tree.py"
CACHE = "engine/devices/test_program_cache.py"
COMMANDS = "public/test_command_output.py"
SCHEDULE = "public/test_schedule_command.py"
OPS = "public/test_ops.py"
OPTIMIZERS = "public/test_optimizers.py"
DATA = "public/test_data.py"
INSTANCES = "settings/test_instances.py"
LAUNCH = "public/test_launch.py"
SEVERAL = "public/test_several_instances.py"
REWRITES = "migration/test_rewrites.py"
MODEL_CODE = "migration/test_model_code.py"
MIGRATED_FILES = "migration/test_script_files.py"
MIGRATE = "public/test_migrate_command.py"
HOSTS = "public/test_launch_hosts.py"
NAMES = "bridge/test_names.py"
OPERATIONS = "bridge/test_operations.py"
STEPS = "bridge/test_steps.py"
MODEL_STEPS = "bridge/test_model_steps.py"
CHECKPOINTS = "bridge/test_tensorflow_checkpoints.py"

SETTINGS = [
    mutant(
        "all-memory-is-too-much",
        "settings/rules.py",
        "if not 0 < part <= 1:",
        "if not 0 < part < 1:",
        CONFIG,
    ),
    mutant(
        "no-memory-is-enough",
        "settings/rules.py",
        "if not 0 < part <= 1:",
        "if not 0 <= part <= 1:",
        CONFIG,
    ),
    mutant(
        "a-device-may-be-named-twice",
        "settings/rules.py",
        "if len(set(indices)) < len(indices):",
        "if len(set(indices)) > len(indices):",
        CONFIG,
    ),
    mutant(
        "one-device-too-few",
        "settings/frozen.py",
        "return max(sum(counts), 1 + max(indices, default=0))",
        "return max(sum(counts), max(indices, default=0))",
        f"{CONFIG}::test_requests",
    ),
    mutant(
        "the-configuration-wins-over-the-environment",
        "settings/frozen.py",
        "return sorted({**config.compilation_poplar_options, **env.engine_options}.items())",
        "return sorted({**env.engine_options, **config.compilation_poplar_options}.items())",
        f"{CONFIG}::test_engine_options_win",
    ),
    mutant(
        "given-caches-are-emptied",
        "settings/cache_folder.py",
        "return Cache(executable_cache_path, UNLIMITED)",
        "return Cache(executable_cache_path)",
        f"{CACHE}::test_which_folder",
        f"{CACHE}::test_programs_in_a_given_folder_stay",
    ),
]

CHECKS = [
    mutant(
        "true-is-a-number",
        "_validate.py",
        "    if _is_bool(value):\n        return None\n",
        "",
        VALIDATE,
    ),
    mutant(
        "most-is-too-many",
        "_validate.py",
        "(most is not None and found > most)",
        "(most is not None and found >= most)",
        VALIDATE,
    ),
    mutant(
        "above-includes-its-bound",
        "_validate.py",
        '(above, "above {}", operator.gt)',
        '(above, "above {}", operator.ge)',
        VALIDATE,
    ),
    mutant(
        "notices-come-every-time",
        "_validate.py",
        "        _named.update(new)\n",
        "",
        VALIDATE,
    ),
]

COMMAND_LINE = [
    mutant(
        "a-slower-run-is-faster",
        "cli/demo.py",
        'if ratio > 1 else f"{1 / ratio:.1f} times slower"',
        'if ratio > 0 else f"{1 / ratio:.1f} times slower"',
        "public/test_cli.py::test_the_verdict_is_honest",
    ),
    mutant(
        "an-epoch-of-broken-updates",
        "cli/options.py",
        "or updates * self.accumulated",
        "or updates",
        "public/test_training_commands.py::test_an_execution_is_an_epoch_of_whole_updates",
    ),
    mutant(
        "narrow-terminals-stay-narrow",
        "cli/terminal.py",
        "        console.width = max(console.width, _NARROWEST)\n",
        "        pass\n",
        COMMANDS,
    ),
    mutant(
        "inference-counts-backwards",
        "cli/schedule.py",
        "for action in cell) / whole",
        "for action in cell) / (whole + 1)",
        f"{SCHEDULE}::test_the_command_prints_the_table_and_its_costs",
    ),
    mutant(
        "huge-tables-are-made",
        "cli/schedule.py",
        "if actions > _MOST_ACTIONS or _cells(schedule, options, devices, rows, actions) > _MOST_CELLS:",
        "if actions > _MOST_ACTIONS:",
        f"{COMMANDS}::test_huge_tables_are_refused_at_once",
    ),
]

PUBLIC = [
    mutant(
        "sums-of-squares-are-sums",
        "ops/_reductions.py",
        "SQUARE_ADD: lambda values, axis: jnp.sum(values * values, axis),",
        "SQUARE_ADD: jnp.sum,",
        OPS,
    ),
    mutant(
        "scattered-sums-of-squares-are-sums",
        "ops/reduce_scatter_op.py",
        "lax.psum_scatter(parts * parts if op == _reductions.SQUARE_ADD else parts, REPLICA_AXIS)",
        "lax.psum_scatter(parts, REPLICA_AXIS)",
        f"{OPS}::test_reduce_scatter",
    ),
    mutant(
        "split-and-concat-are-exchanged",
        "ops/all_to_all_op.py",
        "return lax.all_to_all(x, REPLICA_AXIS, split, concat, tiled=True)",
        "return lax.all_to_all(x, REPLICA_AXIS, concat, split, tiled=True)",
        f"{OPS}::test_collectives",
    ),
    mutant(
        "accumulation-outside-of-a-program",
        "optimizers/wrappers.py",
        "        if self.accumulation.steps > 1:\n            raise RuntimeError(",
        "        if self.accumulation.steps > 99:\n            raise RuntimeError(",
        f"{OPTIMIZERS}::test_accumulation_outside_a_scope_is_an_error",
    ),
    mutant(
        "sharding-is-not-declared",
        "optimizers/wrappers.py",
        "            shard_state=self.replicated_optimizer_state_sharding,\n",
        "",
        "engine/core/test_optimizer_chain.py::test_describe",
    ),
    mutant(
        "a-loop-repeats-its-first-order",
        "data.py",
        "return np.random.default_rng((seed, loop)).permutation(rows)",
        "return np.random.default_rng((seed, 0)).permutation(rows)",
        f"{DATA}::test_repeat_shuffles_every_loop_anew_and_the_same_in_every_run",
    ),
    mutant(
        "padding-adds-a-whole-batch",
        "data.py",
        'missing = -rows % validate.count("batch_size", batch_size)',
        'missing = validate.count("batch_size", batch_size) - rows % batch_size',
        f"{DATA}::test_pad_adds_less_than_a_batch_of_weightless_zeros",
    ),
    mutant(
        "checkpoints-come-too-often",
        "callbacks.py",
        "due = final or (self._waiting >= self._every and self._checkpoints.due(position.step))",
        "due = final or self._checkpoints.due(position.step)",
        "engine/checkpoint/test_checkpoint.py::test_every_n_executions",
    ),
]

LAUNCHER = [
    mutant(
        "an-instance-more-than-there-are",
        "settings/instances.py",
        "    if index >= count:\n",
        "    if index > count:\n",
        f"{INSTANCES}::test_a_wrong_variable_is_named",
    ),
    mutant(
        "half-a-replica-in-each-instance",
        "settings/instances.py",
        "return replicas % count == 0",
        "return replicas * devices_per_replica % count == 0",
        f"{INSTANCES}::test_numbers_that_do_not_match",
    ),
    mutant(
        "the-launcher-eats-the-options-of-scripts",
        "cli/poprun.py",
        'while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):',
        'while rest and rest[0].startswith("-") and rest[0] != "--":',
        "public/test_poprun_options.py::test_where_the_options_end",
    ),
    mutant(
        "what-an-instance-started-outlives-it",
        "launcher/keeper.py",
        "    _send(instance.pid, signal.SIGKILL)  # what it has left behind\n",
        "",
        f"{LAUNCH}::test_what_outlives_an_instance_does_not_hold_the_launcher",
    ),
    mutant(
        "only-the-first-process-of-an-instance-ends",
        "launcher/keeper.py",
        "os.killpg(group, number)",
        "os.kill(group, number)",
        f"{LAUNCH}::test_what_outlives_an_instance_does_not_hold_the_launcher",
    ),
    mutant(
        "instances-outlive-the-launcher",
        "launcher/keeper.py",
        "    _send(group, signal.SIGTERM)\n    time.sleep(GRACE_SECONDS)\n    _send(group, signal.SIGKILL)\n",
        "",
        f"{LAUNCH}::test_a_killed_launcher_leaves_nothing_behind",
    ),
    mutant(
        "instances-outlive-their-keeper",
        "launcher/keeper.py",
        "libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)",
        "libc.prctl(PR_SET_PDEATHSIG, 0)",
        f"{LAUNCH}::test_a_killed_keeper_leaves_nothing_behind",
    ),
    mutant(
        "whoever-holds-the-output-holds-the-launcher",
        "launcher/process.py",
        "                if over and not ready:\n                    break\n",
        "",
        f"{LAUNCH}::test_what_outlives_an_instance_does_not_hold_the_launcher",
    ),
    mutant(
        "a-port-that-nobody-else-can-bind",
        "launcher/ports.py",
        "socket.SO_REUSEPORT, 1)",
        "socket.SO_REUSEPORT, 0)",
        f"{LAUNCH}::test_instances_meet_at_the_held_port",
    ),
    mutant(
        "a-second-ctrl-c-is-not-heard",
        "launcher/run.py",
        "if event is signal.SIGINT and not hurry:",
        "if event is signal.SIGTERM and not hurry:",
        f"{LAUNCH}::test_a_second_ctrl_c_kills_at_once",
    ),
    mutant(
        "sigterm-instead-of-ctrl-c",
        "launcher/run.py",
        "_INTERRUPT if why is signal.SIGINT else _END",
        "_END",
        f"{LAUNCH}::test_ctrl_c_is_passed_on",
    ),
    mutant(
        "restart-after-ctrl-c",
        "launcher/run.py",
        "if not isinstance(why, Ended) or not again or restarts == job.max_restarts:",
        "if why is None or restarts == job.max_restarts:",
        f"{LAUNCH}::test_a_second_ctrl_c_kills_at_once",
    ),
    mutant(
        "what-a-shell-says-is-the-start",
        "launcher/output.py",
        "            if not self.started:\n                return\n",
        "            self.started = True\n",
        f"{HOSTS}::test_hosts_get_their_instances",
    ),
    mutant(
        "variables-are-not-quoted",
        "launcher/job.py",
        "exec {shlex.join(['env', *settings, *words])}",
        "exec {' '.join(['env', *settings, *words])}",
        f"{HOSTS}::test_hosts_get_their_instances",
    ),
]

MIGRATION = [
    mutant(
        "openipu-stays-below-keras",
        "migration/order.py",
        "    if ours is not None and not early:\n",
        "    if ours is not None and not early and anchor.is_dropped:\n",
        REWRITES,
    ),
    mutant(
        "data-code-is-model-code",
        "migration/regions.py",
        " if parent in found} - apart\n",
        " if parent in found}\n",
        f"{MODEL_CODE}::test_what_is_data_code",
    ),
    mutant(
        "tensorflow-is-always-removed",
        "migration/uses.py",
        "        if not model or _HARMLESS.match(use.name):\n            return Findings(kept={use.imported})\n",
        "        if not model or _HARMLESS.match(use.name):\n            return Findings()\n",
        REWRITES,
    ),
    mutant(
        "tensorflow-defaults-are-forgotten",
        "migration/arguments.py",
        "for p in every if p.default and p.old not in given]",
        "for p in every if p.default and p.old in given]",
        f"{MODEL_CODE}::test_operations_with_an_exact_equivalent",
    ),
    mutant(
        "a-step-with-a-tape-loses-its-decorator",
        "migration/steps.py",
        'if name == "tensorflow.GradientTape":',
        'if name == "tensorflow.gradients":',
        f"{MODEL_CODE}::test_a_step_with_a_tape_is_left_with_its_reasons",
    ),
    mutant(
        "a-backup-replaces-another",
        "migration/files.py",
        'with backup.open("xb") as stream:',
        'with backup.open("wb") as stream:',
        f"{MIGRATED_FILES}::test_backups_never_replace_a_file",
    ),
    mutant(
        "the-mark-at-the-start-is-lost",
        "migration/files.py",
        'codecs.BOM_UTF8 if self.has_mark else b""',
        'b""',
        MIGRATED_FILES,
    ),
    mutant(
        "notes-do-not-matter",
        "cli/migrate.py",
        "return NEEDS_A_PERSON if count.notes else ALL_DONE",
        "return ALL_DONE",
        f"{MIGRATE}::test_what_needs_a_person_is_listed_with_its_line",
    ),
]

TENSORFLOW = [
    mutant(
        "decay-once",
        "tensorflow/idioms.py",
        "decay_steps=1, decay_rate=float(decay)",
        "decay_steps=2, decay_rate=float(decay)",
        f"{NAMES}::test_learning_rates_and_their_decay",
    ),
    mutant(
        "argmax-of-everything",
        "tensorflow/native.py",
        "return jnp.argmax(input, axis=axis or 0)",
        "return jnp.argmax(input, axis=axis)",
        OPERATIONS,
    ),
    mutant(
        "a-mark-forgets-other-results",
        "engine/program/gradient_marks.py",
        "if (path and path[0] < start) or self._nested(request, index):",
        "if False:",
        STEPS,
    ),
    mutant(
        "gradients-beyond-a-loop",
        "engine/program/gradient_marks.py",
        "    if began.level != level():\n",
        "    if False:\n",
        f"{STEPS}::test_what_a_program_cannot_do_is_refused_with_the_remedy",
    ),
    mutant(
        "both-branches-see-the-first-ones-values",
        "tensorflow/control_flow.py",
        "        set_state(first)\n        run()\n",
        "        run()\n",
        f"{STEPS}::test_conditions_and_loops_on_values_of_the_program",
    ),
    mutant(
        "a-loss-is-counted-twice",
        "tensorflow/model_steps.py",
        "            running.forget()\n",
        "            pass\n",
        f"{MODEL_STEPS}::test_a_step_that_updates_the_metric_of_the_loss_decides_about_it",
    ),
    mutant(
        "a-checkpoint-forgets-the-optimizer",
        "tensorflow/checkpoints.py",
        "return children | self._optimizers()",
        "return children",
        f"{CHECKPOINTS}::test_a_compiled_model_is_saved_with_its_optimizer",
    ),
    mutant(
        "a-loss-of-a-branch-is-lost",
        "engine/program/program_trace.py",
        "            losses[own] = added_losses.values(site.losses[own], added)\n",
        "",
        "bridge/test_losses_in_branches.py",
    ),
    mutant(
        "only-the-last-loss-of-a-loop-counts",
        "engine/program/program_trace.py",
        "            if site.accumulates:\n",
        "            if False:\n",
        "bridge/test_losses_in_branches.py::test_fit_trains_on_losses_that_are_added_in",
    ),
    mutant(
        "gradients-pass-through-an-update",
        "engine/program/variable_scope.py",
        "= lax.stop_gradient(value)",
        "= value",
        f"{STEPS}::test_no_gradient_passes_through_an_assignment",
    ),
    mutant(
        "every-iterator-has-a-program",
        "engine/program/call_arguments.py",
        "            if isinstance(leaf, FeedArgument):\n",
        "            if False:\n",
        f"{STEPS}::test_a_new_iterator_uses_the_program_of_the_last_one",
    ),
    mutant(
        "a-second-optimizer-is-not-carried",
        "engine/core/model_state.py",
        "        slots = [v for optimizer in self.optimizers for v in optimizer.variables]\n",
        "        slots = []\n",
        "bridge/test_second_optimizers.py::test_two_optimizers_train_as_in_plain_keras",
    ),
]

TOGETHER = [
    mutant(
        "broadcast-from-the-first-instance",
        "distributed/host_collective_ops.py",
        "lambda a: a[root]",
        "lambda a: a[0]",
        f"{SEVERAL}::test_what_instances_tell_each_other",
    ),
    mutant(
        "means-of-instances-are-sums",
        "distributed/host_collective_ops.py",
        'np.sum if name == "SUM" else np.mean',
        "np.sum",
        f"{SEVERAL}::test_what_instances_tell_each_other",
    ),
    mutant(
        "total-replicas-are-those-of-one-instance",
        "popdist/_instance.py",
        "return local_devices() * group.count() // getNumIpusPerReplica()",
        "return local_devices() // getNumIpusPerReplica()",
        f"{SEVERAL}::test_what_instances_tell_each_other",
    ),
    mutant(
        "stages-may-be-nested",
        "keras/pipeline_stage.py",
        "        if outer is not None:\n",
        "        if outer == -1:\n",
        "engine/pipeline/partition/test_stage_marks.py",
    ),
    mutant(
        "metric-reduction-is-forgotten",
        "keras/extensions.py",
        "        self._set_ipu_options(metric_reduction=method)\n",
        "        self._set_ipu_options()\n",
        "engine/fit/test_replicas.py",
    ),
]

MUTANTS: tuple[Mutant, ...] = (
    *SETTINGS, *CHECKS, *COMMAND_LINE, *PUBLIC, *LAUNCHER, *MIGRATION, *TENSORFLOW, *TOGETHER,
)  # fmt: skip
