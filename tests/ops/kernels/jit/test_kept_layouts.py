"""Layouts of weights that stay from step to step, until a step or the user changes the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ops.kernels.conv.implicit import channel_rows
from graphflow.ops.kernels.jit.kept_layouts import DeviceLayouts, KeptLayouts
from graphflow.ops.networks.recurrence.gru_op import gru_op
from graphflow.ops.networks.recurrence.lstm_op import lstm_op
from graphflow.ops.tensors.creation import zeros
from tests.ops.kernels.sharing import HAS_PRODUCTS


def _run_lstm(z: Any, r: Any, **options: Any) -> Any:
    state = zeros((z.shape[1], 64))
    return lstm_op(z, r, zeros((256,)), state, state, gates="ifgo", **options)[0]


def _run_gru(z: Any, r: Any, **options: Any) -> Any:
    state = zeros((z.shape[1], 64))
    return gru_op(z, r, zeros((192,)), state, gates="rzn", reverse=False, **options)[0]


CASES = {
    "strided": (gf.nn.conv2d, (2, 64, 12, 12), (32, 64, 3, 3), {"stride": 2}),
    "dilated": (gf.nn.conv2d, (1, 70, 12, 12), (66, 70, 3, 3), {"dilation": 2, "padding": 2}),
    "taps that see padding only": (
        gf.nn.conv2d,
        (1, 64, 12, 12),
        (32, 64, 3, 3),
        {"dilation": (12, 1), "padding": (12, 1)},
    ),
    "transposed": (gf.nn.conv_transpose2d, (1, 64, 9, 9), (64, 32, 3, 3), {"stride": 2}),
}
RECURRENT_CASES = {
    "lstm": (_run_lstm, (20, 32, 256), (256, 64), {"reverse": False}),
    "reversed lstm": (_run_lstm, (20, 32, 256), (256, 64), {"reverse": True}),
    "long lstm": (_run_lstm, (1030, 8, 256), (256, 64), {"reverse": False}),
    "gru": (_run_gru, (20, 32, 192), (192, 64), {"linear_before_reset": False}),
    "gru with one product": (_run_gru, (20, 32, 192), (192, 64), {"linear_before_reset": True}),
}
if HAS_PRODUCTS:  # otherwise numpy computes recurrent networks
    CASES |= RECURRENT_CASES


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_results_follow_the_weights_with_the_same_bits(case: str, threads: int) -> None:
    call, shape, kernel, options = CASES[case]
    rng = np.random.default_rng(0)
    image, first, second = (rng.normal(size=s).astype("float32") for s in (shape, kernel, kernel))
    x, fed = gf.placeholder("float32", shape), gf.placeholder("float32", kernel)
    w = gf.variable(first)
    y, plain, fixed = (call(x, each, **options) for each in (w, fed, gf.constant(first)))
    double = gf.assign(w, w * 2.0)
    with gf.Session(gf.Cluster.here(threads=threads)) as s:

        def check(value: Any) -> None:
            want = s.run(plain, {x: image, fed: value})
            for _ in range(2):
                np.testing.assert_array_equal(s.run(y, {x: image}), want)

        check(first)
        np.testing.assert_array_equal(s.run(fixed, {x: image}), s.run(y, {x: image}))
        for turn in range(1, 4):  # from the second time on, a step takes a shorter path
            s.run(double)
            check(np.float32(2**turn) * first)
        s.set(w, second)
        check(second)
        (use,) = s.memory(y).values()
        assert use.use.layouts >= second.nbytes / 3 and use.predicted > use.use.layouts


def test_weights_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call, shape, kernel, options = CASES["strided"]
    calls = []
    write = channel_rows.BlockedWeights._write

    def count(self: Any, memory: Any) -> None:
        calls.append(1)
        write(self, memory)

    monkeypatch.setattr(channel_rows.BlockedWeights, "_write", count)
    x, w = gf.placeholder("float32", shape), gf.variable(np.ones(kernel, "float32"))
    image = np.ones(shape, "float32")
    with gf.Session(gf.Cluster.here(threads=1)) as s:
        y = call(x, w, **options)
        for _ in range(3):
            s.run(y, {x: image})
        assert len(calls) == 1
        s.run([y, gf.assign(w, w + 1.0)], {x: image})  # this program keeps nothing
        before = len(calls)
        for _ in range(2):
            s.run(y, {x: image})
        assert len(calls) == before + 1


def test_a_layout_that_was_interrupted_is_written_again() -> None:
    kept, written = KeptLayouts(), []

    def fail(memory: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.get("key", 8, fail)
    for _ in range(2):
        kept.get("key", 8, written.append)
    assert len(written) == 1


def test_cleared_layouts_are_written_to_the_same_memory_which_its_readers_keep() -> None:
    layouts = DeviceLayouts()
    kept = layouts.find("w")
    memory = kept.get("key", 100, lambda memory: None)
    layouts.clear(["w", "other"])
    written: list[Any] = []
    assert layouts.find("w").get("key", 100, written.append) is memory and written
    assert layouts.nbytes == memory.nbytes == 100
    del kept
    assert layouts.nbytes == 0
