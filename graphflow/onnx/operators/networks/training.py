"""ONNX's preview of training: the Gradient operator, and steps of optimisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.onnx.loading.reading.domains import TRAINING
from graphflow.onnx.loading.reading.value_kinds import Known
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.pointwise import arithmetic, comparison, select, transcendental
from graphflow.ops.pointwise.convert import astype
from graphflow.transforms.reverse_mode import gradients

# Gradients ------------------------------------------------------------------------------------


@operator("Gradient", domain=TRAINING)
def _gradient(call: NodeCall) -> Outputs:
    """Differentiate the tensor named y to those named xs, at the inputs as values of xs and zs."""
    names = [*call.required_attr("xs"), *call.attr("zs", [])]
    if len(names) != call.count:
        raise call.unsupported_error(f"{call.count} inputs for the {len(names)} names in xs and zs")
    y = _find_tensor(call, call.required_attr("y"))
    independent = [_find_tensor(call, name) for name in names]
    results = gradients(y, independent[: len(call.required_attr("xs"))])
    replaced = {
        tensor: call.tensor(i)
        for i, tensor in enumerate(independent)
        if call.tensor(i) is not tensor
    }
    return _rebuild_with(results, replaced) if replaced else results


def _find_tensor(call: NodeCall, name: str) -> Tensor:
    value = call.scope.find(name)
    if value is None:
        raise call.unsupported_error(f"nothing before it makes {name!r}")
    if isinstance(value, Known):
        return call.as_tensor(value)
    if not isinstance(value, Tensor):
        raise call.unsupported_error(f"{name!r} is not a tensor of this graph")
    return value


def _rebuild_with(results: list[Tensor], replaced: dict[Tensor, Tensor]) -> list[Tensor]:
    """Rebuild results with some of the tensors that they depend on replaced by others."""

    def replace(node: Node, inputs: tuple[Tensor, ...]) -> list[Tensor] | None:
        if not any(tensor in replaced for tensor in node.outputs):
            return None
        again = node.with_inputs(inputs).outputs
        return [replaced.get(old, new) for old, new in zip(node.outputs, again, strict=True)]

    return list(Graph(results).rewrite(replace).outputs)


# Optimisers -----------------------------------------------------------------------------------

_Step = Callable[..., tuple[Tensor, ...]]


def _optimiser(name: str, states: int) -> Callable[[_Step], _Step]:
    """Register (call, rate, step count, x, gradient, *states) -> (new x, *new states).

    A node's inputs are the rate and the count; then all xs, all gradients, and each state of all
    xs. Its outputs are all xs, and each state of all xs.
    """

    def enter(step: _Step) -> _Step:
        @operator(name, domain=TRAINING)
        def translate(call: NodeCall) -> Outputs:
            rate, count, *others = call.tensors()
            several, rest = divmod(len(others), 2 + states)
            if rest:
                raise call.unsupported_error(f"{len(others)} inputs after the first two")
            steps = [step(call, rate, count, *others[i::several]) for i in range(several)]
            return [made for kind in zip(*steps, strict=True) for made in kind]

        return step

    return enter


def _add_regularization(call: NodeCall, x: Tensor, gradient: Tensor) -> Tensor:
    factor: float = call.attr("norm_coefficient", 0.0)
    return gradient + x * factor if factor else gradient


@_optimiser("Adagrad", states=1)
def _adagrad(
    call: NodeCall, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, squares: Tensor
) -> tuple[Tensor, ...]:
    """Source: Duchi, Hazan & Singer, JMLR 12, 2011."""
    decayed = rate / (astype(count, rate.dtype) * call.attr("decay_factor", 0.0) + 1.0)
    gradient = _add_regularization(call, x, gradient)
    squares = squares + gradient * gradient
    scale = transcendental.sqrt(squares) + call.attr("epsilon", 1e-6)
    return x - astype(decayed, x.dtype) * gradient / scale, squares


@_optimiser("Adam", states=2)
def _adam(
    call: NodeCall, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, mean: Tensor,
    squares: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Source: Kingma & Ba, ICLR 2015."""
    alpha, beta = call.attr("alpha", 0.9), call.attr("beta", 0.999)
    gradient = _add_regularization(call, x, gradient)
    mean = mean * alpha + gradient * (1 - alpha)
    squares = squares * beta + gradient * gradient * (1 - beta)
    power = astype(count, "float64")
    unbiased = transcendental.sqrt(1.0 - _power(beta, power)) / (1.0 - _power(alpha, power))
    first = comparison.greater(count, 0)
    rate = rate * astype(select.where(first, unbiased, 1.0), rate.dtype)
    scale = transcendental.sqrt(squares) + call.attr("epsilon", 1e-6)
    x = x - astype(rate, x.dtype) * (mean / scale)
    after: float = call.attr("norm_coefficient_post", 0.0)
    return (x * (1 - after) if after else x), mean, squares


def _power(base: float, exponent: Tensor) -> Tensor:
    result: Tensor = arithmetic.pow(base, exponent)
    return result


@_optimiser("Momentum", states=1)
def _momentum(
    call: NodeCall, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, speed: Tensor
) -> tuple[Tensor, ...]:
    """Source: Nesterov, Soviet Mathematics Doklady 27, 1983; Sutskever et al., ICML 2013."""
    alpha, mode = call.required_attr("alpha"), call.required_attr("mode")
    if mode not in ("standard", "nesterov"):
        raise call.unsupported_error(f"mode {mode!r}; it is standard or nesterov")
    gradient = _add_regularization(call, x, gradient)
    later: Any = call.required_attr("beta")
    share = select.where(comparison.greater(count, 0), later, 1.0)
    speed = speed * alpha + gradient * astype(share, x.dtype)
    ahead = gradient + speed * alpha if mode == "nesterov" else speed
    return x - astype(rate, x.dtype) * ahead, speed
