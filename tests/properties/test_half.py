"""A public function of 16-bit floats computes in float32 and rounds once: its value, its gradient
and its tangent are those in float64 of the same numbers, rounded."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import is_half, is_inexact
from graphflow.ops.spectral.signal import hann_window
from tests.properties.calls import (
    HEADS,
    IMG,
    INTS,
    SEQ,
    Call,
    F,
    M,
    V,
    _f,
    call_of,
    list_public_names,
)

HALVES = ["bfloat16", "float16"]
ROOMS = ("", "nn", "linalg", "fft", "signal", "optim")
WEIGHTS = {"x": SEQ, "w": _f(2, 18, 3), "r": _f(2, 18, 6), "direction": "bidirectional"}
LOSS = {"prediction": F, "target": F, "weights": V, "reduction": "mean"}
# Calls that take other ways through a function than that of `tests/properties/calls.py`.
OTHERS: dict[str, list[dict[str, Any] | list[Any]]] = {
    "nn.cross_entropy": [
        {"logits": F, "labels": INTS, "weights": V, "reduction": "mean", "label_smoothing": 0.1},
        {"logits": F, "labels": F, "label_smoothing": 0.1, "reduction": "mean"},
        {"logits": F, "labels": INTS, "ignore_index": 1, "reduction": "mean"},
    ],
    "nn.nll_loss": [{"log_probabilities": F, "labels": INTS, "weights": V, "reduction": "mean"}],
    "nn.mse_loss": [LOSS], "nn.huber_loss": [LOSS], "nn.binary_cross_entropy": [LOSS],
    "nn.smooth_l1_loss": [LOSS | {"beta": 0.3}],
    "nn.kl_div": [{"log_prediction": F, "target": F, "log_target": True, "reduction": "mean"}],
    "nn.binary_cross_entropy_with_logits": [{"logits": F, "target": F, "positive_weight": V}],
    "nn.batch_norm": [
        {"x": IMG, "scale": V, "bias": V, "mean": V, "variance": V, "training": True},
    ],
    "nn.layer_norm": [{"x": F, "scale": V, "bias": V}], "nn.rms_norm": [{"x": F, "scale": V}],
    "nn.group_norm": [{"x": IMG, "groups": 2, "scale": V, "bias": V}],
    "nn.rnn": [WEIGHTS | {"w": _f(2, 6, 3), "r": _f(2, 6, 6), "lengths": [5, 3]}],
    "nn.lstm": [WEIGHTS | {"w": _f(2, 24, 3), "r": _f(2, 24, 6), "peepholes": _f(2, 18)}],
    "nn.gru": [WEIGHTS | {"linear_before_reset": False}],
    "nn.rotary": [{"x": HEADS, "positions": [100, 2000, 30000]}],
    "nn.grid_sample": [
        {"x": IMG, "grid": _f(2, 5, 5, 2), "mode": "cubic", "padding": "reflection"},
    ],
    "nn.deform_conv": [
        {"x": IMG, "weight": _f(4, 4, 3, 3), "offset": _f(2, 18, 6, 6), "bias": V,
         "mask": _f(2, 9, 6, 6)},
    ],
    "nn.adaptive_avg_pool": [{"x": IMG, "size": 3}],
    "nn.avg_pool": [{"x": IMG, "kernel": 3, "padding": 1, "count_include_pad": False}],
    "nn.lp_pool": [{"x": IMG, "kernel": 2, "p": 3.0}],
    "nn.interpolate": [{"x": IMG, "size": (5, 5), "mode": "bicubic"}],
    "linalg.matrix_norm": [{"x": M, "ord": "nuc"}, {"x": M, "ord": 1}],
    "linalg.norm": [{"x": M, "ord": 3, "axis": 0}],
    "linalg.vector_norm": [{"x": F, "axis": 1, "ord": 3.5}],
    "linalg.cond": [{"x": M, "p": 1}],
    "linalg.matrix_power": [{"x": M, "n": 5}, {"x": M, "n": -3}],
    "einsum": [["ij,jk,kl->il", F, M, M], ["ij,kj->", F, F], ["ij,jk->k", F, M]],
    "quantile": [{"x": F, "q": [0.1, 0.6], "axis": 1}],
    "prod": [{"x": F, "axis": 1}], "median": [{"x": F, "axis": 1}],
    "signal.stft": [{"x": _f(16), "frame_length": 4, "frame_step": 2, "window": hann_window(4)}],
}  # fmt: skip
LARGE = {
    "nn.cosine_similarity", "nn.triplet_margin_loss", "nn.local_response_norm", "nn.lp_pool",
    "nn.global_lp_pool", "nn.mse_loss", "nn.huber_loss", "std", "linalg.vector_norm", "linalg.norm",
    "linalg.matrix_norm", "linalg.cond", "nn.layer_norm", "nn.rms_norm", "nn.batch_norm",
    "nn.group_norm", "nn.instance_norm", "nn.cross_entropy", "logsumexp", "hypot",
    "atan2", "angle", "divide", "optim.clip_by_global_norm", "median", "quantile", "linalg.inv",
}  # fmt: skip
"""Functions that take numbers in the hundreds, squares of which are infinite in float16."""
READ_STORED = {
    "exp", "sqrt", "rsqrt", "reciprocal", "tan", "tanh", "erfinv", "nn.tanh", "nn.sigmoid",
    "nn.softmax", "nn.log_softmax", "nn.attention", "jvp",
}  # fmt: skip
"""Functions whose gradients read the result only: it is kept for them as it is stored, rounded."""
NOT_ONCE = {
    **dict.fromkeys(READ_STORED, "gradients read the stored result"),
    "diff": "its gradient adds negatives, which are exact",
    **dict.fromkeys(
        ("nn.rnn", "nn.gru", "nn.lstm"), "two directions add zeros to each other's part"
    ),
    "while_loop": "its body rounds at each op",
    "associative_scan": "each call of its function rounds",
    "nn.embedding_bag": "its gradient divides by the size of a bag before it adds rows",
}
"""Functions with several roundings on the way in their graphs, and why."""
DIFFERENT = {"nn.dropout", "nn.gumbel_softmax", "nonzero"}
"""Functions that draw random numbers, or take zeros."""


def is_drawn(name: str) -> bool:
    room = name.rpartition(".")[0]
    return room in ROOMS and name not in {"variable", "assign", "gradients", "plan", "Graph"}


CASES = [
    pytest.param(name, i, id=f"{name}-{i}")
    for name in list_public_names()
    if is_drawn(name)
    for i in range(1 + len(OTHERS.get(name, ())))
]

DRAWN = [
    pytest.param(*case.values, large, id=f"{case.id}-{'large' if large else 'small'}")
    for case in CASES
    for large in (False, True)
    if case.values[0] not in DIFFERENT and (not large or case.values[0] in LARGE)
]


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for x in value.values() if isinstance(value, dict) else value:
            yield from tensors(x)


def replace_tensors(value: Any, each: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return each(value)
    if isinstance(value, list | tuple):
        return type(value)(replace_tensors(x, each) for x in value)
    if isinstance(value, dict):
        return {key: replace_tensors(x, each) for key, x in value.items()}
    return value


def call(name: str, case: int) -> Call:
    if case == 0:
        return call_of(name, list_public_names()[name])
    given = OTHERS[name][case - 1]
    return (given, {}) if isinstance(given, list) else ([], given)


class Built:
    """A call with its float32 placeholders in another dtype, each of its own: what it takes and
    gives."""

    def __init__(self, name: str, case: int, dtype: Any) -> None:
        self.given = call(name, case)
        self.inputs: list[Tensor] = []
        args, kwargs = replace_tensors(list(self.given), lambda x: self._cast_input(x, dtype))
        self.outputs = list(tensors(list_public_names()[name](*args, **kwargs)))
        self.floats = [y for y in self.outputs if is_inexact(y.dtype)]

    def _cast_input(self, x: Tensor, dtype: Any) -> Tensor:
        if x.dtype != np.float32 or x.node.op.name != "placeholder":
            return x
        self.inputs.append(gf.placeholder(dtype, x.shape))
        return self.inputs[-1]

    def gradients(self, seeds: list[Tensor]) -> list[Tensor]:
        """None where there are none."""
        try:
            return gf.gradients(self.floats, self.inputs, seeds)
        except gf.errors.DifferentiationError:
            return []


def make_placeholders(tensors: list[Tensor]) -> list[Tensor]:
    return [gf.placeholder(t.dtype, t.shape) for t in tensors]


def build_case(name: str, case: int, dtype: Any) -> Built:
    try:
        made = Built(name, case, dtype)
    except gf.errors.GraphflowError as error:
        pytest.skip(f"refuses 16 bits: {error}")
    if not made.inputs or not made.outputs:
        pytest.skip("takes or gives no floats")
    return made


# Roundings --------------------------------------------------------------------------------------

MOVES = {
    "abs", "argmax", "argmin", "argsort", "ceil", "clip", "conj", "constant", "cummax", "cummin",
    "equal", "fill", "floor", "greater", "greater_equal", "greater_grad", "isfinite", "isinf",
    "isnan", "less", "less_equal", "max", "max_pool", "max_pool_grad", "maximum", "min", "minimum",
    "negative", "not_equal", "positive", "real", "relu", "relu_grad", "round", "running_extremum",
    "running_extremum_places", "searchsorted", "sign", "sort", "stop_gradient", "trunc",
}  # fmt: skip
"""Ops that compute with 16-bit floats, but give one of them, or what they say of their order."""


def computes(node: Node) -> bool:
    op = node.op
    without = op.kernel is None and op.expr is None
    return not (op.halves or op.alias or without or op.name in MOVES)


def double_roundings(outputs: list[Tensor]) -> set[str]:
    """Ops that compute with what another op has rounded to 16 bits: "multiply > sum"."""
    rounded: dict[Tensor, str] = {}
    found = set()
    for node in Graph(outputs).nodes:
        before = [rounded[x] for x in node.inputs if x in rounded]
        if before and computes(node):
            found.add(f"{before[0]} > {node.op.name}")
        cast = node.op.name == "astype" and not is_half(node.inputs[0].dtype)
        for y in node.outputs:
            if is_half(y.dtype) and (cast or computes(node)):
                rounded[y] = node.op.name
            elif before and not computes(node):
                rounded[y] = before[0]
    return found


@pytest.mark.parametrize("name, case", CASES)
def test_functions_and_their_gradients_round_once(name: str, case: int) -> None:
    if name in NOT_ONCE:
        pytest.skip(NOT_ONCE[name])
    made = build_case(name, case, "float16")
    assert double_roundings(made.outputs) == set()
    assert double_roundings(made.gradients(make_placeholders(made.floats))) == set()


# Values -----------------------------------------------------------------------------------------


def draw_half_numbers(name: str, made: Built, half: str, large: bool) -> list[Any]:
    """Numbers of 16 bits for the placeholders of a call."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    found = []
    for x in made.inputs:
        array = rng.uniform(0.1, 0.9, x.shape) + (name == "acosh")
        if large:
            array = array * 500 + 100
        if x.shape == (4, 4):
            array = array + array.T + np.diag([3.0, 5, 8, 12]) * (1000 if large else 1)
        found.append(array.astype(half))
    return found


