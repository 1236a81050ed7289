"""Mirrors of a session's variables: copies in other processes that take over when a worker is lost.

    partition       ─→ each variable gets a mirror, which changes with the same commit
    take_over       ─→ mirrors become the variables, and their workers take the part of the lost one
    replace_mirrors ─→ variables without a mirror get a new one, on a worker that is left

The session's plans stay those of the whole cluster. A device of a lost worker is replaced by its
stand-in when a graph is partitioned, so that bits, pins and strategies stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.errors import StateLost, WorkerLost
from graphflow.execution.compiled_fetches import CompiledFetches, worker_of
from graphflow.execution.variable_store import VariableStore
from graphflow.init import zeros
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import REGISTRY, Node
from graphflow.placement.clusters.cluster import Cluster
from graphflow.planning.mirror_devices import choose_mirror_devices
from graphflow.planning.mirror_graph import MirroredGraph, add_mirrors
from graphflow.runtime.checkpoint.manifest import list_some
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.host.session_state import MIRROR
from graphflow.runtime.partitioning.partition import Partition, partition
from graphflow.strategy import VariableShards


class Mirrors:
    """The mirrors of one session.

    Attributes:
        stand_ins: for each device of a lost worker, the device that has taken its part.
        adds_new: variables that have lost their mirrors get new ones when they are placed.
    """

    def __init__(self, cluster: Cluster, hosts: Hosts, state: VariableStore) -> None:
        self._hosts = hosts
        self._state = state
        self.restart(cluster)

    def restart(self, cluster: Cluster) -> None:
        """Begin anew on a cluster none of whose workers is lost."""
        self.stand_ins: dict[str, str] = {}
        self._cluster = cluster
        self._lost: set[int] = set()
        self._targets = choose_mirror_devices(cluster, ())
        self.adds_new = True

    # Placing --------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[str]:
        """The devices that were not lost."""
        return [device for device in self._cluster.devices if device not in self.stand_ins]

    def partition(
        self,
        compiled: CompiledFetches,
        order: Sequence[Node] | None,
        names: Mapping[Node, str],
        bindings: Mapping[str, int],
    ) -> dict[str, Partition]:
        """Cut placed fetches, with the mirrors of their variables, along their placement.

        Args:
            names: names of the variables on their workers.
        """
        compiled.devices = {
            node: self.stand_ins.get(device, device) for node, device in compiled.devices.items()
        }
        found = self._add(compiled, compiled.graph.nodes if order is None else order, bindings)
        compiled.mirror_homes = {v: found.devices[mirror] for v, mirror in found.mirrors.items()}
        compiled.mirror_reads, compiled.sent_to_mirrors = found.reads, found.sent
        known = {**names, **{mirror: MIRROR + names[v] for v, mirror in found.mirrors.items()}}
        return partition(
            found.graph, found.devices, found.order, known, self.devices, self._resolve_pin
        )

    def _resolve_pin(self, pin: DeviceName) -> DeviceName:
        """Return a pin for the workers that are left."""
        pin = self._cluster.pinned(pin)
        for lost, stand_in in self.stand_ins.items():
            if pin.worker == worker_of(lost):
                now = DeviceName.parse(stand_in)
                return DeviceName(now.worker, pin.kind, None if pin.index is None else now.index)
        return pin

    def _add(
        self, compiled: CompiledFetches, order: Sequence[Node], bindings: Mapping[str, int]
    ) -> MirroredGraph:
        """Return the placed graph of fetches with the mirrors of its variables."""
        state = self._state
        divided = {} if compiled.division is None else compiled.division.variables
        shards = _by_shard({**divided, **state.shards})
        mirrors, places = {}, {}
        for variable in compiled.graph.variables:
            home = compiled.devices[variable]
            place = state.mirror_homes.get(variable)
            is_new = not state.is_placed(variable)
            if place is None and (is_new or self.adds_new):
                place = self._targets.get(home)
            if place is not None and _find_twin(variable, place, shards, compiled.devices) is None:
                mirrors[variable] = make_mirror(variable, place, is_new=is_new)
                places[variable] = place
        return add_mirrors(compiled.graph, compiled.devices, order, mirrors, places, bindings)

    # Losses ---------------------------------------------------------------------------------------

    def take_over(self, error: WorkerLost) -> None:
        """Let mirrors take the place of the variables that lost workers held.

        The workers must have no programs that use them.

        Raises:
            StateLost: both copies of a variable are gone.
            WorkerLost: a further worker was lost meanwhile; the call can be repeated.
        """
        state, lost = self._state, self._hosts.lost_workers()
        if lost == self._lost:
            raise error
        shards = _by_shard(state.shards)
        moved: dict[int, dict[Node, str]] = {}
        copied: dict[int, dict[Node, Node]] = {}
        gone = []
        for node, home in state.placed_homes().items():
            if worker_of(home) not in lost:
                continue
            place = state.mirror_homes.get(node)
            twin = _find_twin(node, self._targets.get(home), shards, state.homes)
            if node in state.mirrored and place is not None and worker_of(place) not in lost:
                moved.setdefault(worker_of(place), {})[node] = place
            elif twin is not None and worker_of(state.homes[twin]) not in lost:
                copied.setdefault(worker_of(state.homes[twin]), {})[node] = twin
            else:
                gone.append(state.names[node])
        if gone:
            raise StateLost(_lost_text(lost, gone, len(self._cluster.workers)))
        for worker in sorted({*moved, *copied}):
            here, copies = moved.get(worker, {}), copied.get(worker, {})
            names = state.names
            self._hosts.adopt(
                worker,
                {names[node]: MIRROR + names[node] for node in here},
                {names[node]: names[twin] for node, twin in copies.items()},
            )
            state.take_mirrors({**here, **{n: state.homes[twin] for n, twin in copies.items()}})
        state.drop_mirrors(lost)
        self._replace_devices(lost)

    def _replace_devices(self, lost: set[int]) -> None:
        """Choose stand-ins for the devices of lost workers, and mirrors' devices for the others."""
        fresh = choose_mirror_devices(self._cluster, lost)
        left = [d for d in self._cluster.devices if worker_of(d) not in lost]
        for device in self._cluster.devices:
            now = self.stand_ins.get(device, device)
            if worker_of(now) in lost:
                target = self._targets.get(now)
                self.stand_ins[device] = target if target in left else _nearest_kind(now, left)
        self._targets = {
            device: target if (target := self._targets[device]) in left else fresh[device]
            for device in left
            if device in fresh
        }
        self._lost, self.adds_new = set(lost), False

    def replace_mirrors(self) -> bool:
        """Let variables get mirrors where they lack one; return True if some do.

        The caller then sends all programs again.
        """
        state = self._state
        if self.adds_new:
            return False
        self.adds_new = True
        shards = _by_shard(state.shards)
        return any(
            node not in state.mirror_homes
            and (target := self._targets.get(home)) is not None
            and _find_twin(node, target, shards, state.homes) is None
            for node, home in state.placed_homes().items()
        )


