"""What is tested here are generated kernels, also where a whole run has GRAPHFLOW_JIT=off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _generated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRAPHFLOW_JIT", raising=False)
        yield
