"""Routes of device pairs through ports of a cluster: the shared links of a placement problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from graphflow.placement.clusters.cluster import Cluster


def shared_links(cluster: Cluster) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return shared bandwidths, (s,) bytes/s, and (r, 3) rows: source, target, shared link.

    Ports of one name are one. Each direction is a link of its own, unless a port says otherwise. A
    port that only one pair uses is left out, because the pair's own link has its bandwidth.
    """
    users, width = port_users(cluster)
    shared = [key for key, ways in users.items() if len(ways) > 1]
    rows = [(a, b, i) for i, key in enumerate(shared) for a, b in users[key]]
    return (
        np.array([width[key] for key in shared], dtype=np.float64),
        np.array(sorted(rows), dtype=np.int64).reshape(-1, 3),
    )


def port_users(
    cluster: Cluster,
) -> tuple[dict[tuple[str, str], dict[tuple[int, int], None]], dict[tuple[str, str], float]]:
    """Return the pairs (source, target) that use each port, and its bytes/s.

    The keys are the port's name and "out", "in", or "" for both directions.
    """
    index = {name: i for i, name in enumerate(cluster.devices)}
    users: dict[tuple[str, str], dict[tuple[int, int], None]] = {}
    width: dict[tuple[str, str], float] = {}
    for port in cluster.ports:
        inside = set(_expand(cluster, port.inside))
        outside = set(cluster.devices if port.outside is None else _expand(cluster, port.outside))
        outside -= inside | set(_expand(cluster, port.besides))
        ways = ("out", "in") if port.duplex else ("", "")
        for a in sorted(index[name] for name in inside):
            for b in sorted(index[name] for name in outside):
                for key, way in (((port.name, ways[0]), (a, b)), ((port.name, ways[1]), (b, a))):
                    users.setdefault(key, {})[way] = None
                    width[key] = port.bandwidth
    return users, width


def _expand(cluster: Cluster, names: Sequence[str]) -> Iterator[str]:
    """Yield the devices of names of devices and workers."""
    known = set(cluster.devices)
    for name in names:
        if name in known:
            yield name
        else:
            yield from (device for device in cluster.devices if device.startswith(f"{name}/"))
