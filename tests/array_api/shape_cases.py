"""Calls of functions that create, join, cut and shape arrays."""

from __future__ import annotations

from collections.abc import Iterator

from tests.array_api.case import (
    ALL,
    BOOL,
    COMPLEX,
    FLOATS,
    INEXACT,
    REAL,
    Case,
    Make,
    mixing_pairs,
    numbers,
)

SHAPING: dict[str, Make] = {
    "broadcast_to": lambda xp, x: xp.broadcast_to(x, (4, 2, 3)),
    "expand_dims": lambda xp, x: xp.expand_dims(x, axis=-1),
    "expand_dims(axis=0)": lambda xp, x: xp.expand_dims(x, axis=0),
    "flip": lambda xp, x: xp.flip(x), "flip(axis)": lambda xp, x: xp.flip(x, axis=-1),
    "flip(axes)": lambda xp, x: xp.flip(x, axis=(0, 1)),
    "moveaxis": lambda xp, x: xp.moveaxis(xp.expand_dims(x, axis=0), (0, 1), (-1, 0)),
    "permute_dims": lambda xp, x: xp.permute_dims(x, (1, 0)),
    "repeat": lambda xp, x: xp.repeat(x, 2), "repeat(axis)": lambda xp, x: xp.repeat(x, 3, axis=1),
    "reshape": lambda xp, x: xp.reshape(x, (3, -1)),
    "reshape(copy)": lambda xp, x: xp.reshape(x, (6,), copy=True),
    "roll": lambda xp, x: xp.roll(x, 1), "roll(axis)": lambda xp, x: xp.roll(x, -1, axis=1),
    "roll(axes)": lambda xp, x: xp.roll(x, (1, 2), axis=(0, 1)),
    "squeeze": lambda xp, x: xp.squeeze(xp.expand_dims(x, axis=1), 1),
    "squeeze(axes)": lambda xp, x: xp.squeeze(x[None, ..., None], (0, -1)),
    "tile": lambda xp, x: xp.tile(x, (2, 1, 2)), "tile(one)": lambda xp, x: xp.tile(x, (3,)),
    "unstack": lambda xp, x: xp.unstack(x), "unstack(axis)": lambda xp, x: xp.unstack(x, axis=-1),
    "take": lambda xp, x: xp.take(x, xp.asarray([1, 0, 1]), axis=1),
    "take(negative)": lambda xp, x: xp.take(x, xp.asarray([-1]), axis=0),
    "take_along_axis": lambda xp, x: xp.take_along_axis(x, xp.asarray([[0, 2], [1, 1]]), axis=1),
    "take_along_axis(last)": lambda xp, x: xp.take_along_axis(x, xp.asarray([[0], [1]])),
    "tril": lambda xp, x: xp.tril(x), "tril(k)": lambda xp, x: xp.tril(x, k=-1),
    "triu": lambda xp, x: xp.triu(x), "triu(k)": lambda xp, x: xp.triu(x, k=1),
    "matrix_transpose": lambda xp, x: xp.matrix_transpose(x), "mT": lambda xp, x: x.mT,
    "T": lambda xp, x: x.T, "zeros_like": lambda xp, x: xp.zeros_like(x),
    "ones_like": lambda xp, x: xp.ones_like(x), "asarray": lambda xp, x: xp.asarray(x),
    "asarray(copy)": lambda xp, x: xp.asarray(x, copy=True),
    "full_like": lambda xp, x: xp.full_like(x, 1), "x[1]": lambda xp, x: x[1],
    "x[1, 2]": lambda xp, x: x[1, 2], "x[..., 1:]": lambda xp, x: x[..., 1:],
    "x[::-1, None]": lambda xp, x: x[::-1, None], "x[:, -1]": lambda xp, x: x[:, -1],
    "x[-1:5, 2::-2]": lambda xp, x: x[-1:5, 2::-2], "x[()]": lambda xp, x: x[()],
    "x[ints, ints]": lambda xp, x: x[xp.asarray([0, 1]), xp.asarray([2, 0])],
    "x[1:1]": lambda xp, x: x[1:1], "x[ints, 1]": lambda xp, x: x[xp.asarray([1, 1]), 1],
}  # fmt: skip
JOINING: dict[str, Make] = {
    "concat": lambda xp, x, y: xp.concat([x, y]),
    "concat(axis)": lambda xp, x, y: xp.concat((x, y), axis=-1),
    "concat(flat)": lambda xp, x, y: xp.concat([x, y], axis=None),
    "stack": lambda xp, x, y: xp.stack([x, y]),
    "stack(axis)": lambda xp, x, y: xp.stack([x, y], axis=-1),
    "broadcast_arrays": lambda xp, x, y: xp.broadcast_arrays(x, y[:1], x[:, :1]),
    "meshgrid": lambda xp, x, y: xp.meshgrid(x[0], y[:, 0]),
    "meshgrid(ij)": lambda xp, x, y: xp.meshgrid(x[0], y[:, 0], indexing="ij"),
}


