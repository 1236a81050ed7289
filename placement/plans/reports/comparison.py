"""Plans side by side: a column for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.formatting import show_bytes, show_count, show_interval
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlanError
from graphflow.placement.plans.plan_data import PlanData
from graphflow.placement.plans.reports.report import Report, report
from graphflow.placement.plans.reports.tables import TextTable, seconds_cell


@dataclass(frozen=True)
class Comparison:
    """Plans side by side; print it, or show it in a notebook.

    Args:
        names: of the plans, in the order given.
    """

    names: tuple[str, ...]
    plans: tuple[PlanData, ...]

    @property
    def best(self) -> str:
        """Name of the plan with the shortest predicted step."""
        return min(zip(self.names, self.plans, strict=True), key=lambda pair: pair[1].makespan)[0]

    def table(self) -> TextTable:
        """A column for each plan."""
        reports = [report(plan) for plan in self.plans]
        first = self.plans[0].makespan
        rows: list[tuple[str, ...]] = [
            ("devices", *(summary(plan) for plan in self.plans)),
            ("placer", *(plan.placer for plan in self.plans)),
            (
                "predicted step",
                *(show_interval(plan.makespan, plan.low, plan.high) for plan in self.plans),
            ),
            ("speed-up", *(_ratio(first, plan.makespan) for plan in self.plans)),
        ]
        if any(plan.measured is not None for plan in self.plans):
            rows.append(("measured step", *(seconds_cell(each.measured) for each in reports)))
        rows += [
            ("devices used", *(str(sum(use.busy > 0 for use in r.devices)) for r in reports)),
            ("idle", *(f"{100 * each.idle:.0f} %" for each in reports)),
            ("transfers", *(str(sum(t.transfers for t in p.moved)) for p in self.plans)),
            ("bytes moved", *(show_bytes(sum(t.bytes for t in p.moved)) for p in self.plans)),
            (
                "peak memory",
                *(show_bytes(max(p.peak_memory.values(), default=0)) for p in self.plans),
            ),
            ("critical path: computing", *(_path_share(each, "computing") for each in reports)),
            ("critical path: moving", *(_path_share(each, "moving") for each in reports)),
        ]
        return TextTable(show_count(len(self.plans), "plan"), ("", *self.names), tuple(rows))

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


@checks_argument_names(PlanError)
def compare(plans: Mapping[str, PlanData] | Sequence[PlanData]) -> Comparison:
    """Plans side by side: predicted steps, idle shares, traffic, memory, what the step waits for.

    Args:
        plans: by name, or a list, which are called plan 1, plan 2, …

    Raises:
        PlanError: no plans, or something else among them.
    """
    if isinstance(plans, Mapping):
        named = {str(name): plan for name, plan in plans.items()}
    elif isinstance(plans, list | tuple):
        named = {f"plan {i}": plan for i, plan in enumerate(plans, start=1)}
    else:
        raise PlanError(f"compare takes a list of plans, or a dict of them by name, not {plans!r}")
    if not named:
        raise PlanError("compare needs at least one plan")
    for name, plan in named.items():
        if not isinstance(plan, PlanData):
            raise PlanError(f"{name} is no gf.Plan: {plan!r}")
    return Comparison(tuple(named), tuple(named.values()))


def summary(plan: PlanData) -> str:
    """Summarise the devices of a plan's cluster: "16 × h100-sxm"."""
    counts: dict[str, int] = {}
    for worker in plan.cluster.present_workers:
        for device in worker.devices:
            kind = device.product or device.kind
            counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} × {kind}" for kind, count in counts.items())


def _ratio(first: float, other: float) -> str:
    return f"{first / other:.2f}×" if other else "–"


def _path_share(made: Report, kind: str) -> str:
    took = sum(each.finish - each.start for each in made.critical_path if each.kind == kind)
    return f"{100 * took / made.makespan:.0f} %" if made.makespan else "–"
