"""Arguments and methods of Keras 2 that are different in Keras 3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import libcst as cst

from .arguments import drop, find, rename, replace
from .edits import Edit, Remark
from .names import moved
from .script import Script

_RENAMED: Final = (
    (r"keras\.optimizers\.\w+$", "lr", "learning_rate"),
    (r"keras\.layers\.LeakyReLU$", "alpha", "negative_slope"),
    (r"keras\.layers\.InputLayer$", "input_shape", "shape"),
    (r"keras\.layers\.InputLayer$", "batch_input_shape", "batch_shape"),
    (r"keras\.(?:layers\.)?Input$", "batch_input_shape", "batch_shape"),
)
_DROPPED: Final = (
    (r"keras\.layers\.(?:\w+\.)*BatchNormalization$", "fused"),
    (r"keras\.layers\.Embedding$", "input_length"),
    (r"openipu\.ipu_(?:in|out)feed_queue\.IPU(?:In|Out)feedQueue$", "feed_name"),
)
"""Arguments that never changed the result, and are gone."""
_REFUSED: Final = (
    (
        r"keras\.optimizers\.\w+$",
        "decay",
        "use a schedule: keras.optimizers.schedules.InverseTimeDecay(learning_rate, 1, decay)",
    ),
    (r"keras\.layers\.BatchNormalization$", "renorm", "Keras 3 has no batch renormalisation"),
    (r"keras\.layers\.BatchNormalization$", "virtual_batch_size", "Keras 3 has no virtual batches"),
    (r"keras\.layers\.(?!Input)\w+$", "batch_input_shape", "begin the model with keras.Input(batch_shape=...)"),
    (r"keras\.callbacks\.ModelCheckpoint$", "period", "use save_freq"),
)
_SHAPES: Final = (
    (r"keras\.(?:layers\.)?Input(?:Layer)?$", "shape"),
    (r"keras\.layers\.\w+$", "input_shape"),
)
_METHODS: Final = {
    "fit_generator": "fit",
    "evaluate_generator": "evaluate",
    "predict_generator": "predict",
    "experimental_run_v2": "run",
}
_METHOD_ARGUMENTS: Final = {("compile", "experimental_steps_per_execution"): "steps_per_execution"}
_GONE: Final = {
    **{(method, argument): "Keras 3 has no such argument; a keras.utils.PyDataset has it"
       for method in ("fit", "evaluate", "predict", "fit_generator", "evaluate_generator", "predict_generator")
       for argument in ("workers", "use_multiprocessing", "max_queue_size")},
    ("compile", "sample_weight_mode"): "Keras 3 has none; give sample weights of the shape of the loss",
    ("save", "save_format"): "Keras 3 goes by the end of the file's name: .keras or .h5",
    ("save_weights", "save_format"): "Keras 3 goes by the end of the file's name: .weights.h5",
}  # fmt: skip
_STRATEGY_METHODS: Final = {
    "experimental_distribute_dataset": "give the dataset itself to fit, or to an IPUInfeedQueue",
    "experimental_local_results": "strategy.run returns plain arrays",
    "make_dataset_iterator": "give the dataset to an IPUInfeedQueue (docs/feeds.md)",
}


def judge_calls(script: Script, skipped: set[cst.CSTNode]) -> Iterator[Edit | Remark]:
    """Edits and remarks about the arguments and methods of calls, except inside of nodes that go away."""
    for node in script.nodes():
        if isinstance(node, cst.Call) and skipped.isdisjoint((node, *script.above(node))):
            name = moved(script.names.get(node.func, ""))
            if name.startswith(("keras.", "openipu.")):
                yield from _known_call(script, node, name)
            elif isinstance(node.func, cst.Attribute) and not name:
                yield from _method_call(script, node, node.func.attr)


def _known_call(script: Script, call: cst.Call, name: str) -> Iterator[Edit | Remark]:
    for pattern, old, new in _RENAMED:
        if re.match(pattern, name) and (argument := find(call, old)) and not find(call, new):
            yield rename(script, argument, new)
    gone = [argument for pattern, old in _DROPPED if re.match(pattern, name) and (argument := find(call, old))]
    for pattern, old, reason in _REFUSED:
        if re.match(pattern, name) and (argument := find(call, old)):
            if old == "decay" and script.text(argument.value) in ("0", "0.", "0.0"):
                gone.append(argument)
            else:
                yield Remark(script.start(argument), f"{old}=: {reason}")
    yield from drop(script, call, gone)
    for pattern, old in _SHAPES:
        if re.match(pattern, name):
            argument = find(call, old) or (call.args[0] if old == "shape" and call.args else None)
            is_shape = argument is not None and (argument.keyword is None or argument.keyword.value == old)
            if argument is not None and is_shape and isinstance(argument.value, cst.Integer):
                yield replace(script, argument, f"({argument.value.value},)")


def _method_call(script: Script, call: cst.Call, method: cst.Name) -> Iterator[Edit | Remark]:
    name = method.value
    if name in _STRATEGY_METHODS:
        yield Remark(script.start(method), f"{name}: {_STRATEGY_METHODS[name]}")
    if name in _METHODS:
        if find(call, "generator"):
            yield Remark(script.start(method), f"{name}: call {_METHODS[name]}, with the data as its first argument")
        else:
            yield Edit(script.start(method), script.end(method), _METHODS[name])
    for argument in call.args:
        key = (name, argument.keyword.value if argument.keyword else "")
        if key in _METHOD_ARGUMENTS:
            yield rename(script, argument, _METHOD_ARGUMENTS[key])
        if key in _GONE:
            yield Remark(script.start(argument), f"{key[1]}=: {_GONE[key]}")
    yield from _file_name(script, call, name)


def _file_name(script: Script, call: cst.Call, method: str) -> Iterator[Remark]:
    """Names of files that Keras 3 refuses, as far as they can be read in the script."""
    endings = {"save_weights": (".weights.h5",), "load_weights": (".h5", ".keras")}.get(method)
    if endings is None or not call.args or not isinstance(call.args[0].value, cst.SimpleString):
        return
    file = call.args[0].value.evaluated_value
    if isinstance(file, str) and not file.endswith(endings):
        yield Remark(
            script.start(call.args[0]), f"{script.text(call.args[0])}: Keras 3 keeps weights in files NAME.weights.h5"
        )
