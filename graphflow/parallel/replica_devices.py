"""Devices that a user names for replicas, or for places of a mesh, that take several devices each.

In a product each replica is split further, or has stages:

    Data(2, devices=[["a", "b"], ["c", "d"]]) * Shard({"model": 2}, rules)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.errors import ShardingError

DeviceGroups = list[list[str]]
"""For each replica or place, the names of its devices."""


def device_groups(devices: Any, count: int, each: int, where: str, what: str) -> DeviceGroups:
    """Return the devices of each replica or place.

    Args:
        devices: what the user gave.
        count: the number of replicas or places.
        each: how many devices one of them takes, or a divisor of that.
        where: the strategy and its line, for errors.
        what: "replicas" or "places of the mesh", for errors.

    Raises:
        ShardingError: `devices` is no list of `count` lists of names, or these have other lengths.
    """
    lists = isinstance(devices, Sequence) and not isinstance(devices, str)
    if lists and each == 1 and all(isinstance(name, str) for name in devices):
        return [[name] for name in devices]
    names = iter([f"/worker:{i}/cpu:0" for i in range(count * each)])
    example = [[next(names) for _ in range(each)] for _ in range(count)]
    if (
        not lists
        or len(devices) != count
        or any(isinstance(own, str) or not isinstance(own, Sequence) for own in devices)
        or any(len(own) % each or not own or len(own) != len(devices[0]) for own in devices)
        or not all(isinstance(name, str) for own in devices for name in own)
    ):
        raise ShardingError(
            f"{where}: each of the {count} {what} takes {each} devices here: give devices= a list "
            f"of {each} for each, such as {example}, not {devices!r}"
        )
    return [[*own] for own in devices]


def flatten_groups(teams: DeviceGroups, places: int) -> list[Any]:
    """Return the devices of all places of all replicas.

    If a Pipeline is still to come, each place has a list with a device for each stage. A replica's
    list then has the devices of all its places for the first stage, then those for the second, and
    so on.
    """
    stages = len(teams[0]) // places
    if stages == 1:
        return [name for own in teams for name in own]
    return [[*own[place::places]] for own in teams for place in range(places)]


def group_by_stage(teams: DeviceGroups) -> list[str]:
    """Return the devices of all places, those of a stage next to each other."""
    return [name for stage in zip(*teams, strict=True) for name in stage]


__all__ = ["group_by_stage", "device_groups", "flatten_groups"]
