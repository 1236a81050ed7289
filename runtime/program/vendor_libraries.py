"""Kernels of NVIDIA's libraries for single ops on a GPU, if the libraries are installed.

nvmath-python multiplies matrices by cuBLAS (`cublas.py`), also inside our own kernels.
cudnn-frontend computes convolutions, their gradients, and attention in 16 bits (`cudnn.py`). Both
accumulate 16-bit floats in float32 and round once, as our ops promise.

The choice of a kernel depends only on the op's attributes, dtypes and sizes, never on its
neighbours, so placement changes no bits. For that reason bias and activation stay in fused kernels
and are no epilogues of products. A library's kernel is used after it agreed with ours on random
numbers of the same sizes. One that fails or disagrees is not used, and the log says so once.

GRAPHFLOW_GPU_LIBRARIES=off disables both. CuPy then multiplies, which cannot be captured in a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np

from graphflow.base.environment import is_on
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CompileError, DeviceOutOfMemory
from graphflow.ir.op import Op
from graphflow.ir.spec import TensorSpec, is_half, kind
from graphflow.ops.kernels.cuda.cupy_module import gpu_name, import_cupy
from graphflow.runtime.gpu.cuda_graphs import graphs_enabled
from graphflow.runtime.gpu.cudnn import CudnnGraph, concrete_shape
from graphflow.runtime.memory.backend import new_array
from graphflow.runtime.program.generated_call_support import out_kernel
from graphflow.runtime.telemetry.logs import Log

_log = Log("graphflow.gpu")
_HALF_DTYPES = ("float16", "bfloat16")
_logged: set[tuple[str, str]] = set()
_MODULE_KEY = "module"  # key of the array module among a backend's kernels
Kernel = Callable[..., None]
"""(out or outs, *arrays)."""


@dataclass(frozen=True)
class Libraries:
    """The libraries that are used: those that Python finds, unless they are disabled."""

    nvmath: bool
    cudnn: bool

    def __str__(self) -> str:
        have = {"nvmath-python": self.nvmath, "cudnn-frontend": self.cudnn}
        return ", ".join(f"{name}{'' if found else ' not'} found" for name, found in have.items())


def libraries() -> Libraries:
    """Return which libraries this process uses."""
    wanted = is_on("GRAPHFLOW_GPU_LIBRARIES")
    return Libraries(wanted and _is_installed("nvmath"), wanted and _is_installed("cudnn"))


def describe_gpus() -> list[str]:
    """Describe each GPU of this machine and the libraries that compute on it, one line each.

    The list is empty if CuPy is missing or sees no GPU.
    """
    try:
        cupy = import_cupy()
        runtime = cupy.cuda.runtime
        found = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    except Exception:  # no CuPy, no driver, no device: CuPy's own errors
        return []
    graphs = "on" if graphs_enabled() else "off"
    return [
        f"gpu:{i} is {gpu_name(each)}, compute capability {each['major']}.{each['minor']}; "
        f"CuPy {cupy.__version__}, CUDA graphs {graphs}; {libraries()}"
        for i, each in enumerate(found)
    ]


@cache
def _is_installed(module: str) -> bool:
    return find_spec(module) is not None


def library_kernel(
    backend: Any, op: Op, specs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> Kernel | None:
    """Return a library's kernel of an op for these inputs; None if ours is to be used."""
    have = libraries()
    makers = {**(_PRODUCTS if have.nvmath else {}), **(_CUDNN if have.cudnn else {})}
    make = makers.get(op.name)
    if make is None or not all(prod(concrete_shape(s)) for s in specs):
        return None
    key = op.name, tuple(specs), repr(sorted(attrs.items()))
    if key not in backend.kernels:  # equal nodes share a kernel and its workspace
        backend.kernels[key] = _build_kernel(make, backend, op, specs, attrs)
    found: Kernel | None = backend.kernels[key]
    return found


def _build_kernel(
    make: Callable[..., Kernel | None],
    backend: Any,
    op: Op,
    specs: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
) -> Kernel | None:
    outs = op.infer(*specs, **attrs)
    results = (outs,) if isinstance(outs, TensorSpec) else outs
    try:
        kernel = make(backend, specs, results, attrs)
        if kernel is not None:
            with suppress(DeviceOutOfMemory):  # the choice may not depend on free memory
                _check_agreement(backend, op, specs, results, attrs, kernel)
    except Exception as error:  # whatever a library raises, our own kernel remains
        _log_fallback(backend, op.name, ", ".join(map(str, specs)), error)
        return None
    return kernel


def _log_fallback(backend: Any, op: str, shapes: str, error: Exception) -> None:
    """Log that a library's kernel is not used, once for each op and kind of error."""
    key = (op, type(error).__name__)
    if key not in _logged:
        _logged.add(key)
        _log.tell(
            "gpu.fallback", device=f"gpu:{backend.index}", op=op, shapes=shapes,
            error=type(error).__name__, reason=str(error),
        )  # fmt: skip


def array_module(backend: Any) -> Any:
    """Return the array module for kernels that are written for numpy.

    It is CuPy. If nvmath-python is installed, its `matmul` calls cuBLAS in a way that can be
    captured.
    """
    if not libraries().nvmath:
        return backend.xp
    if _MODULE_KEY not in backend.kernels:
        try:
            backend.kernels[_MODULE_KEY] = backend.cublas.module()
        except Exception as error:
            _log_fallback(backend, "matmul", "any", error)
            backend.kernels[_MODULE_KEY] = backend.xp
    return backend.kernels[_MODULE_KEY]


