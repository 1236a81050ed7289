"""Mirrors of a session's variables: copies in other processes that take over when a worker is lost.

    partition   ─→ each variable gets a mirror, which changes with the same commit
    take_over   ─→ mirrors become the variables, and their workers take the part of the lost one
    replace_all ─→ parts without mirrors get new ones, on a new worker or on one that is left
    even_out    ─→ a part goes to the worker that mirrors it, if that has less to do

The session's plans stay those of the whole cluster, so that bits, pins and strategies stay as they
are. A device of the plan stands for a part of the work. Which device holds the part is looked up
when a graph is partitioned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from graphflow.base.process.interrupts import defer_signals
from graphflow.errors import StateLost
from graphflow.execution.compiled_fetches import CompiledFetches, worker_of
from graphflow.execution.variable_store import VariableStore
from graphflow.init import zeros
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import REGISTRY, Node
from graphflow.placement.clusters.cluster import Cluster
from graphflow.planning.mirrors.mirror_devices import choose_mirror_device
from graphflow.planning.mirrors.mirror_graph import MirroredGraph, add_mirrors
from graphflow.runtime.checkpoint.manifest import list_some
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.host.host_variables import MIRROR
from graphflow.runtime.partitioning.partition import Partition, partition
from graphflow.strategy import VariableShards


class Mirrors:
    """The mirrors of one session.

    Args:
        is_active: variables have mirrors; else from when a strategy asks for them.

    Attributes:
        state: the session's variables.
        cluster: the cluster, with workers that were lost and those that joined.
        lost: the workers that were lost.
    """

    def __init__(
        self, cluster: Cluster, hosts: Hosts, state: VariableStore, *, is_active: bool
    ) -> None:
        self.is_active = is_active
        self._hosts = hosts
        self.state = state
        self.restart(cluster)

    def restart(self, cluster: Cluster) -> None:
        """Begin anew on a cluster none of whose workers is lost."""
        self.cluster = cluster
        self.lost: set[int] = set()
        self._parts = cluster.devices
        self._mirror_devices: dict[str, str] = {}  # of each part that has one
        self.state.holders.clear()
        self.replace_all()

    def change_cluster(self, cluster: Cluster) -> None:
        """Take in workers that have joined, and leave out those that have left."""
        self.cluster = cluster
        kept = [part for part in self._parts if worker_of(part) not in cluster.left]
        self._parts = tuple(dict.fromkeys([*kept, *cluster.devices]))
        away = {*cluster.left} | self.lost
        self._mirror_devices = {
            part: place
            for part, place in self._mirror_devices.items()
            if part in self._parts and worker_of(place) not in away
        }
        self._drop_unmirrored()
        self.replace_all()

    # Placing --------------------------------------------------------------------------------------

    def holder(self, part: str) -> str:
        """Return the device that holds a part of the plan."""
        return self.state.holders.get(part, part)

    @property
    def devices(self) -> list[str]:
        """The devices that were not lost."""
        return [d for d in self.cluster.devices if worker_of(d) not in self.lost]

    def partition(
        self,
        compiled: CompiledFetches,
        order: Sequence[Node] | None,
        names: Mapping[Node, str],
        bindings: Mapping[str, int],
    ) -> dict[str, Partition]:
        """Cut placed fetches, with the mirrors of their variables, for the workers that are left.

        Args:
            names: names of the variables on their workers.
        """
        found = self._add(compiled, compiled.graph.nodes if order is None else order, bindings)
        compiled.mirror_homes = {v: found.devices[mirror] for v, mirror in found.mirrors.items()}
        compiled.mirror_reads, compiled.sent_to_mirrors = found.reads, found.sent
        known = {**names, **{mirror: MIRROR + names[v] for v, mirror in found.mirrors.items()}}
        return partition(
            found.graph, found.devices, found.order, known, self.devices, self._resolve_pin
        )

    def _add(
        self, compiled: CompiledFetches, order: Sequence[Node], bindings: Mapping[str, int]
    ) -> MirroredGraph:
        """Return the placed graph of fetches with the mirrors of its variables."""
        state = self.state
        devices = {node: self.holder(part) for node, part in compiled.devices.items()}
        divided = {} if compiled.division is None else compiled.division.variables
        shards = _by_shard({**divided, **state.shards})
        mirrors, places = {}, {}
        for variable in compiled.graph.variables:
            place = self._mirror_devices.get(compiled.devices[variable])
            if place is not None and _find_twin(variable, place, shards, devices) is None:
                is_new = not state.is_placed(variable)
                mirrors[variable] = make_mirror(variable, place, is_new=is_new)
                places[variable] = place
        return add_mirrors(compiled.graph, devices, order, mirrors, places, bindings)

    def _resolve_pin(self, pin: DeviceName) -> DeviceName:
        """Return a pin for the workers that are left."""
        pin = self.cluster.pinned(pin)
        for part, device in self.state.holders.items():
            if pin.worker == worker_of(part):
                now = DeviceName.parse(device)
                return DeviceName(now.worker, pin.kind, None if pin.index is None else now.index)
        return pin

    # Losses ---------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Let mirrors take the place of the variables that lost workers held.

        The workers must have no programs that use them.

        Raises:
            StateLost: both copies of a variable are gone.
            WorkerLost: a further worker was lost meanwhile; the call can be repeated.
        """
        state = self.state
        lost = {w for w in self._hosts.lost_workers() if self._is_member(w)}
        if lost == self.lost:
            return
        moved: dict[int, list[Node]] = {}
        copied: dict[int, dict[Node, Node]] = {}
        gone = []
        shards, homes = _by_shard(state.shards), self._present_homes()
        for node, home in homes.items():
            if worker_of(home) not in lost:
                continue
            place = self._mirror_devices.get(state.homes[node])
            twin = None if place is None else _find_twin(node, place, shards, homes)
            if place is None or worker_of(place) in lost:
                gone.append(state.names[node])
            elif twin is not None:
                copied.setdefault(worker_of(place), {})[node] = twin
            elif node in state.mirrors.current:
                moved.setdefault(worker_of(place), []).append(node)
            else:
                gone.append(state.names[node])
        if gone or all(worker_of(device) in lost for device in self.cluster.devices):
            raise StateLost(_lost_text(lost, gone))
        names = state.names
        for worker in sorted({*moved, *copied}):
            self._hosts.adopt(
                worker,
                {names[node]: MIRROR + names[node] for node in moved.get(worker, ())},
                {names[node]: names[twin] for node, twin in copied.get(worker, {}).items()},
            )
        with defer_signals():
            self._move_parts(lost)
            self._drop_unmirrored()

    def _is_member(self, worker: int) -> bool:
        """Return True unless a worker has left the session, or never got a part."""
        return worker < len(self.cluster.workers) and worker not in self.cluster.left

    def _move_parts(self, lost: set[int]) -> None:
        """Note who holds the parts of lost workers, and which parts have no mirrors any more."""
        self.lost = set(lost)
        for part in self._parts:
            place = self._mirror_devices.get(part)
            if worker_of(self.holder(part)) in lost:
                has_mirror = place is not None and worker_of(place) not in lost
                self.state.holders[part] = place if has_mirror and place else self.devices[0]
                self._mirror_devices.pop(part, None)
            elif place is not None and worker_of(place) in lost:
                del self._mirror_devices[part]

    def _drop_unmirrored(self) -> None:
        """Drop the mirrors of variables whose parts have none any more."""
        for node in [*self.state.mirrors.homes]:
            if self.state.homes[node] not in self._mirror_devices:
                self.state.mirrors.drop(node)

    def _present_homes(self) -> dict[Node, str]:
        """Return the devices that hold the variables."""
        return {node: self.holder(part) for node, part in self.state.placed_homes().items()}

    def find_single_copies(self) -> list[Node]:
        """Return the variables of which a single worker has the present value."""
        shards, homes = _by_shard(self.state.shards), self._present_homes()
        return [
            node
            for node in homes
            if node not in self.state.mirrors.current
            and (
                (place := self._mirror_devices.get(self.state.homes[node])) is None
                or _find_twin(node, place, shards, homes) is None
            )
        ]

    # New mirrors ----------------------------------------------------------------------------------

    def add_worker(self, lost: int, number: int) -> None:
        """Note that a worker has joined the session in place of a lost one, with its devices."""
        before, workers = self.cluster.workers[lost], [*self.cluster.workers]
        if before.address is not None:  # two workers of a cluster have no common address
            workers[lost] = replace(before, address=f"tcp://worker-{lost}.invalid:1")
        cluster = replace(self.cluster, workers=tuple(workers))
        self.cluster = cluster.join(number, before, before.address, before.key)

    @property
    def lacks_mirrors(self) -> bool:
        """True if a part could have mirrors, and has none."""
        return len(self._mirror_devices) < len(self._parts) and any(
            choose_mirror_device(self.cluster, self.holder(part), self.lost, Counter()) is not None
            for part in self._parts
            if part not in self._mirror_devices
        )

    def replace_all(self) -> None:
        """Choose devices for the mirrors of parts that have none.

        The caller then sends all programs again.
        """
        loads = Counter(map(self.holder, self._parts)) + Counter(self._mirror_devices.values())
        for part in self._parts:
            if part not in self._mirror_devices:
                place = choose_mirror_device(self.cluster, self.holder(part), self.lost, loads)
                if place is not None:
                    self._mirror_devices[part] = place
                    loads[place] += 1

    def find_uneven_part(self) -> str | None:
        """Return a part whose holder has more parts than the device that mirrors it; else None."""
        loads = Counter(map(self.holder, self._parts))
        for part, place in self._mirror_devices.items():
            if part != self.holder(part) and loads[self.holder(part)] > loads[place] + 1:
                return part
        return None

    def even_out(self, part: str) -> None:
        """Let a part's mirrors become its variables, and these the mirrors.

        The workers must have no programs that use them, and all of the part's mirrors be right.
        """
        state, names = self.state, self.state.names
        holder, place = self.holder(part), self._mirror_devices[part]
        nodes = [n for n in state.mirrors.homes if state.homes[n] == part]
        with defer_signals():
            self._hosts.adopt(worker_of(place), {names[n]: MIRROR + names[n] for n in nodes}, {})
            self._hosts.adopt(worker_of(holder), {MIRROR + names[n]: names[n] for n in nodes}, {})
            state.holders[part], self._mirror_devices[part] = place, holder
            state.mirrors.homes.update(dict.fromkeys(nodes, holder))
            shards, homes = _by_shard(state.shards), self._present_homes()
            spare = [n for n in nodes if _find_twin(n, holder, shards, homes) is not None]
            for node in spare:
                state.mirrors.drop(node)
        self._hosts.forget([], {worker_of(holder): [MIRROR + names[n] for n in spare]})


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


def _by_shard(divided: Mapping[Node, VariableShards]) -> dict[Node, VariableShards]:
    """Return the shards of the variable that each shard is a part of."""
    return {node: pieces for pieces in divided.values() for node in pieces.nodes}


def _find_twin(
    variable: Node,
    place: str,
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


def _lost_text(lost: Collection[int], gone: Sequence[str]) -> str:
    names = ", ".join(f"worker {worker}" for worker in sorted(lost))
    if not gone:
        return f"the session lost {names}, and no other is left"
    return (
        f"the session lost {names}, and with {'it' if len(lost) == 1 else 'them'} both copies of "
        f"{list_some(gone)}: no mirror is left that has the value of the last commit"
    )
