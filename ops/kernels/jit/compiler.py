"""Native functions of LLVM text: compiled once for a process, loaded from disk where they were
compiled before.

Every engine and target machine stays alive as long as the process: code may run at any time, and an
engine does not share its target machine. Compiling holds a lock of LLVM's own.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CompileError
from graphflow.ops.kernels.jit.object_cache import ObjectCache

_ARGUMENTS = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_RELEASING = ctypes.CFUNCTYPE(*_ARGUMENTS)
_HOLDING = ctypes.PYFUNCTYPE(*_ARGUMENTS)


class NativeFunction:
    """Native code: (operands, sizes, start, stop), by address."""

    def __init__(self, address: int) -> None:
        self.address = address

    @cached_property
    def holding_gil(self) -> Any:
        """As a callable that keeps the interpreter's lock, which is faster for a short run."""
        return _HOLDING(self.address)

    @cached_property
    def releasing_gil(self) -> Any:
        """As a callable that lets other threads run Python meanwhile."""
        return _RELEASING(self.address)


@dataclass(frozen=True)
class KernelTask:
    """A generated kernel for operands of certain sizes; what is left to give is where they are.

    Attributes:
        name: of the function (pointers of operands and results, sizes, start, stop).
        text: the module that defines it, as of `named`.
        sizes: what it is given beside the pointers.
        rows: it runs from 0 to this.
        nanoseconds: a rough guess of its time on one thread.
        scratch: bytes of aligned memory that it writes to meanwhile, the last of its pointers.
        order: the first operands and results as it takes them, by number; others as they come.
        row: elements of a row, where each of its rows reads and writes the same row of all that
            has as many elements as the result; else 0.
        blocks: at which rows how many of the result's first elements are done, up to all of them,
            where it pays to go on with these at once.
    """

    name: str
    text: str
    sizes: tuple[int, ...]
    rows: int
    nanoseconds: float
    scratch: int = 0
    order: tuple[int, ...] = ()
    row: int = 0
    blocks: tuple[tuple[int, int], ...] = ()


class _Compiler:
    """LLVM for this process's processor."""

    def __init__(self) -> None:
        from llvmlite import binding  # heavy, and only here

        self._llvm = binding
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        self._target = binding.Target.from_default_triple()
        self._cpu = binding.get_host_cpu_name()
        self.features = binding.get_host_cpu_features().flatten()
        version = ".".join(map(str, binding.llvm_version_info))
        self._setting = f"{version} {self._target.triple} {self._cpu} {self.features}"
        self._alive: list[Any] = []
        self._engines: dict[bytes, Any] = {}  # by the object code that they hold
        self._lock = threading.Lock()
        self._functions: dict[str, NativeFunction] = {}
        self.store = ObjectCache()
        self.compiled = 0

    def function(self, name: str, text: str) -> NativeFunction:
        """The function of a module's text, of that name."""
        found = self._functions.get(name)
        return self.functions({name: text})[name] if found is None else found

    def functions(self, texts: Mapping[str, str]) -> Mapping[str, NativeFunction]:
        """The functions of some modules, each by its name. Those that are neither here nor on disk
        are compiled together, which takes less time than one by one.

        Raises:
            CompileError: a text is no module.
        """
        with self._lock:
            missing = []
            for name, text in texts.items():
                if name not in self._functions and not self._load(name, text):
                    missing.append(name)
            if missing:
                self._build({name: texts[name] for name in missing})
            return self._functions

    def _load(self, name: str, text: str) -> bool:
        """Whether the function could be had from disk; what is kept with it comes with it."""
        code = self.store.get(self._key(text))
        return code is not None and self._add(code, [name])

    def _build(self, texts: Mapping[str, str]) -> None:
        joined = "".join(dict.fromkeys(chunk for t in texts.values() for chunk in _chunks(t)))
        try:
            code = self._object(joined)
        except CompileError:
            if len(texts) == 1:
                raise
            for name, text in texts.items():  # what they declare does not go together
                self._build({name: text})
            return
        self.compiled += len(texts)
        self.store.put_all([self._key(text) for text in texts.values()], code)
        self._add(code, texts)

    def _key(self, text: str) -> str:
        return f"{self._setting}\n{text}"

    def _add(self, code: bytes, names: Iterable[str]) -> bool:
        """Load object code, which an engine of its own holds; whether it has these functions."""
        engine = self._engines.get(code)
        if engine is None:
            engine = self._llvm.create_mcjit_compiler(
                self._llvm.parse_assembly(""), self._machine()
            )
            engine.add_object_file(self._llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            self._engines[code] = engine
        places = {name: engine.get_function_address(name) for name in names}
        if not all(places.values()):
            return False
        self._functions.update({name: NativeFunction(place) for name, place in places.items()})
        return True

    def _machine(self) -> Any:
        machine = self._target.create_target_machine(
            cpu=self._cpu, features=self.features, opt=2, reloc="pic", codemodel="jitdefault"
        )
        self._alive.append(machine)
        return machine

    def _object(self, text: str) -> bytes:
        code: bytes = self._machine().emit_object(self._parse(text))
        return code

    def assembly(self, text: str) -> str:
        """The text of a module in the processor's assembly language."""
        result: str = self._machine().emit_assembly(self._parse(text))
        return result

    def _parse(self, text: str) -> Any:
        try:
            module = self._llvm.parse_assembly(text)
            module.verify()
        except RuntimeError as error:
            raise CompileError(f"a generated kernel does not compile: {error}\n{text}") from error
        module.triple = self._target.triple
        return module


_TOPLEVEL = re.compile(r"(?m)^(?=declare |define |@|%|attributes |!)")


def _chunks(text: str) -> list[str]:
    """The declarations and definitions of a module."""
    return [chunk.rstrip("\n") + "\n" for chunk in _TOPLEVEL.split(text) if chunk.strip()]


_instances: list[_Compiler] = []
_instance_lock = threading.Lock()


def compiler() -> _Compiler:
    """The compiler of this process, made when the first kernel is: one for all threads, for code of
    another would be freed with it."""
    if not _instances:
        with _instance_lock:
            if not _instances:
                _instances.append(_Compiler())
    return _instances[0]


@cache
def vector_width() -> int:
    """Lanes of a generated loop: as many float32 as a register of this processor holds."""
    features = compiler().features.split(",")
    if "+avx512f" in features and "+avx512dq" in features:
        return 16
    return 8 if "+avx2" in features else 4


def name_module(body: str, needs: Sequence[str] | str) -> tuple[str, str]:
    """A module of one function, named by what it says: its name and text."""
    text = f"{needs}\n{body}"
    name = f"graphflow_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return name, f"{needs}\ndefine void @{name}{body}\n"
