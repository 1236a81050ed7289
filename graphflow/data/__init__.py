"""Data: from files and arrays to the batches of a training.

    data = gf.data.arrays(x=images, y=labels).shuffle(seed=0).batch(64).epochs(10)
    for batch in data.start(session.step):
        session.run(train, batch)

The order of rows is a function of (seed, epoch, index). No state is kept, so a training goes on at
any step, on any number of workers, with the batches that it would have had.
"""

from __future__ import annotations

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

__all__ = [
    "Dataset", "Position", "Source", "arrays", "arrow", "csv", "images", "iterate", "json_lines",
    "npy", "npz", "parquet", "svmlight", "wrap",
]  # fmt: skip
