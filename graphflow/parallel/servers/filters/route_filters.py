"""The filters of a parameter server's routes: which tensors take them, and what state they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphflow.errors import ShardingError
from graphflow.frontend.concurrent_loops import ConcurrentLoops
from graphflow.init import ReplicaRows
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import Span, TensorSpec, kind
from graphflow.ops.control_flow.turn_rules import Consistency
from graphflow.parallel.compression.filter import Filter
from graphflow.parallel.compression.filters.chain import Chain
from graphflow.parallel.compression.traffic import first_state, message_parts
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import whole
from graphflow.parallel.servers.consistency import Rules
from graphflow.parallel.servers.filters.filtered_routes import (
    Answered,
    FilteredPull,
    FilteredPush,
    FilteredTensor,
    count_estimates,
)
from graphflow.parallel.servers.loops.bundles import Bundle
from graphflow.parallel.servers.loops.server_loop import ServerPorts
from graphflow.parallel.servers.step_cut import PushedTensor
from graphflow.parallel.sharding.emission.sharded_graph import ShardedVariable

Known = Mapping[Node, ShardedVariable]
_ANSWERED: Mapping[Consistency, Answered] = {
    "pool": "one", "async": "one", "bsp": "all", "ssp": "any",
}  # fmt: skip


class RouteFilters:
    """The filters of pushes and of pulls, and the variables of their states.

    Args:
        push, pull: the filters; None: tensors travel as they are.
        stream: the stream of their random numbers.
        where: the user's line, for errors.
    """

    def __init__(
        self, push: Filter | None, pull: Filter | None, stream: tuple[int, int], where: str
    ) -> None:
        self.push = push
        self.pull = pull
        self._stream = stream
        self._where = where
        self._states: dict[tuple[Node, str, int, int], Node] = {}

    def takes_push(self, push: PushedTensor, spec: TensorSpec) -> bool:
        """Return True if a pushed tensor of a spec is a gradient that a filter makes smaller."""
        if not push.is_gradient or push.variable is None:
            return False
        return self._choose(self.push, spec, push.variable, 0) is not None

    def takes_pull(self, variable: Node) -> bool:
        """Return True if a filter makes what workers pull of a variable smaller."""
        return self._choose(self.pull, variable.specs[0], variable, 1) is not None

    def make_push(
        self,
        loops: ConcurrentLoops,
        push: PushedTensor,
        spec: TensorSpec,
        mesh: Mesh,
        servers: int,
        known: Known,
    ) -> FilteredPush:
        """Return the route of a gradient that a filter takes.

        Args:
            loops: the loops of the window.
            push: the gradient.
            spec: its spec in a turn.
            mesh: the places of servers and workers.
            servers: the number of servers.
            known: the shards of variables that exist already.
        """
        variable = push.variable
        assert variable is not None
        sent = self._choose(self.push, spec, variable, 0)
        assert sent is not None
        workers = len(mesh.places) - servers
        states = {}
        for number, first in enumerate(first_state(sent.rule, sent.spec)):
            residual = sent.rule.feedback and number == 0
            name = "residual" if residual else f"filter_state_{number}"
            rows = ReplicaRows(first, workers, adds_up=residual)
            node = self._state(variable, f"push/{variable.name}/{name}", number, rows)
            places = [*[0] * servers, *range(workers)]
            states[node] = _place_rows(node, mesh, [(k, 1) for k in places], known)
        return FilteredPush(loops, sent, workers, servers, states)

    def make_pull(
        self, loops: ConcurrentLoops, variable: Node, rules: Rules, server: int,
        mesh: Mesh, servers: int, known: Known,
    ) -> FilteredPull:  # fmt: skip
        """Return the route of a variable whose values a filter takes.

        Args:
            loops, variable, mesh, servers, known: see `make_push`.
            rules: the rules of the window.
            server: the server that has the variable.
        """
        sent = self._choose(self.pull, variable.specs[0], variable, 1)
        assert sent is not None
        workers, answered = len(mesh.places) - servers, _answered_by(rules)
        count = count_estimates(answered, workers)
        states = {}
        for number, first in enumerate(sent.rule.initial(sent.wide)):
            rows = ReplicaRows(first, count, adds_up=False)
            name = f"pull/{variable.name}/filter_state_{number}"
            node = self._state(variable, name, number, rows)
            placed = _place_rows(
                node, mesh, [(0, count)] * len(mesh.places), known, mesh.devices[server]
            )
            states[node] = replace(placed, server=server)
        return FilteredPull(loops, sent, workers, answered, server, states)

    def _choose(
        self, rule: Filter | None, spec: TensorSpec, variable: Node, direction: int
    ) -> FilteredTensor | None:
        """Return what travels through a filter; None if it saves nothing."""
        if rule is None or not spec.is_concrete or kind(spec.dtype) != "float":
            return None
        if not rule.applies(spec):
            return None
        stream = (*self._stream, direction, variable.serial)
        sent = FilteredTensor(rule, spec, stream)
        return sent if sent.nbytes < int(spec.nbytes) else None

    def _state(self, variable: Node, name: str, number: int, rows: ReplicaRows) -> Node:
        """Return the variable of a state, the same in each graph that the strategy partitions."""
        key = (variable, name, number, rows.replicas)
        if key not in self._states:
            tensor: Tensor = REGISTRY["variable"](
                initial=rows, trainable=False, shape=rows.shape, dtype=str(rows.dtype),
                named=False, name=name,
            )  # fmt: skip
            self._states[key] = tensor.node
        return self._states[key]

    def states_of(self, variable: Node) -> list[Node]:
        """Return the variables of the states of a variable's filters."""
        return [node for (owner, *_), node in self._states.items() if owner is variable]

    def describe(self, ports: Sequence[ServerPorts], has_tables: bool) -> list[str]:
        """Return sentences on the bytes of a push and of an answer, before and after each filter.

        Args:
            ports: the routes of each server.
            has_tables: whether servers keep rows of tables, too.

        Raises:
            ShardingError: a filter saves nothing of any tensor.
        """
        pushed = [each for port in ports for each in port.pushes.items() if _is_gradient(each[0])]
        pulled = [each for port in ports for each in port.pulls.items()]
        found = []
        for rule, routes, what, whole_ones in (
            (self.push, pushed, "gradients of a push", "gradients"),
            (self.pull, pulled, "variables of an answer", "variables"),
        ):
            if rule is None:
                continue
            filtered = [route.spec for _, route in routes if route.is_filtered]
            if not routes:
                raise ShardingError(
                    f"{self._where}: {rule!r} has nothing to send: rows of tables travel as they "
                    f"are, since each turn has other ones; leave out filters="
                )
            if not filtered:
                raise ShardingError(
                    f"{self._where}: {rule!r} saves nothing of the "
                    f"{sum(len(bundle.items) for bundle, _ in routes)} {whole_ones}; send less of "
                    "each, or leave it out of filters="
                )
            found.append(f"{what}: {_describe_stages(rule, filtered)}")
        return [*found, *(["rows of tables travel without filters"] if has_tables else [])]


