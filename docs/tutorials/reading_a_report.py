# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Reading a report
#
# A report answers one question: where did the time go? This tutorial makes two runs that are slower than they should be,
# reads the reason off their reports, and mends it. Along the way, you will see the main sections of the page.
#
# What every number means exactly is in the reference: [reports](../reports.md).

# %%
import html
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import openipu as ipu

import keras
from IPython.display import HTML

BATCH = 50
images = min(int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000")), 6000)
mnist = ipu.datasets.mnist(images, images // 6)
x, y = mnist.x_train.reshape(-1, 784).astype("float32") / 255, mnist.y_train
out = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## A first report
#
# The data comes from a slow place. Here it is a generator that sleeps for 50 milliseconds, as if it read each batch from a
# far disk. To get a report, put `ipu.report` around the calls that you want to know about.


# %%
def slow_batches():
    for first in range(0, len(x), BATCH):
        time.sleep(0.05)
        yield x[first : first + BATCH], y[first : first + BATCH]


def create_model():
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(256, activation="relu", name="first"),
            keras.layers.Dense(256, activation="relu", name="second"),
            keras.layers.Dense(10, activation="softmax", name="last"),
        ],
        name="mlp",
    )


def compile_model(model, steps):
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=steps)


strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = create_model()
    compile_model(model, steps=5)

with ipu.report(out / "slow"):
    model.fit(slow_batches(), shuffle=False, verbose=2)
print(sorted(path.name for path in (out / "slow").iterdir()))

# %% [markdown]
# Three files: `report.html` is the page, `report.json` has the same facts for programs, and `trace.json` opens in
# [Perfetto](https://ui.perfetto.dev), where you see what happened when.
#
# Open `report.html` in a browser. In this notebook, we show one section at a time:


# %%
def show(name, section, height):
    """One section of the page of a report, in a frame."""
    page = (out / name / "report.html").read_text(encoding="utf-8")
    style = page.partition("<body>")[0]
    part = re.search(rf"<h3>{section}</h3>.*?(?=<h3>|</section>)", page, re.DOTALL)[0]
    document = html.escape(style + part).replace("\n", "&#10;")  # in one line, as a page needs it
    return HTML(f'<div><iframe title="{section}" srcdoc="{document}" width="100%" height="{height}"></iframe></div>')


show("slow", "Summary", 640)

# %% [markdown]
# ## The summary
#
# **Read the bar first.** It is the whole time of the call, and its parts add up. "Devices compute" is what you pay for.
# Everything else is time in which the devices had nothing to do.
#
# - **Plan, trace, lower, compile** happen once. In a short run like this one they can be most of the time, unless the
#   programs are in the cache; in a long one, they hardly count. That is why throughput and time per step leave them out.
# - **Wait for data** is what is wrong here.
# - The box with the coloured edge says so, and what to do about it.
#
# ## The remedy, and the proof
#
# The data fits into memory, so give `fit` the arrays. They stay on the device, and nobody waits for a disk. Then compare the
# two reports in a terminal with `openipu report slow arrays`:

# %%
with strategy.scope():
    model = create_model()
    compile_model(model, steps=5)
with ipu.report(out / "arrays"):
    model.fit(x, y, batch_size=BATCH, verbose=2)


def openipu_report(*names):
    command = [sys.executable, "-m", "openipu", "report", *names]
    plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    print(subprocess.run(command, cwd=out, env=plain, capture_output=True, text=True, check=True).stdout)


openipu_report("slow", "arrays")

# %% [markdown]
# "Devices wait for data" is where the change is. Memory is the price: the data is on the device now.
#
# Numbers of two runs are never exactly equal; those that differ by less than 2 % are called the same. They are only as good
# as the machine was quiet: if other programs used it, measure again.
#
# ## Compute
#
# What does a step consist of? Each layer has a line with its operations (FLOPs) and the bytes that it has to move.

# %%
show("arrays", "Compute", 760)

# %% [markdown]
# The picture is a roofline. The line is what this machine can reach, as measured after the run: it rises while memory is the
# limit, and is level where arithmetic is. The diamond is your run. If it is far below the line, launches or small operations
# cost more than the arithmetic: use a larger batch, or more steps per execution.
#
# ## Memory
#
# What one device needs when it needs the most.

# %%
show("arrays", "Memory", 520)

# %% [markdown]
# Weights, optimizer state and feeds are there all the time. Activations and gradients come and go. If a program does not fit,
# the largest colour tells you what to change: a smaller micro-batch or recomputation for activations, sharding for the
# optimizer's state, stages for weights.
#
# ## A pipeline
#
# Now two stages, cut badly: both large layers are in the first.

# %%
cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 2
cfg.configure_ipu_system()


def pipelined(name, *stages, **how):
    with strategy.scope():
        model = create_model()
    model.set_pipeline_stage_assignment(*stages, **how)
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    compile_model(model, steps=20)
    with ipu.report(out / name):
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)


pipelined("uneven", [0, 0, 1])
show("uneven", "Pipeline", 760)

# %% [markdown]
# There are two pictures of the schedule. The planned one assumes that all stages take equally long. For the measured one,
# every action was timed by itself. There you see it: device 1 does little and waits for device 0. The summary says it in
# words, and names the stage:

# %%
show("uneven", "Summary", 560)

# %% [markdown]
# So let OpenIPU find the cut, and compare again. Look at "stage balance" and "measured bubble".

# %%
pipelined("even", "auto", stages=2)
openipu_report("uneven", "even")

# %% [markdown]
# ## Questions of your own
#
# Everything on the page is in `report.json`. Its parts of the time add up to the whole:

# %%
run = json.loads((out / "slow" / "report.json").read_text(encoding="utf-8"))["runs"][0]
print({part: round(seconds, 2) for part, seconds in run["parts"].items() if seconds})
print(f"together {sum(run['parts'].values()):.2f} s of {run['seconds']:.2f} s")

# %% [markdown]
# So a script can watch over your runs, for example fail if the devices wait for data for more than a tenth of the time.
#
# ## Where to look
#
# | what you see | what it means | what to do |
# |---|---|---|
# | wait for data | batches are not ready when the devices are | give arrays, or prepare batches in parallel |
# | wait for callbacks | Python has its turn too often | a larger `steps_per_execution` |
# | compile, in a run that you repeat | programs are not found in the cache | the same shapes and options in each run; see "from the cache" under Compile |
# | a large planned bubble | too few micro-batches for so many stages | more micro-batches per update, or fewer stages |
# | a measured bubble larger than the planned one | stages are not equal | another cut, or `"auto"` |
# | the diamond far below the roofline | steps are small | a larger batch, more steps per execution |
# | memory near its limit | see the largest colour | micro-batch, recomputation, sharding, stages |
#
# A report costs little, but not nothing ([what it costs](../reports.md#what-it-costs)). Without one, nothing is measured.
