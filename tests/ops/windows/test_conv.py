"""Convolution against plain loops, its blocks under any number of threads, and wrong arguments."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import ArgumentError, DTypeError, GraphError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY
from graphflow.ir.spec import Dim
from graphflow.ops import nn
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.placement import Cluster
from graphflow.sessions.session import Session

Array = np.ndarray[Any, Any]


def value(build: Any, *arrays: Array) -> Array:
    """What a function gives for arrays, fed with a batch of unknown size."""
    xs = [placeholder(arrays[0].dtype, (None, *arrays[0].shape[1:]))]
    xs += [placeholder(a.dtype, a.shape) for a in arrays[1:]]
    return np.asarray(evaluate([build(*xs)], dict(zip(xs, arrays, strict=True)))[0])


def convolve_by_loops(
    x: Array, w: Array, stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    """Σ w·x, one product after the other."""
    x = np.pad(x, ((0, 0), (0, 0), *padding))
    kernel = w.shape[2:]
    out = [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)
    ]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    each = w.shape[0] // groups
    for o, c, tap in product(range(w.shape[0]), range(w.shape[1]), np.ndindex(*kernel)):
        channel = o // each * w.shape[1] + c
        where = tuple(
            slice(t * d, t * d + (m - 1) * s + 1, s)
            for t, d, s, m in zip(tap, dilation, stride, out, strict=True)
        )
        y[:, o] += w[(o, c, *tap)] * x[(slice(None), channel, *where)]
    return y


@st.composite
def convolutions(draw: Any) -> tuple[Array, Array, dict[str, Any]]:
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, dilation = each(1, 3), each(1, 2)
    padding = tuple(zip(each(0, 2), each(0, 2), strict=True))
    size = each(1, 6)
    assume(
        all(
            n + sum(p) > (k - 1) * d
            for n, p, k, d in zip(size, padding, kernel, dilation, strict=True)
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    inputs, outputs = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    x = rng.normal(size=(draw(st.integers(1, 3)), inputs * groups, *size))
    w = rng.normal(size=(outputs * groups, inputs, *kernel))
    attrs = {
        "stride": each(1, 3),
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
    }
    return x, w, attrs


@given(convolutions())
@settings(max_examples=80)
def test_values_are_those_of_plain_loops(case: tuple[Array, Array, dict[str, Any]]) -> None:
    x, w, attrs = case
    bias = np.arange(len(w)) * 0.5
    wanted = convolve_by_loops(x, w, **attrs) + bias.reshape(-1, *(1,) * (x.ndim - 2))
    have = value(lambda x, w, b: nn.conv(x, w, b, **attrs), x, w, bias)
    np.testing.assert_allclose(have, wanted, rtol=1e-12, atol=1e-12)
    last = value(
        lambda x, w, b: nn.conv(x, w, b, **attrs, channels_last=True),
        np.moveaxis(x, 1, -1).copy(),
        w,
        bias,
    )
    np.testing.assert_array_equal(last, np.moveaxis(have, 1, -1))


@given(convolutions())
@settings(max_examples=60)
def test_the_gradient_ops_are_the_adjoints(case: tuple[Array, Array, dict[str, Any]]) -> None:
    x, w, attrs = case
    ops = REGISTRY
    (y,) = ops["conv"].run(np, [x, w], attrs)
    g = np.random.default_rng(1).normal(size=y.shape)
    (gx,) = ops["conv_transpose"].run(np, [g, w], {**attrs, "sizes": x.shape[2:]})
    (gw,) = ops["conv_weight_grad"].run(np, [x, g], {**attrs, "kernel": w.shape[2:]})
    inner = (g * y).sum()
    np.testing.assert_allclose([(gx * x).sum(), (gw * w).sum()], inner, rtol=1e-10, atol=1e-10)


LARGE = [
    pytest.param((2, 24, 70, 60), (32, 24, 3, 3), 1, 1, id="rows of images"),
    pytest.param((9, 64, 7, 7), (64, 64, 3, 3), 1, 1, id="several images together"),
    pytest.param((3, 64, 40, 40), (64, 64, 3, 3), 2, 1, id="strided"),
    pytest.param((3, 96, 40, 40), (96, 1, 3, 3), 1, 96, id="depthwise"),
    pytest.param((3, 96, 40, 40), (192, 1, 3, 3), 2, 96, id="depthwise, strided, two each"),
    pytest.param((3, 64, 30, 30), (32, 16, 3, 3), 1, 4, id="grouped"),
    pytest.param((3, 64, 30, 30), (32, 64, 1, 1), 1, 1, id="of one element"),
]


@pytest.mark.parametrize("shape, weight, stride, groups", LARGE)
def test_bits_do_not_depend_on_threads(
    shape: tuple[int, ...], weight: tuple[int, ...], stride: int, groups: int
) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=shape).astype("float32"), rng.normal(size=weight).astype("float32")
    attrs = {
        "stride": (stride,) * 2,
        "padding": ((1, 0),) * 2,
        "dilation": (1, 1),
        "groups": groups,
    }
    wide = convolve_by_loops(x, w, **attrs)
    g = rng.normal(size=wide.shape).astype("float32")

    def results() -> list[Array]:
        return [
            REGISTRY["conv"].run(np, [x, w], attrs)[0],
            REGISTRY["conv_transpose"].run(np, [g, w], {**attrs, "sizes": shape[2:]})[0],
            REGISTRY["conv_weight_grad"].run(np, [x, g], {**attrs, "kernel": weight[2:]})[0],
        ]

    alone = results()
    np.testing.assert_allclose(alone[0], wide, rtol=1e-4, atol=1e-3)
    for threads in (2, 3):
        pool = Pool(threads)
        with use_pool(pool):
            assert [a.tobytes() for a in results()] == [a.tobytes() for a in alone]
        pool.close()


def test_transposed_convolution_undoes_the_sizes() -> None:
    x = placeholder("float32", (None, 4, 7, 6))
    w = np.zeros((4, 3, 3, 2), "float32")
    y = nn.conv_transpose2d(x, w, stride=(2, 3), padding=((1, 0), (0, 1)), output_padding=(1, 2))
    assert y.shape == (x.shape[0], 3, 6 * 2 - 1 + 3 + 1, 5 * 3 - 1 + 2 + 2)
    same = nn.conv_transpose2d(x, w, stride=2, padding="same")
    assert same.shape[1:] == (3, 14, 12)
    sized = nn.conv_transpose2d(x, w, stride=2, padding="same", output_size=(13, 11))
    assert sized.shape[1:] == (3, 13, 11)
    assert nn.conv2d(sized, w, stride=2, padding="same").shape[2:] == x.shape[2:]


@pytest.mark.parametrize("padding", ["same", "same_lower"])
def test_same_padding_divides_by_the_stride(padding: str) -> None:
    x, w = np.arange(14.0).reshape(2, 1, 7), np.array([[[1.0, 10.0]]])
    for stride, size in ((1, 7), (2, 4), (3, 3)):
        y = value(lambda x, w, s=stride: nn.conv1d(x, w, stride=s, padding=padding), x, w)
        assert y.shape == (2, 1, size)
    y = value(lambda x, w: nn.conv1d(x, w, padding=padding), x, w)
    assert (y[0, 0, 0] == 0) == (padding == "same_lower") == (y[0, 0, -1] == 65)


def test_unknown_spatial_sizes_are_polynomials() -> None:
    x = placeholder("float32", ("n", 2, "h", 8))
    h = Dim.symbol("h")
    y = nn.conv2d(x, np.ones((5, 2, 3, 3), "float32"), padding=1)
    assert y.shape == (Dim.symbol("n"), 5, h, 8)
    a = np.ones((3, 2, 4, 8), "float32")
    strided = nn.conv2d(x, np.ones((5, 2, 3, 3), "float32"), stride=2, padding="same")
    assert evaluate([y, strided], {x: a})[1].shape == (3, 5, 2, 4)


def test_no_images_and_no_weights_give_nothing() -> None:
    x = np.zeros((0, 2, 5), "float32")
    assert value(nn.conv1d, x, np.ones((3, 2, 2), "float32")).shape == (0, 3, 4)


@pytest.mark.parametrize(
    "x, w, groups, padding",
    [
        pytest.param((2, 40, 9, 7), (30, 40, 1, 1), 1, 0, id="pointwise"),
        pytest.param((3, 40, 1, 1), (30, 40, 1, 1), 1, 0, id="images of one element"),
        pytest.param((2, 20, 9, 7), (40, 1, 3, 3), 20, 1, id="depthwise"),
        pytest.param((1, 40, 5, 5), (30, 40, 3, 3), 1, 1, id="one small image"),
        pytest.param((2, 1, 400), (30, 1, 64), 1, 0, id="a spectrogram"),
        pytest.param((1, 40, 4, 4), (30, 40, 3, 3), 1, 9, id="padding only for most taps"),
    ],
)
def test_sessions_give_the_bits_of_the_op(x: Any, w: Any, groups: int, padding: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype("float32") for s in (x, w)]
    dilation = 9 if padding == 9 else 1
    fed = [placeholder("float32", shape) for shape in (x, w)]
    y = nn.conv(*fed, padding=padding, groups=groups, dilation=dilation) * 2
    attrs = {
        "stride": (1,) * (len(x) - 2), "padding": ((padding, padding),) * (len(x) - 2),
        "dilation": (dilation,) * (len(x) - 2), "groups": groups,
    }  # fmt: skip
    want = REGISTRY["conv"].run(np, arrays, attrs)[0]
    wide = REGISTRY["conv"].run(np, [a.astype("float64") for a in arrays], attrs)[0]
    np.testing.assert_allclose(want, wide, rtol=1e-5, atol=2e-6 * np.abs(wide).max())
    with Session(Cluster.here(threads=1)) as s:
        have = s.run(y, dict(zip(fed, arrays, strict=True)))
    assert have.tobytes() == (want * 2).tobytes()


def test_infinities_stay_where_windows_see_them() -> None:
    x = np.zeros((1, 1, 6))
    x[0, 0, 1] = np.inf
    y = value(lambda x, w: nn.conv1d(x, w, padding=1), x, np.ones((1, 1, 3)))
    assert np.isinf(y[0, 0]).tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_floats_are_summed_in_float32(dtype: str) -> None:
    x = placeholder(dtype, (1, 1, 4096))
    y = nn.conv1d(x, np.ones((1, 1, 4096)).astype(x.dtype))
    assert float(evaluate([y], {x: np.ones((1, 1, 4096)).astype(x.dtype)})[0].item()) == 4096.0


def weight_gradient(g: Array, groups: int = 1) -> Any:
    """The gradient in a 3×3 weight, as a graph from elsewhere might ask for it."""
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
    return REGISTRY["conv_weight_grad"](X, g, kernel=(3, 3), groups=groups, **attrs)


X = np.zeros((2, 4, 6, 6), "float32")
W = np.zeros((4, 2, 3, 3), "float32")
WRONG: dict[str, tuple[Any, type[GraphError], str]] = {
    "rank": (lambda: nn.conv2d(X[0], W), ShapeError, "2 spatial axes"),
    "weight's rank": (lambda: nn.conv2d(X, W[0], groups=2), ShapeError, "a weight of that rank"),
    "channels": (lambda: nn.conv2d(X, W), ShapeError, "channels differ: 4 != 2"),
    "channels last": (
        lambda: nn.conv2d(np.zeros((1, 8, 8, 2), "float32"), W),
        ShapeError,
        r"channels differ \(are they last\? then channels_last=True\): 8 != 2",
    ),
    "groups": (lambda: nn.conv2d(X, W[:3], groups=2), ShapeError, "no multiple of the groups"),
    "kernel": (
        lambda: nn.conv2d(X, W, groups=2, dilation=4),
        ShapeError,
        "size 9 on an axis of size 6.*not one fits",
    ),
    "stride": (
        lambda: nn.conv2d(X, W, stride=0, groups=2),
        ArgumentError,
        "stride must be an int >= 1",
    ),
    "strides": (lambda: nn.conv2d(X, W, stride=(1, 1, 1)), ArgumentError, "3 entries for 2"),
    "padding": (lambda: nn.conv2d(X, W, padding="full"), ArgumentError, "'same'"),
    "negative": (lambda: nn.conv2d(X, W, padding=-1), ArgumentError, "padding must be an int >= 0"),
    "pairs": (lambda: nn.conv2d(X, W, padding=((1, 2, 3), 1)), ArgumentError, "a pair"),
    "bias": (lambda: nn.conv2d(X, W, X, groups=2), ShapeError, "one number for each output"),
    "bias's size": (lambda: nn.conv2d(X, W, X[0, 0, 0], groups=2), ShapeError, "6 != 4"),
    "ints": (
        lambda: nn.conv2d(X.astype("int32"), W.astype("int32")),
        DTypeError,
        "float tensors",
    ),
    "extra": (
        lambda: nn.conv_transpose2d(X, W, output_padding=1),
        ArgumentError,
        "not below the stride",
    ),
    "output size": (
        lambda: nn.conv_transpose2d(X, W, output_size=(1, 1, 1)),
        ArgumentError,
        "3 entries for 2",
    ),
    "gradient's groups": (
        lambda: weight_gradient(np.zeros((2, 3, 4, 4), "float32"), groups=2),
        ShapeError,
        "3 channels are no multiple of the groups",
    ),
    "gradient's dtype": (
        lambda: weight_gradient(X[:, :, 2:, 2:].astype("float64")),
        ShapeError,
        "one rank",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told_with_their_line(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=rf"(?s)test_conv\.py:\d+.*({message})"):
        call()
