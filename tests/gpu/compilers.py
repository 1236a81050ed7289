"""CUDA's compilers where there is no GPU: nvcc, or NVRTC by its shared library."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

Compile = Callable[[str, Path], None]
"""(text, folder): raises AssertionError with what the compiler says."""


def compiler(machine_code: bool = False) -> Compile | None:
    """What compiles CUDA sources here; None where nothing does.

    Args:
        machine_code: to the end, instead of to PTX, where nvcc is there.
    """
    if shutil.which("nvcc"):
        return lambda text, folder: _by_nvcc(text, folder, machine_code)
    library = _nvrtc()
    return None if library is None else lambda text, folder: _by_nvrtc(library, text)


def _by_nvcc(text: str, folder: Path, machine_code: bool) -> None:
    source = folder / "kernels.cu"
    source.write_text(text)
    kind = ["-cubin"] if machine_code else ["-ptx", "-Xcicc", "-O0"]  # only whether it compiles
    done = subprocess.run(
        ["nvcc", "-std=c++17", "-arch=sm_80", *kind, "--fmad=false", "-o", folder / "kernels.out",
         source],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _nvrtc() -> ctypes.CDLL | None:
    names = [name] if (name := find_library("nvrtc")) else []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        names += map(str, Path(folder).glob("*/lib/libnvrtc.so*"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _by_nvrtc(library: ctypes.CDLL, text: str) -> None:
    program = ctypes.c_void_p()
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None
    )
    assert created == 0, f"nvrtcCreateProgram gives {created}"
    options = [b"--gpu-architecture=compute_80", b"--fmad=false", b"-std=c++17"]
    failed = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert failed == 0, log.value.decode()
