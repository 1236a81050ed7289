"""Regions for tests of the generators: every elementwise op of the registry by itself, in every
dtype that it takes, over operands that are whole, rows, columns and scalars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import GraphflowError
from graphflow.ir.op import REGISTRY, Op
from graphflow.ir.spec import TensorSpec, as_dtype
from graphflow.ops.kernels.codegen.region import Operand, Region, RegionOp, freeze_attributes
from graphflow.ops.kernels.fusion.cuda_expression_trace import trace_op
from graphflow.ops.kernels.fusion.row_ops import collapsed_form

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float16", "bfloat16", "float32", "float64")  # fmt: skip


@dataclass(frozen=True)
class Single:
    """One op in some dtypes."""

    op: Op
    attrs: Any
    dtypes: tuple[str, ...]
    out: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.op.name}({', '.join(self.dtypes)}; {dict(self.attrs)})"

    def region(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Region, tuple[int, ...]]:
        """The region of the op alone over operands of these shapes, and its sizes."""
        form = collapsed_form(self.op, shapes, dict(self.attrs))
        assert form is not None
        operands = tuple(Operand(d, a) for d, a in zip(self.dtypes, form.axes, strict=True))
        inputs = tuple((False, i) for i in range(len(operands)))
        items = freeze_attributes(dict(self.attrs))
        assert items is not None
        whole = not form.over or self.result(shapes) == prod(form.sizes)
        applied = RegionOp(self.op, items, inputs, whole)
        return Region(len(form.sizes), operands, (applied,), (0,), form.over), form.sizes

    def result(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Elements of the result."""
        specs = [TensorSpec(s, as_dtype(d)) for s, d in zip(shapes, self.dtypes, strict=True)]
        out = self.op.infer(*specs, **dict(self.attrs))
        assert isinstance(out, TensorSpec)
        return prod(int(n) for n in out.shape)  # type: ignore[arg-type]


def singles() -> Iterator[Single]:
    """Every elementwise op in every dtype for which there is a CUDA kernel."""
    seen = set()
    for op in REGISTRY.values():
        if not op.elementwise:
            continue
        for sample in op.samples:
            given = tuple(spec.dtype.name for spec in sample.inputs)
            for dtype in (None, *DTYPES):
                common = given[-1]
                names = given if dtype is None else tuple(
                    dtype if name == common else name for name in given
                )  # fmt: skip
                key = (op.name, names, repr(sorted(sample.attrs.items())))
                if key in seen:
                    continue
                seen.add(key)
                try:
                    out = op.infer(*(TensorSpec((), as_dtype(n)) for n in names), **sample.attrs)
                except GraphflowError:
                    continue
                found = trace_op(op, [as_dtype(n) for n in names], sample.attrs)
                if found is not None and isinstance(out, TensorSpec) and found.dtype == out.dtype:
                    yield Single(op, tuple(sorted(sample.attrs.items())), names, out.dtype)


ODD = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, float("inf"), float("-inf"), float("nan"), 1e-40,
       -1e-42, 1e-8, 88.7, 88.8, -103.9, 1e30, -1e30, 3.4e38, 709.7, -745.0, 99999.0, 3e5,
       7.0)  # fmt: skip


def draw_numbers(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Random numbers of a dtype, and the odd ones: zeros, limits, infinities, NaN, denormals."""
    rng = np.random.default_rng(seed)
    kind = as_dtype(dtype)
    size = int(np.prod(shape))
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        values = rng.integers(-5 if kind.kind == "i" else 0, 9, size).astype(kind)
        values[: min(4, size)] = [info.min, info.max, 0, 1][:size]
        return rng.permutation(values).reshape(shape)
    with np.errstate(all="ignore"):
        values = (rng.normal(size=size) * 10.0 ** rng.integers(-3, 3, size)).astype(kind)
        odd = np.array(ODD).astype(kind)
    values[: min(len(odd), size)] = odd[:size]
    return rng.permutation(values).reshape(shape)


def along_rows() -> Iterator[tuple[Single, tuple[tuple[int, ...], ...]]]:
    """Every op along rows, over the shapes of its samples and over longer ones."""
    for op in REGISTRY.values():
        if op.rows is None:
            continue
        for sample in op.samples:
            names = tuple(spec.dtype.name for spec in sample.inputs)
            found = trace_op(op, [as_dtype(n) for n in names], sample.attrs)
            if found is None or freeze_attributes(sample.attrs) is None:
                continue
            single = Single(op, tuple(sorted(sample.attrs.items())), names, found.dtype)
            for longer in (1, 37, 300):
                last = sample.inputs[0].shape[-1] if sample.inputs[0].shape else 1
                shapes = tuple(
                    tuple(
                        _scale_size(int(n), longer if n == last else min(longer, 2))
                        for n in s.shape
                    )  # type: ignore[arg-type]
                    for s in sample.inputs
                )
                form = collapsed_form(op, shapes, sample.attrs) if prod(shapes[0]) < 5_000 else None
                if form is not None and form.over:
                    yield single, shapes


def _scale_size(size: int, factor: int) -> int:
    return size if size == 1 else size * factor
