"""The bytes that servers and workers send each other in a window."""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node
from graphflow.ir.spec import product
from graphflow.parallel.mesh.layouts import CommunicationRecord, SentTensor
from graphflow.parallel.servers.loops.routes import PushRoute
from graphflow.parallel.servers.window import PARTY, ServedWindow

NUMBER_BYTES = 4
"""The bytes of the number of a micro-batch."""

Records = tuple[CommunicationRecord, ...]


@dataclass(frozen=True)
class _Ledger:
    """Records of what one server and its workers send each other.

    Attributes:
        window: the window.
        server: the number of the server.
        records: what travels in turns; gets the records.
        fetched: what is sent to be fetched.
    """

    window: ServedWindow
    server: int
    records: list[CommunicationRecord]
    fetched: list[CommunicationRecord]

    def add(
        self,
        kind: str,
        name: str,
        cause: Node,
        size: int,
        *,
        to_workers: bool = False,
        turns: int | None = None,
        plain: int | None = None,
    ) -> None:
        """Record a message between the server and each worker on another device.

        Args:
            size: the bytes of a message.
            to_workers: the server sends it; False: the worker does.
            turns: how often it is sent in a window; None: in each turn.
            plain: the bytes that a message would have without filters, if it has some.
        """
        window, server = self.window, self.server
        times = window.rules.turns.each if turns is None else turns
        sent: dict[SentTensor, float] = {}
        for worker in range(window.rules.turns.workers):
            if size * times and window.is_apart(server, worker):
                ends = (str(window.device(window.servers + worker)), str(window.device(server)))
                link = ends[::-1] if to_workers else ends
                sent[window.results[0].order, (link, kind, server, worker, name)] = size * times
        before = None if plain is None else plain * times * len(sent)
        self._append(kind, name, cause, sent, before)

    def add_between(self, kind: str, name: str, cause: Node, other: int, size: int) -> None:
        """Record a message from another server to this one, once a window."""
        source, target = self.window.device(other), self.window.device(self.server)
        if source != target and size:
            key = ((str(source), str(target)), kind, other, self.server, name)
            self._append(kind, name, cause, {(self.window.results[0].order, key): size}, None)

    def _append(
        self, kind: str, name: str, cause: Node, sent: dict[SentTensor, float], plain: int | None
    ) -> None:
        if sent:
            to = self.fetched if kind == "fetch" else self.records
            total, axis = round(sum(sent.values())), f"{PARTY} {self.server}"
            to.append(
                CommunicationRecord(
                    kind, axis, name, total, cause.name, cause.location, sent, plain
                )
            )


def record_traffic(window: ServedWindow) -> tuple[Records, Records]:
    """Return the records of a window's pushes and pulls, and of what is sent to be fetched.

    A worker on the device of a server sends it nothing. In a pool, workers count as if each took
    as many turns as the others; if none is on the device of a server, the sums are exact. Backup
    workers count as if none were late.
    """
    records: list[CommunicationRecord] = []
    fetched: list[CommunicationRecord] = []
    for server, port in enumerate(window.ports):
        ledger = _Ledger(window, server, records, fetched)
        for pushes, route in port.pushes.items():
            causes = [p.variable or p.value.node for p in pushes.items]
            plain = int(route.spec.nbytes) if route.is_filtered else None
            ledger.add("push", _describe(window, causes), causes[0], route.nbytes, plain=plain)
        for tensor, route in port.fetched.items():
            ledger.add("fetch", tensor.node.name, tensor.node, _guess(window, route))
        _record_pulls(ledger)
        for variable in window.dealt.carried[server]:
            size, home = int(variable.specs[0].nbytes), window.dealt.server[variable]
            ledger.add_between("state", window.name_of(variable), variable, home, size)
        _record_tables(ledger)
        ledger.add("number", "micro-batch", window.node, NUMBER_BYTES)
        if port.numbers:
            name = "next micro-batch"
            ledger.add("number", name, window.node, NUMBER_BYTES, to_workers=True)
    return tuple(records), tuple(fetched)


def _record_pulls(ledger: _Ledger) -> None:
    """Record what workers pull of a server."""
    window = ledger.window
    for variables, pull in window.ports[ledger.server].pulls.items():
        name, cause = _describe(window, variables.items), variables.items[0]
        size = int(pull.spec.nbytes)
        if not pull.is_filtered:
            ledger.add("pull", name, cause, size, to_workers=True)
            continue
        rest = window.rules.turns.each - 1
        ledger.add("first pull", name, cause, size, to_workers=True, turns=1)
        ledger.add("pull", name, cause, pull.nbytes, to_workers=True, turns=rest, plain=size)


def _record_tables(ledger: _Ledger) -> None:
    """Record the rows of tables that a server sends, and their gradients."""
    window = ledger.window
    for rows in window.tables.routes:
        name, table = window.name_of(rows.table.node), rows.table.node
        size = rows.expected_bytes(ledger.server, window.sizes.guess)
        ledger.add("rows", name, table, size, to_workers=True)
        ledger.add("gradients", name, table, size)
    if window.tables.relays and ledger.server:
        name, size = f"micro-batch of server {ledger.server}", NUMBER_BYTES
        ledger.add_between("number", name, window.node, 0, size * window.rules.turns.total)


def _describe(window: ServedWindow, nodes: Sequence[Node]) -> str:
    """Return the name of what travels in one message."""
    return window.name_of(nodes[0]) if len(nodes) == 1 else show_count(len(nodes), "tensor")


def _guess(window: ServedWindow, route: PushRoute) -> int:
    """Return the bytes of what a turn sends of a fetch, for the sizes that reports assume."""
    return window.sizes.guess(product(route.spec.shape)) * route.spec.dtype.itemsize


__all__ = ["record_traffic"]
