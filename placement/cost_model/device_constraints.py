"""Device constraints of nodes: pins, the kernels of ops, and the homes of variables."""

from __future__ import annotations

from collections.abc import Mapping

from graphflow.errors import DeviceError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.placement.clusters.cluster import Cluster


def colocation_groups(graph: Graph) -> dict[Node, Node]:
    """Return for variables and assigns the variable with which they must be placed."""
    variables = set(graph.variables)
    teams: dict[Node, Node] = {}
    for node in graph.variables:
        owner = node.origin if node.origin in variables else node  # a slot is of a variable
        teams[node] = teams.get(owner, owner) if owner is not None else node
    for node in graph.of_op("assign"):
        teams[node] = teams[node.inputs[0].node]
    return teams


class DeviceConstraints:
    """The devices that a node may use, by its pin, its op's kernels and its variable's home."""

    def __init__(self, graph: Graph, cluster: Cluster, homes: Mapping[Node, str]) -> None:
        self._graph = graph
        self._cluster = cluster
        self._kinds = {name: cluster.device(name).kind for name in cluster.devices}
        self._pins: dict[DeviceName, frozenset[str]] = {}
        self._homes = homes
        self._allowed: dict[Node, frozenset[str]] = {}
        self._common: dict[tuple[DeviceName, tuple[str, ...]], frozenset[str]] = {}
        for node, home in homes.items():
            if home not in self._kinds:
                raise DeviceError(
                    f"variable {node.name!r} (made at {node.location}) lives on {home}, which is "
                    f"not in the cluster: it has {', '.join(cluster.devices)}"
                )
        self._teams = colocation_groups(graph)
        self._check_teams()

    def allowed_devices(self, node: Node) -> frozenset[str]:
        """Return the names of the devices that may run a node.

        Raises:
            DeviceError: None may; names node, line, pin and the devices there are.
        """
        known = self._allowed.get(node)
        if known is None:
            if node in self._homes:
                known = self._find(node)
            else:  # thousands of nodes have the same pin and kernels
                key = (node.device, node.op.device_kinds)
                known = self._common.get(key)
                if known is None:
                    known = self._common[key] = self._find(node)
            self._allowed[node] = known
        return known

    def explain(self, node: Node) -> str | None:
        """Explain what took choices away from a node; None if nothing did."""
        everywhere = len(self._kinds)
        if node.op.name == "variable" and node in self._homes:
            return "lives here already"
        if node.device and len(self._pinned_devices(node)) < everywhere:
            if node.origin is not None and node.origin.device != node.device:
                return f"its strategy has it on {node.device}"
            return f"pinned by gf.device({str(node.device)!r})"
        if len(self.allowed_devices(node)) < everywhere:
            return f"{node.op.name} has a kernel for {' and '.join(node.op.device_kinds)} only"
        return None

    def _find(self, node: Node) -> frozenset[str]:
        """Return the devices that may run a node; raises as `allowed_devices`."""
        pinned = self._pinned_devices(node)
        able = frozenset(name for name in pinned if self._kinds[name] in node.op.device_kinds)
        if not able:
            where = f"pinned to {str(node.device)!r}" if node.device else "not pinned"
            raise DeviceError(
                f"{self._title(node)} is {where}, but {node.op.name} has a kernel for "
                f"{' and '.join(node.op.device_kinds)} only, and the cluster has "
                f"{', '.join(self._kinds)}; change the pin or the cluster"
            )
        home = self._homes.get(node)
        if home is None:
            return able
        if home not in able:
            raise DeviceError(
                f"{self._title(node)} lives on {home} already, but is pinned to "
                f"{str(node.device)!r}; pin it before it is first used, or not at all"
            )
        return frozenset({home})

    def _pinned_devices(self, node: Node) -> frozenset[str]:
        """Return the devices that a node's pin allows."""
        pin = node.device
        if pin not in self._pins:
            here = self._cluster.pinned(pin)
            fits = frozenset(n for n in self._kinds if here.matches(DeviceName.parse(n)))
            if not fits:
                raise DeviceError(
                    f"{self._title(node)} is pinned to {str(pin)!r}, which fits no device of the "
                    f"cluster: it has {', '.join(self._kinds)}; change gf.device({str(pin)!r}) "
                    "there, or plan for a cluster that has one"
                )
            self._pins[pin] = fits
        return self._pins[pin]

    def _title(self, node: Node) -> str:
        return (
            f"{node.op.name} {self._graph.names.get(node, node.name)!r} (made at {node.location})"
        )

    def _check_teams(self) -> None:
        """Refuse pins that separate a variable, its slots and its assignments.

        Raises:
            DeviceError: No device is left; names the chain of constraints with lines.
        """
        left: dict[Node, frozenset[str]] = {}
        for node, leader in self._teams.items():
            left[leader] = left.get(leader, frozenset(self._kinds)) & self.allowed_devices(node)
            if not left[leader]:
                told = "; ".join(self._chain(leader))
                raise DeviceError(
                    f"no device is left for {self._title(leader)} and what must live with it: "
                    f"{told}. A variable, its slots and its assignments live on one device; "
                    "give them one pin"
                )

    def _chain(self, leader: Node) -> list[str]:
        """Return the constraints that together leave a group no device.

        Each is told with the reason for which its node is in the group.
        """
        team = [node for node, of in self._teams.items() if of is leader]
        chain: list[Node] = []
        rest = frozenset(self._kinds)
        for node in team:
            if not rest <= self.allowed_devices(node):
                chain.append(node)
                rest &= self.allowed_devices(node)
        for node in list(chain):  # drop a node without which there is no device, either
            others = [other for other in chain if other is not node]
            if others and not frozenset.intersection(*map(self.allowed_devices, others)):
                chain = others
        return [self._constraint(node, leader) for node in chain]

    def _constraint(self, node: Node, leader: Node) -> str:
        """Describe the constraint of a node in a colocated group, and how it joined the group."""
        where = ", ".join(sorted(self.allowed_devices(node)))
        told = f"{self._title(node)} may be on {where} only ({self.explain(node)})"
        if node is leader:
            return told
        if node.op.name == "assign":
            variable = node.inputs[0].node
            if variable is leader:
                return f"{told} and assigns to it"
            return f"{told} and assigns to {self._title(variable)}, which was made for it"
        return f"{told} and was made for it"
