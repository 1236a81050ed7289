"""Checks of an op on its samples, for the tests over the registry and for users' ops.

A sample is one call with random inputs. A kernel must agree with the shape rule, be deterministic,
and leave its inputs unchanged. `into` must give the kernel's bits. Derivatives must agree with
finite differences to second order, and a batch with a stack of calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, GraphflowError, OpCheckError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import FUNCTIONS, Op, Sample, Tensor, as_tensor, error_location
from graphflow.ir.spec import Dim, TensorSpec, is_inexact, kind, show_shape
from graphflow.ir.spec import evaluate as size_of
from graphflow.transforms.forward_mode import jvp
from graphflow.transforms.reverse_mode import gradients
from graphflow.transforms.vmap import vmap

Array = np.ndarray[Any, Any]
_DOUBLE = {"float": "float64", "complex": "complex128"}
_WIDE = dict.fromkeys(("bfloat16", "float16", "float32"), "float64") | {"complex64": "complex128"}


def check_op(op: Op) -> None:
    """Check an op of your own on its samples, as graphflow's ops are checked.

    It compares the shape rule with the kernel, also for symbolic sizes, and `into` with the kernel.
    It checks that results repeat bit by bit, and that inputs stay unchanged. It compares gradients
    to second order, and tangents, with finite differences in float64, which the kernel must
    support; and `vmap` with a stack of calls.

    Raises:
        OpCheckError: a check fails; the message names the sample, the result and the expectation.
        ArgumentError: the argument is not an op, or has no samples.
    """
    with error_location("check_op"):
        if not isinstance(op, Op):
            raise ArgumentError(f"give a gf.Op, not {op!r}")
        if not op.samples:
            raise ArgumentError(f"op {op.name!r} has no samples; give it some, gf.sample(...)")
    for number, each in enumerate(op.samples):
        for check in CHECKS:
            try:
                check(op, each)
            except OpCheckError as error:
                raise OpCheckError(f"{op.name}, sample {number}: {error}") from None
            except Exception as error:
                what = check.__name__.removeprefix("check_").replace("_", " ")
                found = error if isinstance(error, GraphflowError) else repr(error)
                raise OpCheckError(
                    f"{op.name}, sample {number}: the check of its {what} failed: {found}"
                ) from error


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise OpCheckError(message)


# Samples ----------------------------------------------------------------------------------------


def is_smooth(spec: TensorSpec) -> bool:
    """Return True if gradients flow to tensors of this spec."""
    return is_inexact(spec.dtype)


def to_double(sample: Sample) -> Sample:
    """Convert a sample to float64 or complex128, where finite differences are accurate enough."""
    inputs = tuple(
        s if i in sample.fixed else s.with_dtype(_DOUBLE.get(kind(s.dtype), s.dtype))
        for i, s in enumerate(sample.inputs)
    )
    attrs = {k: _WIDE.get(v, v) if isinstance(v, str) else v for k, v in sample.attrs.items()}
    return replace(sample, inputs=inputs, attrs=attrs)


def draw(sample: Sample, seed: str) -> list[Array]:
    """Draw random, read-only inputs of a sample."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    arrays: list[Array] = []
    for spec in sample.inputs:
        array: Any
        if kind(spec.dtype) == "complex":
            parts = rng.uniform(sample.low, sample.high, (2, *_known_shape(spec)))
            array = parts[0] + 1j * parts[1]
        elif is_smooth(spec):
            array = rng.uniform(sample.low, sample.high, _known_shape(spec))
        elif kind(spec.dtype) == "bool":
            array = rng.integers(0, 2, _known_shape(spec))
        else:
            array = rng.integers(0, sample.classes, _known_shape(spec))
        arrays.append(np.asarray(array).astype(spec.dtype))
    if sample.make is not None:
        arrays = sample.make(arrays)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _known_shape(spec: TensorSpec) -> tuple[int, ...]:
    _require(spec.is_concrete, f"samples have known sizes, not {spec}")
    return tuple(size_of(s, {}) for s in spec.shape)


