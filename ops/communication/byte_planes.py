"""Ops that compress the bytes of numbers without loss, plane by plane.

A plane has one byte of each number: all exponents, say. A plane whose bytes vary little is
deflated, by Huffman codes and runs alone, and others are stored as they are. The filter `Lossless`
splits numbers into planes.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import TensorSpec, as_dtype, spec
from graphflow.ops.tensors.table_rows import into_kernel

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

HEAD = 4
"""Bytes of the length of a plane; 0 for a plane that is stored."""
_SAMPLE = 4096
"""Bytes by which it is decided whether to deflate a plane."""
_WORTH = 0.9
"""The largest share that deflating must leave of these."""
_FLOPS = 16
"""The cost of deflating a byte, which takes 7 ns."""

_PLANE = spec("uint8", (6,))


def _infer_pack(*planes: TensorSpec) -> tuple[TensorSpec, ...]:
    for plane in planes:
        if plane != planes[0] or plane.rank != 1 or plane.dtype != np.uint8:
            raise ShapeError(f"planes must be uint8 vectors of one size, not {plane}")
    size = len(planes) * (planes[0].shape[0] + HEAD)
    return (planes[0].with_shape((size,)), TensorSpec((), as_dtype("int64")))


def _pack_into(xp: Any, outs: Any, *planes: Any) -> None:
    out, number = outs
    host = out if xp is np else np.empty(out.shape, np.uint8)
    sizes, end = host[: HEAD * len(planes)].view("<u4"), HEAD * len(planes)
    for i, plane in enumerate(planes):
        raw = plane if xp is np else xp.asnumpy(plane)
        small = _deflate(raw)
        sizes[i] = 0 if small is None else len(small)
        own = raw if small is None else np.frombuffer(small, np.uint8)
        host[end : end + own.size] = own
        end += own.size
    host[end:] = 0
    if host is not out:
        out[...] = xp.asarray(host)
    number[...] = end


def _deflate(plane: Bytes) -> bytes | None:
    """Return a plane in fewer bytes; None if that is not worth its time."""
    for part in (plane[:_SAMPLE], plane):
        coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
        found = coder.compress(part.data) + coder.flush()
        if len(found) > _WORTH * part.size:
            return None
    return found


# k planes of n bytes in one vector of k (n + 4) bytes, and how many of these are in use. Lengths of
# planes come first. The rest is 0.
pack_planes = register(
    Op(
        "pack_planes",
        infer=_infer_pack,
        kernel=into_kernel(_infer_pack, _pack_into),
        into=_pack_into,
        cost=lambda *planes: Cost(flops=_FLOPS * planes[0].size),
        samples=(
            sample(_PLANE),
            sample(_PLANE, _PLANE),
            sample(*[spec("uint8", (600,))] * 2, make=lambda xs: [xs[0] % 3, xs[1]]),
        ),
    )
)


def _infer_unpack(codes: TensorSpec, planes: int) -> tuple[TensorSpec, ...]:
    if codes.rank != 1 or codes.dtype != np.uint8:
        raise ShapeError(f"codes must be a uint8 vector, not {codes}")
    return (codes.with_shape((codes.shape[0] // planes - HEAD,)),) * planes


def _unpack_into(xp: Any, outs: Any, codes: Any, planes: int) -> None:
    host = codes if xp is np else xp.asnumpy(codes)
    sizes, start = host[: HEAD * planes].view("<u4").tolist(), HEAD * planes
    for out, size in zip(outs if planes > 1 else (outs,), sizes, strict=True):
        part = host[start : start + (size or out.size)]
        found = _inflate(part, out.size) if size else part
        if found.size != out.size:
            raise ArgumentError(f"a plane of {out.size} bytes has {found.size}; it is damaged")
        out[...] = found if xp is np else xp.asarray(found)
        start += size or out.size


def _inflate(part: Bytes, size: int) -> Bytes:
    """Return the bytes of a deflated plane, at most `size` and one more.

    Raises:
        ArgumentError: it is damaged.
    """
    try:
        return np.frombuffer(
            zlib.decompressobj(-zlib.MAX_WBITS).decompress(part.data, size + 1), np.uint8
        )
    except zlib.error as error:
        raise ArgumentError(f"a plane of {size} bytes is damaged: {error}") from None


# The k planes of what `pack_planes` returned, of which the bytes in use are enough.
unpack_planes = register(
    Op(
        "unpack_planes",
        infer=_infer_unpack,
        kernel=into_kernel(_infer_unpack, _unpack_into),
        into=_unpack_into,
        cost=lambda codes, planes: Cost(flops=_FLOPS * codes.size / (2 * planes)),
        samples=(
            sample(spec("uint8", (20,)), planes=2, make=lambda xs: [_pack_sample(xs[0])]),
            sample(spec("uint8", (1208,)), planes=2, make=lambda xs: [_pack_sample(xs[0] % 3)]),
        ),
    )
)


def _pack_sample(codes: Any) -> Any:
    """Return two planes of a sample as `pack_planes` does."""
    size = codes.size // 2 - HEAD
    made = into_kernel(_infer_pack, _pack_into)(np, codes[:size], codes[size : 2 * size])
    return made[0]


__all__ = ["HEAD", "pack_planes", "unpack_planes"]
