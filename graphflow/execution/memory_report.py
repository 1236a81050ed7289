"""Reports of the memory that a step takes on each device: predicted by kind of use, and
recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphflow.base.formatting import show_bytes
from graphflow.base.lazy_dataclass import dataclass
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.worker_devices import threads_by_device
from graphflow.placement.plans.reports.tables import TextTable
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.memory.memory_use import MemoryUse, memory_use


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device, in bytes.

    Attributes:
        use: predicted bytes by kind: arena (values of the step), variables, constants, feeds,
            arrivals from other devices, layouts of weights that kernels keep, scratch memory of
            kernels, and the largest workspace of a kernel.
        recorded: the peak of traced steps; None before a step ran inside `s.trace`. Workspaces
            are measured only with `s.trace(memory=True)`, otherwise predicted.
        limit: the memory of the device.
    """

    device: str
    use: MemoryUse
    recorded: int | None
    limit: int

    @property
    def predicted(self) -> int:
        """Predicted peak, in bytes."""
        return self.use.peak


class MemoryReport(Mapping[str, DeviceMemory]):
    """`DeviceMemory` by device name. Print it for a table."""

    def __init__(self, devices: Mapping[str, DeviceMemory]) -> None:
        self._devices = dict(devices)

    def __getitem__(self, name: str) -> DeviceMemory:
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def table(self) -> TextTable:
        """Return a table with a row for each device."""
        heads = (
            "device", "predicted", "recorded", "of", "arena", "variables", "constants", "feeds",
            "arrivals", "layouts", "scratch", "workspace",
        )  # fmt: skip
        rows = [
            (
                name, show_bytes(each.predicted),
                "–" if each.recorded is None else show_bytes(each.recorded),
                show_bytes(each.limit), show_bytes(each.use.arena),
                show_bytes(each.use.variables), show_bytes(each.use.constants),
                show_bytes(each.use.feeds), show_bytes(each.use.recvs),
                show_bytes(each.use.layouts), show_bytes(each.use.scratch),
                show_bytes(each.use.workspace),
            )
            for name, each in self._devices.items()
        ]  # fmt: skip
        return TextTable("", heads, tuple(rows))

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table().html()


def memory_report(compiled: CompiledFetches, cluster: Cluster) -> MemoryReport:
    """Report the memory of fetches on their devices, for the sizes for which they were placed."""
    bindings = compiled.bindings(compiled.sizes)
    threads = threads_by_device(cluster.present_workers)
    measured = compiled.measured.peak_memory if compiled.measured is not None else {}
    return MemoryReport(
        {
            name: DeviceMemory(
                name,
                memory_use(part, plan_layout(part, bindings), bindings, threads[name]),
                measured.get(name),
                cluster.device(name).memory,
            )
            for name, part in compiled.partitions.items()
        }
    )
