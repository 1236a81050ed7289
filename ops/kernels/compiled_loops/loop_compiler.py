"""Plain Python loops over flat sequences as machine code, within a tenth of a second.

    evaluate = native(search_loops, "evaluate")
    seconds = evaluate(n, d, sequence, ...)      # flat arrays, ints, floats, bools

Arrays hold int64, float64, int32, float32 or uint8. Shorter items are computed with as 64 bits; a
loop that is to give the same bits as Python reads them by `int(x[i])` and `float(x[i])`.

Such loops use little of Python: `for` over ranges, `while`, `if`, numbers, flat arrays, and calls
of each other. That is translated to LLVM text and compiled once per machine, in about 0.2 s. A
general compiler such as numba takes 2 s to import and 20 s to compile the same. The operations keep
their order, without fast-math, so the bits are those of Python. A function is compiled for the
types of its arguments; types of local names follow from what they are given. Indices are not
checked, and must not be negative; a division by zero is infinite instead of an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from graphflow.errors import CompileError
from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.compiled_loops.llvm_lines import ITEM
from graphflow.ops.kernels.compiled_loops.python_to_llvm import program, table_program
from graphflow.ops.kernels.jit.compiler import NativeFunction
from graphflow.ops.kernels.jit.kernel_recording import ArrayStandIn, operand_place


def native(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of a module of loops as machine code, compiled when it is first called.

    Raises:
        CompileError: the function holds something beyond what this module knows; names the line.
    """

    def call(*arguments: Any) -> Any:
        kinds = "".join(_kind(a) for a in arguments)
        return _entry(module, name, kinds)(arguments)

    return call


def native_rows(module: ModuleType, name: str) -> Callable[..., None]:
    """A function (start, stop, arrays and numbers) of a module of loops as machine code.

    It works on rows `start` to `stop`, and returns None. Calls of it can be recorded, so that
    programs repeat them without Python (`jit/kernel_recording.py`).
    """

    def call(start: int, stop: int, *arguments: Any) -> None:
        pointers, sizes = [], []
        for value in arguments:
            if hasattr(value, "shape"):
                pointers.append(operand_place(value))
                sizes.append(value.size)
            else:
                sizes.append(_bits(value))
        kinds = "ii" + "".join(map(_kind, arguments))
        call_native(_rows_entry(module, name, kinds), pointers, sizes, start, stop)

    return call


def _bits(value: float) -> int:
    """The bits of a float, or an int itself."""
    return value if isinstance(value, int) else int(np.float64(value).view(np.int64))


@cache
def _rows_entry(module: ModuleType, name: str, kinds: str) -> NativeFunction:
    text, symbol = table_program(module, name, kinds)
    with _LOCK:
        return NativeFunction(_llvm().address(symbol, text))


@cache
def _entry(module: ModuleType, name: str, kinds: str) -> Callable[[tuple[Any, ...]], Any]:
    """The function for arguments of these types, taking Python's values."""
    text, symbol, result = program(module, name, kinds)
    with _LOCK:
        address = _llvm().address(symbol, text)
    types: list[Any] = []
    for kind in kinds:
        if kind in ITEM:
            types += [ctypes.c_void_p, ctypes.c_int64]
        else:
            types.append(ctypes.c_double if kind == "f" else ctypes.c_int64)
    given = {"v": None, "f": ctypes.c_double}.get(result, ctypes.c_int64)
    function = ctypes.CFUNCTYPE(given, *types)(address)
    arrays = tuple(kind in ITEM for kind in kinds)

    def call(arguments: tuple[Any, ...]) -> Any:
        flat: list[Any] = []
        for value, array in zip(arguments, arrays, strict=True):
            if array:
                flat += [value.ctypes.data, len(value)]
            else:
                flat.append(value)
        found = function(*flat)
        return bool(found) if result == "b" else found

    return call


_LOCK = threading.Lock()


class _LLVM:
    """LLVM for this process's processor, with its passes (kernels of ops need none: they are
    written as they should run). Engines and target machines live as long as the process."""

    def __init__(self) -> None:
        from llvmlite import binding  # heavy, and only here

        from graphflow.ops.kernels.jit.object_cache import ObjectCache

        self._binding, self._store = binding, ObjectCache()
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        self._target = binding.Target.from_default_triple()
        self._cpu = binding.get_host_cpu_name()
        self._features = binding.get_host_cpu_features().flatten()
        version = ".".join(map(str, binding.llvm_version_info))
        self._setting = f"loops 2 {version} {self._target.triple} {self._cpu} {self._features}"
        self._alive: list[Any] = []

    def address(self, symbol: str, text: str) -> int:
        """Return the address of a compiled function of a module; compile it if necessary."""
        key = f"{self._setting}\n{text}"
        code = self._store.get(key)
        if code is None:
            code = self._object(text)
            self._store.put(key, code)
        empty = self._binding.parse_assembly("")
        engine = self._binding.create_mcjit_compiler(empty, self._machine())
        engine.add_object_file(self._binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._alive.append(engine)
        return int(engine.get_function_address(symbol))

    def _object(self, text: str) -> bytes:
        machine, llvm = self._machine(), self._binding
        module = llvm.parse_assembly(text)
        module.verify()
        module.triple, module.data_layout = self._target.triple, str(machine.target_data)
        tuning = llvm.create_pipeline_tuning_options(3)
        tuning.slp_vectorization = True  # several sums beside each other become one vector
        builder = llvm.create_pass_builder(machine, tuning)
        builder.getModulePassManager().run(module, builder)
        code: bytes = machine.emit_object(module)
        return code

    def _machine(self) -> Any:
        machine = self._target.create_target_machine(
            cpu=self._cpu, features=self._features, opt=2, reloc="pic", codemodel="jitdefault"
        )
        self._alive.append(machine)
        return machine


@cache
def _llvm() -> _LLVM:
    return _LLVM()


_ARRAYS = {
    np.dtype(np.int64): "I",
    np.dtype(np.float64): "F",
    np.dtype(np.int32): "J",
    np.dtype(np.float32): "G",
    np.dtype(np.uint8): "U",
}


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray | ArrayStandIn):
        letter = _ARRAYS.get(value.dtype)
        if (
            letter
            and value.ndim == 1
            and (isinstance(value, ArrayStandIn) or value.flags.c_contiguous)
        ):
            return letter
        raise CompileError(
            f"an array of shape {value.shape} and {value.dtype}: loops take flat arrays of "
            f"{', '.join(map(str, _ARRAYS))}"
        )
    if isinstance(value, bool):
        return "b"
    return "i" if isinstance(value, int | np.integer) else "f"