def _check_agreement(
    backend: Any,
    op: Op,
    specs: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
    kernel: Kernel,
) -> None:
    """Compare a library's kernel with ours on random numbers.

    Raises:
        CompileError: they disagree.
        DeviceOutOfMemory: the GPU has too little memory for the comparison.
    """
    xp = backend.xp
    with backend.active():
        block = xp.asarray(np.random.default_rng(0).normal(size=_RANDOM_BLOCK).astype("float32"))
        arrays = [_random_array(backend, s, block) for s in specs]
        found = []
        for run in (out_kernel(op, xp, specs, attrs, False), kernel):
            outs = [new_array(backend, s) for s in results]
            run(outs[0] if len(outs) == 1 else tuple(outs), *arrays)
            found.append(outs)
        for wanted, have, spec in zip(*found, results, strict=True):
            wide = "complex128" if kind(spec.dtype) == "complex" else "float64"
            wanted = wanted.astype(wide)
            scale = max(float(xp.max(xp.abs(wanted))), 1e-6)
            off = float(xp.max(xp.abs(wanted - have.astype(wide)))) / scale
            if not off <= (2e-2 if is_half(specs[0].dtype) else 1e-4):
                raise CompileError(
                    f"the library's {spec} differs from ours by {off:.1e} of its largest value"
                )


_RANDOM_BLOCK = 99_991  # a prime, so that no two rows are equal


def _random_array(backend: Any, spec: TensorSpec, block: Any) -> Any:
    """Return an array that repeats a block of random numbers."""
    array = new_array(backend, spec)
    flat = array.reshape(-1)
    for start in range(0, flat.size, _RANDOM_BLOCK):
        backend.xp.copyto(flat[start : start + _RANDOM_BLOCK], block[: flat.size - start])
    return array


# cuBLAS -----------------------------------------------------------------------------------------


def _matmul(
    backend: Any,
    specs: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
) -> Kernel | None:
    """Return cuBLAS's product in 16 bits; our own converts to float32."""
    if any(spec.dtype != results[0].dtype for spec in specs) or not is_half(results[0].dtype):
        return None
    cublas = backend.cublas

    def kernel(out: Any, x: Any, y: Any, added: bool = False) -> None:
        x = x.swapaxes(-1, -2) if attrs.get("transpose_a") else x
        y = y.swapaxes(-1, -2) if attrs.get("transpose_b") else y
        cublas.multiply(out, x, y, added)

    return kernel


def _accumulate(
    backend: Any,
    specs: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
) -> Kernel | None:
    add = _matmul(backend, specs, results, attrs)
    if add is None:
        return None

    def kernel(out: Any, c: Any, x: Any, y: Any) -> None:
        if out.data.ptr != c.data.ptr:
            backend.xp.copyto(out, c)
        add(out, x, y, added=True)

    return kernel


# cuDNN ------------------------------------------------------------------------------------------


def _convolution(name: str, first: str, second: str) -> Callable[..., Kernel | None]:
    """Return the maker of a cuDNN convolution or of one of its gradients.

    Args:
        name: the method of cuDNN's graph.
        first, second: the names of its two operands.
    """

    def make(
        backend: Any,
        specs: Sequence[TensorSpec],
        results: Sequence[TensorSpec],
        attrs: Mapping[str, Any],
    ) -> Kernel | None:
        fits = (
            specs[0].dtype.name in (*_HALF_DTYPES, "float32") and specs[0].dtype == specs[1].dtype
        )
        if not fits or specs[0].rank != 4 or attrs.get("groups", 1) != 1:
            return None
        before, after = ([pair[side] for pair in attrs["padding"]] for side in (0, 1))

        def node(graph: Any, a: Any, b: Any) -> Sequence[Any]:
            return (
                getattr(graph, name)(
                    **{first: a, second: b},
                    pre_padding=before, post_padding=after,
                    stride=list(attrs["stride"]), dilation=list(attrs["dilation"]),
                ),
            )  # fmt: skip

        return CudnnGraph(backend, specs, [(concrete_shape(results[0]), results[0].dtype)], node)

    return make


def _attention(
    backend: Any,
    specs: Sequence[TensorSpec],
    results: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
) -> Kernel | None:
    plain = attrs["left"] is None and attrs["softcap"] is None and attrs["offset"] == 0
    if len(specs) != 3 or not plain or attrs["right"] not in (None, 0):
        return None
    q, k, _ = specs
    if (
        q.rank != 4
        or q.dtype.name not in _HALF_DTYPES
        or concrete_shape(q)[1] != concrete_shape(k)[1]
    ):
        return None

    def node(graph: Any, q: Any, k: Any, v: Any) -> Sequence[Any]:
        found: Sequence[Any] = graph.sdpa(
            q=q, k=k, v=v, attn_scale=attrs["scale"], generate_stats=True,
            use_causal_mask=attrs["right"] == 0, name="attention",
        )  # fmt: skip
        return found

    out, logs = results
    shapes = [(concrete_shape(out), out.dtype), ((*concrete_shape(logs), 1), logs.dtype)]
    return CudnnGraph(backend, specs, shapes, node)


_PRODUCTS: dict[str, Callable[..., Kernel | None]] = {
    "matmul": _matmul,
    "accumulate_product": _accumulate,
}
_CUDNN: dict[str, Callable[..., Kernel | None]] = {
    "conv": _convolution("conv_fprop", "image", "weight"),
    "conv_transpose": _convolution("conv_dgrad", "loss", "filter"),
    "conv_weight_grad": _convolution("conv_wgrad", "image", "loss"),
    "attention": _attention,
}
