"""Estimates of how long the direct kernels and implicit GEMM take, to choose between them.

Rates were measured on one core with AVX-512 and are the same for every processor, since bits follow
from the choice.
"""

from __future__ import annotations

import math

from graphflow.ops.kernels.conv.conv_shape import ConvShape, Target

_LANES = 16
_DEEP = 4  # channels that the weight's gradient computes at once
_DIRECT, _STRIDED, _DIRECT_WEIGHT = 90.0, 50.0, 35.0
_IMPLICIT, _IMPLICIT_WEIGHT = 110.0, 90.0
"""Flops in a nanosecond if all lanes of a vector are in use."""
_TAP_CHANNELS = 3
"""Channels in whose time a product goes on to the next tap."""
_ONE_VECTOR = 0.75
"""Share of the rate that is left if sums are one vector wide, since they wait for each other."""
_ROW_NANOSECONDS = 2.5
"""Nanoseconds to copy a vector of a pixel's channels from planes or back."""
_JOINED_IMAGES = 4


def _lane_share(count: int, block: int = _LANES) -> float:
    """Return the share of blocks that `count` elements fill."""
    return count / (-(-count // block) * block)


def _flops(s: ConvShape, positions: int) -> float:
    taps = math.prod(s.windows.kernel)
    return 2.0 * s.images * s.outputs * s.group_inputs * taps * positions


def direct_nanoseconds(s: ConvShape, target: Target) -> float:
    """Return the time of `direct.py`: vectors lie along the rows of images."""
    out, stride = s.windows.out, s.windows.stride[-1]
    if target == "w":
        is_joined = stride == 1 and s.images >= _JOINED_IMAGES
        lanes = 1.0 if is_joined else _lane_share(out[-1])
        return _flops(s, math.prod(out)) / (_DIRECT_WEIGHT * lanes)
    written = s.space if target == "x" else out  # padding is computed, too
    rate = _STRIDED if target == "y" and stride > 1 else _DIRECT
    return _flops(s, math.prod(written)) / (rate * _lane_share(written[-1]))


def phases_nanoseconds(s: ConvShape) -> float:
    """Return the time of `phases.py`, whose rows are every s-th element of the input's."""
    columns = -(-s.space[-1] // s.windows.stride[-1])
    return _flops(s, math.prod(s.windows.out)) / (_DIRECT * _lane_share(columns))


def implicit_nanoseconds(s: ConvShape, target: Target) -> float:
    """Return the time of `implicit_gemm.py`: vectors lie along the channels of a pixel."""
    depth, columns = s.group_inputs, s.group_outputs
    vectors = math.prod(s.space) * -(-depth // _LANES)
    vectors += math.prod(s.windows.out) * -(-columns // _LANES)
    rows = s.images * s.groups * vectors * _ROW_NANOSECONDS
    if target == "x":
        depth, columns = columns, depth
    rate = _IMPLICIT * depth / (depth + _TAP_CHANNELS)
    if target == "w":
        rate = _IMPLICIT_WEIGHT * _lane_share(depth, _DEEP)
    rate *= _lane_share(columns) * (1.0 if columns > _LANES else _ONE_VECTOR)
    return rows + _flops(s, math.prod(s.windows.out)) / rate
