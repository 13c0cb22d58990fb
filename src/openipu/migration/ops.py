"""Operations of TensorFlow that keras.ops has under another name, with the same meaning for the arguments listed here.

A call that uses other arguments is left for a person.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an operation in TensorFlow, and its name in Keras."""

    old: str
    new: str
    default: str = ""
    """TensorFlow's default, where Keras has another one."""
    required: bool = False
    whole_number: bool = False
    """Whether only a number in the text means the same in both."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: its name in Keras, and the parameters that mean the same, in an order that both share."""

    new: str
    positional: tuple[Parameter, ...]
    by_name: tuple[Parameter, ...] = ()
    dropped: tuple[str, ...] = ("name",)
    added: str = ""

    @property
    def keeps_its_arguments(self) -> bool:
        """Whether it means the same when it is passed on as a function, which is called without names."""
        changed = any(one.default or one.required or one.whole_number for one in self.positional)
        return not (changed or self.by_name or self.added)


def _parameter(text: str) -> Parameter:
    """Read `old:new`, `old:new!` (required), `old:new#` (a whole number) or `old:new=default`."""
    text, _, default = text.partition("=")
    old, _, new = text.rstrip("!#").partition(":")
    return Parameter(old, new or old, default, text.endswith("!"), text.endswith("#"))


def _op(new: str, parameters: str, dropped: str = "", added: str = "") -> Op:
    """Read parameters that are separated by blanks; those after a `*` have to be given by name."""
    first, _, second = parameters.partition("*")
    return Op(
        new, tuple(map(_parameter, first.split())), tuple(map(_parameter, second.split())),
        ("name", *dropped.split()), added,
    )  # fmt: skip


def _same(names: str, parameters: str, prefix: str = "") -> dict[str, Op]:
    """Operations that have the same name in Keras, or `old:new`."""
    pairs = (name.partition(":") for name in names.split())
    return {prefix + old: _op(new or old, parameters) for old, _, new in pairs}


_UNARY: Final = (
    "abs ceil floor exp expm1 log log1p sqrt square sin cos tan sinh cosh tanh asin:arcsin acos:arccos atan:arctan "
    "sign round sigmoid negative rsqrt reciprocal erf is_nan:isnan is_inf:isinf is_finite:isfinite logical_not"
)
_BINARY: Final = (
    "add subtract multiply divide maximum minimum equal not_equal less less_equal greater greater_equal logical_and "
    "logical_or logical_xor pow:power mod floormod:mod floordiv:floor_divide divide_no_nan"
)
_REDUCTIONS: Final = (
    "reduce_mean:mean reduce_sum:sum reduce_max:max reduce_min:min reduce_prod:prod reduce_all:all reduce_any:any "
    "reduce_logsumexp:logsumexp reduce_variance:var reduce_std:std"
)
_ACTIVATIONS: Final = "relu relu6 elu selu softplus softsign silu swish"
TENSORFLOW: Final[dict[str, Op]] = {
    **_same(_UNARY, "x"),
    **_same(_BINARY, "x:x1 y:x2"),
    **_same(_REDUCTIONS, "input_tensor:x axis keepdims"),
    **_same(_ACTIVATIONS, "features:x", "nn."),
    **_same("tanh sigmoid", "x", "nn."),
    **_same("softmax log_softmax", "logits:x axis", "nn."),
    "softplus": _op("softplus", "features:x"),
    "nn.leaky_relu": _op("leaky_relu", "features:x alpha:negative_slope"),
    "nn.gelu": _op("gelu", "features:x approximate=False"),
    "nn.bias_add": _op("add", "value:x1 bias:x2"),
    "nn.embedding_lookup": _op("take", "params:x ids:indices", added="axis=0"),
    "nn.softmax_cross_entropy_with_logits": _op(
        "categorical_crossentropy", "labels:target logits:output", added="from_logits=True"
    ),
    "nn.sparse_softmax_cross_entropy_with_logits": _op(
        "sparse_categorical_crossentropy", "labels:target logits:output", added="from_logits=True"
    ),
    "argmax": _op("argmax", "input:x axis=0", dropped="output_type"),
    "argmin": _op("argmin", "input:x axis=0", dropped="output_type"),
    "broadcast_to": _op("broadcast_to", "input:x shape"),
    "cast": _op("cast", "x dtype"),
    "clip_by_value": _op("clip", "t:x clip_value_min:x_min clip_value_max:x_max"),
    "concat": _op("concatenate", "values:xs axis"),
    "cond": _op("cond", "pred true_fn false_fn"),
    "constant": _op("convert_to_tensor", "value:x dtype"),
    "convert_to_tensor": _op("convert_to_tensor", "value:x dtype"),
    "cumsum": _op("cumsum", "x axis=0"),
    "expand_dims": _op("expand_dims", "input:x axis"),
    "fill": _op("full", "dims:shape value:fill_value"),
    "gather": _op("take", "params:x indices * axis=0"),
    "identity": _op("copy", "input:x"),
    "matmul": _op("matmul", "a:x1 b:x2"),
    "norm": _op("norm", "tensor:x * axis keepdims"),
    "one_hot": _op("one_hot", "indices:x depth:num_classes"),
    "ones": _op("ones", "shape dtype"),
    "ones_like": _op("ones_like", "input:x dtype"),
    "pad": _op("pad", "tensor:x paddings:pad_width * constant_values"),
    "rank": _op("ndim", "input:x"),
    "reshape": _op("reshape", "tensor:x shape:newshape"),
    "shape": _op("shape", "input:x"),
    "split": _op("split", "value:x num_or_size_splits:indices_or_sections# axis"),
    "squeeze": _op("squeeze", "input:x axis"),
    "stack": _op("stack", "values:x axis"),
    "stop_gradient": _op("stop_gradient", "input:variable"),
    "tensordot": _op("tensordot", "a:x1 b:x2 axes"),
    "tile": _op("tile", "input:x multiples:repeats"),
    "transpose": _op("transpose", "a:x perm:axes"),
    "unstack": _op("unstack", "value:x num axis"),
    "where": _op("where", "condition x:x1! y:x2!"),
    "while_loop": _op("while_loop", "cond body loop_vars * maximum_iterations"),
    "zeros": _op("zeros", "shape dtype"),
    "zeros_like": _op("zeros_like", "input:x dtype"),
}
"""By the name after `tensorflow.`, without `math.`, `linalg.`, `dtypes.` or `compat.v1.` in between."""

