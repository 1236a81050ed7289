"""Where bins of regions look on an image: places and weights of their bilinear samples.

How many samples a bin has may depend on its region, so these are lists of a length for each region.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Regions(NamedTuple):
    """How boxes are cut into bins.

    Attributes:
        size: bins (down, across).
        scale: elements of x for one unit of the boxes.
        samples: along each side of a bin; 0: as many as it is long, rounded up.
        half_pixel: whether 0 is the outer edge of the first element, or its centre.
    """

    size: tuple[int, int]
    scale: float
    samples: int
    half_pixel: bool


def entries(box: Array, space: tuple[int, int], regions: Regions) -> tuple[Array, Array]:
    """places (bins, e) in the flattened image and their weights, four for each sample."""
    offset = 0.5 if regions.half_pixel else 0.0
    left, top, right, bottom = (float(v) * regions.scale - offset for v in box)
    axes = []
    for begin, end, bins, n in (
        (top, bottom, regions.size[0], space[0]),
        (left, right, regions.size[1], space[1]),
    ):
        length = end - begin if regions.half_pixel else max(end - begin, 1.0)
        axes.append(_along(begin, length, bins, n, regions.samples))
    (rows, down), (columns, across) = axes
    places = rows[:, None, :, None, :, None] * space[1] + columns[None, :, None, :, None, :]
    weights = down[:, None, :, None, :, None] * across[None, :, None, :, None, :]
    bins = regions.size[0] * regions.size[1]
    return places.reshape(bins, -1), weights.reshape(bins, -1)


def _along(begin: float, length: float, bins: int, n: int, samples: int) -> tuple[Array, Array]:
    """For each sample of each bin of one axis, the two elements around it and their weights, all
    (bins, samples, 2); samples more than one element outside count nothing."""
    count = samples if samples > 0 else max(0, math.ceil(length / bins))
    step = length / bins
    at = begin + (np.arange(bins)[:, None] + (np.arange(count) + 0.5) / max(count, 1)) * step
    there = (at >= -1.0) & (at <= n)
    at = np.clip(at, 0, n - 1)
    low = np.minimum(at.astype(np.int64), n - 1)
    high = np.minimum(low + 1, n - 1)
    part = at - low
    places = np.stack([low, high], axis=-1)
    weights = np.stack([1.0 - part, part], axis=-1) * there[..., None]
    return np.where(there[..., None], places, 0), weights


def means(out: Array, x: Array, boxes: Array, batch: Array, regions: Regions) -> None:
    """out (r, channels, bins) = the means of the samples of each bin."""
    images = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
    for r, image in enumerate(batch):
        places, weights = entries(boxes[r], x.shape[2:], regions)
        count = max(1, places.shape[1] // 4)
        taken = images[image][:, places.reshape(-1)].reshape(x.shape[1], *places.shape)
        taken *= (weights / count).astype(x.dtype)
        np.sum(taken, axis=2, out=out[r])


def spread_means(out: Array, g: Array, boxes: Array, batch: Array, regions: Regions) -> None:
    """The transpose of `means`: g (r, channels, bins) onto images."""
    out[...] = 0
    channels = out.shape[1]
    flat = out.reshape(-1)
    size = out.shape[2] * out.shape[3]
    for r, image in enumerate(batch):
        places, weights = entries(boxes[r], out.shape[2:], regions)
        count = max(1, places.shape[1] // 4)
        starts = (int(image) * channels + np.arange(channels)) * size
        where = starts[:, None, None] + places
        np.add.at(
            flat,
            where.reshape(-1),
            (g[r][:, :, None] * (weights / count).astype(g.dtype)).reshape(-1),
        )


def largest(places_out: Array, x: Array, boxes: Array, batch: Array, regions: Regions) -> None:
    """places_out (r, channels, bins) = which entry of each bin is the largest after weighting."""
    images = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
    places_out[...] = 0
    for r, image in enumerate(batch):
        places, weights = entries(boxes[r], x.shape[2:], regions)
        if places.shape[1]:
            taken = images[image][:, places.reshape(-1)].reshape(x.shape[1], *places.shape)
            places_out[r] = np.argmax(taken * weights.astype(x.dtype), axis=2)


def chosen(
    box: Array, picks: Array, space: tuple[int, int], regions: Regions
) -> tuple[Array, Array]:
    """places and weights, (channels, bins) both, of the entries that were picked."""
    places, weights = entries(box, space, regions)
    if not places.shape[1]:
        return np.zeros(picks.shape, np.int64), np.zeros(picks.shape)
    bins = np.arange(picks.shape[1])
    picks = np.minimum(picks, places.shape[1] - 1)
    return places[bins, picks], weights[bins, picks]
