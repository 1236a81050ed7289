"""Rows of tables: an owner's sums stay inside of its piece."""

from __future__ import annotations

import numpy as np

from graphflow.ir.op import REGISTRY


def test_padding_between_keys_writes_to_no_row() -> None:
    """Calibration runs ops on samples with other sizes, whose padding is anywhere."""
    around = np.full((8, 2), 7.0, "float32")
    into = REGISTRY["merge_row_sums"].into
    assert into is not None
    places, gradient = np.array([0, -1, 2, 2]), np.ones((4, 2), "float32")
    into(np, around[3:6], places, np.array(4), gradient, starts=(0,), size=3)
    np.testing.assert_array_equal(around[3:6, 0], [1, 0, 2])
    assert (around[:3] == 7).all() and (around[6:] == 7).all()
