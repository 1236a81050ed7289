"""CUDA kernels, without a GPU: what they compute, run by the host's compiler, is what the op says,
bit for bit where the host's generated kernels compute it as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from graphflow.ir.spec import as_dtype, is_half
from graphflow.ops.kernels.cuda.region_kernels import CudaKernel, cuda_kernel, module_text
from tests.gpu import cuda_on_cpu
from tests.gpu.cuda_on_cpu import EmulatedModule
from tests.gpu.regions import Single, along_rows, draw_numbers, singles

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.explain_missing_compiler() is not None,
    reason=str(cuda_on_cpu.explain_missing_compiler()),
)
Shapes = Sequence[tuple[int, ...]]
# Whole vectors, and a row that is none; rows, columns and scalars.
FORMS: dict[int, list[Shapes]] = {
    1: [[(5, 16)], [(83,)], [()]],
    2: [[(83,), (83,)], [(5, 16), (16,)], [(5, 1), (16,)], [(), (5, 7)], [(5, 7), (5, 1)]],
    3: [[(5, 16), (16,), (5, 1)], [(83,), (83,), (83,)], [(3, 1, 4), (5, 4), (3, 5, 1)]],
    4: [[(5, 16), (16,), (5, 1), ()]],
}
_CALLS_LIBM = ("sin", "cos", "pow")


def launch_kernel(
    module: EmulatedModule,
    kernel: CudaKernel,
    sizes: Sequence[int],
    arrays: Sequence[Any],
    outs: Any,
) -> None:
    """Run a kernel as a GPU of one multiprocessor would."""
    aligned = all(a.ctypes.data % 16 == 0 for a in (*arrays, *outs))
    grid = kernel.grid(sizes, aligned, processors=1)
    module.launch(kernel.name, grid.blocks, grid.threads, [*arrays, *outs, *grid.numbers])


def are_equal(have: np.ndarray[Any, Any], want: np.ndarray[Any, Any], exactly: bool) -> bool:
    """Whether arrays are equal bit by bit, whatever the bits of NaN; or to the last digits."""
    if have.dtype != want.dtype or have.shape != want.shape:
        return False
    if have.dtype.kind not in "fV" and not is_half(have.dtype):
        return have.tobytes() == want.tobytes()
    wide = [x.astype("float64") for x in (have, want)]
    nan = np.isnan(wide[0])
    if (nan != np.isnan(wide[1])).any():
        return False
    if exactly:
        return bool((have[~nan].tobytes()) == want[~nan].tobytes())
    epsilon = {"bfloat16": 2.0**-7, "float16": 2.0**-9}.get(have.dtype.name, 4e-7)
    with np.errstate(all="ignore"):
        close = np.isclose(*wide, rtol=epsilon, atol=1e-37 if epsilon < 1e-6 else 1e-7)
    return bool((close | nan).all())


def cases(every: bool) -> list[tuple[Single, Shapes]]:
    """Ops with forms of operands, taken in turn; of each op some of its dtypes, or all."""
    chosen, seen = [], {}
    for number, single in enumerate(singles()):
        seen[single.op.name] = seen.get(single.op.name, 0) + 1
        if every or seen[single.op.name] <= 2 or (number + seen[single.op.name]) % 9 == 0:
            forms = FORMS[len(single.dtypes)]
            chosen.append((single, forms[number % len(forms)]))
    return chosen


def check(chosen: list[tuple[Single, Shapes]]) -> None:
    prepared = []
    for number, (single, shapes) in enumerate(chosen):
        region, sizes = single.region(shapes)
        prepared.append((number, single, shapes, sizes, cuda_kernel(region)))
    module = EmulatedModule(module_text(kernel for *_, kernel in prepared))
    wrong = []
    for number, single, shapes, sizes, kernel in prepared:
        kinds = enumerate(zip(single.dtypes, shapes, strict=True))
        arrays = [draw_numbers(dtype, shape, number + i) for i, (dtype, shape) in kinds]
        with np.errstate(all="ignore"):
            wanted = np.asarray(single.op.run(np, arrays, dict(single.attrs))[0])
        out = np.full(wanted.shape, 1, single.out)
        launch_kernel(module, kernel, sizes, arrays, [out])
        exactly = single.op.name not in _CALLS_LIBM and not any(
            is_half(as_dtype(d)) for d in single.dtypes
        )
        if not are_equal(out, wanted, exactly):
            wrong.append(f"{single} over {shapes}: {out.ravel()[:8]} for {wanted.ravel()[:8]}")
    assert wrong == []


def test_elementwise_kernels_give_the_bits_of_the_ops_of_the_registry() -> None:
    check(cases(every=False))


@pytest.mark.slow
def test_elementwise_kernels_give_the_bits_of_the_ops_in_every_dtype() -> None:
    check(cases(every=True))


@pytest.mark.slow
def test_kernels_along_rows_and_columns_are_as_close_as_the_order_of_summation_lets_them() -> None:
    chosen = list(along_rows())
    assert {single.region(shapes)[0].over for single, shapes in chosen} == {"rows", "columns"}
    assert {"softmax", "cross_entropy", "sum", "standardize"} <= {s.op.name for s, _ in chosen}
    prepared = [(s, shapes, *s.region(shapes)) for s, shapes in chosen]
    module = EmulatedModule(module_text(cuda_kernel(region) for *_, region, _ in prepared))
    wrong = []
    for number, (single, shapes, region, sizes) in enumerate(prepared):
        rng = np.random.default_rng(number)
        arrays = [
            rng.integers(0, 3, s).astype(d) if as_dtype(d).kind in "iub" else
            rng.uniform(0.3, 1.3, s).astype(d)
            for s, d in zip(shapes, single.dtypes, strict=True)
        ]  # fmt: skip
        wanted = np.asarray(single.op.run(np, arrays, dict(single.attrs))[0])
        out = np.full(wanted.shape, 7, single.out)
        launch_kernel(module, cuda_kernel(region), sizes, arrays, [out])
        if not np.allclose(out, wanted, rtol=2e-5, atol=1e-6, equal_nan=True):
            wrong.append(f"{single} over {shapes} by {region.over}: {out.ravel()[:4]}, "
                         f"not {wanted.ravel()[:4]}")  # fmt: skip
    assert wrong == []
