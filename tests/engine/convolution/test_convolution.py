"""The rewritten program gives what the original gives: forward, gradients, pooling, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from openipu.engine.convolution import rewrite, rule
from openipu.engine.convolution.geometry import Geometry

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from keras import layers

SLOW = {
    "conv_general_dilated",
    "reduce_window",
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window_sum",
    "select_and_scatter_add",
    "select_and_gather_add",
}
# A convolution sums a few hundred products; both sides round, the comparison is to the largest entry.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


# Compiling is most of the time here, and how well it is done changes no result.
QUICKLY = {"xla_backend_optimization_level": 0}


def equations_in(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations_in(inner)


def names_in(jaxpr: Any) -> Iterator[str]:
    return (eqn.primitive.name for eqn in equations_in(jaxpr))


def slow_in(jaxpr: Any) -> set[str]:
    """What XLA:CPU runs slowly in a loop: all in `SLOW`, except convolutions in the layout that its library takes."""

    def is_fast(eqn: Any) -> bool:
        if eqn.primitive.name != "conv_general_dilated" or not eqn.outvars[0].aval.size:
            return eqn.primitive.name == "conv_general_dilated"
        if max(eqn.params["lhs_dilation"]) > 1:
            return False
        lhs, rhs, out = eqn.params["dimension_numbers"]
        last = len(lhs) - 1
        places = tuple(range(1, last))
        return lhs == out == (0, last, *places) and rhs == (last, last - 1, *range(last - 1))

    return {eqn.primitive.name for eqn in equations_in(jaxpr) if not is_fast(eqn)} & SLOW


def primitives(fn: Callable[..., Any], *args: Any) -> set[str]:
    return set(names_in(jax.make_jaxpr(fn)(*args).jaxpr))


def normal(seed: int, shape: Sequence[int], dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=tuple(shape)), dtype)


def assert_same(got: Any, wanted: Any, tolerance: float, label: str = "") -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), label
        assert_close(a, b, tolerance, label)


def assert_close(got: Any, wanted: Any, tolerance: float, label: str = "") -> None:
    """Equal up to a share of the largest entry."""
    a, b = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    largest = max(np.abs(b[np.isfinite(b)]).max(initial=0), 1e-3)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest, err_msg=label)


def assert_rewritten(programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], tolerance: float) -> None:
    """Many small programs as one: compiled once as they are and once rewritten."""

    def everything(inputs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {name: programs[name][0](*args) for name, args in inputs.items()}

    inputs = {name: args for name, (_, args) in programs.items()}
    changed = jax.jit(rewrite(everything, "cpu"), compiler_options=QUICKLY).trace(inputs)
    assert not slow_in(changed.jaxpr)
    wanted, got = jax.jit(everything, compiler_options=QUICKLY)(inputs), changed.lower().compile()(inputs)
    for name in programs:
        assert_same(got[name], wanted[name], tolerance, name)


def gradients_of(layer: keras.Layer, shape: tuple[int, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Output, input gradient and weight gradients of one layer."""
    config = layer.get_config()
    # Drawing weights would compile a program for each shape; these are not used anyway.
    layer = type(layer).from_config(config | {key: "zeros" for key in config if key.endswith("_initializer")})
    layer.build((None, *shape))
    fixed = [v.value for v in layer.non_trainable_variables]
    weights = [normal(i, v.shape, v.dtype) for i, v in enumerate(layer.trainable_variables)]

    def loss(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, _ = layer.stateless_call(weights, fixed, x)
        # Weighted, so that the gradient that arrives differs from element to element.
        scale = (jnp.arange(out.size, dtype="float32") % 7 - 3).reshape(out.shape)
        return (out.astype("float32") * scale).sum(), out

    return jax.grad(loss, argnums=(0, 1), has_aux=True), (weights, normal(99, (2, *shape), layer.compute_dtype))


def shape_for(rank: int, data_format: str, channels: int, size: int = 7) -> tuple[int, ...]:
    spatial = (size, size - 2, size - 3)[:rank]
    return (channels, *spatial) if data_format == "channels_first" else (*spatial, channels)


CONV = {1: layers.Conv1D, 2: layers.Conv2D, 3: layers.Conv3D}
TRANSPOSE = {1: layers.Conv1DTranspose, 2: layers.Conv2DTranspose, 3: layers.Conv3DTranspose}
DEPTHWISE = {1: layers.DepthwiseConv1D, 2: layers.DepthwiseConv2D}
SEPARABLE = {1: layers.SeparableConv1D, 2: layers.SeparableConv2D}
MAX = {1: layers.MaxPooling1D, 2: layers.MaxPooling2D, 3: layers.MaxPooling3D}
AVERAGE = {1: layers.AveragePooling1D, 2: layers.AveragePooling2D, 3: layers.AveragePooling3D}
FORMATS = ("channels_last", "channels_first")
# Cases of each list that are run: programs over volumes take long to compile and differ only in one more axis.
MOST = {1: 10, 2: 10, 3: 4}


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolution_layers(rank: int, data_format: str) -> None:
    programs = {}
    for options in (
        {"padding": "valid"},
        {"padding": "same"},
        {"padding": "same", "strides": 2},
        {"padding": "valid", "strides": 3},
        {"padding": "same", "dilation_rate": 2},
        {"padding": "same", "groups": 2},
        {"padding": "valid", "groups": 2, "strides": 2},
        {"padding": "valid", "kernel_size": 1},
        {"padding": "same", "kernel_size": 1, "strides": 2},
        {"padding": "causal", "dilation_rate": 2} if rank == 1 else {"padding": "same", "kernel_size": 2},
    )[: MOST[rank]]:
        layer = CONV[rank](6, **{"kernel_size": 3, "data_format": data_format, **options})
        programs[str(options)] = gradients_of(layer, shape_for(rank, data_format, 4))
    assert_rewritten(programs, TOLERANCE["float32"])


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolution_layers(rank: int, data_format: str) -> None:
    programs = {}
    for options in (
        {"padding": "valid"},
        {"padding": "same", "strides": 2},
        {"padding": "valid", "strides": 3},
        {"padding": "valid", "strides": 2, "output_padding": 1},
        {"padding": "same", "dilation_rate": 2},
    )[: MOST[rank]]:
        layer = TRANSPOSE[rank](3, 3, data_format=data_format, **options)
        programs[str(options)] = gradients_of(layer, shape_for(rank, data_format, 2, size=5))
    assert_rewritten(programs, TOLERANCE["float32"])


@pytest.mark.parametrize("data_format", FORMATS)
def test_depthwise_and_separable_layers(data_format: str) -> None:
    programs = {}
    for rank in (1, 2) if data_format == "channels_last" else (2,):
        for options in (
            {"padding": "valid"},
            {"padding": "same", "strides": 2},
            {"padding": "valid", "depth_multiplier": 3},
            {"padding": "same", "dilation_rate": 2},
            {"padding": "same", "strides": 2, "depth_multiplier": 2},
        ):
            layer = DEPTHWISE[rank](3, data_format=data_format, **options)
            programs[f"depthwise {rank} {options}"] = gradients_of(layer, shape_for(rank, data_format, 4))
        layer = SEPARABLE[rank](5, 3, depth_multiplier=2, padding="same", data_format=data_format)
        programs[f"separable {rank}"] = gradients_of(layer, shape_for(rank, data_format, 4))
    assert_rewritten(programs, TOLERANCE["float32"])


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pooling_layers(rank: int, data_format: str) -> None:
    programs = {}
    for name, kind in (("max", MAX), ("average", AVERAGE)):
        for options in (
            {"pool_size": 2},
            {"pool_size": 2, "padding": "same"},
            {"pool_size": 3, "strides": 2},
            {"pool_size": 3, "strides": 2, "padding": "same"},
            {"pool_size": 2, "strides": 3},
            {"pool_size": 3, "strides": 1, "padding": "same"},
        )[: MOST[rank]]:
            layer = kind[rank](data_format=data_format, **options)
            programs[f"{name} {options}"] = gradients_of(layer, shape_for(rank, data_format, 2))
    assert_rewritten(programs, TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_layers(dtype: str) -> None:
    made = {
        "strided": layers.Conv2D(6, 3, strides=2, padding="same", dtype=dtype),
        "winograd": layers.Conv2D(16, 3, dtype=dtype),
        "transpose": layers.Conv2DTranspose(3, 3, strides=2, dtype=dtype),
        "depthwise": layers.DepthwiseConv2D(3, dtype=dtype),
        "max": layers.MaxPooling2D(3, 2, padding="same", dtype=dtype),
        "mixed": layers.Conv2D(6, 3, groups=2, dtype=f"mixed_{dtype}"),
    }
    kinds = made if dtype == "bfloat16" else ("winograd", "max", "mixed")
    assert_rewritten({k: gradients_of(made[k], (7, 6, 16)) for k in kinds}, TOLERANCE[dtype])


dims = st.integers(1, 3)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Any convolution that fits: odd and negative paddings, both dilations, both kinds of groups, any layout."""
    rank = draw(st.integers(1, 2))
    several = st.tuples(*[dims] * rank)
    feature_groups, batch_groups = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (3, 1), (1, 3)]))
    kernel, rhs_dilation, lhs_dilation = draw(several), draw(several), draw(several)
    batch, per_group, out = draw(dims) * batch_groups, draw(dims), draw(dims) * feature_groups * batch_groups
    spatial = draw(st.tuples(*[st.integers(2, 6)] * rank))
    padding = []
    for size, k, rd, ld in zip(spatial, kernel, rhs_dilation, lhs_dilation, strict=True):
        reach, length = (k - 1) * rd + 1, (size - 1) * ld + 1
        low = draw(st.integers(-1, reach))
        padding.append((low, draw(st.integers(max(reach - length - low, -1), reach + 1))))
    letters = "HW"[:rank]
    lhs_spec, rhs_spec, out_spec = ("".join(draw(st.permutations(roles + letters))) for roles in ("NC", "OI", "NC"))
    sizes = dict(zip(letters, spatial, strict=True)) | {"N": batch, "C": per_group * feature_groups}
    kernel_sizes = dict(zip(letters, kernel, strict=True)) | {"O": out, "I": per_group}
    options = {
        "window_strides": draw(several),
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": (lhs_spec, rhs_spec, out_spec),
        "feature_group_count": feature_groups,
        "batch_group_count": batch_groups,
    }
    return options, tuple(sizes[s] for s in lhs_spec), tuple(kernel_sizes[s] for s in rhs_spec)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(convolutions(), st.booleans())
def test_any_convolution(case: tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]], direct: bool) -> None:
    options, lhs, rhs = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rule.LIMITS, "cpu", replace(rule.CPU, direct=direct))
        patch.setattr(rule, "DIRECT_PLACES", 1)
        assert_exact_enough(lambda x, w: lax.conv_general_dilated(x, w, **options), (normal(0, lhs), normal(1, rhs)))


def test_xlas_own_convolution_is_used_where_it_is_fast() -> None:
    """The kernel's gradient too, which XLA:CPU runs slowly in a loop as JAX writes it."""
    fn, args = gradients_of(layers.Conv2D(16, 3, padding="same"), (16, 16, 16))
    assert slow_in(jax.make_jaxpr(fn)(*args).jaxpr) == {"conv_general_dilated"}
    changed = jax.make_jaxpr(rewrite(fn, "cpu"))(*args).jaxpr
    assert not slow_in(changed)
    assert list(names_in(changed)).count("conv_general_dilated") == 3


def assert_exact_enough(fn: Callable[..., Any], args: tuple[jax.Array, ...]) -> None:
    """Compared with float64: XLA:CPU's own float32 convolution is wrong for some negative paddings."""
    changed = jax.jit(rewrite(fn, "cpu"), compiler_options=QUICKLY).trace(*args)
    assert not slow_in(changed.jaxpr)
    got = changed.lower().compile()(*args)
    with jax.enable_x64(True):
        wanted = jax.jit(fn, compiler_options=QUICKLY)(*(jnp.asarray(np.asarray(a), jnp.float64) for a in args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, jnp.float32)
        assert_close(a, b, TOLERANCE["float32"])


@pytest.mark.parametrize("fewer", [0.0, 99.0], ids=["by outputs", "by inputs"])
@pytest.mark.parametrize(
    ("layout", "size", "channels", "area", "padding"),
    [
        ("NHWC", 3, (32, 64), (13, 13), "VALID"),
        ("NCHW", 3, (16, 16), (9, 14), "SAME"),
        ("NHWC", 3, (8, 40), (10, 7), [(3, 3), (4, 1)]),
        ("NHWC", 3, (16, 128), (8, 8), "SAME"),
        ("NCHW", 4, (16, 16), (11, 13), "VALID"),
        ("NHWC", 5, (16, 16), (12, 12), "SAME"),
    ],
)
def test_winograd_is_as_exact_as_promised(
    layout: str,
    size: int,
    channels: tuple[int, int],
    area: tuple[int, int],
    padding: Any,
    fewer: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(rule.LIMITS, "cpu", replace(rule.CPU, direct=False))
    monkeypatch.setattr(rule, "WINOGRAD_FEWER", fewer)

    def all_three(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        numbers = (layout, "HWIO", layout)
        fn = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=numbers)  # noqa: E731
        out, back = jax.vjp(fn, x, w)
        scale = (jnp.arange(out.size, dtype=out.dtype) % 7 - 3).reshape(out.shape)
        return (out, *back(out * scale))

    shape = (3, *area, channels[0]) if layout == "NHWC" else (3, channels[0], *area)
    kernel = normal(1, (size, size, *channels)) / size / channels[0] ** 0.5
    assert_exact_enough(all_three, (jax.nn.relu(normal(0, shape)), kernel))


def chunks(fn: Callable[..., Any], *args: Any) -> set[bool]:
    """Whether the rule divides the convolutions of a program into parts."""
    found = set()
    for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            choice = rule.plan_convolution(Geometry.of(eqn.params, *(v.aval.shape for v in eqn.invars), 4), "cpu")
            found.add(choice is not None and choice.chunk > 0)
    return found


def test_patches_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rule.LIMITS, "cpu", replace(rule.CPU, patches=20_000, direct=False, winograd=False))
    programs = {
        "conv": gradients_of(layers.Conv2D(16, 3), (12, 12, 8)),
        "transpose": gradients_of(layers.Conv2DTranspose(8, 3, strides=2), (6, 6, 16)),
    }
    for fn, args in programs.values():
        assert chunks(fn, *args) == {True}
    assert_rewritten(programs, TOLERANCE["float32"])


def test_result_type_is_the_preferred_one() -> None:
    x, w = normal(0, (2, 6, 6, 3), "bfloat16"), normal(1, (3, 3, 3, 4), "bfloat16")
    fn = lambda a, b: lax.conv_general_dilated(  # noqa: E731
        a, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=jnp.float32
    )
    assert jax.eval_shape(rewrite(fn, "cpu"), x, w).dtype == jnp.float32
    assert_rewritten({"preferred": (fn, (x, w))}, TOLERANCE["float32"])


def max_pool(x: jax.Array, window: tuple[int, int], strides: tuple[int, int], padding: str) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *strides, 1), padding)


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [((2, 2), (2, 2), "VALID"), ((3, 3), (2, 2), "SAME"), ((3, 2), (1, 1), "VALID"), ((2, 2), (3, 3), "VALID")],
)
def test_ties_go_to_the_element_xla_chooses(window: tuple[int, int], strides: tuple[int, int], padding: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 7, 7, 3)), jnp.float32)
    out = jax.eval_shape(lambda x: max_pool(x, window, strides, padding), x)
    # Whole numbers: sums are exact, so the gradients have to be equal to the last bit.
    cotangent = jnp.arange(1, out.size + 1, dtype=jnp.float32).reshape(out.shape)

    def gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: max_pool(x, window, strides, padding), x)[1](cotangent)[0]

    for values in (x, x.at[0, 2:4, 1:3].set(jnp.nan), x.at[:, :, 3].set(-jnp.inf)):
        assert_rewritten({"gradient": (gradient, (values, cotangent))}, 0.0)


