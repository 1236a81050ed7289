"""Calls of the extensions: linear algebra and Fourier transforms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tests.array_api.case import (
    COMPLEX,
    FLOATS,
    INEXACT,
    NUMERIC,
    Array,
    Case,
    Make,
    function_of,
    label,
    numbers,
    with_options,
)


def draw_matrices(dtype: str, shape: tuple[int, ...], definite: bool = False) -> Array:
    x = numbers(dtype, shape)
    if definite:
        return np.asarray(x @ np.conj(np.swapaxes(x, -1, -2)) + 9 * np.eye(shape[-1]), dtype)
    return x


def _raise_to(n: int) -> Make:
    return lambda xp, x: xp.linalg.matrix_power(x, n)


def matrices() -> Iterator[Case]:
    products = {
        "matmul": (((2, 3), (3, 4)), ((3,), (3,)), ((3,), (2, 3, 4)), ((5, 2, 3), (3,)),
                   ((5, 1, 2, 3), (4, 3, 2))),
        "vecdot": (((3,), (3,)), ((2, 3), (3,)), ((2, 1, 3), (4, 3))),
        "linalg.outer": (((3,), (4,)),), "linalg.cross": (((3,), (3,)), ((2, 3), (2, 3))),
        "tensordot": (((4, 2, 3), (2, 3, 5)),),
    }  # fmt: skip
    for name, sizes in products.items():
        for dtype, (left, right) in itertools.product(NUMERIC, sizes):
            yield Case(
                name, function_of(name), (numbers(dtype, left, 0, 3), numbers(dtype, right, 0, 3))
            )
    for dtype in NUMERIC:
        x, y = numbers(dtype, (2, 3, 4)), numbers(dtype, (4, 3, 2))
        for axes in (1, 0, ((1, 2), (1, 0)), ((), ())):
            yield Case(
                f"tensordot(axes={axes})", with_options("tensordot", axes=axes), (x, y[..., :2])
            )
        yield Case("vecdot(axis)", with_options("vecdot", axis=-2), (x, x + x.dtype.type(1)))
        yield Case(
            "linalg.cross(axis)", with_options("linalg.cross", axis=-2), (x, x + x.dtype.type(1))
        )
        yield Case("linalg.diagonal", function_of("linalg.diagonal"), (x,))
        yield Case("linalg.diagonal(1)", with_options("linalg.diagonal", offset=1), (x,))
        yield Case("linalg.trace", function_of("linalg.trace"), (x,))
        yield Case("linalg.trace(-1)", with_options("linalg.trace", offset=-1), (x,))
    for dtype, shape in itertools.product(INEXACT, ((3, 3), (2, 4, 4), (0, 2, 2))):
        x, p = draw_matrices(dtype, shape), draw_matrices(dtype, shape, definite=True)
        right, line = draw_matrices(dtype, (*shape[:-1], 2)), draw_matrices(dtype, shape[-1:])
        yield Case("linalg.cholesky", function_of("linalg.cholesky"), (p,))
        yield Case("linalg.cholesky(upper)", with_options("linalg.cholesky", upper=True), (p,))
        for name in ("det", "slogdet"):
            yield Case(f"linalg.{name}", function_of(f"linalg.{name}"), (x,), loose=1e3)
        for name in ("inv", "eigvalsh", "svdvals", "pinv", "matrix_rank"):
            yield Case(f"linalg.{name}", function_of(f"linalg.{name}"), (p,), loose=1e3)
        yield Case("linalg.matrix_rank(rtol)", with_options("linalg.matrix_rank", rtol=0.3), (p,))
        for n in (0, 3, -2):
            yield Case(f"linalg.matrix_power({n})", _raise_to(n), (p,), loose=1e3)
        yield Case("linalg.solve", function_of("linalg.solve"), (p, right), loose=1e3)
        yield Case("linalg.solve(vector)", function_of("linalg.solve"), (p, line), loose=1e3)
        for name, call in FACTORED.items():
            yield Case(name, call, (p,), loose=1e4)
        for order in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf):
            if shape[0]:
                norm = with_options("linalg.matrix_norm", ord=order, keepdims=order == 1)
                yield Case(f"linalg.matrix_norm({order})", norm, (x,), loose=1e2)
        for order in (0, 1, 2, 3, 0.5, -1, np.inf, -np.inf):
            if shape[0]:
                norm = with_options("linalg.vector_norm", ord=order, axis=-1, keepdims=order == 1)
                yield Case(f"linalg.vector_norm({order})", norm, (x,), loose=1e2)
        yield Case("linalg.vector_norm", function_of("linalg.vector_norm"), (x,))
        yield Case(
            "linalg.vector_norm(axes)", with_options("linalg.vector_norm", axis=(0, 1)), (x,)
        )


FACTORED: dict[str, Make] = {
    "linalg.eigh": lambda xp, x: (
        (r := xp.linalg.eigh(x)).eigenvalues,
        (v := r.eigenvectors) * r.eigenvalues[..., None, :] @ xp.conj(xp.matrix_transpose(v)),
    ),
    "linalg.qr": lambda xp, x: (r := xp.linalg.qr(x)).Q @ r.R,
    "linalg.qr(complete)": lambda xp, x: (r := xp.linalg.qr(x[..., :2], mode="complete")).Q @ r.R,
    "linalg.svd": lambda xp, x: (
        (r := xp.linalg.svd(x[..., :2], full_matrices=False)).S, (r.U * r.S[..., None, :]) @ r.Vh,
    ),
    "linalg.svd(full)": lambda xp, x: (r := xp.linalg.svd(x)).U * r.S[..., None, :] @ r.Vh,
}  # fmt: skip


def transforms() -> Iterator[Case]:
    single = {"fft": INEXACT, "ifft": INEXACT, "rfft": FLOATS, "irfft": COMPLEX, "hfft": COMPLEX,
              "ihfft": FLOATS}  # fmt: skip
    for name, kinds in single.items():
        ways = (
            {},
            {"n": 3},
            {"n": 8, "axis": 0},
            {"norm": "ortho"},
            {"norm": "forward", "axis": 1},
        )
        for dtype, how in itertools.product(kinds, ways):
            yield Case(label(f"fft.{name}", how), with_options(f"fft.{name}", **how),
                       (numbers(dtype, (4, 5)),), loose=1e2)  # fmt: skip
    several = {"fftn": INEXACT, "ifftn": INEXACT, "rfftn": FLOATS, "irfftn": COMPLEX}
    for name, kinds in several.items():
        for dtype, how in itertools.product(
            kinds, ({}, {"axes": (0, 2)}, {"s": (3, 6), "axes": (0, 1)}, {"norm": "ortho"})
        ):
            yield Case(label(f"fft.{name}", how), with_options(f"fft.{name}", **how),
                       (numbers(dtype, (3, 4, 5)),), loose=1e2)  # fmt: skip
    for name, dtype in itertools.product(("fftshift", "ifftshift"), INEXACT):
        for how in ({}, {"axes": 0}, {"axes": (0, 1)}):
            x = numbers(dtype, (4, 5))
            yield Case(label(f"fft.{name}", how), with_options(f"fft.{name}", **how), (x,))
