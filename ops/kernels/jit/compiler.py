"""Native functions from LLVM text, compiled once a process or loaded from disk.

Every engine and target machine lives as long as the process: code may run at any time, and an
engine does not share its target machine. Compiling holds a lock of LLVM's own.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

from graphflow.base.digest import sha256
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CompileError
from graphflow.ops.kernels.jit.object_cache import ObjectCache

_ARGUMENTS = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_RELEASING = ctypes.CFUNCTYPE(*_ARGUMENTS)
_HOLDING = ctypes.PYFUNCTYPE(*_ARGUMENTS)


WRITTEN = 3
"""Characters that may be written for each that may be compiled: writing takes a sixth as long."""


class CompilationLimitExceeded(Exception):
    """Kernels that are neither in memory nor on disk are more than the caller may compile."""


@dataclass
class _Allowance:
    """Characters that a thread may still compile and write, and the modules that it has written."""

    compiled: int
    written: int
    names: set[str] = field(default_factory=set)


_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


@contextmanager
def limit_compilation(characters: int) -> Iterator[None]:
    """Let the block's thread compile at most so many characters of LLVM IR, and write modules of
    `WRITTEN` times as many, of which some may be on disk. Equal modules count once.

    LLVM takes about 1 µs for a character. A count does not depend on the load of the machine.

    Raises:
        CompilationLimitExceeded: by the call that needs more; nothing of it is compiled.
    """
    before = _allowance.set(_Allowance(characters, WRITTEN * characters))
    try:
        yield
    finally:
        _allowance.reset(before)


class NativeFunction:
    """Native code by address: (operands, sizes, start, stop).

    Args:
        address: the address, or a function that compiles the code and returns it.
    """

    def __init__(self, address: int | Callable[[], int]) -> None:
        self._given = address

    @cached_property
    def address(self) -> int:
        """The address of the code, which is compiled when this is first read."""
        if not isinstance(self._given, int):
            self._given = self._given()  # drops the text
        return self._given

    @cached_property
    def holding_gil(self) -> Any:
        """The function as a callable that keeps the GIL, which is faster for a short run."""
        return _HOLDING(self.address)

    @cached_property
    def releasing_gil(self) -> Any:
        """The function as a callable that releases the GIL."""
        return _RELEASING(self.address)


@dataclass(frozen=True)
class TaskShare:
    """A part of a task that may run at the same time as the others.

    Attributes:
        start, stop: its rows.
        sizes: its table of sizes, if it is not the task's.
        offsets: bytes by which its first operands and results begin later.
    """

    start: int
    stop: int
    sizes: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class KernelTask:
    """A generated kernel for operands of certain sizes; only their addresses are left to give.

    Attributes:
        name: of the function (pointers of operands and results, sizes, start, stop).
        text: the module that defines it, from `name_module`.
        sizes: the table of sizes that it takes.
        rows: it runs from 0 to this.
        nanoseconds: a rough estimate of its time on one thread.
        scratch: bytes of aligned scratch memory, its last pointer.
        order: numbers of the first operands and results in the order of its pointers; the others
            follow as they come.
        row: elements of a row, if each row reads and writes the same row of all arrays that have as
            many elements as the result; else 0.
        blocks: (row, elements) pairs: after that many rows, the result's first elements are done.
            The last pair is the whole. Empty if nothing gains from continuing early.
        cut: cuts it into at most so many shares; None if it must run as a whole.
        share: nanoseconds of a share, at least, by the same estimate. Less is not worth a thread.
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
    cut: Callable[[int], Sequence[TaskShare]] | None = field(default=None, compare=False)
    share: float = 30_000

    @property
    def is_divisible(self) -> bool:
        """Whether threads may share it, and gain."""
        return self.cut is not None and self.nanoseconds >= 2 * self.share


