"""CUDA sources compiled by NVRTC through CuPy, and kept on disk like LLVM's object code.

CuPy's `RawModule` adds -ftz=true, which flushes float32's denormals to zero, unlike CPUs.
"""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.jit.object_cache import ObjectCache

OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false")
"""Options of NVRTC: no contraction and no flushing of denormals, so that each step has the bits of
a CPU."""


def compile_module(cupy: Any, text: str) -> Any:
    """Compile a source as a module of the current device, whose functions are launched by name.

    Raises:
        Exception: of CuPy's compiler or of the driver, if it does not compile or load.
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