def infer_specs(op: Op, sample: Sample, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the output specs of a sample by the shape rule, for inputs of some specs."""
    result = op.infer(*specs, **sample.attrs)
    return (result,) if isinstance(result, TensorSpec) else result


def has_equal_bits(a: Any, b: Any) -> bool:
    """Return True if two arrays are equal in dtype, shape and bits."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


# Kernels ----------------------------------------------------------------------------------------


def check_kernel(op: Op, sample: Sample) -> None:
    """Check that the kernel agrees with infer, is deterministic, and keeps its inputs unchanged."""
    arrays = draw(sample, op.name)
    before = [a.tobytes() for a in arrays]
    with np.errstate(all="ignore"):
        results = op.run(np, arrays, sample.attrs)
        again = op.run(np, arrays, sample.attrs)
    specs = infer_specs(op, sample, sample.inputs)
    _require(len(results) == len(specs), f"{len(results)} results; infer says {len(specs)}")
    for spec, result, second in zip(specs, results, again, strict=True):
        have = f"{result.dtype}{show_shape(np.shape(result))}"
        _require(
            (np.shape(result), result.dtype) == (spec.shape, spec.dtype),
            f"the kernel gives {have}; infer says {spec}",
        )
        _require(
            has_equal_bits(np.asarray(result), np.asarray(second)),
            "the kernel gives other bits when it runs again",
        )
        _require(
            bool(np.asarray(result).flags.c_contiguous or op.elementwise),
            "the kernel gives an array that is not contiguous; return np.ascontiguousarray of it",
        )
    _require([a.tobytes() for a in arrays] == before, "the kernel changes its inputs")


def check_cost(op: Op, sample: Sample) -> None:
    """Check that costs are not negative."""
    if op.cost is not None:
        cost = op.cost(*sample.inputs, **sample.attrs)
        for what, number in (("flops", cost.flops), ("bytes", cost.bytes)):
            _require(number is None or size_of(number, {}) >= 0, f"it costs {number} {what}")


def check_symbolic_sizes(op: Op, sample: Sample) -> None:
    """Check that symbolic leading sizes give the specs and costs of known ones."""
    bindings: dict[str, int] = {}

    def symbolic(spec: TensorSpec) -> TensorSpec:
        if not spec.shape or spec.shape[0] in (0, 1):
            return spec
        name = f"n{spec.shape[0]}"
        bindings[name] = size_of(spec.shape[0], {})
        return spec.with_shape((Dim.symbol(name), *spec.shape[1:]))

    known = infer_specs(op, sample, sample.inputs)
    unknown = infer_specs(op, sample, [symbolic(s) for s in sample.inputs])
    bound = tuple(s.bind(bindings) for s in unknown)
    _require(bound == known, f"with sizes known later infer says {bound}, else {known}")
    if op.cost is not None:
        later = op.cost(*map(symbolic, sample.inputs), **sample.attrs).flops
        now = op.cost(*sample.inputs, **sample.attrs).flops
        _require(size_of(later, bindings) == now, f"its flops are {later} and {now}")


def check_into(op: Op, sample: Sample) -> None:
    """Check that `into` gives the bits of the kernel in a buffer that holds other data."""
    if op.into is None:
        return
    arrays = draw(sample, op.name)
    step = {"step": 0} if op.random else {}
    with np.errstate(all="ignore"):
        wanted = op.run(np, arrays, sample.attrs, plain=True)
        outs = tuple(np.empty(np.shape(w), w.dtype) for w in wanted)
        for out in outs:
            out.reshape(-1).view(np.uint8)[...] = 1 if out.dtype == bool else 0xCD
        op.into(np, outs[0] if len(outs) == 1 else outs, *arrays, **step, **sample.attrs)
    for out, result in zip(outs, wanted, strict=True):
        _require(has_equal_bits(out, np.asarray(result)), "into gives other bits than the kernel")


def check_writing_in_place(op: Op, sample: Sample) -> None:
    """Check that an elementwise op may overwrite an input of its result's spec."""
    if op.into is None or not op.elementwise:
        return
    arrays = draw(sample, op.name)
    step = {"step": 0} if op.random else {}
    with np.errstate(all="ignore"):
        (wanted,) = op.run(np, arrays, sample.attrs, plain=True)
        for i, array in enumerate(arrays):
            if (array.shape, array.dtype) == (np.shape(wanted), wanted.dtype):
                copies = [a.copy() for a in arrays]
                op.into(np, copies[i], *copies, **step, **sample.attrs)
                _require(
                    has_equal_bits(copies[i], np.asarray(wanted)),
                    f"into gives other bits where out is the buffer of input {i}; read the inputs "
                    "before writing, or leave out elementwise=True",
                )


# Derivatives ------------------------------------------------------------------------------------


def is_differentiable(op: Op, sample: Sample) -> bool:
    """Return True if a sample has a gradient to check."""
    outputs = infer_specs(op, sample, sample.inputs)
    smooth = any(map(is_smooth, sample.inputs)) and any(map(is_smooth, outputs))
    return op.vjp is not None and smooth


def check_gradients(op: Op, sample: Sample) -> None:
    """Check that the vjp, and the vjp of its result, agree with finite differences."""
    if is_differentiable(op, sample):
        sample = to_double(sample)
        rng = np.random.default_rng(zlib.crc32(op.name.encode()))
        compare_gradients(lambda *xs: op(*xs, **sample.attrs), draw(sample, op.name), rng)


def compare_gradients(
    build: Callable[..., Any], arrays: Sequence[Array], rng: np.random.Generator
) -> None:
    """Compare derivatives along random directions with central differences, to second order.

    A complex direction moves real and imaginary parts; the slope along it is Re(g · conj(d)).
    """
    xs = [placeholder(a.dtype, a.shape) for a in arrays]
    wanted = [i for i, a in enumerate(arrays) if a.dtype in (np.float64, np.complex128)]
    directions = {i: _direction(arrays[i], rng) for i in wanted}
    scalar = project(build(*xs), rng)
    for order in ("first", "second"):
        assert scalar is not None
        slopes = gradients(scalar, [xs[i] for i in wanted])
        values = evaluate(slopes, dict(zip(xs, arrays, strict=True)))
        for i, slope, value in zip(wanted, slopes, values, strict=True):
            same = slope.shape == arrays[i].shape and value.dtype == arrays[i].dtype
            _require(same, f"the gradient of input {i}, {arrays[i].shape}, is {slope.spec}")
        exact = sum(
            float((g * directions[i].conj()).sum().real)
            for i, g in zip(wanted, values, strict=True)
        )
        ends = [_evaluate_moved(scalar, xs, arrays, directions, by) for by in (1e-5, -1e-5)]
        numeric = (float(ends[0]) - float(ends[1])) / 2e-5
        _require(
            abs(exact - numeric) <= max(2e-6, 2e-5 * abs(numeric)),
            f"its {order} derivative along a direction is {exact!r}; differences say {numeric!r}",
        )
        scalar = sum((project(g, rng) for g in slopes[1:]), start=project(slopes[0], rng))


def project(outputs: Any, rng: np.random.Generator) -> Any:
    """Return the randomly weighted sum of float and complex outputs, a real scalar."""
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    total: Any = None
    for y in tensors:
        if is_smooth(y.spec):
            weights: Any = rng.uniform(0.5, 1.5, _known_shape(y.spec))
            if kind(y.dtype) == "complex":
                weights = weights + 1j * rng.uniform(0.5, 1.5, _known_shape(y.spec))
            weights = weights.astype(y.dtype)
            part = FUNCTIONS["real"](FUNCTIONS["sum"](y * as_tensor(weights)))
            total = part if total is None else total + part
    return total


def _direction(array: Array, rng: np.random.Generator) -> Array:
    direction: Any = rng.uniform(-1, 1, array.shape)
    if array.dtype.kind == "c":
        direction = direction + 1j * rng.uniform(-1, 1, array.shape)
    return np.asarray(direction)


def _evaluate_moved(
    outputs: Any, xs: Sequence[Tensor], arrays: Sequence[Array], along: dict[int, Array], by: float
) -> Any:
    """Evaluate outputs at inputs that are moved by `by` along their directions."""
    values = [a + by * along[i] if i in along else a for i, a in enumerate(arrays)]
    many = isinstance(outputs, list)
    found = evaluate(outputs if many else [outputs], dict(zip(xs, values, strict=True)))
    return found if many else found[0]


def check_tangents(op: Op, sample: Sample) -> None:
    """Check that the tangents of `jvp` agree with finite differences."""
    if not is_differentiable(op, sample):
        return
    sample = to_double(sample)
    arrays = draw(sample, op.name)
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    moving = [i for i, s in enumerate(sample.inputs) if is_smooth(s) and i not in sample.fixed]
    along = {i: _direction(arrays[i], rng) for i in moving}
    xs = [placeholder(a.dtype, a.shape) for a in arrays]
    ys = op(*xs, **sample.attrs)
    outputs = list(ys) if isinstance(ys, tuple) else [ys]
    tangents = jvp(outputs, xs, [along.get(i) for i in range(len(xs))])
    exact = evaluate(tangents, dict(zip(xs, arrays, strict=True)))
    after, before = (_evaluate_moved(outputs, xs, arrays, along, by) for by in (1e-6, -1e-6))
    for y, have, a, b in zip(outputs, exact, after, before, strict=True):
        _require((have.shape, have.dtype) == (y.shape, y.dtype), f"the tangent of {y.spec} differs")
        numeric = (a - b) / 2e-6 if is_smooth(y.spec) else np.zeros_like(a)
        near = np.allclose(have, numeric, rtol=1e-5, atol=2e-6)
        _require(near, f"its tangent is {have!r}; differences say {numeric!r}")


# Batches ----------------------------------------------------------------------------------------

_BATCH = 3


def check_batches(op: Op, sample: Sample) -> None:
    """Check that `vmap` over all inputs, and over each alone, equals a stack of calls."""
    count = len(sample.inputs)
    if not count or op.random:
        return
    if op.vjp is not None:
        sample = to_double(sample)
    alone = [tuple(i == j for j in range(count)) for i in range(count)]
    for mapped in dict.fromkeys([(True,) * count, *alone]):
        _compare_with_calls(op, sample, mapped)


def _compare_with_calls(op: Op, sample: Sample, mapped: tuple[bool, ...]) -> None:
    rows = [draw(sample, f"{op.name} 0")]
    for i in range(1, _BATCH):
        fresh = draw(sample, f"{op.name} {i}")
        rows.append([f if m else a for a, f, m in zip(rows[0], fresh, mapped, strict=True)])
    columns = list(zip(*rows, strict=True))
    given = [np.stack(c) if m else c[0] for c, m in zip(columns, mapped, strict=True)]
    xs = [placeholder(a.dtype, a.shape) for a in given]
    ys = vmap(lambda *ts: op(*ts, **sample.attrs), [0 if m else None for m in mapped])(*xs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    with np.errstate(all="ignore"):
        calls = [op.run(np, arrays, sample.attrs) for arrays in rows]
        values = evaluate(ys, dict(zip(xs, given, strict=True)))
    which = f"vmap over inputs {[i for i, m in enumerate(mapped) if m]}"
    for value, parts in zip(values, zip(*calls, strict=True), strict=True):
        want = np.stack([np.asarray(p) for p in parts])
        shown = f"{value.dtype}{show_shape(value.shape)}, not {want.dtype}{show_shape(want.shape)}"
        _require((value.shape, value.dtype) == (want.shape, want.dtype), f"{which} gives {shown}")
        near = 1e-11 if want.dtype.name in ("float64", "complex128") else 1e-5
        if not np.allclose(value, want, rtol=near, atol=near, equal_nan=True):
            raise OpCheckError(f"{which} gives {value!r}; single calls give {want!r}")


CHECKS: tuple[Callable[[Op, Sample], None], ...] = (
    check_kernel,
    check_cost,
    check_symbolic_sizes,
    check_into,
    check_writing_in_place,
    check_gradients,
    check_tangents,
    check_batches,
)

__all__ = ["CHECKS", "check_op"]
