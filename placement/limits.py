"""Limits: which devices a node may use, by its pin, its op's kernels and its variable's home."""

from __future__ import annotations

from collections.abc import Mapping

from graphflow.device import DeviceName
from graphflow.errors import DeviceError
from graphflow.graph import Graph
from graphflow.op import Node
from graphflow.placement.cluster import Cluster


def teams(graph: Graph) -> dict[Node, Node]:
    """Variables and assigns -> the variable with which they must live."""
    variables = set(graph.variables)
    teams: dict[Node, Node] = {}
    for node in graph.variables:
        owner = node.origin if node.origin in variables else node  # a slot is made for a variable
        teams[node] = teams.get(owner, owner) if owner is not None else node
    for node in graph.of_op("assign"):
        teams[node] = teams[node.inputs[0].node]
    return teams


class Limits:
    """Which devices a node may use: its pin, its op's kernels, its variable's home."""

    def __init__(self, graph: Graph, cluster: Cluster, homes: Mapping[Node, str]) -> None:
        self._graph = graph
        self._cluster = cluster
        self._kinds = {name: cluster.device(name).kind for name in cluster.devices}
        self._pins: dict[DeviceName, frozenset[str]] = {}
        self._homes = homes
        self._allowed: dict[Node, frozenset[str]] = {}
        for node, home in homes.items():
            if home not in self._kinds:
                raise DeviceError(
                    f"variable {node.name!r} (made at {node.location}) lives on {home}, which is "
                    f"not in the cluster: it has {', '.join(cluster.devices)}"
                )
        self._teams = teams(graph)
        self._check_teams()

    def allowed(self, node: Node) -> frozenset[str]:
        """Names of the devices that may run a node.

        Raises:
            DeviceError: none may; names node, line, pin and the devices there are.
        """
        known = self._allowed.get(node)
        if known is None:
            known = self._allowed[node] = self._find(node)
        return known

    def why(self, node: Node) -> str | None:
        """What took choices away from a node, or None."""
        everywhere = len(self._kinds)
        if node.op.name == "variable" and node in self._homes:
            return "lives here already"
        if node.device and len(self._pinned(node)) < everywhere:
            return f"pinned by gf.device({str(node.device)!r})"
        if len(self.allowed(node)) < everywhere:
            return f"{node.op.name} has a kernel for {' and '.join(node.op.device_kinds)} only"
        return None

    def _find(self, node: Node) -> frozenset[str]:
        pinned = self._pinned(node)
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

    def _pinned(self, node: Node) -> frozenset[str]:
        pin = node.device
        if pin not in self._pins:
            fits = frozenset(n for n in self._kinds if pin.matches(DeviceName.parse(n)))
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
        common: dict[Node, tuple[frozenset[str], Node]] = {}
        for node, leader in self._teams.items():
            allowed = self.allowed(node)
            so_far, first = common.setdefault(leader, (allowed, node))
            if not so_far & allowed:
                raise DeviceError(
                    f"{self._title(node)} may be on {', '.join(sorted(allowed))} only, and "
                    f"{self._title(first)} on {', '.join(sorted(so_far))}: a variable, its slots "
                    "and its assignments live on one device; give them one pin"
                )
            narrower = node if len(allowed) < len(so_far) else first
            common[leader] = (so_far & allowed, narrower)
