"""Checks of the mesh that a user gives, and the choice of its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from graphflow.errors import ShardingError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import user_location
from graphflow.parallel.mesh.count_arguments import as_count
from graphflow.placement.clusters.cluster import Cluster

MAX_NODES = 4_000_000
"""The most nodes, about, that a graph of shards may have."""


def check_mesh(mesh: Mapping[str, int], what: str) -> Mapping[str, int]:
    """Return the sizes of a mesh as ints.

    Raises:
        ShardingError: the mesh is no dict, is empty, has an axis without a name, or a size below 1.
    """
    where = f"{what} at {user_location()}"
    if not isinstance(mesh, Mapping) or not mesh:
        raise ShardingError(f'{where}: a mesh must be a dict of sizes, {{"data": 2}}, not {mesh!r}')
    sizes = {}
    for name, given in mesh.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ShardingError(
                f"{where}: the name of a mesh axis must be an identifier, not {name!r}"
            )
        size = as_count(given)
        if size is None:
            raise ShardingError(
                f"{where}: axis {name!r} must have a size of at least 1, not {given!r}"
            )
        sizes[name] = size
    return sizes


def check_mesh_size(graph: Graph, mesh: Mapping[str, int]) -> None:
    """Refuse a mesh whose graph of shards would have too many nodes.

    Raises:
        ShardingError: the graph would have more than `MAX_NODES` nodes.
    """
    count, nodes = prod(mesh.values()), len(graph.nodes)
    if count * nodes > MAX_NODES:
        shape = " × ".join(f"{name} {size:,}" for name, size in mesh.items())
        raise ShardingError(
            f"the mesh ({shape}) has {count:,} places, for each of which the {nodes:,} nodes of "
            f"the step would be written; make it smaller, {max(1, MAX_NODES // nodes):,} places at "
            "most"
        )


def own_devices(cluster: Cluster) -> list[str]:
    """Return the devices over which a strategy partitions a graph by itself.

    If nobody named the devices, they are the GPUs if there are several. Otherwise it is the CPU.
    """
    names = list(cluster.devices)
    if not cluster.is_automatic:
        return names
    gpus = [name for name in names if cluster.device(name).kind == "gpu"]
    return gpus if len(gpus) > 1 else [name for name in names if name not in gpus]


def mesh_devices(
    mesh: Mapping[str, int],
    cluster: Cluster,
    wanted: Any = None,
) -> list[DeviceName]:
    """Return a device for each place of a mesh.

    Without `wanted`, the first devices of one kind are taken, GPUs first. A cluster of one device
    has all places. So has the CPU if there are fewer GPUs than places and nobody named a GPU.

    Raises:
        ShardingError: there are too few devices, or `wanted` does not name one for each place.
    """
    count = prod(mesh.values())
    shape = " × ".join(f"{name} {size}" for name, size in mesh.items())
    if wanted is not None:
        if (
            isinstance(wanted, str)
            or not isinstance(wanted, Sequence)
            or not all(isinstance(name, str) for name in wanted)
        ):
            raise ShardingError(
                f"devices must be a list with a name for each of the {count} places of the mesh "
                f"({shape}), such as {(list(cluster.devices) * count)[:count]}, not {wanted!r}"
            )
        if len(wanted) != count:
            raise ShardingError(
                f"the mesh ({shape}) has {count} places, but devices names {len(wanted)}: "
                f"{', '.join(wanted)}; name one for each"
            )
        return [DeviceName.parse(cluster.device(name).name) for name in wanted]
    names = own_devices(cluster)
    if cluster.is_automatic and len(names) < count:
        names = [name for name in cluster.devices if cluster.device(name).kind == "cpu"]
    if len(names) == 1:
        return [DeviceName.parse(names[0])] * count
    kinds = {name: cluster.device(name).kind for name in names}
    for kind in sorted(set(kinds.values()), key=lambda k: k != "gpu"):
        own = [name for name in names if kinds[name] == kind]
        if len(own) >= count:
            return [DeviceName.parse(name) for name in own[:count]]
    if len(names) >= count:
        return [DeviceName.parse(name) for name in names[:count]]
    raise ShardingError(
        f"the mesh ({shape}) takes {count} devices, and the cluster has {len(names)}: "
        f"{', '.join(names)}; make an axis smaller, or give a cluster of {count} devices, such as "
        f"gf.Cluster.local({count})"
    )
