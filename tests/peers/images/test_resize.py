"""Resizing against torch and ONNX's reference, on random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn
from graphflow.ops.kernels.images.resample import COORDINATES, ROUNDINGS

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")
reference = pytest.importorskip(
    "onnx.reference", reason="needs onnx: pip install 'graphflow[onnx]'"
)

from onnx.helper import make_node  # noqa: E402

from tests.peers.comparing import agree  # noqa: E402

F = torch.nn.functional
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=3)
NAMES = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}
SCALES = st.sampled_from([0.5, 0.6, 1.5, 2.0, 2.5, 3.0])


@given(
    SIZES,
    st.lists(st.integers(1, 11), min_size=3, max_size=3),
    st.lists(SCALES, min_size=3, max_size=3),
    st.sampled_from(["nearest", "nearest-exact", "linear", "cubic", "area"]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=120)
def test_interpolation(
    sizes: list[int],
    wanted: list[int],
    scales: list[float],
    mode: str,
    align_corners: bool,
    by_scale: bool,
) -> None:
    rank = len(sizes)
    assume(mode != "cubic" or rank == 2)
    x = np.random.default_rng(sum(sizes)).normal(size=(2, 2, *sizes))
    align = align_corners if mode in NAMES else None
    ours: dict[str, Any] = {"size": wanted[:rank]}
    theirs: dict[str, Any] = {"size": wanted[:rank]}
    if by_scale and mode != "area":
        assume(all(int(n * s) for n, s in zip(sizes, scales, strict=False)))
        ours, theirs = {"scale": scales[:rank]}, {"scale_factor": scales[:rank]}
    name = NAMES[mode][rank - 1] if mode in NAMES else mode
    agree(
        lambda x: nn.interpolate(x, **ours, mode=mode, align_corners=bool(align)),
        lambda x: F.interpolate(x, **theirs, mode=name, align_corners=align),
        [x],
        rtol=1e-6,
        atol=1e-6,  # torch's coordinates are of single precision
    )


# torch resizes images of width 1 wrongly: they are constant.
@given(*[st.integers(2, 9)] * 4, st.sampled_from(["bilinear", "bicubic"]))
@settings(max_examples=40)
def test_antialiased_interpolation(h: int, w: int, to_h: int, to_w: int, mode: str) -> None:
    agree(
        lambda x: nn.interpolate(x, (to_h, to_w), mode=mode, antialias=True),
        lambda x: F.interpolate(x, (to_h, to_w), mode=mode, antialias=True),
        [np.random.default_rng(h).normal(size=(1, 2, h, w))],
        rtol=1e-6,
        atol=1e-6,
    )


# Sizes and factors for which no coordinate is half-way or whole but for a rounding error.
FACTORS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0])


@given(
    st.tuples(*[st.integers(1, 8)] * 2),
    st.tuples(FACTORS, FACTORS),
    st.sampled_from(["nearest", "linear", "cubic"]),
    st.sampled_from([c for c in COORDINATES if c != "half_pixel_symmetric"]),
    st.sampled_from(ROUNDINGS),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=150)
def test_every_rule_is_onnxs(
    size: tuple[int, int],
    factors: tuple[float, float],
    mode: str,
    coordinates: str,
    rounding: str,
    exclude_outside: bool,
    antialias: bool,
) -> None:
    assume(all(int(n * f) for n, f in zip(size, factors, strict=True)))
    antialias, exclude_outside = (b and mode != "nearest" for b in (antialias, exclude_outside))
    crop = coordinates == "tf_crop_and_resize"
    x = np.random.default_rng(size).normal(size=(1, 2, *size))
    roi = np.array([0, 0, -0.2137, 0.1319, 1, 1, 0.8731, 1.1173])
    node = make_node(
        "Resize",
        ["x", "roi" if crop else "", "scales"],
        ["y"],
        mode=mode,
        coordinate_transformation_mode=coordinates,
        nearest_mode=rounding,
        exclude_outside=int(exclude_outside),
        antialias=int(antialias),
        extrapolation_value=7.0,
    )
    p = gf.placeholder("float64", x.shape)
    y = nn.resize(
        p,
        scale=factors,
        mode=mode,
        coordinates=coordinates,
        rounding=rounding,
        exclude_outside=exclude_outside,
        antialias=antialias,
        roi=roi.reshape(2, 4)[:, 2:].T if crop else None,
        extrapolation_value=7.0,
    )
    given_ = {"x": x, "scales": np.array([1.0, 1.0, *factors]), **({"roi": roi} if crop else {})}
    (want,) = reference.ReferenceEvaluator(node).run(None, given_)
    np.testing.assert_allclose(evaluate([y], {p: x})[0], want, rtol=1e-5, atol=5e-6)
