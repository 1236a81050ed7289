"""Graphs cut and compiled by hand, without a session."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, Partition, partition
from graphflow.runtime.program.program import Program

CPU = "/worker:0/cpu:0"
OTHER = "/worker:0/cpu:1"


class NoChannel:
    """The way to no other device."""

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        raise AssertionError(f"edge {edge} is sent to {target}")

    def recv(self, step: int, edge: int) -> Any:
        raise AssertionError(f"edge {edge} is awaited")


class NoRings:
    """No shared memory for edges in loops."""

    senders: Mapping[int, Any] = MappingProxyType({})
    receivers: Mapping[int, Any] = MappingProxyType({})
    copied: frozenset[int] = frozenset()

    def begin_step(self) -> None:
        """There is nothing to begin."""


NO_RINGS = NoRings()


class Mailbox:
    """Keeps what is sent, and hands it over when it is asked for."""

    rings = NO_RINGS

    def __init__(self) -> None:
        self.arrays: dict[tuple[int, int], Any] = {}

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        self.arrays[step, edge] = array

    def recv(self, step: int, edge: int) -> Any:
        return self.arrays.pop((step, edge))

    def grant_credit(self, step: int, edge: int, portion: int) -> None:
        """It has room for everything."""

    def wait_for_credit(self, step: int, edge: int, portion: int, target: str) -> None:
        """It has room for everything."""


def place_nodes(graph: Graph, device: str = CPU, **others: str) -> dict[Node, str]:
    """All nodes on a device, but those of the given names."""
    return {
        node: others.get(graph.names[node], device)
        for node in graph.nodes
        if node.op.name not in UNPLACED_OPS
    }


def make_partition(*fetches: Tensor) -> Partition:
    """The one partition of fetches on one device."""
    graph = Graph(fetches).verify()
    return partition(graph, place_nodes(graph))[CPU]


def initial_state(part: Partition) -> dict[str, Any]:
    """Buffers with the initial values of a partition's variables."""
    state = {}
    for node in part.graph.variables:
        initial = node.attrs["initial"]
        state[node.name] = np.array(initial() if callable(initial) else initial)
    return state


def compile_program(
    part: Partition,
    state: Mapping[str, Any] | None = None,
    bindings: Mapping[str, int] | None = None,
    backend: CpuBackend | None = None,
    channel: Any = None,
) -> Program:
    state = initial_state(part) if state is None else state
    return Program(part, bindings or {}, state, backend or CpuBackend(1), channel or NoChannel())