def _by_shard(divided: Mapping[Node, VariableShards]) -> dict[Node, VariableShards]:
    """Return the shards of the variable that each shard is a part of."""
    return {node: pieces for pieces in divided.values() for node in pieces.nodes}


def _find_twin(
    variable: Node,
    place: str | None,
    shards: Mapping[Node, VariableShards],
    homes: Mapping[Node, str],
) -> Node | None:
    """Return a variable on a device that always has the same value; None if there is none.

    A strategy keeps such copies of what it does not divide.
    """
    pieces = shards.get(variable)
    if pieces is None or pieces.independent:
        return None
    spans = dict(zip(pieces.nodes, pieces.spans, strict=True))
    for twin, part in spans.items():
        if twin is not variable and part == spans[variable] and homes.get(twin) == place:
            return twin
    return None


def make_mirror(variable: Node, place: str, *, is_new: bool = False) -> Node:
    """Return the variable that mirrors another one.

    A new variable and its mirror begin with the same value. Others are copied later.
    """
    spec, attrs = variable.specs[0], dict(variable.attrs)
    if not is_new:
        attrs["initial"] = zeros(tuple(map(int, spec.shape)), spec.dtype)
    return Node(
        REGISTRY["variable"], (), attrs, variable.specs, name=variable.name,
        device=DeviceName.parse(place), location=variable.location,
    )  # fmt: skip


def _nearest_kind(device: str, left: Sequence[str]) -> str:
    """Return the first device that is left of the kind of another one, or the first of all."""
    kind = DeviceName.parse(device).kind
    return next((each for each in left if DeviceName.parse(each).kind == kind), left[0])


def _lost_text(lost: set[int], gone: Sequence[str], workers: int) -> str:
    names = ", ".join(f"worker {worker}" for worker in sorted(lost))
    return (
        f"{len(lost)} of {workers} workers are lost ({names}), and with them both copies of "
        f"{list_some(gone)}: no mirror is left that has the value of the last commit"
    )
