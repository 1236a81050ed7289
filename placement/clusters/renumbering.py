"""Renumber the workers of a cluster that has lost some: their devices, links and ports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphflow.placement.clusters.devices import CLIENT, Link, Worker
from graphflow.placement.clusters.shared_ports import Port


def renumber(
    stay: Sequence[Worker], links: Iterable[Link], ports: Iterable[Port]
) -> tuple[tuple[Worker, ...], tuple[Link, ...], tuple[Port, ...]]:
    """Return workers with the numbers 0, 1, …, and the links and ports that they keep.

    Args:
        stay: the workers that stay, with their numbers of before.
        links, ports: those of before, which name devices by these numbers.
    """
    numbers = {f"/worker:{worker.index}": f"/worker:{i}" for i, worker in enumerate(stay)}

    def rename(end: str) -> str | None:
        worker, slash, device = end.removeprefix("/").partition("/")
        if end == CLIENT:
            return end
        return numbers[f"/{worker}"] + slash + device if f"/{worker}" in numbers else None

    def rename_all(ends: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in map(rename, ends) if name is not None)

    workers = tuple(
        replace(
            worker, index=index,
            devices=tuple(replace(d, name=rename(d.name) or "") for d in worker.devices),
        )
        for index, worker in enumerate(stay)
    )  # fmt: skip
    kept_links = tuple(
        replace(link, source=source, target=target)
        for link in links
        if (source := rename(link.source)) and (target := rename(link.target))
    )
    kept_ports = tuple(
        replace(
            port, inside=rename_all(port.inside), besides=rename_all(port.besides),
            outside=None if port.outside is None else rename_all(port.outside),
        )
        for port in ports
        if rename_all(port.inside)
    )  # fmt: skip
    return workers, kept_links, kept_ports
