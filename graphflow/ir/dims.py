"""Symbolic sizes as integer polynomials.

A size is an int or a `Dim`. In a placeholder's shape, `None` makes a fresh symbol and a string a
shared one. The name of a fresh symbol holds a unique number, and the text that messages show:
`?7 x.shape[0]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partialmethod, reduce
from operator import mul
from typing import Any, Union, cast

import numpy as np

from graphflow.base.source_location import user_location
from graphflow.errors import GraphError

Size = Union[int, "Dim"]
Shape = tuple[Size, ...]
# An atom is a symbol's name or an opaque function of dims, e.g. ("floordiv", a, b).
Atom = Any
Monomial = tuple[Atom, ...]

_fresh = itertools.count()
_FRESH = "?"  # users' names are identifiers, which cannot begin with it


class Dim:
    """An immutable integer polynomial over symbols: `n`, `2*n + 1`, `n*m`, `n//2`.

    `terms` maps each monomial, a sorted tuple of atoms, to its coefficient.
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: dict[Monomial, int] = {m: c for m, c in terms.items() if c}
        self._hash = hash(frozenset(self.terms.items()))

    @staticmethod
    def symbol(name: str) -> Dim:
        """Return the size that is the symbol `name`."""
        return Dim({(name,): 1})

    @staticmethod
    def fresh(shown: str = "None") -> Dim:
        """Return a new symbol, which messages show as `shown`; equal to no other symbol."""
        return Dim.symbol(f"{_FRESH}{next(_fresh)} {shown}")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __repr__(self) -> str:
        text = ""
        for monomial, factor in sorted(self.terms.items(), key=repr):
            plus, minus = (" + ", " - ") if text else ("", "-")
            text += (plus if factor > 0 else minus) + _show_monomial(monomial, abs(factor))
        return text or "0"

    def __add__(self, other: Size) -> Size:
        if not _is_size(other):
            return self._refuse_operand(other, "add")
        terms = dict(self.terms)
        for m, c in _terms(other).items():
            terms[m] = terms.get(m, 0) + c
        return _simplify(terms)

    __radd__ = __add__

    def __mul__(self, other: Size) -> Size:
        if not _is_size(other):
            return self._refuse_operand(other, "multiply")
        if not isinstance(other, Dim):
            scaled = {m: c * int(other) for m, c in self.terms.items()}
            return self if other == 1 else _simplify(scaled)
        terms: dict[Monomial, int] = {}
        for (m1, c1), (m2, c2) in itertools.product(self.terms.items(), other.terms.items()):
            m = tuple(sorted(m1 + m2, key=repr))
            terms[m] = terms.get(m, 0) + c1 * c2
        return _simplify(terms)

    __rmul__ = __mul__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + (other * -1) if _is_size(other) else self._refuse_operand(other, "subtract")

    def __rsub__(self, other: Size) -> Size:
        return -self + other if _is_size(other) else self._refuse_operand(other, "subtract")

    def __floordiv__(self, other: Size) -> Size:
        return (
            floordiv(self, other)
            if _is_size(other)
            else self._refuse_operand(other, "floor_divide")
        )

    def __rfloordiv__(self, other: Size) -> Size:
        return (
            floordiv(other, self)
            if _is_size(other)
            else self._refuse_operand(other, "floor_divide")
        )

    # Operations that need a number ----------------------------------------------------

    def __int__(self) -> int:
        raise GraphError(
            f"at {user_location()}: the size {self} is a number when a step is fed, not while the "
            "graph is built; give the placeholder that size, or leave it to the graph's ops"
        )

    __index__ = __int__

    def __float__(self) -> float:
        return float(int(self))

    def _compare(self, other: Any) -> Any:
        return int(self) if _is_size(other) else NotImplemented

    __lt__ = __le__ = __gt__ = __ge__ = _compare

    def _refuse_operand(self, other: Any, op: str) -> Size:
        """Leave the operation to a tensor operand; raise GraphError for a number."""
        if not isinstance(other, int | float | complex | np.number | Dim):
            return cast("Size", NotImplemented)
        raise GraphError(
            f"at {user_location()}: the size {self}, which only a feed fixes, goes by +, -, * and "
            f"// with whole numbers only; for a tensor use gf.{op}"
        )

    __truediv__ = __rtruediv__ = partialmethod(_refuse_operand, op="divide")
    __mod__ = __rmod__ = partialmethod(_refuse_operand, op="remainder")
    __pow__ = __rpow__ = partialmethod(_refuse_operand, op="pow")


def _is_size(value: Any) -> bool:
    return isinstance(value, int | np.integer | Dim)


def _terms(size: Size) -> Mapping[Monomial, int]:
    return size.terms if isinstance(size, Dim) else {(): int(size)}


def _simplify(terms: Mapping[Monomial, int]) -> Size:
    dim = Dim(terms)
    if not dim.terms:
        return 0
    return dim.terms[()] if set(dim.terms) == {()} else dim


def is_fresh(symbol: str) -> bool:
    """Return True for the symbol of a None in a shape, which has no name of the user's."""
    return symbol.startswith(_FRESH)


def fresh_number(symbol: str) -> int:
    """Return the number of a fresh symbol; later symbols have higher numbers."""
    return int(symbol[len(_FRESH) :].partition(" ")[0])


