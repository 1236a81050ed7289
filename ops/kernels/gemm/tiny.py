"""Products of tiny matrices: a kernel for exact sizes, whose result stays in registers.

    void kernel(ptr* {a, b, out}, i64* none, i64 0, i64 1)

An element is one chain of fused multiply-adds over k, as in `macrokernel.py`, so both give the same
bits. Nothing is decided at run time: a product of 8 × 8 matrices takes a third of the time.
"""

from __future__ import annotations

from functools import cache

from graphflow.ops.kernels.jit.compiler import KernelTask, name_module, vector_width

_ELEMENTS = {"float32": "float", "float64": "double"}
_LARGEST_SIZE = 32
"""Largest size."""


@cache
def tiny_task(
    m: int, k: int, n: int, dtype: str, transpose_a: bool = False, transpose_b: bool = False
) -> KernelTask | None:
    """Return the kernel of a product of contiguous m × k and k × n matrices.

    None if a size is 0 or too large, or the processor lacks AVX2.
    """
    element = _ELEMENTS.get(dtype)
    width = vector_width()
    if element is None or width < 8 or not all(0 < size <= _LARGEST_SIZE for size in (m, k, n)):
        return None
    lanes = width if dtype == "float32" else width // 2
    vectors = -(-n // lanes)
    if m * vectors > (24 if width == 16 else 12):
        return None
    if transpose_b and n * k > 256:  # its columns are gathered element by element
        return None
    name, text = name_module(*_write_tiny(m, k, n, element, transpose_a, transpose_b))
    terms = max(m * vectors / 2, 4) + (n if transpose_b else 0)
    return KernelTask(name, text, (), 1, (6 + 0.3 * k * terms))


def _write_tiny(m: int, k: int, n: int, element: str, ta: bool, tb: bool) -> tuple[str, str]:
    """Write the kernel; returns its text after its name, and its declarations."""
    row = f"<{n} x {element}>"
    size = 4 if element == "float" else 8
    short = f"v{n}f{8 * size}"
    fma = f"@llvm.fma.{short}"
    lines = ["(ptr %ptrs, ptr %none, i64 %start, i64 %stop) {", "entry:"]
    for i, operand in enumerate("abc"):
        lines += [
            f"  %p{operand} = getelementptr ptr, ptr %ptrs, i64 {i}",
            f"  %{operand} = load ptr, ptr %p{operand}, align 8",
        ]
    lines += ["  br label %next", "next:", "  %p = phi i64 [0, %entry], [%p.next, %next]"]
    lines += [f"  %s{i} = phi {row} [zeroinitializer, %entry], [%t{i}, %next]" for i in range(m)]
    if tb:
        last = "poison"
        for j in range(n):
            lines += [
                f"  %o{j} = add i64 %p, {j * k}",
                f"  %q{j} = getelementptr {element}, ptr %b, i64 %o{j}",
                f"  %e{j} = load {element}, ptr %q{j}, align {size}",
                f"  %r{j} = insertelement {row} {last}, {element} %e{j}, i64 {j}",
            ]
            last = f"%r{j}"
    else:
        lines += [
            f"  %ob = mul i64 %p, {n}",
            f"  %qb = getelementptr {element}, ptr %b, i64 %ob",
            f"  %r = load {row}, ptr %qb, align {size}",
        ]
        last = "%r"
    if ta:
        lines += [f"  %oa = mul i64 %p, {m}", f"  %qa = getelementptr {element}, ptr %a, i64 %oa"]
    else:
        lines += [f"  %qa = getelementptr {element}, ptr %a, i64 %p"]
    for i in range(m):
        lines += [
            f"  %x{i} = getelementptr {element}, ptr %qa, i64 {i if ta else i * k}",
            f"  %v{i} = load {element}, ptr %x{i}, align {size}",
            f"  %h{i} = insertelement {row} poison, {element} %v{i}, i64 0",
            f"  %w{i} = shufflevector {row} %h{i}, {row} poison, <{n} x i32> zeroinitializer",
            f"  %t{i} = call {row} {fma}({row} %w{i}, {row} {last}, {row} %s{i})",
        ]
    lines += [
        "  %p.next = add i64 %p, 1",
        f"  %more = icmp slt i64 %p.next, {k}",
        "  br i1 %more, label %next, label %done",
        "done:",
    ]
    for i in range(m):
        lines += [
            f"  %z{i} = getelementptr {element}, ptr %c, i64 {i * n}",
            f"  store {row} %t{i}, ptr %z{i}, align {size}",
        ]
    return "\n".join([*lines, "  ret void", "}"]), f"declare {row} {fma}({row}, {row}, {row})"
