"""Tensor: an output of a node, with Python's operators; and what becomes one.

The operators look their function up by name in `FUNCTIONS`, so this module knows no particular op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from graphflow.base.argument_checks import format_value
from graphflow.base.array_conversion import NoArrayError, array_of, cast_in_range
from graphflow.base.source_location import user_location, with_location
from graphflow.errors import DTypeError, GraphError, VariableError
from graphflow.ir import numpy_interop as numpy_names
from graphflow.ir.registry import FUNCTIONS, REGISTRY
from graphflow.ir.scopes import current_scope
from graphflow.ir.spec import (
    Dim,
    Shape,
    Size,
    TensorSpec,
    as_dtype,
    complex_dtype,
    is_inexact,
    kind,
    limits,
    promote,
)

if TYPE_CHECKING:
    from graphflow.ir.node import Node


def _binary(name: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def operator(self: Tensor, other: Any) -> Any:
        if not _is_convertible(other):
            return NotImplemented
        return FUNCTIONS[name](other, self) if swapped else FUNCTIONS[name](self, other)

    return operator


def _unary(name: str) -> Callable[[Any], Any]:
    def operator(self: Tensor) -> Any:
        return FUNCTIONS[name](self)

    return operator


def _method(name: str) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[name](self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"`gf.{name}(self, ...)`."
    return method


class Tensor:
    """The output number `index` of a node: symbolic, typed, usable with Python's operators.

    `==` builds a node, so tensors are told apart by `is`; as dictionary keys they go by identity.
    """

    __slots__ = ("__weakref__", "index", "node")

    def __init__(self, node: Node, index: int) -> None:
        self.node = node
        self.index = index

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype together."""
        return self.node.specs[self.index]

    @property
    def shape(self) -> Shape:
        """Sizes of the axes; one that only a feed fixes is a `Dim`, such as `n` or `2*n + 1`."""
        return self.node.specs[self.index].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """numpy's dtype of the elements."""
        return self.node.specs[self.index].dtype

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.spec.shape)

    @property
    def size(self) -> Size:
        """How many elements: the product of the shape."""
        return self.spec.size

    @property
    def name(self) -> str:
        """The name of the node that makes it."""
        return self.node.name

    @property
    def real(self) -> Tensor:
        """The real part; a real tensor itself."""
        part: Tensor = FUNCTIONS["real"](self)
        return part

    @property
    def imag(self) -> Tensor:
        """The imaginary part; zeros for a real tensor."""
        part: Tensor = FUNCTIONS["imag"](self)
        return part

    @property
    def T(self) -> Tensor:
        """The last two axes swapped; with fewer, the tensor itself."""
        return self if self.ndim < 2 else self.mT

    @property
    def mT(self) -> Tensor:
        """The last two axes swapped."""
        transposed: Tensor = FUNCTIONS["matrix_transpose"](self)
        return transposed

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.spec} at {self.node.location}>"

    __hash__ = object.__hash__

    def _no_value_error(self, what: str) -> GraphError:
        return GraphError(
            f"{self.name} (made at {self.node.location}) has no {what} while the graph is built: "
            "it is symbolic; use gf.where for choices, Session.run for values"
        )

    def __bool__(self) -> bool:
        raise self._no_value_error("truth value")

    def __int__(self) -> int:
        raise self._no_value_error("integer value")

    __index__ = __int__

    def __float__(self) -> float:
        raise self._no_value_error("float value")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._no_value_error("array")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Operators between an array of numpy and a tensor; no other ufunc."""
        name = numpy_names.OPERATORS.get(ufunc.__name__)
        if name is None or method != "__call__" or options:
            raise self._numpy_error(ufunc)
        return FUNCTIONS[name](*inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        name = function.__name__
        if name in numpy_names.ATTRIBUTES and args == (self,) and not options:
            return getattr(self, name)
        raise self._numpy_error(function)

    def _numpy_error(self, function: Any) -> GraphError:
        what = f"{self.name} (made at {self.node.location})"
        return GraphError(numpy_names.unsupported_message(function, what))

    if not TYPE_CHECKING:  # it would have every attribute

        def __getattr__(self, name: str) -> NoReturn:
            with_location = f"tensors have no attribute {name!r}"
            with_location += numpy_names.attribute_hint(name)
            raise AttributeError(with_location, name=name, obj=self)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise GraphError(
            f"{self.name} (made at {self.node.location}) at {user_location()}: tensors do not "
            "change; gf.where, gf.scatter and gf.index_add make new ones, gf.assign sets a variable"
        )

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: Any) -> Tensor:
        if self.node.op.name == "variable":
            raise VariableError(
                f"{self.name} (made at {self.node.location}) "
                "is one variable, and a copy would be the same; build the layer again for "
                "variables of its own, and session.set(new, session.get(old))"
            )
        return self

    def __reduce__(self) -> NoReturn:
        raise GraphError(
            f"{self.name} (made at {self.node.location}) at {user_location()}: tensors are not "
            "pickled; build the graph where it runs, and take values along by session.save"
        )

    def __len__(self) -> int:
        if not self.ndim:
            raise self._no_value_error("length")
        if not isinstance(self.shape[0], int):
            raise GraphError(
                f"{self.name} (made at {self.node.location}) has no length while the graph is "
                "built: the size of its first axis comes with a feed; x.shape[0] is that size, "
                "gf.vmap and gf.scan run over the axis"
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[i] for i in range(len(self))])

    __add__, __radd__ = _binary("add"), _binary("add", True)
    __sub__, __rsub__ = _binary("subtract"), _binary("subtract", True)
    __mul__, __rmul__ = _binary("multiply"), _binary("multiply", True)
    __truediv__, __rtruediv__ = _binary("divide"), _binary("divide", True)
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _binary("floor_divide", True)
    __mod__, __rmod__ = _binary("remainder"), _binary("remainder", True)
    __pow__, __rpow__ = _binary("pow"), _binary("pow", True)
    __matmul__, __rmatmul__ = _binary("matmul"), _binary("matmul", True)
    __lt__, __le__ = _binary("less"), _binary("less_equal")
    __gt__, __ge__ = _binary("greater"), _binary("greater_equal")
    __eq__ = _binary("equal")
    __ne__ = _binary("not_equal")
    __and__, __rand__ = _binary("bitwise_and"), _binary("bitwise_and", True)
    __or__, __ror__ = _binary("bitwise_or"), _binary("bitwise_or", True)
    __xor__, __rxor__ = _binary("bitwise_xor"), _binary("bitwise_xor", True)
    __lshift__ = _binary("bitwise_left_shift")
    __rlshift__ = _binary("bitwise_left_shift", True)
    __rshift__ = _binary("bitwise_right_shift")
    __rrshift__ = _binary("bitwise_right_shift", True)
    __invert__ = _unary("bitwise_invert")
    __neg__, __pos__, __abs__ = _unary("negative"), _unary("positive"), _unary("abs")
    __getitem__ = _method("getitem")

    sum, mean, max, min, prod = map(_method, ("sum", "mean", "max", "min", "prod"))
    var, std, any, all = map(_method, ("var", "std", "any", "all"))
    argmax, argmin, conj = _method("argmax"), _method("argmin"), _method("conj")
    astype, squeeze = _method("astype"), _method("squeeze")

    def reshape(self, *shape: Any, **named: Any) -> Tensor:
        """`gf.reshape(self, shape)`; sizes may be given one by one, as to numpy's arrays."""
        given = shape if len(shape) < 2 else (shape,)
        reshaped: Tensor = FUNCTIONS["reshape"](self, *given, **named)
        return reshaped


