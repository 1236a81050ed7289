"""Python functions of numpy arrays inside the graph. Public as `gf.host_call`.

A function that can be imported by name runs on any worker that allows its module. Any other
function (a lambda, a closure, a function of the script) runs only in the process that built the
graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.base.array_conversion import NoArrayError, array_of
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.user_modules import import_allowed, load_function
from graphflow.errors import ArgumentError, DifferentiationError, OpError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample, user_location
from graphflow.ir.spec import (
    Shape,
    TensorSpec,
    as_dtype,
    is_inexact,
    show_symbol,
    spec,
    symbols,
)
from graphflow.ops.host_calls import host_samples

Specs = tuple[tuple[Shape, str], ...]


@dataclass(frozen=True)
class HostFunction:
    """A Python function as an attribute of a node.

    Attributes:
        function: the function itself.
        import_path: `module:name`, by which other processes import it; None if only this one has
            it.
    """

    function: Callable[..., Any]
    import_path: str | None = None

    @property
    def name(self) -> str:
        return self.import_path or str(getattr(self.function, "__qualname__", self.function))

    @property
    def module(self) -> str | None:
        """Return the module that a worker must allow."""
        return None if self.import_path is None else self.import_path.partition(":")[0]

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _spec_attributes(specs: Sequence[TensorSpec]) -> Specs:
    """Return specs as plain data, for an attribute."""
    return tuple((s.shape, s.dtype.name) for s in specs)


def _as_host_function(given: Callable[..., Any] | str, what: str) -> HostFunction:
    if isinstance(given, str):
        return HostFunction(load_function(given), given)
    if not callable(given):
        raise ArgumentError(
            f"{what} must be a function, or its name as 'module:function', got {given!r}"
        )
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    named = module not in (None, "__main__") and name.isidentifier()
    if named and getattr(sys.modules.get(str(module)), name, None) is given:
        return HostFunction(given, f"{module}:{name}")
    return HostFunction(given)


def _infer(
    *inputs: TensorSpec, call: HostFunction, specs: Specs, where: str, vjp: HostFunction | None
) -> tuple[TensorSpec, ...]:
    for given in (call, vjp or call):
        if not isinstance(given, HostFunction):
            raise ArgumentError(f"{given!r} is no host function")
    return tuple(TensorSpec(shape, as_dtype(dtype)) for shape, dtype in specs)


def _kernel(
    xp: Any,
    *arrays: Any,
    call: HostFunction,
    specs: Specs,
    where: str,
    vjp: HostFunction | None = None,
) -> tuple[Any, ...]:
    # Copies: the function may keep or change its arguments, and their buffers are reused.
    returned = call.function(*(np.array(a) for a in arrays))
    results = returned if isinstance(returned, tuple | list) else (returned,)
    if len(results) != len(specs):
        raise OpError(
            f"{call.name} at {where} returned {len(results)} arrays; spec says {len(specs)}"
        )
    made = []
    for i, (result, (shape, dtype)) in enumerate(zip(results, specs, strict=True)):
        try:
            array = array_of(result)
        except NoArrayError as error:
            raise OpError(f"result {i} of {call.name} at {where} is {error}") from None
        if array.shape != tuple(shape) or array.dtype != as_dtype(dtype):
            which = f"result {i} of {call.name}" if len(specs) > 1 else call.name
            raise OpError(
                f"{which} at {where} is {array.dtype}{array.shape}; spec says "
                f"{dtype}{tuple(shape)}: let it return that, or change spec"
            )
        made.append(np.ascontiguousarray(array).reshape(array.shape))
    return tuple(made)


def _vjp(
    g: Any,
    y: Any,
    *inputs: Tensor,
    call: HostFunction,
    specs: Specs,
    where: str,
    vjp: HostFunction | None,
) -> list[Tensor | None]:
    if vjp is None:
        raise DifferentiationError(
            f"{call.name} at {where} has no gradient; give host_call vjp=, or wrap its result in "
            "gf.stop_gradient"
        )
    smooth = [x for x in inputs if is_inexact(x.dtype)]
    gs, ys = (t if isinstance(t, tuple) else (t,) for t in (g, y))
    found = _impure(
        *gs,
        *ys,
        *inputs,
        call=vjp,
        specs=_spec_attributes([x.spec for x in smooth]),
        where=where,
        vjp=None,
    )
    parts = iter(found if isinstance(found, tuple) else (found,))
    return [next(parts) if is_inexact(x.dtype) else None for x in inputs]


def _sample_function(name: str) -> HostFunction:
    module = host_samples.__name__
    return HostFunction(getattr(host_samples, name), f"{module}:{name}")


import_allowed([host_samples.__name__])
_INTS = spec("int32", (3,))
_SAMPLE: dict[str, Any] = {"where": "here", "vjp": None}
_SAMPLES = (
    sample(_INTS, call=_sample_function("triple"), specs=(((3,), "int32"),), **_SAMPLE),
    sample(
        _INTS,
        _INTS,
        call=_sample_function("add_and_compare"),
        specs=(((3,), "int32"), ((3,), "bool")),
        **_SAMPLE,
    ),
)


def _op(name: str, pure: bool) -> Op:
    return register(
        Op(
            name,
            infer=_infer,
            kernel=_kernel,
            vjp=_vjp,
            cost=lambda *specs, **attrs: Cost(flops=sum((s.size for s in specs), 0)),
            samples=_SAMPLES,
            pure=pure,
            halves=True,
            device_kinds=("cpu",),
        )
    )


_impure, _pure = _op("host_call", pure=False), _op("pure_host_call", pure=True)


@function
def host_call(
    fn: Any,
    *args: Any,
    spec: Any,
    vjp: Any = None,
    pure: bool = False,
    name: str | None = None,
) -> Any:
    """Call a Python function of numpy arrays when the graph runs.

    The function gets copies of the arguments' values and returns arrays of the specs. It runs once
    in each step that needs its result. On one device, calls run in the order in which they were
    built; a plan for several devices keeps only the order that data dependencies impose.

    Args:
        fn: the function, or its name as "module:function". A function that can be imported by name
            runs on workers that allow the module: `gf.Session(cluster, ops=["module"])`. Others run
            in this process, so in embedded sessions only.
        args: tensors, or what converts to them.
        spec: the `gf.spec` of the result, or a tuple or list of them.
        vjp: another function of numpy arrays, (*cotangents, *results, *args) -> a cotangent for
            each float argument (an array, or a tuple of them). Without it there is no gradient.
        pure: True if the result depends on the arguments only and the function has no side effects.
            Equal calls may then be merged, and calls of constants run while the graph is compiled.

    Returns:
        A tensor; for several specs a tuple of them.

    Raises:
        ArgumentError: fn or vjp is no function; spec is no `gf.spec`, or has a size that no
            argument has.
        OpError: from the step: the function raised, or its results do not match spec.
    """
    call = _as_host_function(fn, "fn")
    backward = None if vjp is None else _as_host_function(vjp, "vjp")
    tensors = [as_tensor(a) for a in args]
    specs = tuple(spec) if isinstance(spec, tuple | list) else (spec,)
    known = {s for t in tensors for size in t.shape for s in symbols(size)}
    for each in specs:
        if not isinstance(each, TensorSpec):
            raise ArgumentError(f"spec is gf.spec(dtype, shape), or a tuple of them: {each!r}")
        unknown = [s for size in each.shape for s in symbols(size) if s not in known]
        if unknown:
            raise ArgumentError(
                f"spec {each} has a size {show_symbol(unknown[0])} that no argument has; write "
                "x.shape[0], or the name of a size of an argument"
            )
    if not isinstance(pure, bool):
        raise ArgumentError(f"pure must be True or False, got {pure!r}")
    return (_pure if pure else _impure)(
        *tensors,
        call=call,
        specs=_spec_attributes(specs),
        where=str(user_location()),
        vjp=backward,
        name=name,
    )


def host_functions(attrs: Any) -> list[HostFunction]:
    """Return the host functions that a node's attributes hold."""
    return [value for value in attrs.values() if isinstance(value, HostFunction)]


__all__ = ["HostFunction", "host_call", "host_functions"]
