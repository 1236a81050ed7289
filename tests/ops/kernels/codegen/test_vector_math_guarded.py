"""Functions of a module that kernels share: one text in all modules, so that these compile as
one."""

from __future__ import annotations

from graphflow.ops.kernels.codegen.vector_math_guarded import sin
from graphflow.ops.kernels.codegen.vector_writer import Floats, Module, VectorWriter


def shared_functions(width: int, before: int) -> dict[str, str]:
    """The declarations of a module that calls sin after some other values."""
    module = Module()
    writer = VectorWriter(module, width, [])
    for _ in range(before):
        writer.write("values of another kernel")
    sin(Floats(writer, "float"), "%x")
    return {name: text for name, text in module.declared.items() if text.startswith("define")}


def test_a_shared_function_has_one_text_wherever_it_is_called() -> None:
    assert len(shared_functions(8, 0)) == 1
    assert shared_functions(8, 0) == shared_functions(8, 5)


def test_functions_of_two_widths_have_two_names() -> None:
    assert shared_functions(8, 0).keys().isdisjoint(shared_functions(16, 0))