def _is_convertible(value: Any) -> bool:
    return isinstance(
        value, Tensor | bool | int | float | complex | np.ndarray | np.generic | list | tuple | Dim
    )


# What plain Python numbers and lists become, by the dtype that numpy gives them.
DEFAULT_DTYPES = {"float64": "float32", "complex128": "complex64"}
_PLAIN_DTYPES = {np.dtype(given): np.dtype(taken) for given, taken in DEFAULT_DTYPES.items()}


def as_tensor(value: Any, dtype: Any = None) -> Tensor:
    """A tensor as it is; arrays, lists and Python scalars as constants (lists of floats become
    float32, of complex numbers complex64); a symbolic size as the number that it is (int64).

    Raises:
        DTypeError: the value has no supported dtype.
    """
    if isinstance(value, Tensor):
        return value
    if not _is_convertible(value):
        raise DTypeError(
            f"cannot make a tensor of {type(value).__name__} {value!r}; give a tensor, a number, a "
            "list of numbers or an array"
        )
    if isinstance(value, Dim):
        size: Tensor = REGISTRY["size_of"](size=value, dtype=as_dtype(dtype or "int64").name)
        return size
    try:
        array = array_of(value)
    except NoArrayError as error:
        why = f"no regular array: {error.__cause__}" if error.__cause__ is not None else error
        raise DTypeError(f"{format_value(value)} is {why}") from None
    if dtype is None and not isinstance(value, np.ndarray | np.generic):
        dtype = _PLAIN_DTYPES.get(array.dtype)
    given = as_dtype(array.dtype)
    wanted = given if dtype is None else as_dtype(dtype)
    if kind(given) == "complex" and kind(wanted) != "complex":
        raise DTypeError(f"complex numbers do not fit {wanted}; take gf.real or gf.abs of them")
    try:
        array = cast_in_range(array, wanted)
    except OverflowError as error:
        raise DTypeError(f"a constant: {error}; give dtype={given.name!r}, or scale it") from None
    array.flags.writeable = False
    constant: Tensor = REGISTRY["constant"](value=array)
    return constant


