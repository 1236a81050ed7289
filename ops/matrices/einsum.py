"""einsum and tensordot, lowered to permutations, reshapes, matmuls and sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, function, promote_inputs
from graphflow.ir.spec import Shape, Size, equate, product, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import normalize_axis, require_list
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.matrices.triangles import diagonal
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import expand_dims, permute_dims, reshape

_Label = Any  # a letter, or ("...", position counted from the right)


@function
def einsum(subscripts: str, *operands: Any) -> Tensor:
    """Sum products over axes named by letters: `einsum("bij,bjk->bik", a, b)`.

    If the output is left out, it has the letters that occur once, in order. `...` stands for axes
    that broadcast, and a letter twice in one operand takes its diagonal. More than two operands are
    contracted in pairs, in the order that opt_einsum finds best (left to right if a size is
    unknown).

    Args:
        subscripts: a letter for each axis of each operand, as in numpy.
        operands: tensors of ints, floats or complex numbers.

    Raises:
        ArgumentError: the subscripts are malformed or do not fit the operands.
        ShapeError: a letter stands for two sizes.
    """
    if not isinstance(subscripts, str):
        raise ArgumentError(f"subscripts must be a str such as 'ij,jk->ik', got {subscripts!r}")
    tensors = list(promote_inputs("einsum", operands)) if operands else []
    inputs, output = _parse(subscripts, tensors)
    contract = _einsum if _is_one_product(inputs, output) else _einsum_of_many
    return contract(tensors, inputs, output, repr(subscripts))


def _parse(subscripts: str, operands: Sequence[Tensor]) -> tuple[list[list[_Label]], list[_Label]]:
    text = subscripts.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands) or not operands:
        raise ArgumentError(f"{subscripts!r} names {len(terms)} operands, got {len(operands)}")
    inputs = []
    for term, x in zip(terms, operands, strict=True):
        labels = _labels(term, x.ndim, subscripts)
        if len(labels) != x.ndim:
            raise ArgumentError(
                f"{subscripts!r}: {term!r} names {len(labels)} axes of {show_shape(x.shape)}"
            )
        inputs.append(labels)
    every = list(itertools.chain.from_iterable(inputs))
    dots = sorted({x for x in every if isinstance(x, tuple)}, key=lambda x: -x[1])
    if not arrow:
        letters = sorted(x for x in set(every) if isinstance(x, str) and every.count(x) == 1)
        return inputs, [*dots, *letters]
    output = _labels(right, len(right.replace("...", "")) + len(dots), subscripts)
    unknown = [x for x in output if x not in every]
    if unknown or len(set(output)) != len(output):
        raise ArgumentError(
            f"{subscripts!r}: the output names an axis twice, or one that no operand has"
        )
    return inputs, output


def _labels(term: str, rank: int, subscripts: str) -> list[_Label]:
    before, dots, after = term.partition("...")
    if not all(c.isascii() and c.isalpha() for c in before + after):
        raise ArgumentError(f"{subscripts!r}: {term!r} is not letters and one '...'")
    hidden = max(0, rank - len(before) - len(after)) if dots else 0
    return [*before, *(("...", i) for i in reversed(range(hidden))), *after]


def _einsum(
    tensors: list[Tensor], inputs: list[list[_Label]], output: list[_Label], what: str
) -> Tensor:
    sizes = _label_sizes(tensors, inputs, what)
    terms = [_take_diagonals(x, labels) for x, labels in zip(tensors, inputs, strict=True)]
    for pair in _contraction_order(terms, output):
        picked = [terms.pop(i) for i in sorted(pair, reverse=True)][::-1]
        needed = set(output).union(*(labels for _, labels in terms))
        terms.append(_contract(picked, needed, sizes))
    x, labels = _sum_axes(*terms[0], set(output))
    return permute_dims(x, [labels.index(label) for label in output])


_einsum_of_many = composite("tensors", to="low")(_einsum)


def _is_one_product(inputs: Sequence[list[_Label]], output: list[_Label]) -> bool:
    """Return True for one operand, or two without an axis that is summed in one of them alone."""
    summed = set(itertools.chain.from_iterable(inputs)).difference(output)
    met = all(label in labels for label in summed for labels in inputs)
    return len(inputs) < 3 and (met or len(inputs) == 1)


def _label_sizes(
    tensors: list[Tensor], inputs: list[list[_Label]], what: str
) -> dict[_Label, Size]:
    """Return the size of each label; sizes of 1 broadcast."""
    sizes: dict[_Label, Size] = {}
    for x, labels in zip(tensors, inputs, strict=True):
        for n, label in zip(x.shape, labels, strict=True):
            known = sizes.get(label, 1)
            if known == 1:
                sizes[label] = n
            elif n != 1:
                name = "'...'" if isinstance(label, tuple) else f"{label!r}"
                sizes[label] = equate(known, n, f"{what}: {name} stands for two sizes")
    return sizes


def _contraction_order(
    terms: Sequence[tuple[Tensor, list[_Label]]], output: list[_Label]
) -> list[tuple[int, ...]]:
    """Return pairs of positions to contract; each result is appended to the list."""
    count = len(terms)
    if count < 3 or not all(x.spec.is_concrete for x, _ in terms):
        # from left to right: the last entry is the result so far
        return [(0, 1) if i == 0 else (0, count - 1 - i) for i in range(count - 1)]
    import opt_einsum

    letters: dict[_Label, str] = {}
    for label in itertools.chain.from_iterable(labels for _, labels in terms):
        letters.setdefault(label, opt_einsum.get_symbol(len(letters)))
    left = ",".join("".join(letters[label] for label in labels) for _, labels in terms)
    right = "".join(letters[label] for label in output)
    shapes = [x.shape for x, _ in terms]
    path, _ = opt_einsum.contract_path(f"{left}->{right}", *shapes, shapes=True)
    return [tuple(p) for p in path if len(p) == 2]


def _take_diagonals(x: Tensor, labels: list[_Label]) -> tuple[Tensor, list[_Label]]:
    """Replace a label that occurs twice by the diagonal of its axes."""
    labels = list(labels)
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            x = diagonal(x, axis1=first, axis2=second)
            del labels[second], labels[first]
            labels.append(label)
    return x, labels


def _sum_axes(x: Tensor, labels: list[_Label], keep: set[_Label]) -> tuple[Tensor, list[_Label]]:
    axes = tuple(i for i, label in enumerate(labels) if label not in keep)
    if axes:
        x = FUNCTIONS["sum"](x, axis=axes, dtype=x.dtype)
    return x, [label for label in labels if label in keep]


def _contract(
    pair: Sequence[tuple[Tensor, list[_Label]]], needed: set[_Label], sizes: dict[_Label, Size]
) -> tuple[Tensor, list[_Label]]:
    """Multiply two terms and sum over the labels that are needed no more."""
    (a, la), (b, lb) = pair
    a, la = _sum_axes(a, la, needed | set(lb))
    b, lb = _sum_axes(b, lb, needed | set(la))
    common = [label for label in la if label in lb]
    batch = [label for label in common if label in needed]
    inner = [label for label in common if label not in needed]
    only_a = [label for label in la if label not in common]
    only_b = [label for label in lb if label not in common]
    if not inner:
        x = _arrange_axes(a, la, batch + only_a + only_b) * _arrange_axes(
            b, lb, batch + only_a + only_b
        )
        return x, batch + only_a + only_b
    a, b = _broadcast_inner_axes(a, la, inner, sizes), _broadcast_inner_axes(b, lb, inner, sizes)
    left, flag_a = _as_matrix(a, la, batch, only_a, inner)
    right, flag_b = _as_matrix(b, lb, batch, inner, only_b)
    x = matmul(left, right, transpose_a=flag_a, transpose_b=flag_b)
    kept = [a.shape[la.index(label)] for label in only_a]
    kept += [b.shape[lb.index(label)] for label in only_b]
    return reshape(x, (*x.shape[: len(batch)], *kept)), batch + only_a + only_b


def _arrange_axes(x: Tensor, labels: list[_Label], order: list[_Label]) -> Tensor:
    """Put axes into the given order; missing ones get size 1."""
    x = permute_dims(x, [labels.index(label) for label in order if label in labels])
    return expand_dims(x, [i for i, label in enumerate(order) if label not in labels])


def _broadcast_inner_axes(
    x: Tensor, labels: list[_Label], inner: list[_Label], sizes: dict[_Label, Size]
) -> Tensor:
    """Broadcast axes of size 1 that are summed against longer ones."""
    shape = tuple(
        sizes[label] if n == 1 and label in inner else n
        for n, label in zip(x.shape, labels, strict=True)
    )
    return broadcast_to(x, shape)


def _as_matrix(
    x: Tensor, labels: list[_Label], batch: list[_Label], rows: list[_Label], columns: list[_Label]
) -> tuple[Tensor, bool]:
    """Arrange axes as (*batch, rows, columns); or transposed, with True, if that needs no copy."""
    flipped = labels == batch + columns + rows
    if flipped:
        rows, columns = columns, rows
    x = permute_dims(x, [labels.index(label) for label in batch + rows + columns])
    front: Shape = x.shape[: len(batch)]
    middle = x.shape[len(batch) : len(batch) + len(rows)]
    return reshape(
        x, (*front, product(middle), product(x.shape[len(batch) + len(rows) :]))
    ), flipped


@function
def tensordot(a: Tensor, b: Tensor, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """Sum products over pairs of axes of a and b.

    Args:
        a, b: tensors of ints, floats or complex numbers.
        axes: a count: the last axes of a with the first of b; or two lists of axes, paired in
            order.

    Raises:
        ArgumentError: the lists differ in length, an axis is given twice, or there are too few
            axes.
        ShapeError: sizes of paired axes differ.
    """
    a, b = promote_inputs("tensordot", (a, b))
    if isinstance(axes, int):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise ArgumentError(
                f"axes must be at most the smaller rank of a and b, {min(a.ndim, b.ndim)}, "
                f"got {axes}"
            )
        axes = (tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes)))
    pair = require_list("axes", axes)
    if len(pair) != 2:
        raise ArgumentError(f"axes must be a count or two lists, got {axes!r}")
    first, second = ([x] if isinstance(x, int) else require_list("axes", x) for x in pair)
    if len(first) != len(second):
        raise ArgumentError(
            f"axes name {len(first)} axes of a but {len(second)} of b; give as many of each"
        )
    labels_a = [("a", i) for i in range(a.ndim)]
    labels_b = [("b", i) for i in range(b.ndim)]
    for i, j in zip(first, second, strict=True):
        labels_b[normalize_axis(j, b.ndim)] = labels_a[normalize_axis(i, a.ndim)]
    shared = set(labels_a) & set(labels_b)
    if len(shared) != len(first):
        raise ArgumentError(f"axes {axes} name an axis twice")
    out = [label for label in (*labels_a, *labels_b) if label not in shared]
    return _einsum([a, b], [labels_a, labels_b], out, "tensordot")
