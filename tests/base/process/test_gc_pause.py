"""The garbage collector rests in blocks, and is left as it was found."""

from __future__ import annotations

import gc

import pytest

import graphflow as gf
from graphflow.base.process.gc_pause import gc_paused, without_collection


def test_the_collector_rests_in_a_block_and_goes_on_after_the_last_of_nested_ones() -> None:
    assert gc.isenabled()
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_in_a_block_leaves_the_collector_on() -> None:
    @without_collection
    def fails() -> None:
        assert not gc.isenabled()
        raise gf.errors.GraphError("no")

    with pytest.raises(gf.errors.GraphError):
        fails()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_gradients_and_sessions_leave_the_collector_on() -> None:
    v = gf.variable([1.0, 2.0])
    with gf.Session() as s:
        s.run(gf.gradients(gf.sum(v * v), [v]))
    assert gc.isenabled()
