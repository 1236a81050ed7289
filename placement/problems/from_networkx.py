"""networkx graphs as placement problems: `Problem.from_networkx`.

Only the graph's own methods are called, so networkx itself need not be loaded.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from graphflow.errors import ProblemError

NODE_KEYS = ("compute", "candidates", "memory", "output_memory", "group", "prefer")
EDGE_KEYS = ("bytes", "tensor")
GRAPH_KEYS = (
    "devices", "latency", "bandwidth", "capacity", "contention", "client", "shared", "routes",
)  # fmt: skip


class NetworkxReader:
    """Reads the arrays of a problem; errors name nodes and edges as the graph does."""

    def __init__(self, graph: Any) -> None:
        for method in ("is_directed", "nodes", "edges", "graph"):
            if not hasattr(graph, method):
                raise ProblemError(f"a problem is made of a networkx.DiGraph, not {graph!r}")
        if not graph.is_directed():
            raise ProblemError(
                f"the graph ({len(graph.nodes)} nodes) is not directed: edges lead from "
                "producers to consumers; use a networkx.DiGraph"
            )
        self.graph = graph
        self.settings: Mapping[str, Any] = graph.graph
        _check_keys(self.settings, GRAPH_KEYS, "graph")
        self.names: list[Hashable] = list(graph.nodes)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.data: list[Mapping[str, Any]] = [graph.nodes[name] for name in self.names]
        self.devices = self._devices()
        self.edges = list(graph.edges(data=True))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a `Problem`.

        Raises:
            ProblemError: An attribute is missing or wrong.
        """
        groups = self._groups()
        compute = np.array([self._compute(i) for i in range(len(self.names))], dtype=np.float64)
        compute = compute.reshape(len(self.names), len(self.devices))
        self._check_groups(groups, compute)
        sizes = [self._number(data, "bytes", _edge(a, b), 0.0) for a, b, data in self.edges]
        transient = any("output_memory" in data for data in self.data)
        return {
            "compute": compute,
            "edges": np.array(
                [(self.index[a], self.index[b]) for a, b, _ in self.edges], dtype=np.int64
            ).reshape(-1, 2),
            "bytes": np.array(sizes, dtype=np.float64),
            "tensor": self._tensors(sizes),
            "latency": self._matrix("latency"),
            "bandwidth": self._matrix("bandwidth"),
            "memory": self._column("memory"),
            "output_memory": self._column("output_memory") if transient else None,
            "capacity": self._capacity(),
            "groups": np.array(groups, dtype=np.int64),
            "contention": bool(self.settings.get("contention", False)),
            "prefer": self._prefer(),
            "client": self._client(),
            "shared": self.settings.get("shared"),
            "routes": self.settings.get("routes"),
        }

    def with_names(self, error: ProblemError) -> ProblemError:
        """Return an error of the problem with the graph's names of its nodes."""
        text = str(error)
        if text.startswith("edges form a cycle: "):
            steps = text.removeprefix("edges form a cycle: ").partition(";")[0].split(" -> ")
            told = " -> ".join(repr(self.names[int(step)]) for step in steps)
            return ProblemError(f"edges form a cycle: {told}; a problem must be acyclic")
        if error.nodes:
            told = ", ".join(repr(self.names[i]) for i in error.nodes[:6])
            named = ProblemError(f"{text} (nodes {told})")
            named.nodes = error.nodes
            return named
        return error

    # Nodes ------------------------------------------------------------------------------------

    def _devices(self) -> list[Hashable]:
        """Return the names of the devices: given ones, those in nodes, or numbers."""
        given = self.settings.get("devices")
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return list(range(given))
        if given is not None:
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise ProblemError(
                    f"graph attribute 'devices' is {given!r}: give names, or a count"
                )
            named = list(given)
            if not named or len(set(named)) < len(named):
                raise ProblemError(f"graph attribute 'devices' is {named}: give each name once")
            return named
        found: dict[Hashable, None] = {}
        for data in self.data:
            compute = data.get("compute", data.get("candidates"))
            if isinstance(compute, Mapping):
                found.update(dict.fromkeys(compute))
            elif isinstance(compute, Sequence | np.ndarray) and not isinstance(compute, str):
                return list(range(len(compute)))
        if not found and self.names:
            name = self.names[0]
            raise ProblemError(
                f"node {name!r}: no 'compute' that says which devices there are; give seconds by "
                "device, or the graph attribute 'devices'"
            )
        return list(found) or [0]

    def _compute(self, i: int) -> list[float]:
        """Return the seconds of a node on each device; inf where it cannot run.

        Raises:
            ProblemError: They are missing or wrong, or the node has no device.
        """
        name, data = self.names[i], self.data[i]
        where = f"node {name!r}"
        _check_keys(data, NODE_KEYS, where)
        compute = data.get("compute", data.get("candidates"))
        if compute is None:
            raise ProblemError(f"{where}: 'compute' is missing; give seconds for each device")
        if isinstance(compute, Mapping):
            for device in compute:
                if device not in self.devices:
                    told = ", ".join(map(repr, self.devices))
                    raise ProblemError(f"{where}: compute names {device!r}; devices are {told}")
            row = [compute.get(device, math.inf) for device in self.devices]
        elif isinstance(compute, Sequence | np.ndarray) and not isinstance(compute, str):
            row = list(compute)
            if len(row) != len(self.devices):
                raise ProblemError(
                    f"{where}: compute has {len(row)} numbers for {len(self.devices)} devices"
                )
        else:
            row = [compute] * len(self.devices)
        seconds = [_seconds(value, f"{where}: compute", allow_inf=True) for value in row]
        if not any(map(math.isfinite, seconds)):
            raise ProblemError(f"{where} has no device: its compute is infinite everywhere")
        return seconds

    def _column(self, key: str) -> np.ndarray[Any, Any]:
        """Return a numeric attribute of all nodes, (n,); 0 where it is missing."""
        values = (
            self._number(data, key, f"node {name!r}", 0.0)
            for name, data in zip(self.names, self.data, strict=True)
        )
        return np.array(list(values), dtype=np.float64)

    def _number(self, data: Mapping[str, Any], key: str, where: str, default: float) -> float:
        """Return an attribute that must be a number of at least 0."""
        value = data.get(key)
        return default if value is None else _seconds(value, f"{where}: {key}")

    def _groups(self) -> list[int]:
        """Return the colocation group of each node; -1 for none."""
        ids: dict[Any, int] = {}
        groups = []
        for name, data in zip(self.names, self.data, strict=True):
            group = data.get("group")
            try:
                free = group is None or (type(group) is int and group < 0)
                groups.append(-1 if free else ids.setdefault(group, len(ids)))
            except TypeError:
                raise ProblemError(
                    f"node {name!r}: group {group!r} cannot be a name; use a string or a number"
                ) from None
        return groups

    def _check_groups(self, groups: list[int], compute: np.ndarray[Any, Any]) -> None:
        """Check that each group has a device that all of its nodes may use."""
        common: dict[int, np.ndarray[Any, Any]] = {}
        for i, group in enumerate(groups):
            if group < 0:
                continue
            able = np.isfinite(compute[i])
            so_far = common.setdefault(group, able)
            if not (so_far & able).any():
                told = "; ".join(
                    f"{self.names[j]!r} runs on {self._able(compute[j])}"
                    for j in range(i + 1)
                    if groups[j] == group and not np.isfinite(compute[j]).all()
                )
                raise ProblemError(
                    f"group {self.data[i]['group']!r} has no device that all its nodes can use: "
                    f"{told}; loosen one of them or split the group"
                )
            common[group] = so_far & able

    def _able(self, seconds: np.ndarray[Any, Any]) -> str:
        """Return the names of the devices with finite seconds, as text."""
        return ", ".join(repr(self.devices[d]) for d in np.flatnonzero(np.isfinite(seconds)))

    def _prefer(self) -> np.ndarray[Any, Any]:
        """Return for each node the node that it prefers to be near; -1 for none."""
        prefer = np.full(len(self.names), -1, dtype=np.int64)
        for i, data in enumerate(self.data):
            near = data.get("prefer")
            if near is not None and near not in self.index:
                raise ProblemError(
                    f"node {self.names[i]!r}: prefer names {near!r}, which is no node"
                )
            if near is not None:
                prefer[i] = self.index[near]
        return prefer

    # Edges ------------------------------------------------------------------------------------

    def _tensors(self, sizes: list[float]) -> np.ndarray[Any, Any]:
        """Return tensor ids: edges that name a tensor share it, others carry one each."""
        ids: dict[Any, int] = {}
        first: dict[Any, tuple[Hashable, Hashable, float]] = {}
        tensors = []
        for i, (a, b, data) in enumerate(self.edges):
            _check_keys(data, EDGE_KEYS, _edge(a, b))
            name = data.get("tensor")
            key = ("edge", i) if name is None else ("tensor", name)
            source, target, size = first.setdefault(key, (a, b, sizes[i]))
            if source != a or size != sizes[i]:
                what = "come from different nodes" if source != a else "differ in their bytes"
                raise ProblemError(
                    f"{_edge(a, b)} and {_edge(source, target)} carry tensor {name!r}, but {what}"
                )
            tensors.append(ids.setdefault(key, len(ids)))
        return np.array(tensors, dtype=np.int64)

    # The graph --------------------------------------------------------------------------------

    def _matrix(self, key: str) -> Any:
        """Return an attribute of the graph; a number becomes a (d, d) array."""
        value = self.settings.get(key)
        if isinstance(value, int | float):
            value = np.full((len(self.devices),) * 2, _seconds(value, f"graph attribute {key!r}"))
        return value

    def _capacity(self) -> Any:
        """Return the capacity of each device."""
        value = self.settings.get("capacity")
        if isinstance(value, Mapping):
            unknown = [device for device in value if device not in self.devices]
            if unknown:
                raise ProblemError(f"graph attribute 'capacity' names {unknown[0]!r}, no device")
            return np.array([value.get(device, math.inf) for device in self.devices], np.float64)
        if isinstance(value, int | float):
            return np.full(len(self.devices), float(value))
        return value

    def _client(self) -> int | None:
        """Return the index of the client's device, or None."""
        client = self.settings.get("client")
        if client is None:
            return None
        if client not in self.devices:
            raise ProblemError(f"graph attribute 'client' is {client!r}, which is no device")
        return self.devices.index(client)


def _check_keys(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse an attribute that is nearly a known, missing one: a typo. Others are allowed."""
    others = tuple(str(other) for other in data if other not in known)
    given = {*data, "compute"} if "candidates" in data else data
    typo = _typo(others, tuple(key for key in known if key not in given))
    if typo:
        raise ProblemError(f"{where}: {typo[0]!r} is no attribute; did you mean {typo[1]!r}?")


@lru_cache(1024)  # most nodes have the same attributes
def _typo(others: tuple[str, ...], missing: tuple[str, ...]) -> tuple[str, str] | None:
    """Describe a misspelt key and the key that was probably meant."""
    for key in missing:
        close = difflib.get_close_matches(key, others, n=1, cutoff=0.75)
        if close:
            return close[0], key
    return None


def _edge(source: Hashable, target: Hashable) -> str:
    """Return an edge as text."""
    return f"edge {source!r} -> {target!r}"


def _seconds(value: Any, what: str, allow_inf: bool = False) -> float:
    """Return a number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ProblemError(f"{what} is {value!r}, not a number")
    number = float(value)
    if math.isnan(number) or number < 0 or (math.isinf(number) and not allow_inf):
        raise ProblemError(f"{what} is {number:g}; it must be a number >= 0")
    return number
