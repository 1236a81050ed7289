"""Answers to the questions of the array API standard: capabilities, dtypes and devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.array_api.data_types import DTYPES, isdtype
from graphflow.placement.clusters.machine.machine_devices import find_gpus

VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")
"""Versions of the standard whose functions are here, the oldest first."""


class NamespaceInfo:
    """Capabilities, dtypes and devices, as the standard asks for them."""

    def capabilities(self) -> dict[str, Any]:
        """Return what tensors can do: shapes never depend on values."""
        return {"boolean indexing": False, "data-dependent shapes": False, "max dimensions": 64}

    def default_device(self) -> str:
        """Return the empty name: the planner chooses the device of each node."""
        return ""

    def devices(self) -> list[str]:
        """Return the names that fit this machine: the planner's choice, any CPU, any GPU."""
        return ["", "cpu", "gpu"] if find_gpus().names else ["", "cpu"]

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype[Any]]:
        """Return the dtypes of tensors that are made without one, by kind."""
        names = {
            "real floating": "float32", "complex floating": "complex64", "integral": "int64",
            "indexing": "int64",
        }  # fmt: skip
        return {kind: DTYPES[name] for kind, name in names.items()}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, np.dtype[Any]]:
        """Return the dtypes of a kind (see `isdtype`) by name; default: all."""
        return {n: d for n, d in DTYPES.items() if kind is None or isdtype(d, kind)}


def __array_namespace_info__() -> NamespaceInfo:
    """Return what a library may ask of this namespace."""
    return NamespaceInfo()


__all__ = ["VERSIONS", "NamespaceInfo", "__array_namespace_info__"]
