"""Metrics of a session: serve them over HTTP, and count the steps of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphflow.base.environment import setting
from graphflow.execution.cached_step import CachedStep
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.step_executor import StepExecutor
from graphflow.ir.op import Node
from graphflow.runtime.host.host_interface import Hosts, LocalHosts
from graphflow.runtime.telemetry.metrics import watch_process

if TYPE_CHECKING:
    from graphflow.runtime.telemetry.metrics_endpoint import MetricsServer

T = TypeVar("T", bound="list[Any] | None")


class MeteredStepExecutor(StepExecutor):
    """Runs the steps of a session, keeps what the last one returned, and counts those of this
    process.

    Steps over workers are counted by their hosts.
    """

    def run_cached(
        self, compiled: CompiledFetches, cached: CachedStep, feeds: Any
    ) -> list[Any] | None:
        return self._meter(super().run_cached, compiled, cached, feeds)

    def run(
        self,
        compiled: CompiledFetches,
        arrays: Mapping[Node, np.ndarray[Any, Any]],
        bindings: dict[str, int],
    ) -> list[Any]:
        return self._meter(super().run, compiled, arrays, bindings)

    def finish(
        self,
        begun: Any,
        compiled: CompiledFetches,
        arrays: Mapping[Node, np.ndarray[Any, Any]],
    ) -> list[Any]:
        self.latest = values = super().finish(begun, compiled, arrays)
        return values

    def _meter(self, run: Callable[..., T], *args: Any) -> T:
        """Run a step; note its values, and count it if it ran (a cached step may not fit)."""
        start = perf_counter()
        try:
            values = run(*args)
        except BaseException:
            self._count("aborted")
            raise
        if values is not None:
            self.latest = values
            self._count("committed", perf_counter() - start)
        return values

    def _count(self, outcome: str, seconds: float | None = None) -> None:
        if not isinstance(self._hosts, LocalHosts):
            return
        self._hosts.meters.add("graphflow_steps_total", 1, outcome)
        if seconds is not None:
            self._hosts.meters.observe("graphflow_step_seconds", seconds)


def serve_metrics(address: str | None, hosts: Hosts) -> MetricsServer | None:
    """Serve the counters of hosts at an address, or at `$GRAPHFLOW_METRICS`; None without either.

    Raises:
        ArgumentError, InsecureAddress, AddressInUse, TransportError: as `MetricsServer`.
    """
    if address is None:
        address = setting("GRAPHFLOW_METRICS")
    if address is None:
        return None
    from graphflow.runtime.telemetry.metrics_endpoint import MetricsServer

    where = "this process" if isinstance(hosts, LocalHosts) else "over workers"
    watch_process(hosts.meters, "session", where)
    return MetricsServer(address, hosts.meters)


def make_step_executor(
    hosts: Hosts, deadline: float, sampling: bool, is_metered: bool
) -> StepExecutor:
    """Return the step executor of a session; it counts steps if the session serves metrics."""
    kind = MeteredStepExecutor if is_metered else StepExecutor
    return kind(hosts, deadline, sampling)
