"""Convolution, its transpose, unfolding and folding against torch, on random shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

F = torch.nn.functional
DTYPES = st.sampled_from(["float64", "float32"])


@dataclass(frozen=True)
class Case:
    """A convolution; one entry of each list for a spatial axis."""

    batch: int
    groups: int
    inputs: int  # of a group
    outputs: int  # of a group
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    size: list[int]
    seed: int


@st.composite
def cases(draw: Any) -> Case:
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    return Case(
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        each(1, 3),
        each(1, 3),
        each(0, 2),
        each(1, 2),
        each(1, 8 if rank < 3 else 5),
        draw(st.integers(0, 99)),
    )


def fits(case: Case) -> bool:
    return all(
        n + 2 * p > (k - 1) * d
        for n, p, k, d in zip(case.size, case.padding, case.kernel, case.dilation, strict=True)
    )


def arrays(case: Case, channels: int, biases: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(case.seed)
    shapes = (
        (case.batch, channels, *case.size),
        (case.groups * case.outputs, case.inputs, *case.kernel),
        (biases,),
    )
    return [rng.normal(size=s).astype(dtype) for s in shapes]


def tolerance(dtype: str) -> dict[str, float]:
    if dtype == "float64":
        return {"rtol": 1e-9, "atol": 1e-10}
    return {"rtol": 1e-5, "atol": 5e-5}  # sums of up to 700 products around 1


@given(cases(), DTYPES)
@settings(max_examples=60)
def test_convolution(case: Case, dtype: str) -> None:
    assume(fits(case))
    how = (case.stride, case.padding, case.dilation, case.groups)
    theirs = getattr(F, f"conv{len(case.size)}d")
    ours = getattr(nn, f"conv{len(case.size)}d")
    agree(
        lambda x, w, b: ours(x, w, b, *how),
        lambda x, w, b: theirs(x, w, b, *how),
        arrays(case, case.groups * case.inputs, case.groups * case.outputs, dtype),
        **tolerance(dtype),
    )


@given(cases(), DTYPES, st.integers(0, 2))
@settings(max_examples=60)
def test_transposed_convolution(case: Case, dtype: str, extra: int) -> None:
    more = [min(extra, max(s, d) - 1) for s, d in zip(case.stride, case.dilation, strict=True)]
    assume(
        all(
            (n - 1) * s - 2 * p + (k - 1) * d + 1 + e > 0
            for n, s, p, k, d, e in zip(
                case.size, case.stride, case.padding, case.kernel, case.dilation, more, strict=True
            )
        )
    )
    ours = getattr(nn, f"conv_transpose{len(case.size)}d")
    theirs = getattr(F, f"conv_transpose{len(case.size)}d")
    agree(
        lambda x, w, b: ours(x, w, b, case.stride, case.padding, more, case.dilation, case.groups),
        lambda x, w, b: theirs(
            x, w, b, case.stride, case.padding, more, case.groups, case.dilation
        ),
        arrays(case, case.groups * case.outputs, case.groups * case.inputs, dtype),
        **tolerance(dtype),
    )


@pytest.mark.parametrize("groups", [1, 2, 64])
@pytest.mark.parametrize("stride", [1, 2])
def test_large_convolutions_of_several_blocks(groups: int, stride: int) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(3, 64, 40, 33)), rng.normal(size=(64, 64 // groups, 3, 5))
    agree(
        lambda x, w: nn.conv2d(x, w, None, stride, 1, 1, groups),
        lambda x, w: F.conv2d(x, w, None, stride, 1, 1, groups),
        [x, w],
        atol=1e-9,
    )


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_same_padding_is_torchs() -> None:
    rng = np.random.default_rng(0)
    agree(
        lambda x, w: nn.conv1d(x, w, padding="same", dilation=3),
        lambda x, w: F.conv1d(x, w, padding="same", dilation=3),
        [rng.normal(size=(2, 3, 9)), rng.normal(size=(4, 3, 4))],
    )


@given(cases())
@settings(max_examples=30)
def test_unfold_and_fold(case: Case) -> None:
    assume(fits(case) and len(case.size) == 2)
    how = (case.stride, case.padding, case.dilation)
    there = (case.dilation, case.padding, case.stride)
    x = arrays(case, 2, 1, "float64")[0]
    agree(
        lambda x: nn.unfold(x, case.kernel, *how), lambda x: F.unfold(x, case.kernel, *there), [x]
    )
    columns = F.unfold(torch.tensor(x), case.kernel, *there).numpy()
    agree(
        lambda c: nn.fold(c, case.size, case.kernel, *how),
        lambda c: F.fold(c, case.size, case.kernel, *there),
        [np.random.default_rng(1).normal(size=columns.shape)],
    )