def cut_rows(rows: int, unit: int, count: int) -> list[TaskShare]:
    """Cut rows into at most `count` shares of nearly equal size, at multiples of `unit`."""
    units = -(-rows // unit)
    parts = max(1, min(count, units))
    ends = [min(units * i // parts * unit, rows) for i in range(parts + 1)]
    return [TaskShare(start, stop) for start, stop in pairwise(ends)]


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
        """Return the function of that name in a module's text, which is compiled when the function
        is first used."""
        found = self._functions.get(name)
        if found is None:
            return NativeFunction(lambda: self.functions({name: text})[name].address)
        return found

    def functions(self, texts: Mapping[str, str]) -> Mapping[str, NativeFunction]:
        """Return the functions of some modules, each by its name.

        Functions that are neither in memory nor on disk are compiled together, which takes less
        time than one by one.

        Raises:
            CompileError: a text does not compile.
            CompilationLimitExceeded: more than `limit_compilation` allows.
        """
        with self._lock:
            missing = []
            for name, text in texts.items():
                if name not in self._functions and not self._load(name, text):
                    missing.append(name)
            if missing:
                _spend_allowance([texts[name] for name in missing])
                self._build({name: texts[name] for name in missing})
            return self._functions

    def _load(self, name: str, text: str) -> bool:
        """Load a function from disk, with those stored beside it; returns whether it was there."""
        code = self.store.get(self._key(text))
        return code is not None and self._add(code, [name])

    def _build(self, texts: Mapping[str, str]) -> None:
        joined = "".join(dict.fromkeys(chunk for t in texts.values() for chunk in _chunks(t)))
        try:
            code = self._object(joined)
        except CompileError:
            if len(texts) == 1:
                raise
            for name, text in texts.items():  # their declarations conflict
                self._build({name: text})
            return
        self.compiled += len(texts)
        self.store.put_all([self._key(text) for text in texts.values()], code)
        self._add(code, texts)

    def _key(self, text: str) -> str:
        return f"{self._setting}\n{text}"

    def _add(self, code: bytes, names: Iterable[str]) -> bool:
        """Load object code into an engine of its own; returns whether it has these functions."""
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
        """Return a module in the processor's assembly language."""
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


def _spend_allowance(texts: Sequence[str]) -> None:
    """Count texts that are about to be compiled.

    Raises:
        CompilationLimitExceeded: this thread may not compile so many.
    """
    allowance, size = _allowance.get(), sum(map(len, texts))
    if allowance is None:
        return
    if size > allowance.compiled:
        raise CompilationLimitExceeded(
            f"{len(texts)} kernels of {size:,} characters are not compiled yet; "
            f"{allowance.compiled:,} characters are allowed"
        )
    allowance.compiled -= size


_TOPLEVEL = re.compile(r"(?m)^(?=declare |define |@|%|attributes |!)")


def _chunks(text: str) -> list[str]:
    """Return the declarations and definitions of a module."""
    return [chunk.rstrip("\n") + "\n" for chunk in _TOPLEVEL.split(text) if chunk.strip()]


_instances: list[_Compiler] = []
_instance_lock = threading.Lock()


def compiler() -> _Compiler:
    """Return the compiler of this process, made for the first kernel.

    All threads share one, since code would be freed with its compiler.
    """
    if not _instances:
        with _instance_lock:
            if not _instances:
                _instances.append(_Compiler())
    return _instances[0]


@cache
def vector_width() -> int:
    """Return the lanes of a generated loop: the float32 that a register of this processor holds."""
    features = compiler().features.split(",")
    if "+avx512f" in features and "+avx512dq" in features:
        return 16
    return 8 if "+avx2" in features else 4


def name_module(body: str, needs: Sequence[str] | str) -> tuple[str, str]:
    """Return the name and text of a module with one function, named by a hash of its text.

    Raises:
        CompilationLimitExceeded: this thread writes more than `limit_compilation` allows.
    """
    text = f"{needs}\n{body}"
    name = f"graphflow_{sha256(text.encode()).hex()[:32]}"
    allowance = _allowance.get()
    if allowance is not None and name not in allowance.names:
        allowance.names.add(name)
        allowance.written -= len(text)
        if allowance.written < 0:
            raise CompilationLimitExceeded("kernels have more characters than may be written")
    return name, f"{needs}\ndefine void @{name}{body}\n"
