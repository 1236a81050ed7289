"""Native functions: compiled together, once for a process, and found again on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from graphflow.errors import CompileError
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import (
    WRITTEN,
    CompilationLimitExceeded,
    NativeFunction,
    _Compiler,
    limit_compilation,
    name_module,
)


def write_adding_function(number: int) -> tuple[str, str]:
    """A function that adds a number to an int64, by way of a function of its own."""
    needs = """define internal i64 @added(i64 %x, i64 %y) noinline {
  %z = add i64 %x, %y
  ret i64 %z
}"""
    body = f"""(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop) {{
  %p = load ptr, ptr %ptrs
  %x = load i64, ptr %p
  %y = call i64 @added(i64 %x, i64 {number})
  store i64 %y, ptr %p
  ret void
}}"""
    return name_module(body, needs)


def apply_to(function: NativeFunction, value: int) -> int:
    cell = np.array([value], np.int64)
    table = np.array([address(cell)], np.uint64)
    function.holding_gil(address(table), None, 0, 0)
    return int(cell[0])


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Compiler:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    return _Compiler()


def test_functions_are_compiled_together_and_each_once(fresh: _Compiler) -> None:
    texts = dict(write_adding_function(i) for i in range(4))
    functions = fresh.functions(texts)
    assert [apply_to(functions[name], 10) for name in texts] == [10, 11, 12, 13]
    assert fresh.compiled == 4
    name, text = write_adding_function(2)
    assert fresh.function(name, text) is functions[name]
    more = dict(write_adding_function(i) for i in range(2, 6))
    functions = fresh.functions(more)
    assert [apply_to(functions[name], 0) for name in more] == [2, 3, 4, 5]
    assert fresh.compiled == 6


def test_another_compiler_finds_all_of_them_on_disk(fresh: _Compiler) -> None:
    texts = dict(write_adding_function(i) for i in range(4))
    fresh.functions(texts)
    later = _Compiler()
    functions = later.functions(dict(reversed(texts.items())))
    assert [apply_to(functions[name], 0) for name in texts] == [0, 1, 2, 3]
    assert later.compiled == 0


def test_a_text_that_is_no_module_is_named_and_the_others_compile(fresh: _Compiler) -> None:
    name, text = write_adding_function(7)
    with pytest.raises(CompileError, match="nonsense"):
        fresh.functions({name: text, "bad": "define void @bad() { nonsense }"})
    assert apply_to(fresh.function(name, text), 1) == 8


def test_what_was_kept_of_something_else_is_compiled_anew(fresh: _Compiler) -> None:
    name, text = write_adding_function(3)
    other = _Compiler()
    other.functions(dict([write_adding_function(4)]))
    wrong = other.store.get(other._key(write_adding_function(4)[1]))
    assert wrong is not None
    fresh.store.put(fresh._key(text), wrong)
    assert apply_to(fresh.function(name, text), 1) == 4
    assert fresh.compiled == 1


def test_threads_that_want_the_same_functions_compile_them_once(fresh: _Compiler) -> None:
    texts = dict(write_adding_function(i) for i in range(6))
    found: list[int] = []

    def want(order: int) -> None:
        items = list(texts.items())
        functions = fresh.functions(dict(items[order:] + items[:order]))
        found.append(sum(apply_to(functions[name], 0) for name in texts))

    threads = [threading.Thread(target=want, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [15] * 6 and fresh.compiled == 6


PROGRAM = """
import sys
sys.path[:] = {path!r}
from tests.ops.kernels.jit.test_compiler import adding, apply_to
from graphflow.ops.kernels.jit.compiler import _Compiler
sys.stdin.readline()
total = 0
for turn in range(8):
    compiler = _Compiler()
    for i in range(turn % 3, 9, 2):
        texts = dict(write_adding_function(k) for k in range(i, i + 3))
        functions = compiler.functions(texts)
        total += sum(apply_to(functions[name], 100) for name in texts)
    if turn % 2:
        for path in compiler.store.folder.iterdir():
            if hash(path.name) % 3 == 0:
                try:
                    path.write_bytes(path.read_bytes()[:-3])
                except OSError:
                    pass
        compiler.store.clear() if turn == 5 else compiler.store.usage()
print(total)
"""


@pytest.mark.slow
def test_processes_share_the_folder_while_entries_are_damaged_and_removed(tmp_path: Path) -> None:
    program = PROGRAM.format(path=sys.path)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "GRAPHFLOW_CACHE": str(tmp_path), "GRAPHFLOW_JIT": "on"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    told = [child.communicate("go\n")[0] for child in children]
    want = sum(100 + k for turn in range(8) for i in range(turn % 3, 9, 2) for k in range(i, i + 3))
    assert [child.returncode for child in children] == [0, 0, 0]
    assert [int(text) for text in told] == [want] * 3


def test_a_thread_compiles_no_more_than_it_may(fresh: _Compiler) -> None:
    texts = dict(write_adding_function(i) for i in range(4))
    names, size = list(texts), len(write_adding_function(0)[1])
    assert fresh.function(names[0], texts[names[0]]).address
    with limit_compilation(2 * size + 1):
        fresh.functions({name: texts[name] for name in names[:3]})  # the first one is there
        assert fresh.compiled == 3
        with pytest.raises(CompilationLimitExceeded, match=r"1 kernels of .* characters"):
            fresh.functions({names[3]: texts[names[3]]})
        assert fresh.compiled == 3
        other = threading.Thread(target=fresh.functions, args=({names[3]: texts[names[3]]},))
        other.start()
        other.join()
    assert fresh.compiled == 4


def test_a_function_is_compiled_when_it_is_first_used(fresh: _Compiler) -> None:
    function = fresh.function(*write_adding_function(5))
    assert fresh.compiled == 0
    assert apply_to(function, 1) == apply_to(function, 1) == 6
    assert fresh.compiled == 1


def test_a_thread_writes_no_more_than_it_may() -> None:
    size = len(write_adding_function(0)[1])
    with limit_compilation(size):
        for number in range(WRITTEN):
            write_adding_function(number)
            write_adding_function(number)  # equal modules count once
        with pytest.raises(CompilationLimitExceeded, match="may be written"):
            write_adding_function(WRITTEN)
    write_adding_function(WRITTEN)
