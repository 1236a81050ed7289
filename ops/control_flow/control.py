"""Control-flow ops, whose nodes hold graphs: call, cond, scan and while_loop.

A body (`graphflow.ir.graph.Body`) has a parameter for each operand of its node; captured tensors
come last. A node's outputs are, in order: the count of a while_loop, the carried values that its
body returns first, and the body's further results, which loops stack. A gradient may ask the same
body for more results, so those are always at the end.

Each iteration of a loop draws random numbers of a step of its own, derived from the session's step
and the iteration's index (see `fold_in`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.errors import ShapeError
from graphflow.frontend.interpreter import run
from graphflow.ir.graph import Body
from graphflow.ir.op import Cost, Op, register
from graphflow.ir.spec import Size, TensorSpec, show_distinctly, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.control_flow.loop_reverse_mode import scan_vjp, while_vjp
from graphflow.ops.control_flow.reverse_mode import call_jvp, call_vjp, cond_vjp

COUNT = spec("int64")
UNPLACED_OPS = ("constant", "placeholder")
"""Ops that run on no device of their own: each device that reads their value has it."""
ASSUMED_ITERATIONS = 16
"""Iterations that the cost model assumes for a loop without a bound."""


def fold_in(step: int, index: int) -> int:
    """Derive the step that iteration `index` of a loop draws from: 48 bits, mixed as in splitmix64.

    Source: Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = (step * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 16


def run_body(xp: Any, body: Body, arrays: Sequence[Any], step: int) -> list[Any]:
    """Run a body by plain kernels, as the reference for compiled programs."""
    given = dict(zip(body.inputs, arrays, strict=True))
    return run(body.graph, given, body.bindings, step, xp)[: body.results]


def check_operands(body: Body, operands: Sequence[TensorSpec]) -> None:
    wanted = [node.specs[0] for node in body.inputs]
    if len(wanted) != len(operands):
        raise ShapeError(f"the body has {len(wanted)} parameters, got {len(operands)} operands")
    for i, (want, have) in enumerate(zip(wanted, operands, strict=True)):
        if want != have:
            given, taken = show_distinctly(have, want)
            raise ShapeError(f"operand {i} is {given}, and the body takes {taken}")


def _result_specs(body: Body) -> tuple[TensorSpec, ...]:
    return tuple(t.spec for t in body.outputs)


def _check_carried(body: Body, carries: Sequence[TensorSpec], what: str) -> None:
    for i, (before, after) in enumerate(zip(carries, _result_specs(body), strict=False)):
        if before != after:
            first, last = show_distinctly(before, after)
            raise ShapeError(
                f"{what} {i} begins as {first} and comes back as {last}; it must stay the same"
            )


def body_cost(body: Body) -> tuple[Size, Size]:
    """Return the flops and bytes of one run of a body."""
    flops: Size = 0
    moved: Size = 0
    for node in body.graph.nodes:
        if node.op.cost is None or node.op.name in ("placeholder", "constant"):
            continue
        inputs = [t.spec for t in node.inputs]
        cost = node.op.cost(*inputs, **node.attrs)
        flops = flops + cost.flops
        through = sum((s.nbytes for s in (*inputs, *node.specs)), 0)
        moved = moved + (through if cost.bytes is None else cost.bytes)
    return flops, moved


# call -------------------------------------------------------------------------------------------


def _infer_call(
    *operands: TensorSpec, body: Body, recompute: bool = False
) -> tuple[TensorSpec, ...]:
    check_operands(body, operands)
    return _result_specs(body)


# Returns the results of a body. `recompute`: its gradient runs the body again and keeps no
# intermediates.
call: Op = register(
    Op(
        "call",
        infer=_infer_call,
        kernel=lambda xp, *arrays, body, step, recompute=False: tuple(
            run_body(xp, body, arrays, step)
        ),
        halves=True,
        vjp=call_vjp,
        jvp=call_jvp,
        cost=lambda *specs, body, recompute=False: Cost(*body_cost(body)),
        pure=False,
        random=True,
    )
)


# cond -------------------------------------------------------------------------------------------


def _infer_cond(
    pred: TensorSpec, *operands: TensorSpec, then: Body, orelse: Body
) -> tuple[TensorSpec, ...]:
    require_kind(pred, "bool")
    if pred.shape != ():
        raise ShapeError(f"the predicate must be one bool, got {pred}")
    for body in (then, orelse):
        check_operands(body, operands)
    if _result_specs(then) != _result_specs(orelse):
        count = len(_result_specs(then))
        shown = show_distinctly(*_result_specs(then), *_result_specs(orelse))
        raise ShapeError(
            f"the branches differ: ({', '.join(shown[:count])}) and ({', '.join(shown[count:])}); "
            "let both return the same shapes and dtypes"
        )
    return _result_specs(then)


def _cond_kernel(
    xp: Any, pred: Any, *arrays: Any, then: Body, orelse: Body, step: int
) -> tuple[Any, ...]:
    return tuple(run_body(xp, then if bool(pred) else orelse, arrays, step))


def _cond_cost(pred: TensorSpec, *operands: TensorSpec, then: Body, orelse: Body) -> Cost:
    """Return the cost of the branch with more nodes."""
    return Cost(*body_cost(then if len(then.graph) >= len(orelse.graph) else orelse))


# Runs one of two bodies and returns its results.
cond: Op = register(
    Op(
        "cond",
        infer=_infer_cond,
        kernel=_cond_kernel,
        halves=True,
        vjp=cond_vjp,
        cost=_cond_cost,
        pure=False,
        random=True,
    )
)


# scan -------------------------------------------------------------------------------------------


def _infer_scan(
    *operands: TensorSpec,
    body: Body,
    carries: int,
    items: int,
    length: Size,
    reverse: bool = False,
    counted: bool = False,
) -> tuple[TensorSpec, ...]:
    if counted:
        if operands[0] != COUNT:
            raise ShapeError(f"the count must be {COUNT}, got {operands[0]}")
        operands = operands[1:]
    for i, item in enumerate(operands[carries : carries + items]):
        if not item.shape or item.shape[0] != length:
            given, wanted = show_distinctly(item, length)
            raise ShapeError(
                f"xs {i} is {given}; its first axis must be {wanted}, as of the others"
            )
    rows = [s.with_shape(s.shape[1:]) for s in operands[carries : carries + items]]
    check_operands(body, (*operands[:carries], *rows, *operands[carries + items :]))
    _check_carried(body, operands[:carries], "carry")
    results = _result_specs(body)
    stacked = (s.with_shape((length, *s.shape)) for s in results[carries:])
    return (*results[:carries], *stacked)


def iteration_indices(length: int, count: int | None, reverse: bool) -> range:
    """Return the indices of a scan's iterations, in order."""
    number = length if count is None else min(max(count, 0), length)
    return range(number - 1, -1, -1) if reverse else range(number)


def _scan_kernel(
    xp: Any,
    *arrays: Any,
    body: Body,
    carries: int,
    items: int,
    length: int,
    step: int,
    reverse: bool = False,
    counted: bool = False,
) -> tuple[Any, ...]:
    count = int(arrays[0]) if counted else None
    state, xs, captures = _split_operands(arrays[counted:], carries, items)
    stacks = _allocate_stacks(xp, body, carries, length)
    for i in iteration_indices(length, count, reverse):
        results = run_body(xp, body, (*state, *(x[i] for x in xs), *captures), fold_in(step, i))
        state = tuple(results[:carries])
        for stack, y in zip(stacks, results[carries:], strict=True):
            stack[i] = y
    return (*state, *stacks)


def _split_operands(
    arrays: Sequence[Any], carries: int, items: int
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Split operands into carries, items and captures."""
    return (
        tuple(arrays[:carries]),
        tuple(arrays[carries : carries + items]),
        tuple(arrays[carries + items :]),
    )


def _allocate_stacks(xp: Any, body: Body, carries: int, length: int) -> list[Any]:
    specs = [s.bind(body.bindings) for s in _result_specs(body)[carries:]]
    return [xp.zeros((length, *s.shape), s.dtype) for s in specs]


def _scan_cost(*operands: TensorSpec, body: Body, length: Size, **attrs: Any) -> Cost:
    flops, moved = body_cost(body)
    return Cost(flops * length, moved * length)


# Runs a body over the first axis of the items: (carry, item, captures) -> (carry, y). `counted`:
# the first operand is the number of iterations, at most `length`; rows of y beyond it are 0.
scan: Op = register(
    Op(
        "scan",
        infer=_infer_scan,
        kernel=_scan_kernel,
        halves=True,
        vjp=scan_vjp,
        cost=_scan_cost,
        pure=False,
        random=True,
    )
)


# while_loop -------------------------------------------------------------------------------------


def _infer_while(
    *operands: TensorSpec, test: Body, body: Body, states: int, limit: int | None = None
) -> tuple[TensorSpec, ...]:
    for each in (test, body):
        check_operands(each, operands)
    (verdict,) = _result_specs(test)
    if verdict.dtype.kind != "b" or verdict.shape != ():
        raise ShapeError(f"the condition must be one bool, got {verdict}")
    _check_carried(body, operands[:states], "state")
    results = _result_specs(body)
    stacked = (s.with_shape((limit or 0, *s.shape)) for s in results[states:])
    return (COUNT, *results[:states], *stacked)


def _while_kernel(
    xp: Any,
    *arrays: Any,
    test: Body,
    body: Body,
    states: int,
    step: int,
    limit: int | None = None,
) -> tuple[Any, ...]:
    state, captures = tuple(arrays[:states]), tuple(arrays[states:])
    stacks = _allocate_stacks(xp, body, states, limit or 0)
    count = 0
    while limit is None or count < limit:
        draws = fold_in(step, count)
        if not bool(run_body(xp, test, (*state, *captures), draws)[0]):
            break
        results = run_body(xp, body, (*state, *captures), draws)
        state = tuple(results[:states])
        for stack, y in zip(stacks, results[states:], strict=True):
            stack[count] = y
        count += 1
    return (xp.asarray(count, "int64"), *state, *stacks)


def _while_cost(
    *operands: TensorSpec, test: Body, body: Body, states: int, limit: int | None = None
) -> Cost:
    times = ASSUMED_ITERATIONS if limit is None else limit
    pairs = [body_cost(test), body_cost(body)]
    return Cost(sum((f for f, _ in pairs), 0) * times, sum((b for _, b in pairs), 0) * times)


# Runs `body` on the states while `test` holds, at most `limit` times. The first output is the
# number of iterations.
while_loop: Op = register(
    Op(
        "while_loop",
        infer=_infer_while,
        kernel=_while_kernel,
        halves=True,
        vjp=while_vjp,
        cost=_while_cost,
        pure=False,
        random=True,
    )
)


def iteration_count(op: Op, attrs: Any) -> int:
    """Return how often a node runs its bodies, for cost models; its attributes are bound."""
    if op is scan:
        return int(attrs["length"])
    if op is while_loop:
        return ASSUMED_ITERATIONS if attrs.get("limit") is None else int(attrs["limit"])
    return 1


def is_control(op: Op) -> bool:
    """Return True if nodes of the op hold bodies."""
    return op in (call, cond, scan, while_loop) or op.name in ("concurrent", "numbered_call")


__all__ = [
    "COUNT", "UNPLACED_OPS", "body_cost", "call", "check_operands", "cond", "fold_in", "is_control",
    "iteration_count", "iteration_indices", "run_body", "scan", "while_loop",
]  # fmt: skip