def promote_inputs(op_name: str, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Inputs converted to their common dtype; Python scalars are weak and take the tensors', a
    complex one the complex dtype of the floats'.

    Raises:
        DTypeError: kinds would mix, or a scalar does not fit.
    """
    try:
        strong: Sequence[Tensor] = [as_tensor(x) for x in inputs if type(x) not in _SCALAR_KINDS]
        if op_name in REGISTRY and current_scope.get().autocast is not None:
            strong = autocast_inputs(strong, REGISTRY[op_name].autocast)
        if not strong:
            strong = [as_tensor(max(inputs, key=lambda x: list(_SCALAR_KINDS).index(type(x))))]
        dtype = strong[0].dtype
        same = True
        for tensor in strong[1:]:
            if tensor.dtype is not dtype:
                same = False
                dtype = promote(dtype, tensor.dtype)
        if same and len(strong) == len(inputs):
            return tuple(strong)
        if kind(dtype) == "float" and any(type(x) is complex for x in inputs):
            dtype = complex_dtype(dtype)
        scalars = iter(strong)
        converted = (_convert_scalar(x, dtype) if _is_scalar(x) else next(scalars) for x in inputs)
        return tuple(t if t.dtype == dtype else FUNCTIONS["astype"](t, dtype) for t in converted)
    except DTypeError as error:
        raise with_location(op_name, error) from None


def autocast_inputs(
    tensors: Sequence[Tensor], to: Literal["low", "high"] | None
) -> Sequence[Tensor]:
    """Inputs in the dtypes in which a `gf.autocast` block computes what declares `to`."""
    scope = current_scope.get().autocast
    if scope is None or to is None:
        return tensors
    return [scope.cast(t, to) for t in tensors]


def _is_scalar(value: Any) -> bool:
    """Whether a value is a Python scalar (np.float64 is a float, but keeps its dtype), or a size,
    which counts as one."""
    return type(value) in _SCALAR_KINDS


_SCALAR_KINDS = {bool: "bool", int: "int", Dim: "int", float: "float", complex: "complex"}


def _convert_scalar(scalar: Any, dtype: np.dtype[Any]) -> Tensor:
    rank = ("bool", "int", "float", "complex")
    scalar_kind = _SCALAR_KINDS[type(scalar)]
    if rank.index(scalar_kind) > rank.index(kind(dtype)) or (
        not is_inexact(dtype) and scalar_kind != kind(dtype)
    ):
        raise DTypeError(
            f"Python scalar {scalar!r} does not fit {dtype}; convert the tensor with .astype first"
        )
    if not isinstance(scalar, Dim) and not _is_in_range(scalar, dtype):
        raise DTypeError(f"Python scalar {scalar!r} is outside the range of {dtype}")
    if scalar_kind == "int" and is_inexact(dtype) and not isinstance(scalar, Dim):
        scalar = float(scalar)  # an int may be longer than any of numpy's
    return as_tensor(scalar, dtype)


def _is_in_range(scalar: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds a number, or nearly; floats hold infinities and NaN."""
    if kind(dtype) == "bool":
        return True
    low, high = limits(dtype)
    if is_inexact(dtype):
        return not any(high < abs(part) < np.inf for part in (scalar.real, scalar.imag))
    return bool(low <= scalar <= high)
