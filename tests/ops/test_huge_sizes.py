"""Sizes that nothing holds: an error of ours while the graph is built, or before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.op import validate_arguments

HUGE = 10**12
BUILT: dict[str, Callable[[], Any]] = {
    "linspace": lambda: gf.linspace(0.0, 1.0, HUGE),
    "hann_window": lambda: gf.signal.hann_window(HUGE),
    "fftfreq": lambda: gf.fft.fftfreq(HUGE),
    "rfftfreq": lambda: gf.fft.rfftfreq(HUGE),
}
RUN: dict[str, Callable[[], Any]] = {
    "arange": lambda: gf.arange(HUGE),
    "zeros": lambda: gf.zeros((2**40, 2**40)),
    "eye": lambda: gf.eye(10**6, 10**6),
    "normal": lambda: gf.random.normal((HUGE,)),
    "broadcast_to": lambda: gf.broadcast_to(gf.constant(1.0), (HUGE,)),
    "tile": lambda: gf.tile(gf.constant([1.0]), (HUGE,)),
    "pad": lambda: gf.pad(gf.constant([1.0]), ((0, HUGE),)),
    "variable": lambda: gf.variable(gf.init.zeros((HUGE,))) + 1.0,
}


@pytest.mark.parametrize("name", BUILT)
def test_numbers_that_no_graph_holds_are_refused_where_they_are_asked_for(name: str) -> None:
    with pytest.raises(gf.errors.ArgumentError, match=rf"{name} at .*test_huge_sizes\.py.*GiB"):
        BUILT[name]()


@pytest.mark.parametrize("name", RUN)
def test_tensors_that_no_device_holds_are_refused_before_they_are_computed(name: str) -> None:
    fetch = RUN[name]()
    with pytest.raises(gf.errors.MemoryLimitError):
        gf.plan(fetch)
    with gf.Session() as s, pytest.raises(gf.errors.MemoryLimitError):
        s.run(fetch)


def test_a_function_that_runs_out_of_memory_says_on_which_line() -> None:
    def builds(size: int) -> Any:
        return gf.constant(np.zeros(size * 2**40))

    with pytest.raises(gf.errors.ArgumentError, match=r"builds at .*test_huge_sizes\.py.*PiB"):
        validate_arguments(builds, "builds")(2**10)
