"""Sampling off the grid, regions, deformable windows, pixels and channels, against plain loops."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import ArgumentError, CheckError, DTypeError, GraphError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import FUNCTIONS
from graphflow.ops import nn
from graphflow.ops.kernels.images.roi_sampling import BinGrid, samples_of
from graphflow.transforms.reverse_mode import gradients

Array = np.ndarray[Any, Any]


def value(build: Any, *arrays: Array) -> Any:
    """What a function gives for arrays, fed with a batch of unknown size."""
    xs = [placeholder(a.dtype, (None, *a.shape[1:])) for a in arrays]
    result = build(*xs)
    several = isinstance(result, tuple)
    values = evaluate(list(result) if several else [result], dict(zip(xs, arrays, strict=True)))
    return values if several else values[0]


def pixel(image: Array, y: float, x: float) -> Array:
    """Bilinear between the elements of (channels, h, w); zeros beyond."""
    total = np.zeros(image.shape[0])
    for i in (math.floor(y), math.floor(y) + 1):
        for j in (math.floor(x), math.floor(x) + 1):
            if 0 <= i < image.shape[1] and 0 <= j < image.shape[2]:
                total = total + image[:, i, j] * (1 - abs(y - i)) * (1 - abs(x - j))
    return total


# Grids ------------------------------------------------------------------------------------------


def test_grid_sample_is_bilinear_between_elements_and_zero_beyond() -> None:
    rng = np.random.default_rng(0)
    x, grid = rng.normal(size=(2, 3, 4, 5)), rng.uniform(-1.5, 1.5, (2, 3, 2, 2))
    have = value(nn.grid_sample, x, grid)
    for n, i, j in np.ndindex(2, 3, 2):
        across, down = grid[n, i, j]
        wanted = pixel(x[n], ((down + 1) * 4 - 1) / 2, ((across + 1) * 5 - 1) / 2)
        np.testing.assert_allclose(have[n, :, i, j], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_the_identity_map_gives_the_image(mode: str, align_corners: bool) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    theta = np.tile(np.eye(2, 3), (2, 1, 1))

    def build(x: Any, theta: Any) -> Any:
        grid = nn.affine_grid(theta, x.shape, align_corners)
        return nn.grid_sample(x, grid, mode, "border", align_corners)

    np.testing.assert_allclose(value(build, x, theta), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_sampling_at_no_place_gives_no_number_but_no_error(mode: str, padding: str) -> None:
    x, grid = np.ones((1, 1, 3, 3)), np.array([[[[np.nan, 0.0], [1e30, 0.1], [0.0, 0.0]]]])
    have = value(lambda x, g: nn.grid_sample(x, g, mode, padding), x, grid)
    assert have.shape == (1, 1, 1, 3)
    assert have[0, 0, 0, 2] == 1


def test_one_and_three_spatial_axes() -> None:
    line = np.array([[[1.0, 2.0, 4.0]]])
    have = value(lambda x, g: nn.grid_sample(x, g, align_corners=True), line, np.array([[[-0.5]]]))
    np.testing.assert_allclose(have, [[[1.5]]])
    cube = np.arange(8.0).reshape(1, 1, 2, 2, 2)
    grid = np.array([[[[[1.0, -1.0, -1.0]]]]])
    have = value(lambda x, g: nn.grid_sample(x, g, align_corners=True), cube, grid)
    np.testing.assert_allclose(have, [[[[[1.0]]]]])


# Deformable convolution -------------------------------------------------------------------------


@pytest.mark.parametrize("groups, parts", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_deform_conv_is_a_sum_over_moved_taps(groups: int, parts: int) -> None:
    rng = np.random.default_rng(groups)
    x, w = rng.normal(size=(2, 4, 5, 6)), rng.normal(size=(6, 4 // groups, 2, 3))
    stride, padding, dilation, out, taps = 2, 1, 1, (3, 3), 6
    offset = rng.uniform(-2, 2, (2, parts * taps * 2, *out))
    mask, bias = rng.normal(size=(2, parts * taps, *out)), rng.normal(size=6)

    def build(x: Any, offset: Any, mask: Any) -> Any:
        return nn.deform_conv(x, w, offset, bias, mask, stride, padding, dilation, groups, parts)

    have = value(build, x, offset, mask)
    wanted = np.tile(bias[None, :, None, None], (2, 1, *out))
    for n, o, i, j in np.ndindex(2, 6, *out):
        for c in range(4 // groups):
            channel = o // (6 // groups) * (4 // groups) + c
            part = channel // (4 // parts)
            for k, (a, b) in enumerate(np.ndindex(2, 3)):
                dy, dx = offset[n, (part * taps + k) * 2 :][:2, i, j]
                seen = pixel(
                    x[n, channel : channel + 1],
                    i * stride - padding + a + dy,
                    j * stride - padding + b + dx,
                )
                wanted[n, o, i, j] += seen[0] * w[o, c, a, b] * mask[n, part * taps + k, i, j]
    np.testing.assert_allclose(have, wanted, rtol=1e-10, atol=1e-10)


def test_deform_conv_without_offsets_is_convolution_with_its_gradients() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 4, 5, 6)), rng.normal(size=(3, 4, 3, 3))
    p, q = placeholder("float64", x.shape), placeholder("float64", w.shape)
    plain = nn.conv2d(p, q, stride=2, padding=1, dilation=2)
    moved = nn.deform_conv(
        p, q, np.zeros((2, 18, *plain.shape[2:])), stride=2, padding=1, dilation=2
    )
    both = [[y, *gradients(y * y, [p, q])] for y in (plain, moved)]
    have = evaluate([*both[0], *both[1]], {p: x, q: w})
    for a, b in zip(have[:3], have[3:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


# Regions ----------------------------------------------------------------------------------------

BOXES = st.lists(
    st.tuples(*[st.floats(-3, 12, width=32)] * 4).map(
        lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
    ),
    min_size=1,
    max_size=3,
)


def region(image: Array, box: Any, size: tuple[int, int], samples: int, half: bool) -> Array:
    """The mean of bilinear samples in each bin: (channels, *size)."""
    offset = 0.5 if half else 0.0
    left, top, right, bottom = (v * 0.5 - offset for v in box)
    height, width = bottom - top, right - left
    if not half:
        height, width = max(height, 1.0), max(width, 1.0)
    bin_h, bin_w = height / size[0], width / size[1]
    rows = samples or math.ceil(bin_h)
    columns = samples or math.ceil(bin_w)
    h, w = image.shape[1:]
    result = np.zeros((image.shape[0], *size))
    for i, j in np.ndindex(*size):
        for a, b in np.ndindex(rows, columns):
            y = top + i * bin_h + (a + 0.5) * bin_h / rows
            x = left + j * bin_w + (b + 0.5) * bin_w / columns
            if -1 <= y <= h and -1 <= x <= w:
                y, x = min(max(y, 0), h - 1), min(max(x, 0), w - 1)
                result[:, i, j] += pixel(image, y, x)
        result[:, i, j] /= max(rows * columns, 1)
    return result


@given(BOXES, st.sampled_from([0, 1, 2]), st.booleans())
@settings(max_examples=50)
def test_regions_are_means_of_samples(boxes: list[Any], samples: int, half: bool) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4))
    given_ = np.array(boxes, "float64")
    images = np.arange(len(boxes)) % 2
    have = value(
        lambda x, b, i: nn.roi_align(x, b, i, (3, 2), 0.5, samples, half_pixel=half),
        x,
        given_,
        images,
    )
    for r, box in enumerate(boxes):
        wanted = region(x[images[r]], box, (3, 2), samples, half)
        np.testing.assert_allclose(have[r], wanted, rtol=1e-9, atol=1e-9)


def test_the_largest_of_a_region_is_that_of_its_weighted_elements() -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 6, 6))
    box = np.array([[0.3, 1.2, 4.9, 5.5]])
    have = value(lambda x, b: nn.roi_align(x, b, np.array([0]), 2, samples=2, mode="max"), x, box)
    down, across = samples_of(box[0], (6, 6), BinGrid((2, 2), 1.0, 2, True))
    for i, j in np.ndindex(2, 2):
        taken = x[0][:, down.places[i]][:, :, across.places[j]]
        weighted = taken * down.weights[i][:, None] * across.weights[j]
        np.testing.assert_allclose(have[0, :, i, j], weighted.max(axis=(1, 2)), rtol=1e-12)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("side", [40.0, 1e4, 1e9, 1e30])
def test_a_region_takes_no_memory_for_the_size_of_its_box(mode: str, side: float) -> None:
    x = placeholder("float32", (1, 2, 5, 5))
    box = placeholder("float32", (1, 4))
    y = nn.roi_align(x, box, np.array([0]), 2, mode=mode)
    fetches = [y, *gradients(FUNCTIONS["sum"](y), [x])]
    feeds = {x: np.ones((1, 2, 5, 5), "float32"), box: np.array([[-3, -3, side, side]], "float32")}
    tracemalloc.start()
    values = evaluate(fetches, feeds)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert all(np.isfinite(v).all() for v in values)


def test_samples_that_follow_from_a_large_box_are_those_on_the_image() -> None:
    x = np.random.default_rng(1).normal(size=(1, 3, 5, 4))
    box = np.array([[-31.0, -20.5, 44.25, 61.0]])
    have = value(lambda x, b: nn.roi_align(x, b, np.array([0]), (3, 2)), x, box)
    np.testing.assert_allclose(have[0], region(x[0], box[0] / 0.5, (3, 2), 0, True), atol=1e-12)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_box_that_is_not_finite_has_no_number_of_samples(wrong: float) -> None:
    box = placeholder("float32", (1, 4))
    y = nn.roi_align(np.ones((1, 1, 3, 3), "float32"), box, np.array([0]), 1)
    with pytest.raises(CheckError, match="is not finite; state `samples`"):
        evaluate([y], {box: np.array([[0, 0, wrong, 1]], "float32")})


@pytest.mark.parametrize("samples", [0, 3])
def test_a_number_that_no_sample_touches_changes_no_bin(samples: int) -> None:
    x = np.ones((1, 1, 6, 6))
    x[0, 0, 5, 5] = np.nan
    box = np.array([[0.0, 0.0, 6.0, 6.0]])
    have = value(lambda x, b: nn.roi_align(x, b, np.array([0]), 3, samples=samples), x, box)
    assert np.isnan(have[0, 0, 2, 2])
    assert np.isfinite(have[0, 0]).sum() == 8


def test_a_region_of_no_image_is_an_error_of_the_step() -> None:
    x = placeholder("float32", (None, 1, 3, 3))
    y = nn.roi_align(x, np.zeros((1, 4), "float32"), np.array([2]), 1)
    with pytest.raises(IndexError, match=r"image 2 of a region is outside \[0, 2\)"):
        evaluate([y], {x: np.zeros((2, 1, 3, 3), "float32")})


# Non-maximum suppression ------------------------------------------------------------------------


def overlap(a: Any, b: Any) -> float:
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])
    shared = np.prod(np.maximum(high - low, 0))
    union = np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - shared
    return float(shared / union) if union > 0 else 0.0


@given(st.integers(1, 8), st.integers(0, 4), st.floats(0, 0.9), st.booleans(), st.integers(0, 99))
def test_suppression_keeps_the_best_and_what_does_not_overlap_them(
    n: int, max_output: int, threshold: float, centers: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    low, extent = rng.uniform(0, 3, (2, n, 2)), rng.uniform(0.5, 3, (2, n, 2))
    corners, scores = np.concatenate([low, low + extent], axis=2), rng.normal(size=(2, 3, n))
    boxes = np.concatenate([low + extent / 2, extent], axis=2) if centers else corners
    have, count = value(
        lambda b, s: nn.non_max_suppression(b, s, max_output, threshold, -0.5, centers),
        boxes,
        scores,
    )
    wanted = []
    for image, label in np.ndindex(2, 3):
        kept: list[int] = []
        for i in sorted(range(n), key=lambda i: -scores[image, label, i]):
            if len(kept) == max_output or scores[image, label, i] <= -0.5:
                break
            if all(
                overlap(corners[image, i], corners[image, k]) <= threshold + 1e-12 for k in kept
            ):
                kept.append(i)
        wanted += [(image, label, i) for i in kept]
    assert have.shape == (2 * 3 * max_output, 3) and count == len(wanted)
    assert have[: len(wanted)].tolist() == [list(row) for row in wanted]
    assert (have[len(wanted) :] == -1).all()


def test_suppression_of_one_class_gives_boxes() -> None:
    boxes = np.array([[1, 1, 0, 0], [0, 0, 1.1, 1], [3, 3, 4, 4], [0, 0, 0, 0]])
    p, q = placeholder("float64", (None, 4)), placeholder("float64", (None,))
    indices, count = nn.non_max_suppression(p, q, 3)
    have = evaluate([indices, count], {p: boxes, q: np.array([0.5, 0.9, 0.1, 0.0])})
    assert have[0].tolist() == [1, 2, 3] and have[1] == 3


# Pixels and channels ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_depth_to_space_and_back(rank: int, mode: str, channels_last: bool) -> None:
    x = np.arange(2 * 3 * 2**rank * 2**rank).reshape(2, 3 * 2**rank, *(2,) * rank)
    moved = np.moveaxis(x, 1, -1).copy() if channels_last else x
    wide = value(lambda x: nn.depth_to_space(x, 2, mode, channels_last), moved)
    assert wide.shape == ((2, *(4,) * rank, 3) if channels_last else (2, 3, *(4,) * rank))
    back = value(lambda x: nn.space_to_depth(x, 2, mode, channels_last), wide)
    np.testing.assert_array_equal(back, moved)
    image = np.moveaxis(wide, -1, 1) if channels_last else wide
    place = (1,) * rank  # the last one of a block
    channel = 2**rank * 2 - 1 if mode == "CRD" else (2**rank - 1) * 3 + 1
    np.testing.assert_array_equal(image[(0, 1, *place)], x[(0, channel, *(0,) * rank)])


def test_unfolded_windows_are_columns_and_folding_adds_them() -> None:
    x = np.arange(2 * 1 * 3 * 3.0).reshape(2, 1, 3, 3)
    columns = value(lambda x: nn.unfold(x, 2), x)
    np.testing.assert_array_equal(columns[0, :, 0], [0, 1, 3, 4])
    np.testing.assert_array_equal(columns[1, :, 3], [13, 14, 16, 17])
    counts = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]])
    np.testing.assert_array_equal(value(lambda c: nn.fold(c, (3, 3), 2), columns), x * counts)
    line = value(lambda x: nn.unfold(x, 2, stride=2, padding=((1, 0),)), x[:, :, 0])
    np.testing.assert_array_equal(line[0], [[0, 1], [0, 2]])


@given(st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans())
def test_local_response_norm(channels: int, size: int, onnx: bool, channels_last: bool) -> None:
    x = np.random.default_rng(size).normal(size=(2, channels, 3))
    before = (size - 1) // 2 if onnx else size // 2
    wanted = np.empty_like(x)
    for c in range(channels):
        part = x[:, max(0, c - before) : c - before + size]
        wanted[:, c] = x[:, c] / (1.5 + 0.3 / size * (part**2).sum(axis=1)) ** 0.6
    moved = np.moveaxis(x, 1, -1).copy() if channels_last else x
    have = value(
        lambda x: nn.local_response_norm(
            x, size, 0.3, 0.6, 1.5, before if onnx else None, channels_last
        ),
        moved,
    )
    np.testing.assert_allclose(
        np.moveaxis(have, -1, 1) if channels_last else have, wanted, rtol=1e-12
    )


# Wrong arguments --------------------------------------------------------------------------------

X, GRID = np.zeros((2, 4, 6, 6), "float32"), np.zeros((2, 3, 3, 2), "float32")
BOX, ONE = np.zeros((1, 4), "float32"), np.zeros(1, "int64")
OFFSET = np.zeros((2, 18, 4, 4), "float32")
W = np.zeros((2, 4, 3, 3), "float32")
WRONG: dict[str, tuple[Any, type[GraphError], str]] = {
    "grid": (lambda: nn.grid_sample(X, GRID[..., :1]), ShapeError, "axes"),
    "batch": (lambda: nn.grid_sample(X, GRID[:1]), ShapeError, "batch sizes: 2 != 1"),
    "mode": (lambda: nn.grid_sample(X, GRID, "lanczos"), ArgumentError, "'lanczos'"),
    "padding": (lambda: nn.grid_sample(X, GRID, padding="wrap"), ArgumentError, "'wrap'"),
    "ints": (lambda: nn.grid_sample(X.astype(int), GRID.astype(int)), DTypeError, "float"),
    "theta": (
        lambda: nn.affine_grid(GRID[0], X.shape),
        ShapeError,
        "expected theta of .batch, r, r . 1.",
    ),
    "unknown": (
        lambda: nn.affine_grid(np.zeros((2, 2, 3)), (2, 1, placeholder("f4", (None,)).shape[0], 3)),
        ShapeError,
        "must be known",
    ),
    "offsets": (
        lambda: nn.deform_conv(X, W, OFFSET[:, 1:]),
        ShapeError,
        "expected offset of shape .2, 18, 4, 4., got .*17 != 18",
    ),
    "parts": (
        lambda: nn.deform_conv(X, W, OFFSET, offset_groups=3),
        ShapeError,
        "do not divide into 1 groups and 3 offset groups",
    ),
    "mask": (
        lambda: nn.deform_conv(X, W, OFFSET, mask=OFFSET),
        ShapeError,
        "expected mask of shape .2, 9, 4, 4., got",
    ),
    "bias": (lambda: nn.deform_conv(X, W, OFFSET, X[0, 0, 0]), ShapeError, "one number for each"),
    "boxes": (lambda: nn.roi_align(X, BOX[:, :3], ONE, 2), ShapeError, "numbers of a box: 3 != 4"),
    "images": (lambda: nn.roi_align(X, BOX, BOX[0], 2), DTypeError, "int"),
    "region's mode": (lambda: nn.roi_align(X, BOX, ONE, 2, mode="sum"), ArgumentError, "'sum'"),
    "region's scale": (lambda: nn.roi_align(X, BOX, ONE, 2, 0), ArgumentError, "scale must be a"),
    "scores": (
        lambda: nn.non_max_suppression(BOX, X, 2),
        ShapeError,
        "expected boxes of .batch, n, 4.",
    ),
    "how many": (
        lambda: nn.non_max_suppression(BOX, BOX[:, 0], -1),
        ArgumentError,
        "max_output must be an int >= 0",
    ),
    "threshold": (
        lambda: nn.non_max_suppression(BOX, BOX[:, 0], 1, "0.5"),
        ArgumentError,
        "iou_threshold must be a number",
    ),
    "block": (lambda: nn.depth_to_space(X, 3), ShapeError, "no multiple of 9"),
    "blocks": (lambda: nn.space_to_depth(X, 4), ShapeError, "no multiple of 4"),
    "order": (lambda: nn.depth_to_space(X, 2, "RCD"), ArgumentError, "'DCR' or 'CRD'"),
    "windows": (lambda: nn.unfold(X, 7), ShapeError, "not one fits"),
    "columns": (lambda: nn.fold(X[0], (6, 6), 2), ShapeError, "25|!= "),
    "neighbours": (lambda: nn.local_response_norm(X, 0), ArgumentError, "size must be an int >= 1"),
    "before": (lambda: nn.local_response_norm(X, 2, before=2), ArgumentError, "not below"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told_with_their_line(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=rf"(?s)test_pixel_ops\.py:\d+.*({message})"):
        call()
