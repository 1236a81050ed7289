"""The graph of a window: one `concurrent` node with the loops of servers and workers, and what is
assigned and fetched when it ends.

StepCut ─deal_variables→ Dealt ─ServedWindow→ loops ─finish→ ShardedGraph
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphflow.errors import ShardingError
from graphflow.frontend.concurrent_loops import ConcurrentLoops
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import Span, TensorSpec, substitute
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import whole
from graphflow.parallel.served_tables.party_tables import ServerTables
from graphflow.parallel.served_tables.window_tables import WindowTables
from graphflow.parallel.servers.consistency import Rules
from graphflow.parallel.servers.dealing import Dealt
from graphflow.parallel.servers.filters.route_filters import RouteFilters
from graphflow.parallel.servers.loops.backup_loop import BackupServerLoop
from graphflow.parallel.servers.loops.bundles import Bundle, make_bundles
from graphflow.parallel.servers.loops.compensated_update import CompensatedUpdate
from graphflow.parallel.servers.loops.routes import (
    PullRoute,
    PushRoute,
    Route,
    make_pull,
    make_push,
    may_share_pull,
    may_share_push,
)
from graphflow.parallel.servers.loops.server_loop import (
    ServedResults,
    ServerLoop,
    ServerPorts,
    make_tickets,
)
from graphflow.parallel.servers.loops.server_update import ServerUpdate
from graphflow.parallel.servers.loops.worker_loop import WorkerLoop, draw_key
from graphflow.parallel.servers.micro_batches import MicroBatches, row_of, whole_feed
from graphflow.parallel.servers.party_copy import PartyCopy
from graphflow.parallel.servers.step_cut import PushedTensor, StepCut
from graphflow.parallel.sharding.emission.sharded_graph import FeedSlice, ShardedVariable

PARTY = "party"
"""The mesh axis of servers and workers, servers first."""


class ServedWindow:
    """Writes the loops of a window.

    Args:
        cut: the step.
        batch: the placeholders that hold the batch.
        sizes: the sizes of micro-batches.
        rules: the rules of the window.
        mesh: a place for each server, then one for each worker.
        dealt: the servers of variables.
        known: the shards of variables that exist already.
        order: the user's placeholder of orders.
        filters: what pushes and pulls go through; None: nothing.

    Attributes:
        order, filters: the same.
        variables: the shards of the user's variables.
        shares: what the placeholders are fed.
        results: the results of each server.
        ports: the channels of each server.
        updates: the assignments of each variable.
        turn_fetches: the outputs of the step that turns compute, with their numbers.
        update_fetches: for each output that an update computes, the server.
        sent: the bytes that went through the filters of pushes and of pulls, and those without.
    """

    def __init__(
        self,
        cut: StepCut,
        batch: Sequence[Tensor],
        sizes: MicroBatches,
        rules: Rules,
        mesh: Mesh,
        dealt: Dealt,
        known: Mapping[Node, ShardedVariable],
        order: Tensor,
        filters: RouteFilters | None = None,
    ) -> None:
        self.cut = cut
        self.rules = rules
        self.mesh = mesh
        self.sizes = sizes
        self.dealt = dealt
        self.servers = len(dealt.carried)
        self._batch = [t.node for t in batch]
        self._known = known
        self.order = order
        self.filters = filters
        self.variables: dict[Node, ShardedVariable] = {}
        self.shares: dict[Node, FeedSlice] = {}
        self.results: list[ServedResults] = []
        self.updates: dict[Node, Tensor] = {}
        self.turn_fetches: dict[Tensor, int] = {}
        self.update_fetches: dict[Tensor, int] = {}
        self.sent: dict[str, list[Tensor]] = {"push": [], "pull": []}
        self._sort_fetches()
        self._loops = ConcurrentLoops()
        homes = [self.device(s) for s in range(self.servers)]
        self.tables = WindowTables(
            self._loops, cut.tables, cut.graph.names, rules, sizes.sizes, homes, known
        )
        self._updates = [self._server_update(s) for s in range(self.servers)]
        pushed = [push.value for update in self._updates for push in update.pushes]
        self.turn = cut.turn_of([*pushed, *self.turn_fetches, *self.tables.gradients])
        self.ports = [self._make_ports(s) for s in range(self.servers)]
        self._place_variables()
        self._write()

    def name_of(self, node: Node) -> str:
        """Return the name of a node of the step, or its own."""
        return self.cut.graph.names.get(node, node.name)

    # What runs where ------------------------------------------------------------------------------

    def is_apart(self, server: int, worker: int) -> bool:
        """Return True if a server and a worker are on different devices."""
        return self.device(server) != self.device(self.servers + worker)

    def copy_outside(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the step that no update changes, computed once, at the first
        server."""
        mapped = {
            n.outputs[0]: self._value_at(n, 0)
            for n in self.cut.graph.nodes
            if n.op.name in ("placeholder", "variable")
        }
        PartyCopy(self.sizes.sizes, self.device(0)).write(self.cut.turn_of([tensor]), mapped)
        return mapped[tensor]

    def device(self, place: int) -> DeviceName:
        """Return the device of a server, or of a worker after them."""
        return self.mesh.devices[place]

    def _sort_fetches(self) -> None:
        """Find out which outputs turns compute, and which ones updates do."""
        cut = self.cut
        for tensor in cut.graph.outputs:
            if tensor.node.op.name in ("group", "assign", "variable"):
                continue
            if cut.is_of_turn(tensor):
                self.turn_fetches.setdefault(tensor, len(self.turn_fetches))
                continue
            nodes, crossing = cut.update_of([tensor])
            read = {node for node in nodes if node in cut.assigned}
            read |= {push.variable for push in crossing if push.variable is not None}
            if read or crossing:
                self.update_fetches[tensor] = self._server_of(tensor, read)

    def _server_of(self, tensor: Tensor, read: set[Node]) -> int:
        """Return the server that has all variables that a fetch reads.

        Raises:
            ShardingError: there is none.
        """
        for server, carried in enumerate(self.dealt.carried):
            if read <= {*carried}:
                return server
        node = tensor.node
        raise ShardingError(
            f"fetch {node.name!r} (made at {node.location}) reads variables or gradients of "
            f"several of the {self.servers} servers; fetch it in a step that does not train, or "
            "take servers=1"
        )

    def _server_update(self, server: int) -> ServerUpdate:
        fetches = [t for t, s in self.update_fetches.items() if s == server]
        copy = PartyCopy(self.sizes.sizes, self.device(server))
        late = any(push.compensation for push in self.cut.gradients)
        kind = CompensatedUpdate if late else ServerUpdate
        return kind(self.cut, self.dealt.carried[server], fetches, copy)

    def _make_ports(self, server: int) -> ServerPorts:
        """Make the channels of a server."""
        loops, workers = self._loops, self.rules.turns.workers
        read = [n for n in self.turn if self.dealt.server.get(n) == server]
        read += [
            push.variable
            for push in self._updates[server].pushes
            if push.variable is not None and self._needs_value(push)
        ]
        fetched = [*self.turn_fetches] if server == 0 else []
        is_queue = self.rules.deals_numbers and server == 0
        return ServerPorts(
            make_tickets(loops, workers),
            {
                bundle: self._make_push(bundle)
                for bundle in make_bundles(
                    (push, self._in_turn(push.value.spec), self._may_share_push(push))
                    for push in self._updates[server].pushes
                )
            },
            {t: make_push(loops, (), self._in_turn(t.spec), workers) for t in fetched},
            {
                bundle: self._make_pull(bundle, server)
                for bundle in make_bundles(
                    (v, v.specs[0], self._may_share_pull(v)) for v in dict.fromkeys(read)
                )
            },
            make_tickets(loops, workers) if is_queue else (),
        )

    def _needs_value(self, push: PushedTensor) -> bool:
        """Return True if a worker needs the value of a variable to push something of it."""
        rule = self.filters.push if self.filters is not None else None
        return push.is_difference or (push.is_gradient and rule is not None and rule.reads_value)

    def _may_share_push(self, push: PushedTensor) -> bool:
        spec = self._in_turn(push.value.spec)
        filtered = self.filters is not None and self.filters.takes_push(push, spec)
        return may_share_push(push) and not filtered

    def _may_share_pull(self, variable: Node) -> bool:
        filtered = self.filters is not None and self.filters.takes_pull(variable)
        return may_share_pull(variable) and not filtered

    def _make_push(self, bundle: Bundle[PushedTensor]) -> PushRoute:
        first, *others = bundle.items
        if not others and self.filters is not None and self.filters.takes_push(first, bundle.spec):
            return self.filters.make_push(
                self._loops, first, bundle.spec, self.mesh, self.servers, self._known
            )
        return make_push(self._loops, bundle.items, bundle.spec, self.rules.turns.workers)

    def _make_pull(self, bundle: Bundle[Node], server: int) -> PullRoute:
        first, *others = bundle.items
        if not others and self.filters is not None and self.filters.takes_pull(first):
            return self.filters.make_pull(
                self._loops, first, self.rules, server, self.mesh, self.servers,
                self._known,
            )  # fmt: skip
        return make_pull(self._loops, bundle.items, bundle.spec, self.rules.turns.workers)

    def _in_turn(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of a tensor in a turn."""
        return spec.with_shape(tuple(substitute(size, self.sizes.sizes) for size in spec.shape))

    # Variables ------------------------------------------------------------------------------------

    def _place_variables(self) -> None:
        """Take the shards of variables that exist already, or make them: one at the server of a
        variable that the step assigns, else one at each device that reads it."""
        of_workers = {node for node in self.turn if node.op.name == "variable"}
        self.variables |= self.tables.pieces
        for node in self.cut.graph.variables:
            if node in self.variables:
                continue
            if node in self._known:
                self.variables[node] = self._known[node].check(node, self.mesh)
                continue
            server = self.dealt.server.get(node)
            if server is not None:
                places = [server]
            else:
                places = [s for s, update in enumerate(self._updates) if node in update.outside]
                if node in of_workers or not places:
                    places += range(self.servers, len(self.mesh.places))
            self.variables[node] = replace(self._make_copies(node, places), server=server)
        for route in self._routes():
            self.variables |= route.variables
        for update in self._updates:
            for node in update.first_state():
                self._add_state(node)

    def _routes(self) -> list[Route]:
        pushes: list[Route] = [route for port in self.ports for route in port.pushes.values()]
        return [*pushes, *(route for port in self.ports for route in port.pulls.values())]

    def _worker_states(self, route: Route) -> list[Node]:
        workers = range(self.rules.turns.workers)
        return [node for worker in workers for node in route.worker_states(worker)]

    def _add_state(self, node: Node) -> None:
        """Add a variable of a route's state, which lies where its device says."""
        spans = tuple(Span(0, int(size)) for size in node.specs[0].shape)
        count = len(self.mesh.places)
        self.variables[node] = ShardedVariable(
            (node,) * count, (spans,) * count, whole(len(spans)), self.mesh.sizes, derived=True
        )

    def _make_copies(self, node: Node, places: Sequence[int]) -> ShardedVariable:
        """Make a copy of a variable at each device of some places."""
        source = self.cut.graph
        copies: dict[DeviceName, Node] = {}
        for place in places:
            device = self.device(place)
            if device not in copies:
                name = f"{source.names[node]}{self.mesh.tag(self.mesh.places[place])}"
                attrs = {**node.attrs, "named": False}
                copies[device] = node.copy_for((), name, device, node, attrs)
        first = next(iter(copies.values()))
        nodes = tuple(copies.get(device, first) for device in self.mesh.devices)
        spans = tuple(Span(0, int(size)) for size in node.specs[0].shape)
        return ShardedVariable(
            nodes, (spans,) * len(nodes), whole(len(spans)), self.mesh.sizes
        )  # fmt: skip

    def _value_at(self, node: Node, place: int) -> Tensor:
        """Return a placeholder, or a variable's value before the window, for a party."""
        if node.op.name == "placeholder":
            return node.outputs[0]
        return self.variables[node].nodes[place].outputs[0]

    # Loops ----------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write the loops and the assignments at their end."""
        servers = [self._server_loop(s) for s in range(self.servers)]
        workers = [self._worker_loop(k) for k in range(self.rules.turns.workers)]
        every: list[ServerLoop | WorkerLoop] = [*servers, *workers]
        for place, loop in enumerate(every):
            self._loops.add(loop, pin=str(self.device(place)))
        rules = TurnRules(
            tuple(range(self.servers)),
            tuple(range(self.servers, len(self.mesh.places))),
            (self.rules.turns.each,) * self.rules.turns.workers,
            self.rules.consistency,
            self.rules.staleness if self.rules.consistency == "ssp" else None,
            self.rules.aggregate,
        )
        results = self._loops.build("window", rules)
        self.results, ends = results[: self.servers], results[self.servers :]
        self.node = self.results[0].order.node
        for node, server in self.dealt.server.items():
            self._assign(
                node, self.variables[node].nodes[server], self.results[server].values[node]
            )
        self.updates |= self.tables.write_back([result.rows for result in self.results])
        for loop, states in zip(every, [*(r.states for r in self.results), *ends], strict=True):
            count = len(loop.states)
            for node, value in zip(loop.states, states[:count], strict=True):
                self._assign(node, node, value)
            self.sent["pull" if isinstance(loop, ServerLoop) else "push"] += states[count:]

    def _assign(self, node: Node, own: Node, value: Tensor) -> None:
        with origin_scope(node, "", own.device):
            assigned: Tensor = REGISTRY["assign"](own.outputs[0], value)
        self.updates[node] = assigned

    def _server_loop(self, server: int) -> ServerLoop:
        update = self._updates[server]
        values = {
            node: self._value_at(node, self.dealt.server[node])
            for node in self.dealt.carried[server]
        }
        outside = {node: self._value_at(node, server) for node in update.outside}
        order = None if self.rules.has_fixed_order else self._wanted_order(server)
        make = BackupServerLoop if self.rules.has_backups else ServerLoop
        tables = self._server_tables(server)
        return make(self.rules, update, self.ports[server], values, outside, order, tables)

    def _server_tables(self, server: int) -> ServerTables:
        """Return the tables at a server, which is fed all ids of the window."""
        feeds = self.tables.feeds
        batches = {n: self._all_micro_batches(n, server) for n in feeds if n in self._batch}
        outside = {n: self._value_at(n, server) for n in feeds if n not in batches}
        copy = PartyCopy(self.sizes.sizes, self.device(server))
        return self.tables.at_server(server, batches, outside, copy)

    def _wanted_order(self, server: int) -> Tensor:
        """Return the order that a server has to follow: its row of what is fed."""
        total = self.rules.turns.total
        with origin_scope(self.order.node, f"server{server}/", self.device(server)):
            fed: Tensor = REGISTRY["placeholder"](
                shape=(1, total), dtype="int32", name=self.order.name
            )
            row: Tensor = FUNCTIONS["reshape"](fed, (total,))
        row_extents = row_of(server, self.servers, total)
        self.shares[fed.node] = FeedSlice(self.order.node, row_extents)
        return row

    def _worker_loop(self, worker: int) -> WorkerLoop:
        place = self.servers + worker
        read = [n for n in self.turn if n.op.name in ("placeholder", "variable")]
        batches = {n: self._micro_batches(n, worker) for n in read if n in self._batch}
        outside = {
            n: self._value_at(n, place)
            for n in read
            if n not in batches and n not in self.dealt.server
        }
        copy = PartyCopy(self.sizes.sizes, self.device(place))
        key = draw_key(self.turn, self.device(place))
        tables = self.tables.routes
        return WorkerLoop(
            self.rules, worker, self.turn, self.ports, batches, outside, copy, key, tables
        )

    def _all_micro_batches(self, node: Node, server: int) -> Tensor:
        """Return all micro-batches at a server, (K·W, b, …)."""
        rows = self._fed_rows(node, f"server{server}/", server, self.rules.turns.total)
        self.shares[rows.node.inputs[0].node] = whole_feed(node)
        return rows

    def _micro_batches(self, node: Node, worker: int) -> Tensor:
        """Return the micro-batches of a worker, or of all in a pool, (number, b, …)."""
        is_pool, turns = self.rules.is_pool, self.rules.turns
        count = turns.total if is_pool else turns.each
        rows = self._fed_rows(node, f"worker{worker}/", self.servers + worker, count)
        share = whole_feed(node) if is_pool else self.sizes.worker_rows(node, worker)
        self.shares[rows.node.inputs[0].node] = share
        return rows

    def _fed_rows(self, node: Node, prefix: str, place: int, count: int) -> Tensor:
        """Return micro-batches that a place is fed of a placeholder, (count, b, …)."""
        (tensor,) = node.outputs
        with origin_scope(node, prefix, self.device(place)):
            fed: Tensor = REGISTRY["placeholder"](
                shape=(count * self.sizes.size, *tensor.shape[1:]), dtype=tensor.dtype.name,
                name=node.name,
            )  # fmt: skip
            rows: Tensor = REGISTRY["reshape"](
                fed, shape=(count, self.sizes.size, *tensor.shape[1:])
            )
        return rows


__all__ = ["PARTY", "ServedWindow"]
