"""Workers as actors of a Ray cluster: Ray places them, the session decides who is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from graphflow.errors import LaunchError
from graphflow.runtime.launch.engines.worker_holder import HolderReport, WorkerHolder
from graphflow.runtime.launch.worker_launcher import ENDED, RUNNING, WAITING, LaunchedWorker

_END_SECONDS = 6.0


@dataclass
class _RayActor:
    """A worker's actor, the call that is on its way to it, and the last report."""

    actor: Any
    call: Any
    report: HolderReport | None = None
    error: str = ""


class Ray:
    """Starts workers as Ray actors in a placement group, one bundle a worker.

    Ray does not restart them: a session that loses one asks for another, which Ray places. This
    process joins the Ray cluster, unless it has already.

    Args:
        cpus, gpus: of each worker.
        resources: further resources of each worker, by name.
        address: of the Ray cluster, as of `ray.init`; default: `RAY_ADDRESS`, else a new local one.
        strategy: of the placement group: "SPREAD", "PACK", "STRICT_SPREAD" or "STRICT_PACK".
        listen: where workers listen on their node; default: the address by which Ray knows it.
    """

    def __init__(
        self,
        *,
        cpus: float = 1,
        gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        address: str | None = None,
        strategy: str = "SPREAD",
        listen: str = "",
    ) -> None:
        self._bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **(resources or {})}
        self._address, self._strategy, self._listen = address, strategy, listen
        self._held: list[_RayActor] = []
        self._group: Any = None
        self._joined = False  # by us
        self._options: Sequence[str] = ()
        self._env: Mapping[str, str] = {}

    def start(self, count: int, options: Sequence[str], env: Mapping[str, str]) -> None:
        ray = _import_ray()
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise LaunchError(f"Ray: no cluster can be joined: {error}") from error
            self._joined = True
        self._options, self._env = options, env
        self._group = ray.util.placement_group([self._bundle] * count, strategy=self._strategy)
        self._held = [self._hold(index) for index in range(count)]

    def _hold(self, index: int) -> _RayActor:
        """Ask Ray for an actor in a worker's bundle."""
        ray = _import_ray()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        holder = ray.remote(WorkerHolder).options(
            scheduling_strategy=strategy, max_restarts=0, num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            resources={k: v for k, v in self._bundle.items() if k not in ("CPU", "GPU")},
        )  # fmt: skip
        actor = holder.remote(self._listen, list(self._options), dict(self._env))
        return _RayActor(actor, actor.report.remote())

    def workers(self) -> list[LaunchedWorker]:
        return [self._describe(index, held) for index, held in enumerate(self._held)]

    def _describe(self, index: int, held: _RayActor) -> LaunchedWorker:
        ray = _import_ray()
        if not held.error and ray.wait([held.call], timeout=0)[0]:
            try:
                held.report = ray.get(held.call)
                held.call = held.actor.report.remote()
            except ray.exceptions.RayError as error:
                held.error = str(error).splitlines()[0]
        if held.error:
            return LaunchedWorker(index, None, ENDED, f"an actor of Ray: {held.error}")
        if held.report is None:
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
            free = ray.available_resources()
            has = ", ".join(f"{free.get(name, 0):g} {name}" for name in self._bundle)
            return LaunchedWorker(
                index, None, WAITING, f"waits in Ray for {wanted}; {has} are free there"
            )
        told, status, log = held.report
        state = ENDED if status is not None else WAITING if told is None else RUNNING
        where = f"{told.host}, an actor of Ray" if told is not None else "an actor of Ray"
        return LaunchedWorker(index, told, state, where, log)

    def restart(self, index: int) -> None:
        _import_ray().kill(self._held[index].actor, no_restart=True)
        self._held[index] = self._hold(index)

    def stop(self) -> None:
        if not self._held and self._group is None:
            return
        ray = _import_ray()
        with suppress(ray.exceptions.RayError):
            ends = [held.actor.end.remote() for held in self._held if held.report is not None]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
            for held in self._held:
                ray.kill(held.actor, no_restart=True)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._held, self._group = [], None
        if self._joined:
            ray.shutdown()
            self._joined = False


def _import_ray() -> Any:
    """Return Ray.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise LaunchError(f"Ray is not installed: pip install 'graphflow[ray]' ({error})") from None
    return ray
