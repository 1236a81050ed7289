"""CUDA sources compiled by NVRTC, by way of CuPy, and kept on disk as LLVM's objects are.

CuPy's own way (`RawModule`) adds -ftz=true, which takes float32's denormals for zero: other bits
than a CPU's.
"""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.jit.object_cache import ObjectCache

OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false")
"""Of NVRTC: no multiplication and addition is contracted and no denormal is zero, so that a step's
bits are its own."""


def compile_module(cupy: Any, text: str) -> Any:
    """A source as a module of the current device, whose functions are launched by name.

    Raises:
        Exception: of CuPy's compiler, or of the driver: it does not compile, or load.
    """
    cuda = cupy.cuda
    setting = (cupy.__version__, cuda.nvrtc.getVersion(), cuda.Device().compute_capability, OPTIONS)
    key, store = f"{setting}\n{text}", ObjectCache()
    code = store.get(key)
    if code is None:
        code, _ = cuda.compiler.compile_using_nvrtc(text, OPTIONS)
        store.put(key, code)
    module = cuda.function.Module()
    module.load(code)
    return module
