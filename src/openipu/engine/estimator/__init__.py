"""How estimators run: a user's `model_fn` as a pure step, driven by the engine's loop.

specs.py    what model_fn returns        trace.py    model_fn -> Plan: its variables, and a pure function of them
outbox.py   results inside the program   steps.py    Plan -> Step
inputs.py   input_fn -> Feed             saved.py    State <-> checkpoints
hooks.py    code between executions      watch.py    log lines, event files, facts about programs
core.py     train, evaluate, predict     shards.py   Plan -> Program on several devices per replica

Models in stages: stage_specs.py, stage_trace.py, stage_program.py do what specs.py, trace.py and steps.py do.
"""
