"""Derivatives made of others: vector-Jacobian products, whole Jacobians and Hessians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.errors import ArgumentError, DifferentiationError, ShapeError
from graphflow.frontend.pytree import flatten_values
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.graph import substitute_tensors
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function
from graphflow.ir.spec import kind, show_shape
from graphflow.transforms.forward_mode import flat_tangents, jvp
from graphflow.transforms.reverse_mode import gradients
from graphflow.transforms.vmap import vmap


@function
def vjp(target: Any, inputs: Any, cotangents: Any) -> Any:
    """Compute the vector-Jacobian product: cotangents of outputs pulled back to inputs.

    `gf.vjp(y, [x], g)` returns a list: for each input the sum over the outputs of the transposed
    Jacobian times the cotangent, which is `gf.gradients(y, [x], g)`. `gf.vjp(f, (x,), g)` calls the
    function and returns (f(x), the cotangents of its arguments, in their structure). An input that
    no output depends on has a cotangent of zeros.

    Args:
        target: tensors (a tensor or a nest of them), or a function of `inputs`.
        inputs: a list of float or complex tensors; for a function its arguments, each a tensor, an
            array, or a nest.
        cotangents: tensors or arrays of the shapes and dtypes of the outputs, in their structure;
            None for an output that does not count.

    Raises:
        DifferentiationError: an input, or an output with a cotangent, is neither float nor complex;
            or an op between them has no gradient.
        ShapeError, DTypeError: a cotangent has another shape or dtype than its output.
        ArgumentError: inputs are no list, or cotangents do not have the structure of the outputs.
    """
    if not isinstance(inputs, list | tuple):
        raise ArgumentError("give lists: gf.vjp(y, [x], g)")
    if isinstance(target, Tensor) or not callable(target):
        outputs, nest = flatten_values(target, "the outputs")
        return _pull_back(outputs, nest(outputs), list(inputs), cotangents)
    values, rebuild = flatten_values(tuple(inputs), "the inputs")
    stand_ins = [make_parameter(x.spec, x.name).outputs[0] for x in values]
    outputs, nest = flatten_values(target(*rebuild(stand_ins)), "what the function returns")
    found = _pull_back(outputs, nest(outputs), stand_ins, cotangents)
    results = substitute_tensors([*outputs, *found], dict(zip(stand_ins, values, strict=True)))
    return nest(results[: len(outputs)]), rebuild(results[len(outputs) :])


def _pull_back(
    outputs: Sequence[Tensor], target: Any, xs: list[Any], cotangents: Any
) -> list[Tensor]:
    given = flat_tangents(target, cotangents, "cotangents", "outputs")
    pairs = [(y, g) for y, g in zip(outputs, given, strict=True) if g is not None]
    if not pairs:
        raise ArgumentError("no output has a cotangent; give one, such as gf.ones_like(y)")
    return gradients([y for y, _ in pairs], xs, [g for _, g in pairs])


@function
def jacobian(y: Any, x: Any) -> Any:
    """Compute the derivative of each element of y with respect to each element of x.

    For one output element it is a gradient. Otherwise one pass over the graph, mapped over the
    elements of y (reverse mode) or, if x has fewer, of x (forward mode). The passes are held
    together, so memory grows with the number of these elements.

    Args:
        y: a float tensor of any shape (…y); symbolic sizes are allowed, in x, too.
        x: a float tensor of the graph (…x), or a list of such tensors.

    Returns:
        A tensor (…y, …x), for a list of tensors a list. Zeros where y does not depend on x.

    Raises:
        DifferentiationError: y or x is no float tensor, or an op between them has no gradient.
    """
    y = _require_float("y", y)
    if isinstance(x, list | tuple):
        return [_jacobian(y, _require_float("x", each)) for each in x]
    return _jacobian(y, _require_float("x", x))


@function
def hessian(y: Any, x: Any) -> Any:
    """Compute the second derivatives of a scalar y: the Jacobian of its gradient.

    For products with vectors, `gf.jvp(gf.gradients(y, [x]), [x], [v])` needs no matrix.

    Args:
        y: a float tensor of one element.
        x: a float tensor of the graph (…x), or a list of such tensors.

    Returns:
        A tensor (…x, …x). For a list of tensors a list of lists: number [i][j] holds the
        derivatives by tensor i and tensor j, (…x_i, …x_j).

    Raises:
        DifferentiationError: y or x is no float tensor, or an op between them has no gradient.
        ShapeError: y has several elements.
    """
    y = _require_float("y", y)
    if y.size != 1:
        raise ShapeError(
            f"y is of shape {show_shape(y.shape)}; a Hessian is of one number, such as gf.sum(y)"
        )
    xs = [_require_float("x", each) for each in (x if isinstance(x, list | tuple) else [x])]
    slopes = gradients(y, xs)
    blocks = [[_jacobian(slope, each) for each in xs] for slope in slopes]
    return blocks if isinstance(x, list | tuple) else blocks[0][0]


def _require_float(what: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise DifferentiationError(f"{what} is {x!r:.80}, not a tensor of the graph")
    if kind(x.dtype) != "float":
        raise DifferentiationError(
            f"{what} ({x.name!r}) is {x.dtype}, and derivatives here are of floats; convert it "
            "with .astype('float32') first, or take gf.real and gf.imag"
        )
    return x


def _jacobian(y: Tensor, x: Tensor) -> Tensor:
    rows, columns = y.size, x.size
    shape = (*y.shape, *x.shape)
    if rows == 1:
        return _reshape(gradients(y, [x])[0], shape)
    if isinstance(rows, int) and isinstance(columns, int) and columns < rows:
        return _reshape(
            _map_unit_vectors(lambda t: jvp(y, [x], [_reshape(t, x.shape)]), x, -1), shape
        )
    return _reshape(
        _map_unit_vectors(lambda g: gradients(y, [x], _reshape(g, y.shape))[0], y, 0), shape
    )


def _map_unit_vectors(derivative: Callable[[Tensor], Tensor], like: Tensor, axis: int) -> Tensor:
    """Return the derivative along each element of a tensor, stacked along an axis."""
    units = FUNCTIONS["eye"](like.size, dtype=like.dtype)
    found: Tensor = vmap(derivative, 0, axis)(units)
    return found


def _reshape(x: Tensor, shape: Any) -> Tensor:
    result: Tensor = FUNCTIONS["reshape"](as_tensor(x), shape)
    return result


__all__ = ["hessian", "jacobian", "vjp"]
