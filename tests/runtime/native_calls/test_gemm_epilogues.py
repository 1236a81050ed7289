"""Epilogues: block by block, where nothing is overwritten that is still wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.kernels.gemm.gemm import is_supported
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.runtime.native_calls import native_segments as segments
from graphflow.runtime.native_calls.gemm_epilogues import (
    BlockCall,
    KernelAccess,
    MemoryRange,
    interleave_epilogues,
)

MADE, SCRATCH = MemoryRange(1000, 160), MemoryRange(2000, 64)
PRODUCT = KernelAccess(
    KernelTask("product", "", (), 5, 0.0, blocks=((2, 16), (4, 32), (5, 40))),
    (MemoryRange(0, 80), MemoryRange(80, 80)),
    (MADE, SCRATCH),
)
REGION = KernelAccess(
    KernelTask("region", "", (), 10, 0.0, row=4),
    (MADE, MemoryRange(None, 16)),
    (MemoryRange(3000, 160),),
)


def test_a_region_follows_each_block_of_the_product_that_it_reads() -> None:
    assert interleave_epilogues([PRODUCT, REGION, PRODUCT]) == [
        BlockCall(0, 0, 2), BlockCall(1, 0, 4), BlockCall(0, 2, 4), BlockCall(1, 4, 8),
        BlockCall(0, 4, 5), BlockCall(1, 8, 10),
        BlockCall(2, 0, 5),
    ]  # fmt: skip


def test_a_region_may_write_where_the_product_is() -> None:
    assert len(interleave_epilogues([PRODUCT, REGION._replace(writes=(MADE,))])) == 6


@pytest.mark.parametrize(
    "region",
    [
        REGION._replace(reads=(MemoryRange(3000, 160),)),
        REGION._replace(reads=(MADE, MemoryRange(1000, 16))),
        REGION._replace(writes=(MemoryRange(1008, 160),)),
        REGION._replace(writes=(MemoryRange(40, 160),)),
        REGION._replace(writes=(MemoryRange(3000, 160), MemoryRange(2000, 8))),
        REGION._replace(task=replace(REGION.task, row=0)),
        REGION._replace(task=replace(REGION.task, rows=9)),
        REGION._replace(task=replace(REGION.task, row=5, rows=8)),
    ],
    ids=["reads another", "reads a part", "shifted", "on an operand", "on scratch", "no rows",
         "other rows", "blocks end in a row"],
)  # fmt: skip
def test_otherwise_both_run_as_a_whole(region: KernelAccess) -> None:
    assert interleave_epilogues([PRODUCT, region]) == [
        BlockCall(0, 0, 5),
        BlockCall(1, 0, region.task.rows),
    ]


def test_what_is_unknown_runs_as_a_whole() -> None:
    assert len(interleave_epilogues([KernelAccess(PRODUCT.task, (), ()), REGION])) == 2
    assert (
        len(interleave_epilogues([PRODUCT._replace(writes=(MemoryRange(None, 160),)), REGION])) == 2
    )
    assert interleave_epilogues([]) == []


@pytest.mark.skipif(not is_supported("float32"), reason="made for AVX2 and up")
@pytest.mark.parametrize("epilogue", ["bias and gelu", "norm", "residual", "attention"])
def test_programs_with_epilogues_give_the_bits_of_nodes_one_by_one(
    epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def record_epilogues(works: Any) -> list[BlockCall]:
        found = interleave_epilogues(works)
        taken.append(len(found) - len(works))
        return found

    monkeypatch.setattr(segments, "interleave_epilogues", record_epilogues)
    random = np.random.default_rng(0)
    rows = 700 if epilogue == "attention" else 1200  # a product goes by blocks of up to 1,024
    x = gf.placeholder("float32", (rows, 96))
    fed = random.normal(size=(rows, 96)).astype("f4")
    w, bias = (gf.constant(random.normal(size=s).astype("f4")) for s in ((96, 800), (800,)))
    match epilogue:
        case "bias and gelu":
            y = gf.nn.gelu(x @ w + bias)
        case "norm":
            y = gf.nn.layer_norm(x @ w + bias, bias, bias)
        case "residual":
            y = gf.concat([x] * 4, axis=1) @ gf.constant(np.eye(384, 800, dtype="f4")) * 0.5 + bias
        case _:
            heads = gf.reshape(gf.concat([x] * 8, axis=0), (8, 700, 96))
            y = gf.nn.softmax(heads @ gf.matrix_transpose(heads) * 0.1, axis=-1)
    with gf.Session(gf.Cluster.here(threads=1)) as session:
        result = session.run(y, {x: fed})
    np.testing.assert_array_equal(result, evaluate([y], {x: fed})[0])
    assert sum(taken) > 0