def show_symbol(symbol: str) -> str:
    """Return a symbol's name for messages: of a fresh one, without its number."""
    return symbol.partition(" ")[2] if is_fresh(symbol) else symbol


def _show_monomial(monomial: Monomial, factor: int) -> str:
    return "*".join(
        [str(factor)] * (factor != 1 or not monomial) + [_show_atom(a) for a in monomial]
    )


def _show_atom(atom: Atom) -> str:
    if isinstance(atom, str):
        return show_symbol(atom)
    function, a, b = atom
    if function != "floordiv":
        return f"{function}({a}, {b})"
    above, below = str(a), str(b)
    above = f"({above})" if " " in above else above
    below = f"({below})" if " " in below or "*" in below else below
    return f"({above} // {below})"


def floordiv(a: Size, b: Size) -> Size:
    """Return a // b: the exact quotient of polynomials if there is one, else an opaque atom."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if isinstance(b, int) and b == 1:
        return a
    quotient = _divide_exactly(a, b)
    return quotient if quotient is not None else Dim({(("floordiv", a, b),): 1})


def _divide_exactly(a: Size, b: Size) -> Size | None:
    """Return a / b if b has one term that divides every term of a; else None."""
    if a == b:
        return 1
    if a == 0:
        return 0
    divisor = list(_terms(b).items())
    if len(divisor) != 1:
        return None
    (atoms, factor) = divisor[0]
    terms: dict[Monomial, int] = {}
    for monomial, coefficient in _terms(a).items():
        rest = list(monomial)
        for atom in atoms:
            if atom not in rest:
                return None
            rest.remove(atom)
        if coefficient % factor:
            return None
        terms[tuple(rest)] = coefficient // factor
    return _simplify(terms)


def minimum(a: Size, b: Size) -> Size:
    """Return the smaller of two sizes; an opaque atom if symbols leave it open."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return a if a == b else Dim({(("min", a, b),): 1})


def maximum(a: Size, b: Size) -> Size:
    """Return the larger of two sizes; an opaque atom if symbols leave it open."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return a if a == b else Dim({(("max", a, b),): 1})


def evaluate(size: Size, bindings: Mapping[str, int]) -> int:
    """Return the value of a size, given the sizes of its symbols.

    Raises:
        KeyError: a symbol has no binding.
    """
    if not isinstance(size, Dim):
        return int(size)
    return sum(
        factor * reduce(mul, (_atom_value(a, bindings) for a in monomial), 1)
        for monomial, factor in size.terms.items()
    )


def _atom_value(atom: Atom, bindings: Mapping[str, int]) -> int:
    if isinstance(atom, str):
        return bindings[atom]
    function, a, b = atom
    x, y = evaluate(a, bindings), evaluate(b, bindings)
    if function == "floordiv":
        return x // y
    return min(x, y) if function == "min" else max(x, y)


def substitute(size: Size, sizes: Mapping[str, Size]) -> Size:
    """Replace some symbols in a size by other sizes."""
    if not isinstance(size, Dim):
        return size
    total: Size = 0
    for monomial, factor in size.terms.items():
        term: Size = factor
        for atom in monomial:
            term = term * _substitute_atom(atom, sizes)
        total = total + term
    return total


def _substitute_atom(atom: Atom, sizes: Mapping[str, Size]) -> Size:
    if isinstance(atom, str):
        return sizes.get(atom, Dim.symbol(atom))
    function, a, b = atom
    x, y = substitute(a, sizes), substitute(b, sizes)
    if function == "floordiv":
        return floordiv(x, y)
    return minimum(x, y) if function == "min" else maximum(x, y)


def is_nonnegative(size: Size) -> bool:
    """Return True if a size is provably at least 0, whatever the sizes of its symbols."""
    if not isinstance(size, Dim):
        return size >= 0
    for monomial, factor in size.terms.items():
        if factor < 0:
            # Subtracting min(p, q) leaves at least as much as subtracting p, or q: it is enough
            # that one of these differences is not negative.
            if len(monomial) != 1 or isinstance(monomial[0], str) or monomial[0][0] != "min":
                return False
            rest = size + Dim({monomial: -factor})
            return any(is_nonnegative(rest + factor * bound) for bound in monomial[0][1:])
    return all(_is_nonnegative_atom(atom) for monomial in size.terms for atom in monomial)


def _is_nonnegative_atom(atom: Any) -> bool:
    if isinstance(atom, str):
        return True
    function_, a, b = atom
    combine = any if function_ == "max" else all
    return combine(is_nonnegative(x) for x in (a, b))


def sole_symbol(size: Size) -> str | None:
    """Return the symbol if a size is a single symbol, else None."""
    if isinstance(size, Dim) and len(size.terms) == 1:
        ((monomial, factor),) = size.terms.items()
        if factor == 1 and len(monomial) == 1 and isinstance(monomial[0], str):
            return monomial[0]
    return None


def symbols(size: Size) -> Iterator[str]:
    """Iterate over the symbols in a size, also inside atoms."""
    if isinstance(size, Dim):
        for atom in itertools.chain.from_iterable(size.terms):
            if isinstance(atom, str):
                yield atom
            else:
                yield from symbols(atom[1])
                yield from symbols(atom[2])


def product(shape: Iterable[Size]) -> Size:
    """Return the product of sizes: the number of elements of a shape."""
    total: Size = 1
    for size in shape:
        total = total * size
    return total