def test_forward_derivative_of_pooling() -> None:
    x, t = normal(0, (2, 7, 7, 3)), normal(1, (2, 7, 7, 3))
    fn = lambda x, t: jax.jvp(lambda x: max_pool(x, (3, 3), (2, 2), "SAME"), (x,), (t,))  # noqa: E731
    assert_rewritten({"jvp": (fn, (x, t))}, 0.0)


def test_pooling_with_an_initial_value_of_its_own() -> None:
    x = normal(0, (2, 7, 6, 3))
    programs = {
        "max": (lambda x: lax.reduce_window(x, jnp.float32(0.5), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), (x,)),
        "sum": (lambda x: lax.reduce_window(x, jnp.float32(0.5), lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"), (x,)),
        "min": (lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), (x,)),
        "dilated": (
            lambda x: lax.reduce_window(
                x,
                0.0,
                lax.add,
                (1, 2, 2, 1),
                (1, 1, 2, 1),
                "VALID",
                base_dilation=(1, 2, 1, 1),
                window_dilation=(1, 1, 3, 1),
            ),
            (x,),
        ),
    }
    assert_rewritten(programs, TOLERANCE["float32"])


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
    return conv(x, w)


scaled.defvjp(lambda x, w: (conv(x, w), (x, w)), lambda saved, g: (g * 2, saved[1] * g.sum()))


@jax.custom_jvp
def tilted(x: jax.Array, w: jax.Array) -> jax.Array:
    return conv(x, w)


tilted.defjvp(lambda primals, tangents: (conv(*primals), conv(tangents[0], primals[1]) * 3))


def in_scan(x: jax.Array, w: jax.Array) -> Any:
    return lax.scan(lambda c, s: (conv(c, w) * s, c.sum()), x, jnp.arange(3.0))


def in_while(x: jax.Array, w: jax.Array) -> Any:
    return lax.while_loop(lambda c: c[0] < 2 + conv(c[1], w).sum() * 0, lambda c: (c[0] + 1, conv(c[1], w)), (0, x))


def in_cond(x: jax.Array, w: jax.Array) -> Any:
    return [lax.cond(flag > 0, lambda: conv(x, w), lambda: x * 2) for flag in (w[0, 0, 0, 0], -jnp.abs(w[0, 0, 0, 0]))]


def in_jit(x: jax.Array, w: jax.Array) -> Any:
    inner = jax.jit(conv)
    return inner(inner(x, w), w)


def gradient_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(x, w)))

    return jax.grad(loss, argnums=(0, 1))


