"""The text of `help` for an op, written from its declaration."""

from __future__ import annotations

from typing import Any

from graphflow.errors import GraphError
from graphflow.ir.spec import TensorSpec, spec

_KINDS = {"bools": "bool", "ints": "int32", "floats": "float32", "complex numbers": "complex64"}


class OpDoc:
    """A descriptor for `__doc__`: the class's own docstring, or a text about one op.

    The text is written on access, so hundreds of declarations cost nothing at import.
    """

    def __init__(self, of_the_class: str | None) -> None:
        self.of_the_class = of_the_class

    def __get__(self, op: Any, owner: Any = None) -> str | None:
        return self.of_the_class if op is None else _describe_op(op)


def _describe_op(op: Any) -> str:
    words = op.doc or (f"numpy's `{op.ufunc}`." if op.ufunc else f"The op {op.name}.")
    parts = [words]
    if op.elementwise and op.arity:
        parts.append("\n".join(_describe_elementwise(op, op.arity)))
    flat = getattr(op.vjp, "__name__", "") == "no_gradient"
    if op.vjp:
        parts.append("Its gradient is zero." if flat else "It has a gradient.")
    else:
        parts.append("It has no gradient.")
    errors = ["    ArgumentError: another number of tensors, or an argument that it does not take."]
    errors.append("    DTypeError: a dtype that it does not take, or kinds of numbers that mix.")
    if op.arity != 1:
        errors.append("    ShapeError: the shapes do not fit each other.")
    parts.append("\n".join(["Raises:", *errors]))
    return "\n\n".join(parts)


def _describe_elementwise(op: Any, arity: int) -> list[str]:
    results = {
        name: result
        for name, dtype in _KINDS.items()
        if (result := _infer_or_none(op, [spec(dtype, ())] * arity)) is not None
    }
    names = list(results)
    kinds = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    shape = "of any shape" if arity == 1 else "whose shapes broadcast (one may be a Python number)"
    lines = [
        f"Element by element, of {arity} tensor{'s' * (arity > 1)} {shape}: {kinds}.",
        f"Gives a tensor of {'its' if arity == 1 else 'the broadcast'} shape",
    ]
    if {r.dtype.name for r in results.values()} == {"bool"} and names != ["bools"]:
        lines[-1] += ", bool."
    else:
        lines[-1] += f" and {'its' if arity == 1 else 'the common'} dtype" + (
            " (real for complex numbers)." if _gives_real(results) else "."
        )
    return lines


def _gives_real(results: dict[str, TensorSpec]) -> bool:
    return "complex numbers" in results and results["complex numbers"].dtype.name == "float32"


def _infer_or_none(op: Any, inputs: list[TensorSpec]) -> TensorSpec | None:
    try:
        result = op.infer(*inputs)
    except (GraphError, TypeError):  # the op refuses this kind of dtype, or needs attributes
        return None
    return result if isinstance(result, TensorSpec) else result[0]


__all__ = ["OpDoc"]
