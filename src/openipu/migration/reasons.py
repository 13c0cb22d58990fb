"""Why something needs a person, and what to do about it."""

from __future__ import annotations

import re
from typing import Final

_WITHOUT_SUCCESSOR: Final = {
    r"openipu\.(?:ops\.)?custom_ops\b": "custom operations are code for IPUs; write them with keras.ops or JAX",
    r"openipu\.(?:serving\b|.*\.export_)": "nothing is exported for IPUs here; use model.save or model.export",
    r"openipu\.(?:ops\.)?(?:embedded_runtime|application_compile_op)\b": (
        "executables for IPUs cannot be made or run here; use model.export"
    ),
    r"openipu\.utils\.": "it configured old SDKs; set the option of ipu.config.IPUConfig (docs/config.md)",
    r"openipu\.keras\.(?:Pipeline)?(?:Model|Sequential)$": (
        "use the class of keras inside of strategy.scope(), with set_pipelining_options or "
        "set_gradient_accumulation_options (docs/pipelining.md)"
    ),
    r"openipu\.keras\.(?:layers|optimizers)\b": "OpenIPU has no such class; take the one of Keras",
    r"openipu\.horovod\b": "train in several processes with PopDistStrategy and `openipu launch` (docs/hosts.md)",
    r"openipu\.estimator\.": (
        "of the estimators, only those for IPUs exist here; use IPUEstimator or a Keras model (docs/estimators.md)"
    ),
    r"openipu\.": "OpenIPU has no such name",
    r"keras\.backend\.": "Keras 3 has no such function in keras.backend; write it with keras.ops",
    r"keras\.preprocessing\.image\.ImageDataGenerator": (
        "Keras 3 has no such class; use layers such as keras.layers.RandomFlip, or a PyDataset"
    ),
    r"keras\.": "Keras 3 has no such name",
}
"""By the name that it would have here. The first that fits counts."""

_ACTIVATIONS: Final = "relu6?|elu|selu|sigmoid|tanh|softmax|log_softmax|softplus|softsign|l2_loss"
"""What `tf.compat.v1.nn` has in common with `tf.nn`."""
_TENSORFLOW: Final = {
    r"GradientTape$": (
        "JAX takes gradients of a function, not from a tape: put the loss into a function, and call "
        "ipu.training.minimize(optimizer, loss_fn, variables) or ipu.training.value_and_gradients (docs/feeds.md)"
    ),
    r"(?:compat\.v1\.)?Variable$": "programs cannot use it; make a keras.Variable, or self.add_weight in a layer",
    r"compat\.v1\.(?:Session|placeholder|global_variables_initializer|disable_\w+|get_default_graph)$": (
        "there are no graphs and sessions here; run the function with strategy.run (docs/feeds.md)"
    ),
    r"compat\.v1\.metrics\.": (
        "give a Keras metric with its arguments: eval_metric_ops={'accuracy': (keras.metrics.Accuracy(), labels, "
        "predictions)} (docs/estimators.md)"
    ),
    r"compat\.v1\.train\.\w*Optimizer$": "its defaults differ from Keras'; choose one of keras.optimizers",
    r"(?:compat\.v1\.)?train\.get_(?:or_create_)?global_step$": "use ipu.estimator.get_global_step",
    r"compat\.v1\.layers\.": "make a layer and call it: keras.layers.Dense(64)(x) instead of tf.layers.dense(x, 64)",
    r"compat\.v1\.losses\.": (
        "take the mean of one of keras.losses: keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, "
        "logits, from_logits=True))"
    ),
    r"compat\.v1\.train\.(?:\w+_decay|piecewise_constant)$": (
        "give the optimizer a schedule of keras.optimizers.schedules; it counts updates by itself"
    ),
    r"compat\.v1\.(?:variable|name)_scope$": "leave it out: Keras names variables after their layers",
    r"compat\.v1\.trainable_variables$": "take the weights of your layers: layer.kernel",
    r"compat\.v1\.logging\b": "use Python's logging: logging.getLogger('openipu').setLevel(logging.INFO)",
    r"(?:compat\.v1\.)?group$": "in a model_fn, use ipu.estimator.group",
    rf"compat\.v1\.nn\.(?!(?:{_ACTIVATIONS})$)|compat\.v1\.(?:train|summary|get_variable)\b": (
        "it belongs to TensorFlow 1; write it with Keras"
    ),
    r"distribute\.": "strategies are in ipu.ipu_strategy and ipu.distributed, collectives in ipu.ops",
    r"train\.(?:Checkpoint|CheckpointManager|latest_checkpoint)$": (
        "it does not see Keras' variables here; use ipu.callbacks.Checkpoint or model.save_weights "
        "(docs/checkpoints.md)"
    ),
    r"saved_model\.": "save a model with model.save('NAME.keras') or model.export",
    r"custom_gradient$": "use keras.ops.custom_gradient, whose gradient function has other arguments",
    r"python\.": "it is private to TensorFlow",
}
"""Names of TensorFlow that need a person wherever they are, by what follows `tensorflow.`"""


_IN_MODEL_CODE: Final = {
    r"print$|debugging\.": "a program prints and checks with jax.debug.print and jax.debug.callback",
    r"random\.|nn\.dropout$": "random numbers come from keras.random, with a keras.random.SeedGenerator",
    r"range$": "loops are ipu.loops.repeat, or `range` if they are short; as an array it is keras.ops.arange",
    r"summary\.": "write summaries on the host, from a callback or from an outfeed",
    r"(?:compat\.v1\.)?(?:math\.)?add_n$": "add them up with Python's sum",
    r"(?:compat\.v1\.)?nn\.l2_loss$": "write keras.ops.sum(keras.ops.square(x)) / 2",
    r"TensorShape$": "shapes are tuples in Keras 3",
    r"image\.": "keras.ops.image has most of these functions, with other arguments",
    r"nn\.(?:\w*conv|\w*pool)": "keras.ops.conv, average_pool and max_pool have other arguments",
    r"": "keras.ops has no exact equivalent; write it with keras.ops, or with JAX",
}
"""Names of TensorFlow that stay where they are in data code, by what follows `tensorflow.`"""


def without_successor(name: str) -> str:
    """Why a name does not exist here, by what it would be called."""
    return next(reason for pattern, reason in _WITHOUT_SUCCESSOR.items() if re.match(pattern, name))


def for_a_person(name: str) -> str:
    """Why a name of TensorFlow needs a person wherever it is, or nothing. `name` is what follows `tensorflow.`"""
    return next((reason for pattern, reason in _TENSORFLOW.items() if re.match(pattern, name)), "")


def in_model_code(name: str) -> str:
    """Why a name of TensorFlow cannot stay in model code. `name` is what follows `tensorflow.`"""
    return next(reason for pattern, reason in _IN_MODEL_CODE.items() if re.match(pattern, name))
