"""The bilinear samples of regions of interest: their places and weights on an image.

The number of samples of a bin may depend on its region. Samples outside the image count nothing, so
only those on it, and one beside them, are computed. The memory of a region depends on the image and
the bins, not on the numbers of its box.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from graphflow.errors import CheckError

Array = np.ndarray[Any, Any]
_PICK_ELEMENTS = 1 << 20  # elements of which the largest are picked together


class BinGrid(NamedTuple):
    """How boxes are cut into bins.

    Attributes:
        size: bins (down, across).
        scale: elements of x for one unit of the boxes.
        samples: along each side of a bin; 0: as many as it is long, rounded up.
        half_pixel: whether 0 is the outer edge of the first element; False: its centre.
    """

    size: tuple[int, int]
    scale: float
    samples: int
    half_pixel: bool


class BinSamples(NamedTuple):
    """The samples of each bin along one axis, each between two elements.

    Attributes:
        places: (bins, 2 * samples) ints.
        weights: of these elements, of the same shape.
        number: samples of a bin, those outside the image included.
    """

    places: Array
    weights: Array
    number: float

    def matrix(self, n: int, dtype: Any) -> Array:
        """Return the weight of each of n elements in the mean of each bin, (bins, n)."""
        total = np.zeros((len(self.places), n))
        bins = np.arange(len(self.places))[:, None]
        np.add.at(total, (bins, self.places), self.weights / max(self.number, 1))
        result: Array = total.astype(dtype)
        return result


def samples_of(
    box: Array, space: tuple[int, int], regions: BinGrid
) -> tuple[BinSamples, BinSamples]:
    """Return a box's samples down and across an image; the box is (left, top, right, bottom).

    Raises:
        CheckError: the number of samples follows from a box that is not finite.
    """
    offset = 0.5 if regions.half_pixel else 0.0
    left, top, right, bottom = (float(v) * regions.scale - offset for v in box)
    ends = ((top, bottom), (left, right))
    if not regions.samples and not all(math.isfinite(b - a) for a, b in ends):
        raise CheckError(
            f"the box {np.asarray(box).tolist()} of a region, which decides how many samples its "
            "bins have, is not finite; state `samples`, or mend what computes the boxes"
        )
    down, across = (
        _axis_samples(
            begin,
            end - begin if regions.half_pixel else max(end - begin, 1.0),
            bins,
            n,
            regions.samples,
        )
        for (begin, end), bins, n in zip(ends, regions.size, space, strict=True)
    )
    return down, across


def _axis_samples(begin: float, length: float, bins: int, n: int, samples: int) -> BinSamples:
    """Return the samples of each bin of an axis; beyond one element outside, they count nothing."""
    count = samples if samples > 0 else max(0, math.ceil(length / bins))
    step, bin_ = length / bins, np.arange(bins)[:, None]
    if samples or not count:
        numbers = np.arange(count) + np.zeros((bins, 1))
    else:
        numbers = _on_image(begin + bin_ * step, step / count, n, count)
    at = begin + (bin_ + (numbers + 0.5) / max(count, 1)) * step
    there = (at >= -1.0) & (at <= n)
    at = np.clip(at, 0, n - 1)
    low = np.where(there, at, 0).astype(np.int64)
    high = np.minimum(low + 1, n - 1)
    part = at - low
    weights = np.stack([1.0 - part, part], axis=-1) * there[..., None]
    places = np.stack([low, np.where(there, high, 0)], axis=-1)
    return BinSamples(places.reshape(bins, -1), weights.reshape(bins, -1), float(count))


def _on_image(begins: Array, gap: float, n: int, count: int) -> Array:
    """Return the numbers of the samples that count, and of one on each side of them, as floats.

    Bins (begins, (bins, 1)) have `count` samples each, between half an element and one apart. All
    get as many numbers as the bin that needs most.
    """
    first = np.floor((-1.0 - begins) / gap - 0.5) - 1
    last = np.ceil((n - begins) / gap - 0.5) + 2
    first, last = np.clip(first, 0, count), np.clip(last, 0, count)
    most = int(
        min((last - first).max(), 2 * n + 8)
    )  # more only if floats cannot hold half elements
    most = max(most, 1)
    numbers: Array = np.clip(first, 0, count - most) + np.arange(most)
    return numbers


def mean_samples(out: Array, x: Array, boxes: Array, batch: Array, regions: BinGrid) -> None:
    """Write the means of the samples of each bin, (r, channels, bins).

    Bilinear samples on a grid are a product of one sum down and one across.
    """
    for r, image in enumerate(batch):
        down, across = _matrices(boxes[r], x.shape[2:], regions, x.dtype)
        rows = np.empty((len(down), x.shape[1], x.shape[3]), x.dtype)
        for bin_, weights in enumerate(down):
            _weighted_sum(rows[bin_], weights, x[image].swapaxes(0, 1))
        bins = out[r].reshape(x.shape[1], len(down), len(across))
        for bin_, weights in enumerate(across):
            _weighted_sum(bins[:, :, bin_], weights, rows.T)


def _weighted_sum(out: Array, weights: Array, parts: Array) -> None:
    """Write the weighted sum of parts, in order, so that an element's bits are its own.

    Parts of no weight are skipped, since they may be NaN.
    """
    out[...] = 0
    for i in np.flatnonzero(weights):
        out += weights[i] * parts[i]


def spread_means(out: Array, g: Array, boxes: Array, batch: Array, regions: BinGrid) -> None:
    """Write the transpose of `mean_samples`: g (r, channels, bins) onto images."""
    out[...] = 0
    for r, image in enumerate(batch):
        down, across = _matrices(boxes[r], out.shape[2:], regions, g.dtype)
        bins = g[r].reshape(out.shape[1], len(down), len(across))
        rows = np.zeros((out.shape[1], len(down), out.shape[3]), out.dtype)
        for bin_, weights in enumerate(across):
            used = np.flatnonzero(weights)
            rows[:, :, used] += bins[:, :, bin_, None] * weights[used]
        target = out[image]
        for bin_, weights in enumerate(down):
            used = np.flatnonzero(weights)
            target[:, used] += weights[used, None] * rows[:, bin_, None]


def _matrices(
    box: Array, space: tuple[int, int], regions: BinGrid, dtype: Any
) -> tuple[Array, Array]:
    down, across = samples_of(box, space, regions)
    return down.matrix(space[0], dtype), across.matrix(space[1], dtype)


def pick_largest(picks: Array, x: Array, boxes: Array, batch: Array, regions: BinGrid) -> None:
    """Write which weighted element of each bin is the largest, (r, channels, bins).

    A pick is its place down the samples of the bin times their number across, plus its place
    across.
    """
    picks[...] = 0
    for r, image in enumerate(batch):
        down, across = samples_of(boxes[r], x.shape[2:], regions)
        per_bin = down.places.shape[1] * across.places.shape[1]
        if not per_bin:
            continue
        bins = picks[r].reshape(x.shape[1], len(down.places), len(across.places))
        channels = max(1, _PICK_ELEMENTS // (per_bin * len(across.places)))
        for bin_ in range(len(down.places)):
            weights = down.weights[bin_, :, None] * across.weights[:, None, :]
            for start in range(0, x.shape[1], channels):
                rows = x[image, start : start + channels][:, down.places[bin_]]
                taken = np.moveaxis(rows[:, :, across.places], 1, 2) * weights.astype(x.dtype)
                flat = taken.reshape(*taken.shape[:2], per_bin)
                bins[start : start + channels, bin_] = np.argmax(flat, axis=2)


def picked_samples(
    box: Array, picks: Array, space: tuple[int, int], regions: BinGrid
) -> tuple[Array, Array]:
    """Return the places and weights, both (channels, bins), of the picked elements."""
    down, across = samples_of(box, space, regions)
    width = across.places.shape[1]
    if not down.places.shape[1] * width:
        return np.zeros(picks.shape, np.int64), np.zeros(picks.shape)
    picks = np.minimum(picks, down.places.shape[1] * width - 1)
    (i, j), (d, a) = (
        np.divmod(picks, width),
        np.divmod(np.arange(picks.shape[1]), len(across.places)),
    )
    return (
        down.places[d, i] * space[1] + across.places[a, j],
        down.weights[d, i] * across.weights[a, j],
    )
