"""Sweeps over hypothetical clusters: one graph planned for many clusters, and where more of them
no longer pays.

fetches + clusters ─plan each→ Sweep ─→ table, speed-up curves (SVG, HTML)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.interrupts import passes_interrupts
from graphflow.errors import GraphflowError, PlanError
from graphflow.ir.op import Tensor
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers import Placer
from graphflow.placement.plans.building.plan_fetches import plan
from graphflow.placement.plans.reports.sweep_data import Curve, Point, SweepData, number
from graphflow.placement.view.curves import draw, page

Maker = Callable[[Any], Cluster]


@dataclass(frozen=True)
class Sweep(SweepData):
    """Speed-ups of one graph over clusters: print it, save it, or show it in a notebook.

    Args:
        curves: one for each family of clusters.
        label: of x. worth: see `Curve.pays_until`.
    """

    def svg(self) -> str:
        """The speed-up curves as one SVG document, with a ring where more no longer pays."""
        return draw(self)

    def _repr_html_(self) -> str:
        return self.svg() + "".join(table.html() for table in self.tables())

    @passes_interrupts
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the curves: .svg, or .html with the tables.

        Raises:
            PlanError: another suffix, or a folder that cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise PlanError(f"a sweep is saved in a file: give its path, not {path!r}")
        target = Path(path)
        if target.suffix not in (".svg", ".html"):
            raise PlanError(
                f"a sweep is saved as .svg or .html, not {target.suffix or 'no suffix'!r}: {target}"
            )
        text = self.svg() if target.suffix == ".svg" else page(self)
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot write the sweep to {target}: {error.strerror}") from None
        return target


@checks_arguments(PlanError)
@passes_interrupts
def sweep(
    fetches: Any,
    clusters: Maker | Mapping[str, Maker] | Sequence[Cluster],
    over: Sequence[float] | None = None,
    *,
    shapes: Mapping[Tensor, Sequence[int]] | None = None,
    placer: str | Placer = "greedy",
    label: str | None = None,
    worth: float = 0.25,
) -> Sweep:
    """Plan a graph for many clusters, and find where more no longer pays.

    `sweep(loss, lambda n: gf.Cluster.hypothetical(f"{n}xh100"), over=[1, 2, 4, 8])` goes over
    counts; a function of bytes/s goes over bandwidths; a dict of functions draws a curve for each.

    Args:
        fetches, shapes, placer: as `gf.plan` takes them.
        clusters: a function of a number, several by name, or the clusters themselves.
        over: the numbers, above 0; for clusters themselves default: how many devices they have.
        label: of the numbers, for the axis. Default: "devices" for lists, else "x".
        worth: what more must bring to pay: the speed it adds, as a share of what is added to x.

    Raises:
        PlanError: no points, a number that is not above 0 or there twice, or something else than
            clusters.
    """
    if not isinstance(worth, int | float) or not 0 <= worth <= 1:
        raise PlanError(f"worth must lie between 0 and 1, not {worth!r}")
    families, xs = _families(clusters, over)
    name = label or ("devices" if isinstance(clusters, list | tuple) and over is None else "x")
    curves = []
    for title, maker in families.items():
        points = []
        for x in xs:
            cluster = maker(x)
            if not isinstance(cluster, Cluster):
                raise PlanError(f"{title} at {number(x)} gives {cluster!r}, not a gf.Cluster")
            try:
                made = plan(fetches, cluster, shapes=shapes, placer=placer)
            except GraphflowError as error:
                raise type(error)(f"{title} at {number(x)}: {error}") from error
            points.append(Point(float(x), made))
        curves.append(Curve(title, tuple(points)))
    found = Sweep(tuple(curves), name, float(worth))
    if label is None and name == "x" and found.counts_devices:
        return Sweep(found.curves, "machines", found.worth)
    return found


def _families(clusters: Any, over: Any) -> tuple[dict[str, Maker], list[Any]]:
    """Functions of a number by name, and the numbers in rising order."""
    if isinstance(clusters, list | tuple):
        for cluster in clusters:
            if not isinstance(cluster, Cluster):
                raise PlanError(f"{cluster!r} is no gf.Cluster")
        xs = [len(cluster.devices) for cluster in clusters] if over is None else list(over)
        if len(xs) != len(clusters):
            raise PlanError(f"{len(clusters)} clusters over {len(xs)} numbers: give one for each")
        numbers = _numbers(xs)
        return {"plans": dict(zip(xs, clusters, strict=True)).__getitem__}, numbers
    if over is None:
        raise PlanError("a sweep of a function of a number needs over=[…]")
    if callable(clusters):
        return {"plans": clusters}, _numbers(over)
    if isinstance(clusters, Mapping) and clusters and all(map(callable, clusters.values())):
        return {str(name): maker for name, maker in clusters.items()}, _numbers(over)
    raise PlanError(
        "a sweep goes over a function of a number, a dict of such functions, or a list of "
        f"clusters, not {clusters!r}"
    )


def _numbers(over: Any) -> list[Any]:
    xs = list(over) if isinstance(over, Iterable) and not isinstance(over, str | bytes) else []
    if not xs:
        raise PlanError(f"a sweep needs numbers to go over, not {over!r}")
    for x in xs:
        plain = isinstance(x, int | float) and not isinstance(x, bool)
        if not plain or not 0 < x < math.inf:
            raise PlanError(f"a sweep goes over finite numbers above 0, not {x!r}")
    if len(set(xs)) < len(xs):
        raise PlanError(f"a sweep goes over each number once; got {xs}")
    return sorted(xs)
