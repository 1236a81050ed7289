"""Data: from files and arrays to the batches of a training.

    data = gf.data.arrays(x=images, y=labels).shuffle(seed=0).batch(64).epochs(10)
    for batch in data.start(session.step):
        session.run(train, batch)

The order of rows is a function of (seed, epoch, index). No state is kept, so a training goes on at
any step, on any number of workers, with the batches that it would have had.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphflow.ir.name_hints import missing_attribute_error

if TYPE_CHECKING:
    from graphflow.data.dataset import Dataset, Position
    from graphflow.data.open_sources import (
        arrays,
        arrow,
        csv,
        images,
        iterate,
        json_lines,
        npy,
        npz,
        parquet,
        svmlight,
        wrap,
    )
    from graphflow.data.sources.source import Source
    from graphflow.data.worker_reading import WorkerReading, bind

__all__ = [
    "Dataset", "Position", "Source", "WorkerReading", "arrays", "arrow", "bind", "csv", "images",
    "iterate", "json_lines", "npy", "npz", "parquet", "svmlight", "wrap",
]  # fmt: skip

_HOMES = {
    "Dataset": "dataset", "Position": "dataset", "Source": "sources.source",
    "WorkerReading": "worker_reading", "bind": "worker_reading",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: workers need the op that reads rows only."""
    if name not in __all__:
        raise missing_attribute_error(__name__, name)
    found = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'open_sources')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
