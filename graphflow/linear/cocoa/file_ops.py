"""Ops that read a worker's rows of a svmlight file, between two bytes of it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from graphflow.base.process.data_folders import check_data_file
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import TensorSpec
from graphflow.linear.cocoa.part_rules import F64, I64

SIZES = 4
"""Numbers of `svmlight_sizes`: rows, entries, the lowest and the highest column as in the text."""


def _sizes_kernel(xp: Any, path: str, part: int, parts: int) -> Any:
    from graphflow.linear.cocoa import part_kernels

    return part_kernels.measure_file(check_data_file(path), part, parts)


# The sizes of part `part` of `parts`: the lines after the first newline from part / parts on.
svmlight_sizes: Op = register(
    Op(
        "svmlight_sizes",
        infer=lambda path, part, parts: TensorSpec((SIZES,), I64),
        kernel=_sizes_kernel,
        cost=lambda path, part, parts: Cost(flops=0),
        samples=(sample(path=os.devnull, part=0, parts=1),),
        pure=False,
        device_kinds=("cpu",),
    )
)


def _infer_rows(rows: int, entries: int, **_: Any) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec((rows,), F64), TensorSpec((entries,), F64),
        TensorSpec((entries,), np.dtype("int32")), TensorSpec((rows + 1,), I64),
    )  # fmt: skip


def _rows_kernel(xp: Any, path: str, **attrs: Any) -> Any:
    from graphflow.linear.cocoa import part_kernels

    return part_kernels.read_file(path=check_data_file(path), **attrs)


# The rows of such a part: targets, values, columns, row offsets. `first` is the number of the first
# column in the text, 0 or 1; rows and entries are as `svmlight_sizes` found them.
svmlight_rows: Op = register(
    Op(
        "svmlight_rows",
        infer=_infer_rows,
        kernel=_rows_kernel,
        cost=lambda rows, entries, **_: Cost(flops=40 * entries + 100 * rows),
        samples=(sample(path=os.devnull, part=0, parts=1, rows=0, entries=0, first=1),),
        pure=False,
        device_kinds=("cpu",),
    )
)

__all__ = ["SIZES", "svmlight_rows", "svmlight_sizes"]
