"""What a step takes of each device's memory: predicted, part by part, and recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphflow.base.formatting import show_bytes
from graphflow.base.lazy_dataclass import dataclass
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.tables import TextTable
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.memory.memory_use import MemoryUse, memory_use


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device.

    Attributes:
        use: what they are for: arena (values of the step), variables, constants, feeds, arrivals
            from other devices, and the most that a kernel takes for itself.
        recorded: the most that traced steps took; None before a step ran inside `s.trace`. In
            `s.trace(memory=True)`, what kernels take is counted; else it is the predicted figure.
        limit: what the device has.
    """

    device: str
    use: MemoryUse
    recorded: int | None
    limit: int

    @property
    def predicted(self) -> int:
        """The most in use at once."""
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
        """A row for each device."""
        heads = (
            "device", "predicted", "recorded", "of", "arena", "variables", "constants", "feeds",
            "arrivals", "workspace",
        )  # fmt: skip
        rows = [
            (
                name, show_bytes(each.predicted),
                "–" if each.recorded is None else show_bytes(each.recorded),
                show_bytes(each.limit), show_bytes(each.use.arena),
                show_bytes(each.use.variables), show_bytes(each.use.constants),
                show_bytes(each.use.feeds), show_bytes(each.use.recvs),
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
    """What fetches take on the devices where they are placed, for the sizes that they were placed
    for."""
    bindings = compiled.bindings(compiled.sizes)
    measured = compiled.measured.peak_memory if compiled.measured is not None else {}
    return MemoryReport(
        {
            name: DeviceMemory(
                name,
                memory_use(part, plan_layout(part, bindings)),
                measured.get(name),
                cluster.device(name).memory,
            )
            for name, part in compiled.partitions.items()
        }
    )
