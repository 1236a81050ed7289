"""The bytes that servers and workers send each other in a window."""

from __future__ import annotations

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

        for push, route in port.pushes.items():
            cause = push.value.node if push.variable is None else push.variable
            plain = int(route.spec.nbytes) if route.is_filtered else None
            record("push", window.name_of(cause), cause, route.nbytes, plain=plain)
        for tensor, route in port.fetched.items():
            record("fetch", tensor.node.name, tensor.node, _guess(window, route))
        for variable, pull in port.pulls.items():
            size = int(pull.spec.nbytes)
            if not pull.is_filtered:
                record("pull", window.name_of(variable), variable, size)
                continue
            record("first pull", window.name_of(variable), variable, size, len(apart))
            after = count - len(apart)
            record("pull", window.name_of(variable), variable, pull.nbytes, after, plain=size)
        for variable in window.dealt.carried[server]:
            home = window.dealt.server[variable]
            if window.device(home) != window.device(server):
                record(
                    "state", window.name_of(variable), variable, int(variable.specs[0].nbytes), 1
                )
        record("number", "micro-batch", window.node, TICKET_BYTES)
        if port.numbers:
            record("number", "next micro-batch", window.node, TICKET_BYTES)
    return tuple(records), tuple(fetched)


def _guess(window: ServedWindow, route: PushRoute) -> int:
    """Return the bytes of what a turn sends of a fetch, for the sizes that reports assume."""
    return window.sizes.guess(product(route.spec.shape)) * route.spec.dtype.itemsize


__all__ = ["record_traffic"]
