# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Coming from the IPU port of TensorFlow
#
# You have scripts for `tensorflow.python.ipu`, and no IPU. There are three ways to run them here:
#
# | | what you do | what you get |
# |---|---|---|
# | [`openipu run train.py`](../scripts.md) | nothing | the script as it is, with TensorFlow installed beside Keras 3 and JAX |
# | [`openipu migrate --write train.py`](../migrate.md) | read what it could not edit | a native script, without TensorFlow unless data comes from tf.data |
# | by hand | the changes on this page | the same |
#
# ## By hand
#
# Replace the imports of TensorFlow, put `import openipu as ipu` above the first import of Keras, and leave out the trimming.
# What follows is a script of the Keras tutorial after these changes. Nothing else in it is different.

# %%
import os

import openipu as ipu  # was: from tensorflow.python import ipu

import keras  # was: from tensorflow import keras

images = int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000"))
mnist = ipu.datasets.mnist(images, images // 6)  # or keras.datasets.mnist.load_data()
x_train, x_test = mnist.x_train.astype("float32") / 255, mnist.x_test.astype("float32") / 255

cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 2
cfg.configure_ipu_system()

strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    inputs = keras.Input((28, 28))
    with ipu.keras.PipelineStage(0):
        x = keras.layers.Flatten()(inputs)
        x = keras.layers.Dense(128, activation="relu")(x)
    with ipu.keras.PipelineStage(1):
        outputs = keras.layers.Dense(10, activation="softmax")(x)
    model = keras.Model(inputs, outputs)

    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=8,
        pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=16)
    model.fit(x_train, mnist.y_train, epochs=2, batch_size=32, verbose=2)
    # No second compile: the test data may have any number of batches.
    result = model.evaluate(x_test, mnist.y_test, batch_size=32, verbose=0, return_dict=True)
print(f"Test accuracy: {result['accuracy']:.3f}")

