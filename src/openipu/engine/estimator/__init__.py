"""How estimators run: a user's `model_fn` becomes a pure step that the engine's loop drives.

specs.py         what model_fn returns       model_trace.py    its variables, and model_fn as a pure function of them
outbox.py        results inside a program    model_steps.py    that function as a `Step`
inputs.py        input_fn -> batches         saved_state.py    state <-> checkpoints
hooks.py         code between executions     progress.py       log lines, event files, facts about programs
runner.py        train, evaluate, predict    run.py            a single call of one of them
run_settings.py  what is read from a config  sharded_model.py  model_fn on several devices per replica

variable_ledger.py is the scope in which model_fn makes its variables. For models in stages, stage_specs.py,
stage_trace.py and stage_program.py do the work of specs.py, model_trace.py and model_steps.py.
"""
