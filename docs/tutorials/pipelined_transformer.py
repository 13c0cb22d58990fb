# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Pipelining a transformer
#
# A small decoder learns to write Python, letter by letter. We let OpenIPU cut it into four stages, look at the schedules
# that can run them, train, and see how much memory each stage takes. The first and the last stage share a weight: the
# embedding.
#
# `examples/pipeline_transformer.py` is this tutorial as a script with options.

# %%
import argparse
import json
import os
import pathlib
import tempfile

import openipu as ipu

import keras
import numpy as np
from IPython.display import SVG, display
from keras import layers

# %% [markdown]
# ## The data
#
# The text is a module of Python's own library. Each sample is a line of 32 letters, and its labels are the letters that
# follow. Set `OPENIPU_TUTORIAL_IMAGES` to a small number if you only want to see it run.

# %%
BATCH = 8
CONTEXT = 32
ACCUMULATE = 16  # micro-batches in an update
updates = min(int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000")) // (BATCH * ACCUMULATE), 40)
samples = updates * BATCH * ACCUMULATE

text = pathlib.Path(argparse.__file__).read_text(encoding="utf-8")
letters, numbers = np.unique(list(text), return_inverse=True)
starts = np.random.default_rng(1).integers(0, len(numbers) - CONTEXT, samples)
pieces = numbers[starts[:, None] + np.arange(CONTEXT + 1)].astype("int32")
x, y = pieces[:, :-1], pieces[:, 1:]
print(f"{samples} lines of {CONTEXT} letters, for {updates} updates; {len(letters)} different letters")

# %% [markdown]
# ## The model
#
# Four attention blocks between two uses of one embedding. `ReversibleEmbedding` turns letters into vectors at the beginning
# and vectors into letters at the end, with the same table.

# %%
WIDTH = 32


def create_model():
    inputs = keras.Input((CONTEXT,), dtype="int32")
    embedding = layers.ReversibleEmbedding(len(letters), WIDTH, name="embedding")
    x = embedding(inputs)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(num_heads=2, key_dim=WIDTH // 2)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(WIDTH)(y))
    outputs = embedding(layers.LayerNormalization()(x), reverse=True)
    return keras.Model(inputs, outputs, name="decoder")


cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 4
cfg.configure_ipu_system()

strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = create_model()

# %% [markdown]
# ## The cut
#
# `"auto"` looks for stages of about the same cost. Nothing is run for that: the cost of each layer is counted. Give it a
# micro-batch, so that it counts with your batch size.

# %%
model.set_pipeline_stage_assignment("auto", stages=4, inputs=x[:BATCH])

# %% [markdown]
# Each stage got one block. The last one costs a little more, because it also turns vectors into letters.
#
# - The **balance** is the mean cost of a stage divided by the largest: at 100 %, no stage waits for a slower one.
# - **Sends** is the boundary: what goes to the next device for each micro-batch. Here it is 8 lines x 32 letters x 32 numbers
#   of 4 bytes, 32 KiB.
#
# The embedding is called twice, in the first stage and in the last:

# %%
for call in model.get_pipeline_stage_assignment():
    if call.layer.name == "embedding":
        print(call.layer.name, "in stage", call.pipeline_stage)

# %% [markdown]
# The first stage owns the table, and the last one borrows it. Both devices have a copy. Their gradients are added up before
# the update, so the copies stay equal. You need not do anything for it.
#
# ## The schedules
#
# A schedule says which device runs what and when. You can draw it before you train. Here are four stages and eight
# micro-batches: time goes to the right, forwards are blue, backwards are orange, and grey is waiting.

# %%
schedules = {
    "Grouped": ipu.schedules.Grouped(),
    "OneFOneB": ipu.schedules.OneFOneB(),
    "Sequential": ipu.schedules.Sequential(),
}
for name, schedule in schedules.items():
    display(SVG(ipu.schedules.svg(schedule.table(stages=4, micro_batches=8), title=name)))

# %% [markdown]
# "Holds" counts the micro-batches whose forward is done and whose backward is not. Their activations have to be kept.
#
# - **Grouped** (the default) is fast, and the first device holds seven micro-batches.
# - **OneFOneB** holds at most four of them, and takes longer.
# - **Sequential** has one micro-batch under way at a time, so three of four devices wait.
#
# The bubble is the share of time in which devices wait. More micro-batches in an update make it smaller, except in
# Sequential:

# %%
for count in (8, 16, 32, 64):
    bubbles = {name: ipu.schedules.bubble(schedule.table(4, count)) for name, schedule in schedules.items()}
    print(f"{count} micro-batches:", ", ".join(f"{name} {bubble:.0%}" for name, bubble in bubbles.items()))

# %% [markdown]
# ## Training
#
# Choose a schedule, say how many micro-batches are in an update, and call `fit`. The report is for later.


# %%
def compile_model(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, steps_per_execution=2 * ACCUMULATE)  # two updates per launch


out = pathlib.Path(tempfile.mkdtemp())
model.set_pipelining_options(
    gradient_accumulation_steps_per_replica=ACCUMULATE,
    gradient_accumulation_reduction_method="mean",
    pipeline_schedule="Grouped",
)
compile_model(model)
with ipu.report(out):
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=2)

# %% [markdown]
# ## The same on one device
#
# Cutting a model does not change what it computes. Here it is again on one device, without stages, with gradients from the
# same 16 micro-batches per update. Seeds and data are the same, so the losses are the same, dropout included.

# %%
cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 1
cfg.configure_ipu_system()

with strategy.scope():
    keras.utils.set_random_seed(1)
    whole = create_model()
whole.set_gradient_accumulation_options(ACCUMULATE, "mean")
compile_model(whole)
expected = whole.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
print("four stages:", history.history["loss"])
print("one device: ", expected.history["loss"])
np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-3)

# %% [markdown]
# ## Memory, stage by stage
#
# A device has the weights of its stage, the gradients for them, and the optimizer's state. On top of that come the values
# that its micro-batches keep from their forward to their backward. The report knows these numbers.

# %%
pipeline = json.loads((out / "report.json").read_text(encoding="utf-8"))["runs"][0]["pipeline"]
kept = pipeline["measured"]["kept"]
for number, (stage, size, held) in enumerate(zip(pipeline["stages"], kept, pipeline["live"], strict=True)):
    print(f"stage {number}: {stage['weights']} weights, {held} x {size / 1024:.0f} KiB for its micro-batches")

# %% [markdown]
# The first stage holds the most micro-batches, because it waits longest for their gradients. The first and the last stage have
# more weights than the others: each has a copy of the table.
#
# What if you had chosen another schedule? How many micro-batches a device holds follows from the table alone:

# %%
for name, schedule in schedules.items():
    held = ipu.schedules.live_on_devices(schedule.table(4, ACCUMULATE))
    print(f"{name:10}", ", ".join(f"{count * size / 1024:.0f} KiB" for count, size in zip(held, kept, strict=True)))

# %% [markdown]
# Speed against memory, and the schedule is the switch. Where even that is not enough, `cfg.allow_recompute = True` computes
# a stage again in its backward instead of keeping its values ([how it runs](../pipelining.md#how-it-runs)).
#
# ## What you have seen
#
# | question | answer |
# |---|---|
# | where do I cut? | `model.set_pipeline_stage_assignment("auto", stages=4)` |
# | what about tied weights? | nothing to do |
# | which schedule? | Grouped; OneFOneB if memory is short |
# | how many micro-batches? | many times the number of stages, or devices wait |
# | is it still the same model? | yes: the losses are those of one device |
#
# Next: [reading a report](reading_a_report.py), which shows what such a pipeline does with its time.
