"""Non-maximum suppression: of overlapping boxes keep the one with the best score. CPU only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, function, promote_inputs, register, sample
from graphflow.ir.spec import TensorSpec, equate, show_shape, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.tensors.shape import expand_dims
from graphflow.ops.windows.window_arguments import per_axis


def _infer(
    boxes: TensorSpec, scores: TensorSpec, max_output: int, **attrs: Any
) -> tuple[TensorSpec, TensorSpec]:
    require_kind(boxes, "float")
    require_kind(scores, "float")
    shapes = f"boxes {show_shape(boxes.shape)}, scores {show_shape(scores.shape)}"
    if boxes.rank != 3 or scores.rank != 3:
        raise ShapeError(
            f"expected boxes of (batch, n, 4) and scores of (batch, classes, n), got {shapes}"
        )
    equate(boxes.shape[2], 4, f"{shapes}: numbers of a box")
    equate(boxes.shape[0], scores.shape[0], f"{shapes}: batch sizes")
    equate(boxes.shape[1], scores.shape[2], f"{shapes}: numbers of boxes")
    rows = scores.shape[0] * scores.shape[1] * max_output
    return TensorSpec((rows, 3), np.dtype("int64")), TensorSpec((), np.dtype("int64"))


def _corners(boxes: Any, centers: bool) -> Any:
    """Return boxes (n, 4) as low and high corners."""
    first, second = boxes[:, :2], boxes[:, 2:]
    if centers:
        return np.concatenate([first - second / 2, first + second / 2], axis=1)
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)


def _suppress_class(
    corners: Any, scores: Any, max_output: int, overlap: float, least: float
) -> list[int]:
    """Return the boxes to keep, by descending score (equal scores by index).

    A box goes if it overlaps a better one that is kept.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > least]
    areas = np.prod(corners[:, 2:] - corners[:, :2], axis=1)
    kept: list[int] = []
    while order.size and len(kept) < max_output:
        best = int(order[0])
        kept.append(best)
        rest = order[1:]
        low = np.maximum(corners[rest, :2], corners[best, :2])
        high = np.minimum(corners[rest, 2:], corners[best, 2:])
        shared = np.prod(np.maximum(high - low, 0), axis=1)
        union = areas[rest] + areas[best] - shared
        order = rest[~((shared > overlap * union) & (union > 0))]
    return kept


def _suppression_kernel(
    xp: Any,
    boxes: Any,
    scores: Any,
    max_output: int,
    iou_threshold: float,
    score_threshold: float,
    centers: bool,
) -> tuple[Any, Any]:
    batch, classes = scores.shape[:2]
    indices = np.full((batch * classes * max_output, 3), -1, np.int64)
    count = 0
    for image in range(batch):
        corners = _corners(boxes[image], centers)
        for label in range(classes):
            kept = _suppress_class(
                corners, scores[image, label], max_output, iou_threshold, score_threshold
            )
            indices[count : count + len(kept)] = [(image, label, box) for box in kept] or -1
            count += len(kept)
    return indices, np.asarray(count, np.int64)


def _cost(boxes: TensorSpec, scores: TensorSpec, max_output: int, **attrs: Any) -> Cost:
    return Cost(flops=scores.size * max_output * 12)


_BOXES, _SCORES = spec("float32", (2, 5, 4)), spec("float32", (2, 3, 5))
_CALL: dict[str, Any] = {"max_output": 2, "iou_threshold": 0.3, "score_threshold": -1.0}

suppression_op: Op = register(
    Op(
        "non_max_suppression",
        infer=_infer,
        kernel=_suppression_kernel,
        cost=_cost,
        samples=(
            sample(_BOXES, _SCORES, **_CALL, centers=False),
            sample(_BOXES, _SCORES, **_CALL, centers=True, low=0.1),
        ),
        device_kinds=("cpu",),
    )
)


@function
def non_max_suppression(
    boxes: Any,
    scores: Any,
    max_output: int,
    iou_threshold: float = 0.5,
    score_threshold: float | None = None,
    centers: bool = False,
) -> tuple[Tensor, Tensor]:
    """Select boxes by descending score, without those that overlap a better one of their class.

    Args:
        boxes: (batch, n, 4) or (n, 4) floats: two opposite corners, or centre and extent with
            `centers`. The order of the axes makes no difference.
        scores: (batch, classes, n), or (n,).
        max_output: most boxes for one image and class.
        iou_threshold: a box goes if its intersection with a better one is more than this part of
            their union.
        score_threshold: a box goes if its score is not above this number (None: all stay).
        centers: True if boxes are given by centre and extent.

    Returns:
        indices and their number, both int64, without a gradient. The indices are rows (image,
        class, box), (batch·classes·max_output, 3) of them, or for inputs without a batch those
        of boxes, (max_output,); rows after the last hold -1.

    Raises:
        ShapeError, DTypeError, ArgumentError: the arguments do not fit each other.
    """
    b, s = promote_inputs("non_max_suppression", (boxes, scores))
    alone = b.ndim == 2 and s.ndim == 1
    if alone:
        b, s = expand_dims(b, 0), expand_dims(s, (0, 1))
    for what, value in (("iou_threshold", iou_threshold), ("score_threshold", score_threshold)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ArgumentError(f"{what} must be a number, got {value!r}")
    indices, count = suppression_op(
        b,
        s,
        max_output=per_axis("max_output", max_output, 1, least=0)[0],
        iou_threshold=float(iou_threshold),
        score_threshold=-math.inf if score_threshold is None else float(score_threshold),
        centers=bool(centers),
    )
    return (indices[:, 2], count) if alone else (indices, count)
