"""Traces of scalar expressions of elementwise ops, from which loops are generated.

An op's `expr(xp, *scalars)` runs once on symbols and a symbolic `xp`. The trace is a graph of
primitive steps of one dtype each, by numpy's rules: a Python number takes the dtype of the symbol
that it meets, and truth values count as 0 and 1. An expression that does anything else has no
trace, and its op keeps its plain kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import Untraceable

BOOL = np.dtype(np.bool_)
DTYPES = frozenset(map(np.dtype, ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16",
                                  "uint32", "uint64", "float32", "float64")))  # fmt: skip
APPROXIMATE = frozenset(
    (
        "exp",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "tanh",
        "erf",
        "sigmoid",
        "sin",
        "cos",
        "arcsin",
        "arccos",
        "arctan",
        "power",
    )
)
"""Steps whose last bits depend on the algorithm."""


class ScalarStep:
    """A primitive step: its kind, its arguments, and the dtype of its value.

    Attributes:
        value: the number of an "input", or the value of a "constant".
    """

    __slots__ = ("args", "dtype", "kind", "value")

    def __init__(
        self, kind: str, args: tuple[ScalarStep, ...], dtype: np.dtype[Any], value: Any = None
    ) -> None:
        self.kind = kind
        self.args = args
        self.dtype = dtype
        self.value = value


class ExpressionTrace:
    """Steps in the order in which they were recorded; equal steps are one object."""

    def __init__(self) -> None:
        self.steps: list[ScalarStep] = []
        self._known: dict[Any, ScalarStep] = {}

    def step(
        self, kind: str, args: tuple[ScalarStep, ...], dtype: np.dtype[Any], value: Any = None
    ) -> ScalarStep:
        key = (kind, tuple(map(id, args)), dtype, repr(value))
        if key not in self._known:
            self._known[key] = ScalarStep(kind, args, dtype, value)
            self.steps.append(self._known[key])
        return self._known[key]

    def input(self, number: int, dtype: np.dtype[Any]) -> Symbol:
        """Return the symbol of an operand's scalar."""
        return Symbol(self, self.step("input", (), dtype, number))

    def constant(self, value: Any, dtype: np.dtype[Any]) -> ScalarStep:
        return self.step("constant", (), dtype, value)


def _operator(name: str, swapped: bool = False) -> Callable[[Symbol, Any], Symbol]:
    def operator(self: Symbol, other: Any) -> Symbol:
        result: Symbol = getattr(XP, name)(*((other, self) if swapped else (self, other)))
        return result

    return operator


class Symbol:
    """A scalar while an expression is recorded."""

    __slots__ = ("step", "trace")
    __array_ufunc__ = None  # numpy's functions refuse a symbol, so the expression has no trace

    def __init__(self, trace: ExpressionTrace, step: ScalarStep) -> None:
        self.trace = trace
        self.step = step

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.step.dtype

    def astype(self, dtype: Any, copy: bool = True) -> Symbol:
        return Symbol(self.trace, _convert_step(self.trace, self.step, np.dtype(dtype)))

    def view(self, dtype: Any) -> Symbol:
        """Return the same bits as another dtype."""
        wanted = np.dtype(dtype)
        if BOOL in (wanted, self.dtype) or wanted.itemsize != self.dtype.itemsize:
            raise Untraceable(f"no view of {self.dtype} as {wanted}")
        return Symbol(self.trace, self.trace.step("bits", (self.step,), _require_supported(wanted)))

    def __bool__(self) -> bool:
        raise Untraceable("a symbol has no truth value")

    __hash__ = object.__hash__
    __add__, __radd__ = _operator("add"), _operator("add", True)
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", True)
    __mul__, __rmul__ = _operator("multiply"), _operator("multiply", True)
    __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", True)
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __eq__ = _operator("equal")  # type: ignore[assignment]
    __ne__ = _operator("not_equal")  # type: ignore[assignment]
    __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", True)
    __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", True)
    __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", True)

    def __neg__(self) -> Symbol:
        return XP.negative(self)

    def __abs__(self) -> Symbol:
        return XP.abs(self)

    def __invert__(self) -> Symbol:
        return XP.invert(self)