def in_checkpoint(x: jax.Array, w: jax.Array) -> Any:
    return jax.checkpoint(lambda x, w: jnp.sin(conv(jnp.sin(conv(x, w)), w)))(x, w)


def test_programs_inside_programs() -> None:
    args = (normal(0, (2, 5, 5, 3)), normal(1, (3, 3, 3, 3)) * 0.2)
    forward = (in_scan, in_while, in_cond, in_jit, in_checkpoint, scaled, tilted)
    backward = (in_scan, in_cond, in_jit, in_checkpoint, scaled, tilted)
    programs: dict[str, Any] = {f"{i} forward": (fn, args) for i, fn in enumerate(forward)}
    programs |= {f"{i} backward": (gradient_of(fn), args) for i, fn in enumerate(backward)}
    assert_rewritten(programs, 1e-5)


def test_rewritten_program_runs_in_a_loop_and_under_transformations() -> None:
    x, w = normal(0, (2, 5, 5, 3)), normal(1, (3, 3, 3, 3)) * 0.2
    step = rewrite(lambda x: max_pool(conv(x, w), (2, 2), (1, 1), "SAME"), "cpu")

    def loop(step: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return lambda x: lax.fori_loop(0, 3, lambda _, c: step(c), x)

    plain = lambda x: max_pool(conv(x, w), (2, 2), (1, 1), "SAME")  # noqa: E731
    assert_same(jax.jit(loop(step))(x), jax.jit(loop(plain))(x), 1e-5)
    assert_same(jax.vmap(step)(x[None]), plain(x)[None], 1e-5)
    assert_same(jax.jit(jax.grad(lambda x: step(x).sum()))(x), jax.grad(lambda x: plain(x).sum())(x), 1e-5)


def test_program_per_device_is_rewritten_under_its_mesh() -> None:
    mesh = jax.make_mesh((1,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            loss = lambda w: max_pool(conv(x, w), (3, 3), (2, 2), "SAME").sum()  # noqa: E731
            return lax.scan(lambda w, _: (w - 0.1 * lax.psum(jax.grad(loss)(w), "replica"), None), w, length=2)[0]

        return jax.shard_map(local, mesh=mesh, in_specs=(P("replica"), P()), out_specs=P())(x, w)

    args = (normal(0, (2, 5, 5, 3)), normal(1, (3, 3, 3, 3)))
    assert not primitives(rewrite(fn, "cpu"), *args) & SLOW
    assert_same(jax.jit(rewrite(fn, "cpu"))(*args), jax.jit(fn)(*args), TOLERANCE["float32"])


def test_structure_of_arguments_and_results_is_kept() -> None:
    def fn(state: dict[str, Any], *, scale: float) -> dict[str, Any]:
        return {"y": (conv(state["x"], state["w"]) * scale, None), "n": state["n"] + 1}

    state = {"x": normal(0, (2, 5, 5, 3)), "w": normal(1, (3, 3, 3, 2)), "n": 3}
    assert_same(rewrite(fn, "cpu")(state, scale=2.0), jax.jit(fn)(state, scale=2.0), TOLERANCE["float32"])


def test_nothing_to_replace_leaves_the_program_alone() -> None:
    fn = lambda x: jnp.tanh(x) @ x  # noqa: E731
    x = normal(0, (3, 3))
    assert str(jax.make_jaxpr(rewrite(fn, "cpu"))(x)) == str(jax.make_jaxpr(fn)(x))
    assert rewrite(fn, "tpu") is fn


def test_integer_convolutions_are_kept() -> None:
    x, w = jnp.ones((1, 5, 5, 2), jnp.int8), jnp.ones((3, 3, 2, 2), jnp.int8)
    assert "conv_general_dilated" in primitives(rewrite(conv, "cpu"), x, w)


def test_large_convolutions_stay_with_the_gpu_library() -> None:
    kernel = normal(1, (3, 3, 64, 64))
    small, large = jnp.zeros((2, 8, 8, 64)), jax.ShapeDtypeStruct((64, 112, 112, 64), jnp.float32)
    assert "conv_general_dilated" not in primitives(rewrite(conv, "gpu"), small, kernel)
    assert "conv_general_dilated" in primitives(rewrite(conv, "gpu"), large, kernel)
    assert "conv_general_dilated" not in primitives(rewrite(conv, "cpu"), large, kernel)
