"""`gf.vmap`: turn a function of one example into a function of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphflow.errors import ArgumentError
from graphflow.frontend.pytree import flatten_values
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.op import FUNCTIONS, Tensor, error_location, function, next_serial
from graphflow.ir.spec import Size, equate
from graphflow.ops.base.shape_rules import normalize_axis
from graphflow.transforms.batching_control_flow import BODY_RULES
from graphflow.transforms.batching_transform import Batching
from graphflow.transforms.reverse_mode import nodes_built_since


@function
def vmap(fn: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """Return a function that applies `fn` to each slice of its arguments, as one computation.

    `fn` is traced on tensors without the batch axis, and each node is emitted again with it. An op
    without a batching rule runs in a loop. The result equals a stack of calls, up to the order in
    which matrix products add. Random ops draw anew for each example. A `cond` whose predicate
    depends on the example computes both branches, and a `while_loop` runs until the last example is
    done. Calls nest. Gradients may be taken inside (for each example) and outside.

    Args:
        fn: nests of tensors -> a nest of tensors. Tensors that it reads from outside are shared.
        in_axes: the mapped axis of all arguments, or a tuple or list with one for each argument;
            None for an argument that all calls share. An argument that is a nest may have a nest of
            axes.
        out_axes: the position of the batch axis in the results: an axis, or a nest of axes like the
            results; None for a result that does not depend on the example.

    Raises:
        ArgumentError: fn is no function; axes do not fit the arguments; nothing is mapped; a result
            with None depends on the example.
        ShapeError: an axis is outside an argument, or the mapped sizes differ.
        VariableError: fn assigns a value that depends on the example.
    """
    if not callable(fn):
        raise ArgumentError(f"give a function, not {fn!r}")

    @functools.wraps(fn)
    def batched_fn(*args: Any) -> Any:
        with error_location("vmap"):
            return _apply_batched(fn, args, in_axes, out_axes)

    return batched_fn


def _apply_batched(
    fn: Callable[..., Any], args: tuple[Any, ...], in_axes: Any, out_axes: Any
) -> Any:
    tensors, rebuild = flatten_values(args, "the arguments")
    axes = _axes_of(args, tuple(in_axes) if isinstance(in_axes, list) else in_axes, "in_axes")
    whole, size = _move_mapped_axes(tensors, axes)
    since = next_serial()
    stand_ins = [
        x if axis is None else make_parameter(x.spec.with_shape(x.shape[1:]), x.name).outputs[0]
        for x, axis in zip(whole, axes, strict=True)
    ]
    outputs, nest = flatten_values(fn(*rebuild(stand_ins)), "what the function returns")
    engine = Batching(
        size,
        {s: (x, True) for s, x, a in zip(stand_ins, whole, axes, strict=True) if a is not None},
        BODY_RULES,
    )
    engine.emit(nodes_built_since(outputs, since))
    wanted = _axes_of(nest(outputs), out_axes, "out_axes")
    return nest([_result(engine, y, axis) for y, axis in zip(outputs, wanted, strict=True)])


def _move_mapped_axes(
    tensors: Sequence[Tensor], axes: Sequence[int | None]
) -> tuple[list[Tensor], Size]:
    """Move the mapped axis of each tensor to the front, and return its size, too."""
    size: Size | None = None
    whole = []
    for i, (x, axis) in enumerate(zip(tensors, axes, strict=True)):
        if axis is not None:
            x = FUNCTIONS["moveaxis"](x, normalize_axis(axis, x.ndim), 0)
            n = x.shape[0]
            if size is None:
                size = n
            elif n != size:
                what = f"argument {i} has {n} along its mapped axis {axis}, others {size}"
                equate(size, n, what)
                x = FUNCTIONS["reshape"](x, (size, *x.shape[1:]))
        whole.append(x)
    if size is None:
        raise ArgumentError("nothing is mapped: in_axes is None for every argument")
    return whole, size


def _result(engine: Batching, y: Tensor, axis: int | None) -> Tensor:
    twin, has = engine.twin(y)
    if axis is None:
        if has:
            raise ArgumentError(
                f"the result {y.name!r} (made at {y.node.location}) depends on the example, and "
                "its place in out_axes is None; give it an axis"
            )
        return twin
    batched = engine.batched_twin(y)
    moved: Tensor = FUNCTIONS["moveaxis"](batched, 0, normalize_axis(axis, batched.ndim))
    return moved


def _axes_of(value: Any, axes: Any, what: str) -> list[int | None]:
    """Return an axis for each tensor of a nest, given one axis for all or a nest of axes."""
    if axes is None or (isinstance(axes, int) and not isinstance(axes, bool)):
        return [axes] * len(flatten_values(value, what)[0])
    if isinstance(axes, Mapping) and isinstance(value, Mapping) and axes.keys() == value.keys():
        return [a for key in value for a in _axes_of(value[key], axes[key], f"{what}[{key!r}]")]
    if (
        isinstance(axes, list | tuple)
        and isinstance(value, list | tuple)
        and len(axes) == len(value)
    ):
        return [
            a
            for i, (v, x) in enumerate(zip(value, axes, strict=True))
            for a in _axes_of(v, x, f"{what}[{i}]")
        ]
    given = str(value.spec) if isinstance(value, Tensor) else type(value).__name__
    if isinstance(value, list | tuple):
        given += f" of {len(value)}"
    raise ArgumentError(f"{what} is an axis (an int), None, or a nest like {given}; not {axes!r}")


__all__ = ["vmap"]
