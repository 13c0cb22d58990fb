"""How estimators run: a user's `model_fn` as a pure step, driven by the engine's loop.

specs.py         what model_fn returns       model_trace.py    which variables it makes, and a pure function of them
outbox.py        results inside a program    model_steps.py    that function as a `Step`
inputs.py        input_fn -> batches         saved_state.py    state <-> checkpoints
hooks.py         code between executions     progress.py       log lines, event files, facts about programs
runner.py        train, evaluate, predict    run.py            one call of them
sharded_model.py model_fn on several devices per replica

Models in stages: stage_specs.py, stage_trace.py and stage_program.py do what specs.py, model_trace.py and
model_steps.py do.
"""