def _require_supported(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype not in DTYPES:
        raise Untraceable(f"no generated loop computes {dtype}")
    return dtype


def _convert_step(trace: ExpressionTrace, step: ScalarStep, dtype: np.dtype[Any]) -> ScalarStep:
    if step.dtype == _require_supported(dtype):
        return step
    if step.dtype.kind == "f" and dtype.kind in "iu":
        raise Untraceable(
            "converting a float beyond an integer's range gives what the processor chooses"
        )
    return trace.step("convert", (step,), dtype)


def _constant_like(trace: ExpressionTrace, value: Any, dtype: np.dtype[Any]) -> ScalarStep:
    """Return a number as a constant of the dtype that it meets."""
    if isinstance(value, np.generic):
        if value.dtype != dtype:
            raise Untraceable("a typed number of another dtype")
        value = value.item()
    rank = {bool: "b", int: "biu", float: "biuf"}.get(type(value))
    if rank is None or (type(value) is not bool and dtype == BOOL):
        raise Untraceable(f"{value!r} is not a number of {dtype}")
    if type(value) is float and dtype.kind != "f":
        raise Untraceable(f"{value!r} would make {dtype} a float")
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise Untraceable(f"{value!r} is outside of {dtype}")
    python = {"f": float, "b": bool}.get(dtype.kind, int)
    return trace.constant(python(value), dtype)


def _promote_operands(
    values: Sequence[Any], dtype: np.dtype[Any] | None = None
) -> tuple[ExpressionTrace, list[ScalarStep]]:
    """Return steps of one dtype: the given one, or numpy's promotion."""
    symbols = [v for v in values if isinstance(v, Symbol)]
    if not symbols:
        raise Untraceable("no symbol among the operands")
    trace = symbols[0].trace
    common = np.result_type(*(s.dtype for s in symbols)) if dtype is None else dtype
    return trace, [
        _convert_step(trace, v.step, common)
        if isinstance(v, Symbol)
        else _constant_like(trace, v, common)
        for v in values
    ]


def _numeric_step(kind: str, kinds: str = "fiu") -> Callable[..., Symbol]:
    """Make a function that records a step whose value has its operands' dtype."""

    def function(self: _Symbolic, *values: Any) -> Symbol:
        trace, steps = _promote_operands(values)
        _require_kind(steps[0].dtype, kinds, kind)
        return Symbol(trace, trace.step(kind, tuple(steps), steps[0].dtype))

    return function


def _predicate_step(kind: str, kinds: str = "fiub") -> Callable[..., Symbol]:
    """Make a function that records a step whose value is a truth value."""

    def function(self: _Symbolic, *values: Any) -> Symbol:
        trace, steps = _promote_operands(values)
        _require_kind(steps[0].dtype, kinds, kind)
        return Symbol(trace, trace.step(kind, tuple(steps), BOOL))

    return function


def _require_kind(dtype: np.dtype[Any], kinds: str, what: str) -> None:
    if dtype.kind not in kinds:
        raise Untraceable(f"{what} of {dtype} is not generated")


_power = _numeric_step("power", "f")


class _Symbolic:
    """`xp` while an expression is recorded: numpy's functions by name."""

    add, subtract, multiply = (
        _numeric_step("add"),
        _numeric_step("subtract"),
        _numeric_step("multiply"),
    )
    divide, sqrt = _numeric_step("divide", "f"), _numeric_step("sqrt", "f")
    negative, abs = _numeric_step("negative"), _numeric_step("abs")
    maximum, minimum = _numeric_step("maximum"), _numeric_step("minimum")
    floor, ceil = _numeric_step("floor", "f"), _numeric_step("ceil", "f")
    trunc, rint = _numeric_step("trunc", "f"), _numeric_step("rint", "f")
    copysign, sign = _numeric_step("copysign", "f"), _numeric_step("sign", "f")
    exp, expm1 = _numeric_step("exp", "f"), _numeric_step("expm1", "f")
    log, log1p = _numeric_step("log", "f"), _numeric_step("log1p", "f")
    arcsin, arccos = _numeric_step("arcsin", "f"), _numeric_step("arccos", "f")
    arctan = _numeric_step("arctan", "f")
    log2, log10 = _numeric_step("log2", "f"), _numeric_step("log10", "f")
    tanh, erf = _numeric_step("tanh", "f"), _numeric_step("erf", "f")
    sigmoid = _numeric_step("sigmoid", "f")
    sin, cos = _numeric_step("sin", "f"), _numeric_step("cos", "f")
    bitwise_and, bitwise_or = _numeric_step("and", "iub"), _numeric_step("or", "iub")
    bitwise_xor, invert = _numeric_step("xor", "iub"), _numeric_step("invert", "iub")
    left_shift, right_shift = _numeric_step("left_shift", "iu"), _numeric_step("right_shift", "iu")
    equal, not_equal = _predicate_step("equal"), _predicate_step("not_equal")
    less, less_equal = _predicate_step("less", "fiu"), _predicate_step("less_equal", "fiu")
    greater, greater_equal = (
        _predicate_step("greater", "fiu"),
        _predicate_step("greater_equal", "fiu"),
    )
    isnan, isinf, isfinite = (
        _predicate_step("isnan", "f"),
        _predicate_step("isinf", "f"),
        _predicate_step("isfinite", "f"),
    )
    logical_and, logical_or = _predicate_step("and", "b"), _predicate_step("or", "b")
    logical_xor, logical_not = _predicate_step("xor", "b"), _predicate_step("invert", "b")

    def positive(self, x: Symbol) -> Symbol:
        return x

    def power(self, x: Any, y: Any) -> Symbol:
        """Record a power of float32; in float64 numpy's is exact where ours may miss an integer."""
        result = _power(self, x, y)
        if result.dtype != np.float32:
            raise Untraceable(f"power of {result.dtype} is not generated")
        return result

    def square(self, x: Symbol) -> Symbol:
        return self.multiply(x, x)

    def reciprocal(self, x: Symbol) -> Symbol:
        return self.divide(1.0, x)

    def where(self, condition: Symbol, a: Any, b: Any) -> Symbol:
        if not isinstance(condition, Symbol) or condition.dtype != BOOL:
            raise Untraceable("a condition is a truth value")
        trace, (first, second) = _promote_operands((a, b))
        return Symbol(trace, trace.step("where", (condition.step, first, second), first.dtype))

    def clip(self, x: Symbol, low: Any, high: Any) -> Symbol:
        """Record a clip by numpy's rules: NaN stays, and a bound that equals x wins."""
        _require_kind(x.dtype, "fiu", "clip")
        for kind, bound in (("clip_low", low), ("clip_high", high)):
            if bound is not None:
                trace, steps = _promote_operands((x, bound), x.dtype)
                x = Symbol(trace, trace.step(kind, tuple(steps), x.dtype))
        return x


class _SymbolicRows(_Symbolic):
    """`xp` for expressions with reductions along rows, like `row_ops.AxisReductions`."""

    sum, prod = _numeric_step("row_sum"), _numeric_step("row_prod")
    max, min = _numeric_step("row_max"), _numeric_step("row_min")
    any, all = _predicate_step("row_any", "b"), _predicate_step("row_all", "b")

    def mean(self, x: Symbol) -> Symbol:
        return self.sum(x) / self.count(x)

    def count(self, like: Symbol) -> Symbol:
        _require_kind(like.dtype, "f", "count")
        return Symbol(like.trace, like.trace.step("count", (), like.dtype))

    def place(self, like: Symbol) -> Symbol:
        return Symbol(like.trace, like.trace.step("place", (), np.dtype("int32")))


XP = _Symbolic()
ROWS = _SymbolicRows()


def record_expression(
    trace: ExpressionTrace,
    expr: Callable[..., Any],
    inputs: Sequence[Symbol],
    attrs: Mapping[str, Any],
    xp: _Symbolic = XP,
) -> Symbol:
    """Return the symbol that an op's expression makes of symbols.

    Raises:
        Untraceable: it does anything but primitive steps.
    """
    try:
        result = expr(xp, *inputs, **attrs)
    except Untraceable:
        raise
    except Exception as error:  # a user's expression may do anything
        raise Untraceable(f"{type(error).__name__}: {error}") from error
    if not isinstance(result, Symbol):
        raise Untraceable(f"the value is {type(result).__name__}")
    return result
