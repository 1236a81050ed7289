"""The report of a window: what servers keep, and what travels between them and the workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property

from graphflow.base.formatting import show_bytes, show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.parallel.report import StrategyReport, format_table


@dataclass(frozen=True)
class ServerReport(StrategyReport):
    """The report of a ParameterServer. `bytes` and `fed` are those of a window.

    Attributes:
        servers: the number of servers.
    """

    servers: int

    @cached_property
    def bytes_by_link(self) -> dict[tuple[str, str], int]:
        """The bytes that travel in a window, by the devices that send and receive."""
        found: dict[tuple[str, str], float] = {}
        for move in (*self.collectives, *self.fetched):
            for (_, key), size in move.sent.items():
                if isinstance(key, tuple):
                    found[key[0]] = found.get(key[0], 0.0) + size
        return {link: round(size) for link, size in sorted(found.items())}

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        devices = [str(device) for device in self.division.mesh.devices]
        yield from self.division.notes
        for server, device in enumerate(devices[: self.servers]):
            yield f"  server {server} on {device or 'this process'}: {self._describe_state(device)}"
        yield f"  workers on {', '.join(map(str, devices[self.servers :]))}"
        if self.fed:
            yield f"  fed a window: {', '.join(self._fed_lines())}"
        yield f"{self.bytes:,} bytes a window between servers and workers"
        if self.filtered is not None:
            after, before = self.filtered
            yield (
                f"  of these {after:,} through filters, in place of {before:,} "
                f"({after / before:.2%})"
            )
        yield from format_table(
            ("message", "server", "of", "bytes", "because of", "at"),
            [
                (m.kind, m.axis.rpartition(" ")[2], m.tensor, f"{m.bytes:,}", m.cause,
                 f"{os.path.basename(m.location.file)}:{m.location.line}")
                for m in (*self.collectives, *self.fetched)
            ],
        )  # fmt: skip
        yield from format_table(
            ("from", "to", "bytes"),
            [(*link, f"{size:,}") for link, size in self.bytes_by_link.items()],
        )

    def _describe_state(self, device: str) -> str:
        """Describe the variables on a device of a server."""
        own = {
            node
            for pieces in self.division.variables.values()
            for node in pieces.nodes
            if str(node.device) == device
        }
        size = sum(int(node.specs[0].nbytes) for node in own)
        return f"{show_count(len(own), 'variable')}, {show_bytes(size)}"


__all__ = ["ServerReport"]
