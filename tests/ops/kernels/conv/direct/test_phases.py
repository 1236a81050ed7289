"""Gradients in the input of strided convolutions, by the phases of the stride, are im2col's."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.ops.kernels.conv import im2col
from graphflow.ops.kernels.conv.direct import phases
from graphflow.ops.windows.window_arguments import Windows

RANDOM = np.random.default_rng(0)


def draw_windows(random: np.random.Generator, rank: int) -> tuple[tuple[int, ...], Windows]:
    """Return the spatial axes of an input, and windows over it that have phases."""
    axes = []
    while len(axes) < rank:
        stride, dilation = (int(random.integers(1, 5)) for _ in range(2))
        kernel, before = int(random.integers(stride, 8)), int(random.integers(0, 4))
        n, after = int(random.integers(1, 30)), int(random.integers(0, 4))
        out = (n + before + after - (kernel - 1) * dilation - 1) // stride + 1
        if out > 0 and np.gcd(stride, dilation) == 1:
            axes.append((n, kernel, stride, before, dilation, out))
    space, *windows = (tuple(values) for values in zip(*axes, strict=True))
    return space, Windows(*windows)


@pytest.mark.parametrize("seed", range(40))
def test_results_are_those_of_im2col_in_float64(seed: int) -> None:
    random = np.random.default_rng(seed)
    space, windows = draw_windows(random, 1 + seed % 2)
    images, inputs, outputs = (int(n) for n in random.integers(1, (5, 5, 12)))
    groups = (1, 1, 3, inputs)[seed % 4]
    inputs = inputs if seed % 4 == 3 else groups * inputs
    outputs *= groups
    g = random.normal(size=(images, outputs, *windows.out))
    w = random.normal(size=(outputs, inputs // groups, *windows.kernel))
    expected = np.empty((images, inputs, *space))
    im2col.input_gradient(np, expected, g, w, windows, groups)
    found = np.full(expected.shape, np.nan, "float32")
    phases.input_gradient(found, g.astype("float32"), w.astype("float32"), windows, groups)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_transposed_convolution_is_recorded_and_has_the_same_bits_on_two_threads() -> None:
    x = RANDOM.normal(size=(6, 9, 13, 17)).astype("float32")
    w = gf.variable(RANDOM.normal(size=(9, 3, 4, 4)).astype("float32"))
    fed = gf.placeholder("float32", x.shape)
    y = gf.nn.conv_transpose(fed, w, stride=2, padding=1)
    results = []
    for threads in (1, 2):
        with gf.Session(gf.Cluster.here(devices=["cpu:0"], threads=threads)) as session:
            results += [session.run(y, {fed: x}) for _ in range(3)]
    assert all(np.array_equal(result, results[0]) for result in results)


def test_windows_without_a_tap_for_each_position_have_no_phases() -> None:
    def windows(kernel: int, stride: int, dilation: int) -> Windows:
        return Windows((kernel,), (stride,), (0,), (dilation,), (4,))

    assert phases.has_phases(windows(3, 2, 1))
    assert phases.has_phases(windows(2, 2, 3))
    assert not phases.has_phases(windows(1, 2, 1))
    assert not phases.has_phases(windows(4, 2, 2))