def _answered_by(rules: Rules) -> Answered:
    """Return which workers a server answers at once. With backup workers, late ones are answered
    alone."""
    return "any" if rules.has_backups else _ANSWERED[rules.consistency]


def _is_gradient(bundle: Bundle[PushedTensor]) -> bool:
    return bundle.items[0].is_gradient


def _describe_stages(rule: Filter, specs: Sequence[TensorSpec]) -> str:
    """Return the bytes of some tensors, then those of their messages after each filter."""
    filters = rule.filters if isinstance(rule, Chain) else (rule,)
    before = sum(int(spec.nbytes) for spec in specs)
    text = f"{before:,} bytes"
    for count in range(1, len(filters) + 1):
        one = filters[0] if count == 1 else Chain(filters[:count])
        after = sum(part.expected_bytes for spec in specs for part in message_parts(one, spec))
        text += f" → {filters[count - 1]!r}: {after:,}"
    return text


def _place_rows(
    node: Node,
    mesh: Mesh,
    rows: Sequence[tuple[int, int]],
    known: Known,
    device: DeviceName | None = None,
) -> ShardedVariable:
    """Return the shards of a state: those that exist already, or new ones.

    Args:
        node: the state.
        mesh: the places.
        rows: the first row, and the number of rows, that each place has.
        known: the shards of variables that exist already.
        device: where all rows are; default: each at the last place that has it.
    """
    if node in known:
        return known[node].check(node, mesh)
    initial, shape = node.attrs["initial"], tuple(map(int, node.specs[0].shape))
    pieces = {}
    for place, own in enumerate(rows):
        home = device or mesh.devices[place]
        with origin_scope(node, "", home):
            tensor: Tensor = REGISTRY["variable"](
                initial=initial.first_rows(own[1]), trainable=False, shape=(own[1], *shape[1:]),
                dtype=node.attrs["dtype"], named=False,
                name=f"{node.name}{mesh.tag(mesh.places[place])}",
            )  # fmt: skip
        pieces[own] = tensor.node
    rest = tuple(Span(0, size) for size in shape[1:])
    return ShardedVariable(
        tuple(pieces[own] for own in rows),
        tuple((Span(first, first + count), *rest) for first, count in rows),
        whole(len(shape)),
        mesh.sizes,
        derived=True,
    )


__all__ = ["RouteFilters"]
