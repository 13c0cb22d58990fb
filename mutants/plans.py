"""Mistakes in plans, and in the timing of stages."""

from __future__ import annotations

from .mutant import Mutant, mutant

PREDICT = "engine/plan/test_predict.py"
COUNTS = "engine/plan/test_counts.py"
TIMING = "engine/pipeline/test_stage_timing.py"
COMMAND = "public/test_plan_command.py"

MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "a-ring-has-one-turn",
        "engine/plan/predict.py",
        "round(2 * (replicas - 1) / replicas * size)",
        "round((replicas - 1) / replicas * size)",
        f"{PREDICT}::test_one_stage_by_hand",
    ),
    mutant(
        "long-tables-are-one-group-short",
        "engine/plan/predict.py",
        "before.continued(after, (micro_batches - short) / group)",
        "before.continued(after, (micro_batches - short) / group - 1)",
        f"{PREDICT}::test_long_tables_take_what_short_ones_foretell",
    ),
    mutant(
        "memory-has-no-limit",
        "engine/plan/search.py",
        "if machine.memory is None or one.memory.total <= machine.memory]",
        "]",
        f"{PREDICT}::test_replicas_are_best_until_memory_or_links_are_short",
    ),
    mutant(
        "dead-equations-count",
        "engine/core/operation_count.py",
        "if equation.effects or not read.isdisjoint(equation.outvars):",
        "if True:",
        f"{COUNTS}::test_two_stages_of_two_products_each",
    ),
    mutant(
        "a-launch-counts-as-a-turn",
        "engine/pipeline/runtime/stage_timing.py",
        "return max(0.0, more) / turns",
        "return max(0.0, more) / (turns + 1)",
        f"{TIMING}::test_the_time_of_a_launch_does_not_count",
    ),
    mutant(
        "timed-actions-have-company",
        "engine/pipeline/runtime/stage_timing.py",
        "only = np.full_like(chosen.micro_batch, NONE)",
        "only = chosen.micro_batch.copy()",
        f"{TIMING}::test_rows_have_one_action_and_no_exchange_or_the_other_way_round",
    ),
    mutant(
        "a-plan-goes-on-to-train",
        "engine/fit/fit.py",
        "    tell(session, feed)\n",
        "",
        f"{COMMAND}::test_stages_and_schedule_can_be_given_and_a_picture_is_drawn",
    ),
)
