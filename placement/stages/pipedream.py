"""PipeDream's planner: a chain of layers over machines of machines, stages replicated.

Beside `split_stages`: there no stage is replicated, here every stage is an interval of layers on
some workers of a level, which share its samples and then agree on its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlacementError, ProblemError
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.placement.problems.arrays import array_of
from graphflow.placement.stages import loops as stage_loops


@checks_arguments(PlacementError)
@dataclass(frozen=True)
class Level:
    """A level of the hierarchy, innermost first: how many of the level below, and bytes/s."""

    workers: int
    bandwidth: float


@dataclass(frozen=True)
class PipeStage:
    """Layers `start` to `stop` (excluded) on `replicas` components of the level below.

    Inside one component they are split again by `inner` (empty: on one device).
    """

    start: int
    stop: int
    replicas: int
    inner: tuple[PipeStage, ...] = ()


@dataclass(frozen=True)
class PipePlan:
    """The stages of the outermost level, and seconds per sample of the slowest one."""

    stages: tuple[PipeStage, ...]
    seconds: float


@checks_arguments(PlacementError)
def pipedream_plan(
    seconds: ArrayLike, activations: ArrayLike, weights: ArrayLike, levels: Sequence[Level]
) -> PipePlan:
    """The plan of PipeDream's recurrence, which is optimal under its cost model.

    A stage on m workers takes max(seconds of its layers below, 2 (m - 1) bytes of weights over the
    bandwidth) / m; a cut takes twice the bytes of the activation (and its gradient) over it.

    Args:
        seconds: (n,) of each layer, forward and backward.
        activations: (n,) bytes that each layer sends on.
        weights: (n,) bytes of parameters.
        levels: innermost first. All their workers are used.

    Time O(n³ m²) and space O(n² m) per level of m workers.

    Raises:
        ProblemError: lengths differ, or a number is negative or not finite.
        PlacementError: a level without workers or bandwidth, or no level at all.

    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.1.
    """
    given = {"seconds": seconds, "activations": activations, "weights": weights}
    layers = [array_of(name, a, np.float64, 1) for name, a in given.items()]
    n = len(layers[0])
    if n == 0 or any(a.shape != (n,) for a in layers):
        raise ProblemError(
            f"seconds, activations and weights have shapes {[a.shape for a in layers]}; "
            "expected the same (n,), n > 0"
        )
    if any(not np.isfinite(a).all() or (a < 0).any() for a in layers):
        raise ProblemError("seconds, activations and weights must be finite and not negative")
    for level in levels:
        if not isinstance(level, Level):
            raise PlacementError(f"levels must hold Level(workers, bandwidth), not {level!r}")
        if type(level.workers) is not int or level.workers < 1 or not level.bandwidth > 0:
            raise PlacementError(f"{level} needs at least one worker and a positive bandwidth")
    if not len(levels):
        raise PlacementError("levels is empty; one device is [Level(1, bandwidth)]")
    total = np.concatenate([[0.0], np.cumsum(layers[0])])
    below: NDArray[np.float64] = total[None, 1:] - total[:-1, None]
    tables = []
    for level in levels:
        passed = np.concatenate([[0.0], np.cumsum(layers[2] / level.bandwidth)])
        sent = 2.0 * layers[1] / level.bandwidth
        alone, time = np.full((2, n, n, level.workers + 1), np.inf)
        cut, share = np.full((2, n, n, level.workers + 1), -1, dtype=np.int64)
        native(stage_loops, "pipedream_level")(
            n, level.workers, passed, sent, below.ravel(), alone.ravel(), time.ravel(),
            cut.ravel(), share.ravel(),
        )  # fmt: skip
        below = np.ascontiguousarray(time[:, :, level.workers])
        tables.append(((time, cut, share), level.workers))
    return PipePlan(_stages(tables, 0, n - 1), float(below[0, n - 1]))


def _stages(tables: list[Any], i: int, j: int) -> tuple[PipeStage, ...]:
    """The stages of layers i..j on one machine of the last level of `tables`."""
    if not tables:
        return ()
    (_, cut, share), left = tables[-1]
    stages: list[PipeStage] = []
    while True:
        s = int(cut[i, j, left])
        start, replicas = (i, left) if s < 0 else (s + 1, int(share[i, j, left]))
        stages.append(PipeStage(start, j + 1, replicas, _stages(tables[:-1], start, j)))
        if s < 0:
            return tuple(reversed(stages))
        j, left = s, left - replicas
