"""The bytes that servers and workers send each other in a window."""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.formatting import show_count
from graphflow.ir.op import Node
from graphflow.ir.spec import product
from graphflow.parallel.mesh.layouts import CommunicationRecord, SentTensor
from graphflow.parallel.servers.routes import PushRoute
from graphflow.parallel.servers.window import PARTY, ServedWindow

TICKET_BYTES = 4
"""The bytes of the number of a micro-batch."""

Records = tuple[CommunicationRecord, ...]


def record_traffic(window: ServedWindow) -> tuple[Records, Records]:
    """Return the records of a window's pushes and pulls, and of what is sent to be fetched.

    A worker on the device of a server sends it nothing. In a pool, workers count as if each took
    as many turns as the others; if none is on the device of a server, the sums are exact.
    """
    records: list[CommunicationRecord] = []
    fetched: list[CommunicationRecord] = []
    turns = window.rules.turns
    for server, port in enumerate(window.ports):
        apart = [k for k in range(turns.workers) if window.is_apart(server, k)]
        count = len(apart) * turns.each

        def record(
            kind: str, name: str, cause: Node, size: int, times: int = count, server: int = server,
            plain: int | None = None,
        ) -> None:  # fmt: skip
            if size * times:
                to = fetched if kind == "fetch" else records
                number = (kind, server, name, len(to))
                sent: dict[SentTensor, float] = {(window.results[0].order, number): size * times}
                axis = f"{PARTY} {server}"
                to.append(
                    CommunicationRecord(
                        kind,
                        axis,
                        name,
                        size * times,
                        cause.name,
                        cause.location,
                        sent,
                        None if plain is None else plain * times,
                    )
                )

        for pushes, route in port.pushes.items():
            causes = [p.variable or p.value.node for p in pushes.items]
            plain = int(route.spec.nbytes) if route.is_filtered else None
            record("push", _describe(window, causes), causes[0], route.nbytes, plain=plain)
        for tensor, route in port.fetched.items():
            record("fetch", tensor.node.name, tensor.node, _guess(window, route))
        for variables, pull in port.pulls.items():
            name, cause = _describe(window, variables.items), variables.items[0]
            size = int(pull.spec.nbytes)
            if not pull.is_filtered:
                record("pull", name, cause, size)
                continue
            record("first pull", name, cause, size, len(apart))
            record("pull", name, cause, pull.nbytes, count - len(apart), plain=size)
        for variable in window.dealt.carried[server]:
            home = window.dealt.server[variable]
            if window.device(home) != window.device(server):
                record(
                    "state", window.name_of(variable), variable, int(variable.specs[0].nbytes), 1
                )
        for rows in window.tables.routes:
            table = rows.table.node
            size = rows.expected_bytes(server, window.sizes.guess)
            record("rows", window.name_of(table), table, size)
            record("gradients", window.name_of(table), table, size)
        if window.tables.relays and server == 0:
            for other in range(1, window.servers):
                if window.device(other) != window.device(0):
                    total = window.rules.turns.total
                    record("number", f"micro-batch of server {other}", window.node, 4, total)
        record("number", "micro-batch", window.node, TICKET_BYTES)
        if port.numbers:
            record("number", "next micro-batch", window.node, TICKET_BYTES)
    return tuple(records), tuple(fetched)


def _describe(window: ServedWindow, nodes: Sequence[Node]) -> str:
    """Return the name of what travels in one message."""
    return window.name_of(nodes[0]) if len(nodes) == 1 else show_count(len(nodes), "tensor")


def _guess(window: ServedWindow, route: PushRoute) -> int:
    """Return the bytes of what a turn sends of a fetch, for the sizes that reports assume."""
    return window.sizes.guess(product(route.spec.shape)) * route.spec.dtype.itemsize


__all__ = ["record_traffic"]
