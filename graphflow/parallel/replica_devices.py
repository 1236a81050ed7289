"""Devices that a user names for replicas, or places of a mesh, of which each takes several: in a
product with what cuts a replica further, or has it in stages.

    Data(2, devices=[["a", "b"], ["c", "d"]]) * Shard({"model": 2}, rules)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.errors import ShardingError

DeviceGroups = list[list[str]]


def device_groups(devices: Any, count: int, each: int, where: str, what: str) -> DeviceGroups:
    """The devices of some replicas or places, a list for each.

    Args:
        count: of the lists.
        each: a divisor of how many devices one takes.
        what: takes them, for errors.

    Raises:
        ShardingError: they are no such lists, or of other lengths.
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
    """The devices of all places of replicas, a list for each where stages are still to come, of
    which a replica's devices have those of all its places, one after the other."""
    stages = len(teams[0]) // places
    if stages == 1:
        return [name for own in teams for name in own]
    return [[*own[place::places]] for own in teams for place in range(places)]


def group_by_stage(teams: DeviceGroups) -> list[str]:
    """The devices of all places, those of a stage beside each other."""
    return [name for stage in zip(*teams, strict=True) for name in stage]


__all__ = ["group_by_stage", "device_groups", "flatten_groups"]
