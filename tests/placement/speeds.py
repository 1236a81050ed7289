"""A machine that never was: speeds that are round, so that tests need no calibration."""

from __future__ import annotations

from typing import Any


def speeds(**changes: Any) -> dict[str, Any]:
    """Speeds of a CPU: 1 µs a launch, 100 Gflop/s, 4 GB/s in memory, 1 Gflop/s elementwise."""
    return {
        "launch": 1e-6,
        "handoff": 10e-6,
        "cache_bytes": 1 << 20,
        "traffic": [[1e6, 25e-6], [1e8, 25e-3]],
        "matmul": {
            "float32": [[1e4, 1e-6], [1e6, 1e-5], [1e9, 1e-2]],
            "float64": [[1e4, 2e-6], [1e6, 2e-5], [1e9, 2e-2]],
            "other": [[1e4, 1e-5], [1e6, 1e-3]],
        },
        "ops": {"exp": {"launch": 2e-6, "rate": 5e9, "itemsize": 4}},
        "classes": {
            "elementwise": {"launch": 1e-6, "rate": 1e9, "itemsize": 4},
            "other": {"launch": 2e-6, "rate": 1e9, "itemsize": 4},
            "random": {"launch": 1e-4, "rate": 1e9, "itemsize": 4},
        },
        "contention": {"threads": [1, 2], "compute": [1.0, 1.1], "memory": [1.0, 1.6]},
        **changes,
    }


def profile(links: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A profile of that machine."""
    return {
        "format": 1,
        "key": {},
        "devices": {"cpu": speeds(**changes)},
        "links": {"process": [1e-4, 1e9], "client": [1e-4, 1e9], "thread": [1e-5, None]}
        | (links or {}),
    }


def scatter(deviation: float) -> dict[str, list[float]]:
    """The `scatter` of speeds whose predictions of all ops are equally uncertain."""
    return {"all": [deviation, deviation]}
