"""Products of tiny matrices: a kernel for exact sizes, whose result stays in registers.

    void kernel(ptr* {a, b, out}, i64* none, i64 0, i64 1)

An element is one chain of fused multiply-adds over k, as in `macrokernel.py`, so both give the same
bits. Nothing is decided at run time: a product of 8 × 8 matrices takes a third of the time.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from graphflow.ops.kernels.jit.compiler import KernelTask, name_module, vector_width

_ELEMENTS = {"float32": "float", "float64": "double"}
_LARGEST_SIZE, _MOST_ROWS = 32, 64
"""Largest size of a row and a column, and most rows."""


@cache
def tiny_task(
    m: int, k: int, n: int, dtype: str, transpose_a: bool = False, transpose_b: bool = False
) -> KernelTask | None:
    """Return the kernel of a product of contiguous m × k and k × n matrices.

    None if a size is 0 or too large, or the processor lacks AVX2.
    """
    element = _ELEMENTS.get(dtype)
    width = vector_width()
    if element is None or width < 8 or not 0 < m <= _MOST_ROWS:
        return None
    if not all(0 < size <= _LARGEST_SIZE for size in (k, n)):
        return None
    lanes = width if dtype == "float32" else width // 2
    vectors = -(-n // lanes)
    if n > lanes and n not in (2 * lanes, 4 * lanes):  # LLVM splits other rows badly
        return None
    most = (24 if width == 16 else 12) // vectors  # rows whose sums stay in registers
    if not most or (vectors > 2 and m > most):
        return None
    if transpose_b and (n * k > 256 or m > most):  # its columns are gathered element by element
        return None
    count = -(-m // most)
    name, text = name_module(*_write_tiny(m, k, n, element, transpose_a, transpose_b, count))
    terms = sum(max(rows * vectors / 2, 4) for _, rows in _row_blocks(m, count))
    terms += n if transpose_b else 0
    return KernelTask(name, text, (), 1, (6 + 0.3 * k * terms))


def _row_blocks(m: int, count: int) -> list[tuple[int, int]]:
    """Return first row and rows of `count` blocks of nearly equal size."""
    edges = [m * i // count for i in range(count + 1)]
    return [(start, stop - start) for start, stop in pairwise(edges)]


def _write_tiny(
    m: int, k: int, n: int, element: str, ta: bool, tb: bool, count: int
) -> tuple[str, str]:
    """Write the kernel; returns its text after its name, and its declarations."""
    row = f"<{n} x {element}>"
    size = 4 if element == "float" else 8
    fma = f"@llvm.fma.v{n}f{8 * size}"
    lines = ["(ptr %ptrs, ptr %none, i64 %start, i64 %stop) {", "entry:"]
    for i, operand in enumerate("abc"):
        lines += [
            f"  %p{operand} = getelementptr ptr, ptr %ptrs, i64 {i}",
            f"  %{operand} = load ptr, ptr %p{operand}, align 8",
        ]
    before = "entry"
    for first, rows in _row_blocks(m, count):
        lines.append(f"  br label %next{first}")
        lines += _write_rows(m, k, n, element, ta, tb, first, rows, before)
        before = f"done{first}"
    return "\n".join([*lines, "  ret void", "}"]), f"declare {row} {fma}({row}, {row}, {row})"


def _write_rows(
    m: int, k: int, n: int, element: str, ta: bool, tb: bool, first: int, rows: int, before: str
) -> list[str]:
    """Write the product of some rows of a; `before` is the block of instructions before it."""
    row, size = f"<{n} x {element}>", 4 if element == "float" else 8
    fma, t = f"@llvm.fma.v{n}f{8 * size}", f"r{first}_"
    lines = [f"next{first}:", f"  %{t}p = phi i64 [0, %{before}], [%{t}p.next, %next{first}]"]
    lines += [
        f"  %{t}s{i} = phi {row} [zeroinitializer, %{before}], [%{t}t{i}, %next{first}]"
        for i in range(rows)
    ]
    if tb:
        last = "poison"
        for j in range(n):
            lines += [
                f"  %{t}o{j} = add i64 %{t}p, {j * k}",
                f"  %{t}q{j} = getelementptr {element}, ptr %b, i64 %{t}o{j}",
                f"  %{t}e{j} = load {element}, ptr %{t}q{j}, align {size}",
                f"  %{t}r{j} = insertelement {row} {last}, {element} %{t}e{j}, i64 {j}",
            ]
            last = f"%{t}r{j}"
    else:
        lines += [
            f"  %{t}ob = mul i64 %{t}p, {n}",
            f"  %{t}qb = getelementptr {element}, ptr %b, i64 %{t}ob",
            f"  %{t}r = load {row}, ptr %{t}qb, align {size}",
        ]
        last = f"%{t}r"
    lines += [
        f"  %{t}oa = mul i64 %{t}p, {m if ta else 1}",
        f"  %{t}qa = getelementptr {element}, ptr %a, i64 %{t}oa",
    ]
    for i in range(rows):
        place = (first + i) if ta else (first + i) * k
        lines += [
            f"  %{t}x{i} = getelementptr {element}, ptr %{t}qa, i64 {place}",
            f"  %{t}v{i} = load {element}, ptr %{t}x{i}, align {size}",
            f"  %{t}h{i} = insertelement {row} poison, {element} %{t}v{i}, i64 0",
            f"  %{t}w{i} = shufflevector {row} %{t}h{i}, {row} poison, <{n} x i32> zeroinitializer",
            f"  %{t}t{i} = call {row} {fma}({row} %{t}w{i}, {row} {last}, {row} %{t}s{i})",
        ]
    lines += [
        f"  %{t}p.next = add i64 %{t}p, 1",
        f"  %{t}more = icmp slt i64 %{t}p.next, {k}",
        f"  br i1 %{t}more, label %next{first}, label %done{first}",
        f"done{first}:",
    ]
    for i in range(rows):
        lines += [
            f"  %{t}z{i} = getelementptr {element}, ptr %c, i64 {(first + i) * n}",
            f"  store {row} %{t}t{i}, ptr %{t}z{i}, align {size}",
        ]
    return lines
