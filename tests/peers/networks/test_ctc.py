"""The loss of connectionist temporal classification against torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402


@given(
    st.integers(1, 12), st.integers(1, 3), st.integers(1, 5), st.integers(2, 4),
    st.sampled_from([1.0, 30.0, 400.0]), st.sampled_from(["none", "mean", "sum"]),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40)
def test_ctc(
    time: int, batch: int, most: int, classes: int, spread: float, reduction: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    blank = int(rng.integers(classes))
    labels = (blank + rng.integers(1, classes, (batch, most))) % classes
    steps, counts = rng.integers(1, time + 1, batch), rng.integers(0, most + 1, batch)
    given = [torch.tensor(a) for a in (labels, steps, counts)]
    agree(
        lambda x: nn.ctc_loss(
            nn.log_softmax(x), labels, steps, counts, blank, reduction, zero_infinity=True
        ),
        lambda x: torch.nn.functional.ctc_loss(
            torch.log_softmax(x, -1), *given, blank, reduction, zero_infinity=True
        ),
        [rng.normal(0, spread, (time, batch, classes))],
        rtol=1e-7,
    )