# %% [markdown]
# ## What counts as before
#
# `batch_size` is the micro-batch of one replica. `steps_per_execution` counts per replica, `steps_per_epoch` over all
# replicas. Gradients are summed over micro-batches (unless you say "mean") and over replicas. Grouped needs a multiple of twice
# the number of stages per update, Interleaved a multiple of that number. So learning rates and counts can stay.
#
# ## Name by name
#
# "Same" means: same arguments, same defaults, same meaning.
#
# | name | here | what differs, and why |
# |---|---|---|
# | `ipu.config.IPUConfig` | same | Every option exists and is checked. Options for hardware that is not there (tiles, Poplar) have no effect, and a warning says so once ([all options](../config.md#all-options)) |
# | `ipu.config.configure_ipu_system`, `ipu.config.reset_ipu_configuration` | same | Devices are GPUs, TPU cores or virtual CPU devices |
# | `ipu.config.SelectionOrder`, `ipu.config.DeviceConnectionType`, `ipu.config.SchedulingAlgorithm`, `ipu.config.StochasticRoundingBehaviour`, `ipu.config.MergeRemoteBuffersBehaviour` | same | The last three are accepted without effect |
# | `ipu.ipu_strategy.IPUStrategy`, `ipu.ipu_strategy.IPUStrategyV1` | same | `run` takes any function, not only a `tf.function`: it is traced by JAX |
# | `ipu.keras.PipelineStage` | same | |
# | `model.set_pipelining_options` | same | More schedules: GPipe, 1F1B, your own. Options about Poplar and offloading are named once, without effect |
# | `model.set_gradient_accumulation_options` | same | |
# | `model.set_replication_options` | differs | Without it, metrics are values over all replicas; in the original, those of the last replica |
# | `model.set_pipeline_stage_assignment`, `model.get_pipeline_stage_assignment`, `model.reset_pipeline_stage_assignment`, `model.print_pipeline_stage_assignment_summary` | same | `"auto"` cuts the model for you |
# | `model.set_asynchronous_callbacks` | same | Callbacks run in your thread, not in a second one |
# | `model.set_infeed_queue_options`, `model.set_outfeed_queue_options` | same | |
# | `model.fit`, `model.evaluate`, `model.predict` | differs | Data of any length and kind, generators included; a remainder is used, not dropped or refused. `steps_per_execution` need not divide the steps |
# | `ipu.ops.pipelining_ops.pipeline`, `ipu.pipelining_ops.PipelineSchedule`, `ipu.pipelining_ops.RecomputationMode`, `ipu.pipelining_ops.OptimizerFunctionOutput`, `ipu.pipelining_ops.recomputation_checkpoint` | same | |
# | `ipu.ipu_infeed_queue.IPUInfeedQueue`, `ipu.ipu_infeed_queue.IPUIterator` | same | Any iterable, not only tf.data. Data that ends too early is an error that can be caught; in the original, the process ends |
# | `ipu.ipu_outfeed_queue.IPUOutfeedQueue`, `ipu.ipu_outfeed_queue.IPUOutfeedMode` | same | A queue may also be filled in layers and optimizers ([feeds](../feeds.md)) |
# | `ipu.loops.repeat`, `ipu.loops.while_loop` | same | `ipu.loops.cond` is new |
# | `ipu.ipu_compiler.compile`, `ipu.scopes.ipu_scope` | same | `ipu_shard` does not place anything |
# | `ipu.optimizers.CrossReplicaOptimizer`, `ipu.optimizers.GradientAccumulationOptimizerV2`, `ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2`, `ipu.optimizers.MapGradientOptimizer` | same | They wrap optimizers of Keras 3 instead of TensorFlow's |
# | `ipu.gradient_accumulation.GradientAccumulationReductionMethod` | same | |
# | `ipu.cross_replica_ops.cross_replica_sum`, `ipu.cross_replica_ops.cross_replica_mean`, `ipu.replication_ops.replication_index`, `ipu.all_to_all_op.all_gather`, `ipu.reduce_scatter_op.reduce_scatter` | same | Inside programs and layers ([operations](../replication-ops.md)) |
# | `ipu.ipu_estimator.IPUEstimator`, `ipu.ipu_pipeline_estimator.IPUPipelineEstimator`, `ipu.ipu_run_config.RunConfig`, `ipu.ipu_run_config.IPURunConfig` | differs | A `model_fn` is written in Keras. Metrics are true values over replicas, `predict` ends with the data, checkpoints have another format ([what differs](../estimators.md#what-differs-from-the-original)) |
# | `ipu.ipu_session_run_hooks.IPULoggingTensorHook` | same | |
# | `ipu.keras.layers.LSTM`, `ipu.keras.layers.GroupNormalization`, `ipu.keras.layers.SerialDense`, `ipu.keras.optimizers.AdamIpuOptimizer`, `ipu.keras.optimizers.LAMBIpuOptimizer`, `ipu.keras.optimizers.ALSOptimizer`, ... | same | From `ipu_tensorflow_addons` and `keras.ipu` ([all of them](../layers.md)) |
# | `ipu.distributed.popdist_strategy.PopDistStrategy`, `ipu.popdist.getNumInstances`, `ipu.popdist.getInstanceIndex`, `ipu.popdist.tensorflow.set_ipu_config` | same | `openipu launch` in place of `poprun`, with its options ([several instances](../hosts.md)) |
# | `ipu.distributed.allreduce`, `ipu.distributed.broadcast`, `ipu.distributed.allgather` | same | |
# | `ipu.dataset_benchmark.dataset_benchmark` | same | Mistakes are raised; the original returns them |
# | `ipu.utils.reset_ipu_seed` | same | |
# | `ipu.nn_ops.gelu`, `ipu.math_ops.serialized_matmul`, `ipu.embedding_ops.embedding_lookup`, `ipu.normalization_ops.group_norm`, ... | same | Ordinary arithmetic, on any device ([operations](../operations.md)) |
# | `ipu.custom_ops.precompiled_user_op`, `ipu.serving`, `ipu.embedded_runtime`, `ipu.f8_ops` | not here | They can be imported. When used, they say what to do instead ([what is not there](../operations.md#what-is-not-there)) |
#
# ## What to expect
#
# - **Speed.** A GPU is not an IPU. Small steps gain from running many per launch, as they did there; large ones are as fast as
#   your hardware ([performance](../performance.md)).
# - **Half precision.** There is no stochastic rounding. Scripts that train in float16 with it should use bfloat16, or loss
#   scaling.
# - **Batch statistics in pipelines** are right here; the original warns that they are not.
# - **Three stages** take three devices; the original rounds up to four.
