"""Check that the files of a training are those with which it began, by its checkpoint.

A checkpoint holds a digest of each file in a variable. A position in other files would be other
rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.data.dataset import Dataset
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import variable
from graphflow.ir.op import user_location
from graphflow.sessions.session import Session

_SLOTS = 64
"""Digests that are kept; further files share them."""


def check_same_files(session: Session, data: Dataset, number: str, steps: int) -> None:
    """Keep the digests of a dataset's files in the session, or compare them with those of its
    checkpoint.

    Args:
        session: trains on the dataset.
        data: the dataset.
        number: the end of the names of the training's variables.
        steps: those that were done before.

    Raises:
        ArgumentError: a file has changed, or there are more or fewer.
    """
    now = _digests(data)
    kept = variable(now, name=f"fit/files{number}", trainable=False)
    before = np.asarray(session.get(kept))
    if not steps or not now.any() or not before.any() or np.array_equal(before, now):
        return
    assert data.files is not None
    at = f"fit at {user_location()}"
    remedy = "bring back the files as they were, or train anew in another checkpoint folder"
    if before[-1] != now[-1]:
        raise ArgumentError(
            f"{at}: the data has {now[-1]} files, and had {before[-1]} when the {steps} steps of "
            f"the checkpoint were trained; {remedy}"
        )
    changed = [
        path for i, path in enumerate(data.files.paths) if before[i % _SLOTS] != now[i % _SLOTS]
    ]
    others = f" (or one of {len(changed) - 1} others)" if len(changed) > 1 else ""
    raise ArgumentError(
        f"{at}: {changed[0]!r}{others} has changed since the {steps} steps of the checkpoint were "
        f"trained, and its batches would be others; {remedy}"
    )


def _digests(data: Dataset) -> np.ndarray[Any, Any]:
    """Return the digests of a dataset's files, and their number, int64; zeros if it has none."""
    found = np.zeros(_SLOTS + 1, np.int64)
    if data.files is not None:
        for i, digest in enumerate(data.files.digests()):
            found[i % _SLOTS] ^= np.array(int(digest, 16), np.uint64).view(np.int64)
        found[-1] = len(data.files.paths)
    return found