def _convert_to(dtype: str) -> Make:
    return lambda xp, x: xp.astype(x, getattr(xp, dtype))


def _get_dtype(dtype: str) -> Make:
    return lambda xp: getattr(xp, dtype)


def shapes() -> Iterator[Case]:
    for dtype in ALL:
        x = numbers(dtype, (2, 3))
        for name, call in SHAPING.items():
            if not (name == "full_like" and dtype == "bool"):
                yield Case(name, call, (x,))
        for name, call in JOINING.items():
            yield Case(name, call, (x, numbers(dtype, (2, 3), -1, 4)))
        for other in ALL:
            if not (dtype in COMPLEX and other not in COMPLEX + BOOL):
                x = numbers(dtype, (2, 3), 0, 4)
                yield Case(f"astype({other})", _convert_to(other), (x,))
    for a, b in mixing_pairs(ALL):
        for name in ("concat", "stack"):
            yield Case(name, JOINING[name], (numbers(a, (2, 3)), numbers(b, (2, 3))))


def _convert_frequencies(dtype: str) -> Make:
    return lambda xp: xp.fft.fftfreq(4).astype(dtype)


def creation() -> Iterator[Case]:
    made: dict[str, tuple[Make, str]] = {
        "zeros(3)": (lambda xp: xp.zeros(3), "float"),
        "ones": (lambda xp: xp.ones((2, 3)), "float"),
        "full(int)": (lambda xp: xp.full((2,), 3), "int"),
        "full(float)": (lambda xp: xp.full((2,), 2.5), "float"),
        "full(complex)": (lambda xp: xp.full((), 2.5j), "complex"),
        "full(bool)": (lambda xp: xp.full(2, True), "bool"), "eye": (lambda xp: xp.eye(3), "float"),
        "eye(k)": (lambda xp: xp.eye(2, 4, k=1), "float"),
        "eye(-k)": (lambda xp: xp.eye(3, k=-2), "float"),
        "arange": (lambda xp: xp.arange(5), "int"),
        "arange(float)": (lambda xp: xp.arange(0.0, 2.0, 0.5), "float"),
        "arange(down)": (lambda xp: xp.arange(5, -1, -2), "int"),
        "arange(empty)": (lambda xp: xp.arange(3, 1), "int"),
        "linspace": (lambda xp: xp.linspace(0, 1, 5), "float"),
        "linspace(open)": (lambda xp: xp.linspace(1, -1, 4, endpoint=False), "float"),
        "linspace(complex)": (lambda xp: xp.linspace(0, 1j, 3), "complex"),
        "linspace(1)": (lambda xp: xp.linspace(2.0, 3.0, 1), "float"),
        "asarray(ints)": (lambda xp: xp.asarray([[1, 2], [3, 4]]), "int"),
        "asarray(floats)": (lambda xp: xp.asarray([1.0, 2]), "float"),
        "asarray(complex)": (lambda xp: xp.asarray([1j, 2]), "complex"),
        "asarray(bools)": (lambda xp: xp.asarray([True, False]), "bool"),
        "asarray(number)": (lambda xp: xp.asarray(2.5), "float"),
        "fftfreq": (lambda xp: xp.fft.fftfreq(5, d=0.5), "float"),
        "rfftfreq": (lambda xp: xp.fft.rfftfreq(6), "float"),
    }  # fmt: skip
    for name, (call, dtype) in made.items():
        yield Case(name, call, (), dtype)
    for dtype in ALL:
        to = _get_dtype(dtype)
        number = True if dtype == "bool" else 2
        yield Case(f"zeros({dtype})", lambda xp, to=to: xp.zeros((2, 0), dtype=to(xp)))
        yield Case(f"ones({dtype})", lambda xp, to=to: xp.ones((), dtype=to(xp)))
        yield Case(f"full({dtype})", lambda xp, to=to, n=number: xp.full((2,), n, dtype=to(xp)))
        yield Case(f"eye({dtype})", lambda xp, to=to: xp.eye(2, dtype=to(xp)))
        yield Case(f"asarray({dtype})", lambda xp, to=to, n=number: xp.asarray([n], dtype=to(xp)))
        yield Case(
            f"zeros_like({dtype})", lambda xp, to=to: xp.zeros_like(xp.ones(2), dtype=to(xp))
        )
        if dtype in REAL:
            yield Case(f"arange({dtype})", lambda xp, to=to: xp.arange(1, 9, 3, dtype=to(xp)))
        if dtype in INEXACT:
            yield Case(f"linspace({dtype})", lambda xp, to=to: xp.linspace(0, 9, 7, dtype=to(xp)))
    for dtype in FLOATS:
        to = _get_dtype(dtype)
        yield Case(
            f"fftfreq({dtype})",
            lambda xp, to=to: xp.fft.fftfreq(4, dtype=to(xp)),
            oracle=_convert_frequencies(dtype),
        )
