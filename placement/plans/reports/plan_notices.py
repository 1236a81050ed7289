"""Notices of a plan: ports that transfers shared, and constraints that took choices away.

PlanData ─ports→ [PortUse, …];  PlanData ─taken→ [Taken, …]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.clusters.port_routes import port_users

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import PlannedNode

BESIDE = "beside its variable"
"""How the reasons of what lives with a variable begin; see `explain.reason`."""


@dataclass(frozen=True)
class PortUse:
    """The traffic of a port that several pairs of devices share: a network card, a switch.

    Args:
        way: "out", "in", or "" for a port that both ways share.
        transfers, bytes: in a step.
        bandwidth: bytes/s.
        busy: seconds of a step in which something is on its way through it.
        used: share of what it could carry in a step.
    """

    name: str
    way: str
    transfers: int
    bytes: int
    bandwidth: float
    busy: float
    used: float

    @property
    def title(self) -> str:
        """ "worker:0 nic, out" """
        return f"{self.name}, {self.way}" if self.way else self.name


def ports(plan: PlanData) -> tuple[PortUse, ...]:
    """The ports that transfers of a plan go through, most bytes first."""
    if not plan.cluster.ports or not plan.transfers:
        return ()
    index = {name: i for i, name in enumerate(plan.cluster.devices)}
    rows: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    for row in plan.transfers:
        if row.source in index and row.target in index:
            way = (index[row.source], index[row.target])
            rows.setdefault(way, []).append((row.start, row.finish, row.bytes))
    users, width = port_users(plan.cluster)
    found = []
    for (name, direction), pairs in users.items():
        mine = sorted(each for pair in pairs if pair in rows for each in rows[pair])
        if len(pairs) < 2 or not mine:  # what one pair has alone is its link
            continue
        moved, bandwidth = sum(size for _, _, size in mine), width[name, direction]
        room = bandwidth * plan.makespan
        found.append(
            PortUse(
                name, direction, len(mine), moved, bandwidth, _covered_seconds(mine),
                moved / room if room > 0 else 0.0,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda use: (-use.bytes, use.name, use.way)))


def _covered_seconds(rows: list[tuple[float, float, int]]) -> float:
    """Seconds that sorted intervals cover."""
    seconds, end = 0.0, 0.0
    for start, finish, _ in rows:
        seconds += max(0.0, finish - max(start, end))
        end = max(end, finish)
    return seconds


@dataclass(frozen=True)
class Constraint:
    """A constraint, or a fallback, that left nodes fewer devices than there are.

    Args:
        why: "pinned by gf.device('/worker:1')".
        nodes: their number; 0 where it is about the plan as a whole.
        example: the name of one, and its line.
    """

    why: str
    nodes: int
    example: str


def constraints(plan: PlanData) -> tuple[Constraint, ...]:
    """Everything that took choices away from a plan, what concerns most nodes first."""
    devices = len(plan.cluster.devices)
    found: dict[str, list[PlannedNode]] = {}
    for node in plan.nodes if devices > 1 else ():
        why = _why(plan, node)
        if why:
            found.setdefault(why, []).append(node)
    rows = [
        Constraint(why, len(nodes), f"{nodes[0].name} ({nodes[0].location})")
        for why, nodes in sorted(found.items(), key=lambda item: -len(item[1]))
    ]
    for name in (*(f"one device: {each}" for each in plan.cluster.devices), "round robin"):
        if plan.baselines and name not in plan.baselines:
            rows.append(Constraint(f"{name} does not fit in memory", 0, ""))
    if not plan.reproducible:
        rows.append(Constraint("a clock ended the search; planning again may differ", 0, ""))
    return tuple(rows)


def _why(plan: PlanData, node: PlannedNode) -> str:
    if node.device == CLIENT:
        return ""
    if plan.model is not None and node.name in plan.model.limits:
        return plan.model.limits[node.name]
    if node.why.startswith(BESIDE):
        return "lives with its variable"
    if node.why.startswith(("pinned by", "lives here already", "with what it must live with")):
        return node.why
    return node.why if " has a kernel for " in node.why else ""