_KERAS_BACKEND: Final[dict[str, Op]] = {
    **_same("abs exp log sqrt square sign round sin cos sigmoid tanh softplus softsign", "x"),
    **_same("maximum minimum equal not_equal less less_equal greater greater_equal pow:power", "x:x1 y:x2"),
    **_same("mean sum max min prod std var all any logsumexp", "x axis keepdims"),
    "argmax": _op("argmax", "x axis=-1"),
    "argmin": _op("argmin", "x axis=-1"),
    "cast": _op("cast", "x dtype"),
    "clip": _op("clip", "x min_value:x_min max_value:x_max"),
    "concatenate": _op("concatenate", "tensors:xs axis"),
    "expand_dims": _op("expand_dims", "x axis=-1"),
    "ones_like": _op("ones_like", "x dtype"),
    "reshape": _op("reshape", "x shape:newshape"),
    "shape": _op("shape", "x"),
    "softmax": _op("softmax", "x axis"),
    "squeeze": _op("squeeze", "x axis"),
    "stack": _op("stack", "x axis"),
    "stop_gradient": _op("stop_gradient", "variables:variable"),
    "transpose": _op("transpose", "x"),
    "zeros_like": _op("zeros_like", "x dtype"),
}
_DTYPES: Final = re.compile(r"tensorflow\.(?:dtypes\.)?(bool|bfloat16|half|float(?:16|32|64)|u?int(?:8|16|32|64))$")
_BETWEEN: Final = ("compat.v1.", "math.", "linalg.", "dtypes.")


def tensorflow_op(name: str) -> Op | None:
    """The operation of a full name such as `tensorflow.math.reduce_mean`."""
    short = name.removeprefix("tensorflow.")
    for between in _BETWEEN:
        short = short.removeprefix(between)
    return TENSORFLOW.get(short) if name.startswith("tensorflow.") else None


def backend_op(name: str) -> Op | None:
    """The operation of `keras.backend`, by its full name."""
    return _KERAS_BACKEND.get(name.removeprefix("keras.backend.")) if name.startswith("keras.backend.") else None


def dtype(name: str) -> str | None:
    """The dtype of a full name such as `tensorflow.float32`, as Keras writes it."""
    found = _DTYPES.match(name)
    return found[1].replace("half", "float16") if found else None