def ints_of(made: Built, name: str) -> dict[Tensor, Any]:
    """Small ints, and booleans, for the other placeholders."""
    below = {"nn.max_unpool": 64, "nn.roi_align": 2}.get(name, 3)
    return {
        x: (np.arange(np.prod(x.shape, dtype=int)) % below).reshape(x.shape).astype(x.dtype)
        for x in tensors(made.given)
        if x.node.op.name == "placeholder" and x.dtype != np.float32
    }


def results(name: str, made: Built, numbers: list[Any], along: list[Any]) -> list[list[Any]]:
    """Values, gradients and tangents of a call; `along`: cotangents, then tangents."""
    seeds, tangents = make_placeholders(made.floats), make_placeholders(made.inputs)
    fed = zip([*made.inputs, *seeds, *tangents], [*numbers, *along], strict=True)
    feeds = {x: value.astype(x.dtype) for x, value in fed} | ints_of(made, name)
    fetched = [made.outputs]
    if name not in READ_STORED and (grads := made.gradients(seeds)):
        fetched += [grads, gf.jvp(made.floats, made.inputs, tangents)]
    with np.errstate(all="ignore"):
        return [evaluate(each, feeds) for each in fetched]


def require_near(have: Any, want: Any, half: str, what: str) -> None:
    """Within 1.5 units in the last place, beside what float32 loses where large numbers cancel."""
    have, want = np.asarray(have), np.asarray(want)
    if not is_half(have.dtype):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(initial=1))
        return
    info = ml_dtypes.finfo(have.dtype)
    with np.errstate(all="ignore"):
        rounded = want.astype(half)
    inside = np.isfinite(rounded.astype("float64"))
    np.testing.assert_array_equal(
        have[~inside].astype("float64"), rounded[~inside].astype("float64")
    )
    have, want = have[inside].astype("float64"), want[inside]
    _, exponent = np.frexp(want)
    least = max(float(info.smallest_subnormal), float(np.finfo("float32").tiny))
    unit = np.maximum(np.ldexp(float(info.eps), exponent - 1), least)
    error = np.abs(have - want)
    allowed = 1.5 * unit + 2.0**-19 * np.abs(want).max(initial=0)
    worst = (error / unit).max(initial=0)
    assert (error <= allowed).all(), f"{what}: {worst:.1f} units in the last place"


@pytest.mark.every(3)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name, case, large", DRAWN)
def test_values_and_gradients_are_those_in_float64_rounded(
    name: str, case: int, half: str, large: bool
) -> None:
    made, exact = build_case(name, case, half), build_case(name, case, "float64")
    numbers = draw_half_numbers(name, made, half, large)
    rng = np.random.default_rng(1)
    along = [rng.uniform(0.5, 1, t.shape).astype(half) for t in (*made.floats, *made.inputs)]
    found, wanted = (results(name, each, numbers, along) for each in (made, exact))
    for what, haves, wants in zip(("value", "gradient", "tangent"), found, wanted, strict=False):
        for have, want in zip(haves, wants, strict=True):
            require_near(have, want, half, what)
