"""Chain: filters one after the other. Each gets the numbers that the one before it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import Tensor, user_location
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.compression.filter import (
    Array,
    CachedKeys,
    Filter,
    Parts,
    State,
    used_rows_of,
)
from graphflow.parallel.compression.filters.key_cache import KeyCache
from graphflow.parallel.compression.filters.selection import Selection
from graphflow.parallel.mesh.count_arguments import set_frozen_fields


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Chain(Filter):
    """Filters one after the other, such as `Chain([TopK(0.01), FixedPoint(8)])`.

    All but the last choose numbers (`TopK`, `Significant`, `Kkt`, `RandomSkip`); the next filter
    gets these. If any has feedback, what the whole chain does not send is kept. With a parameter
    server, a `KeyCache` may follow the first.

    Args:
        filters: the filters, at least one, in the order in which a tensor goes through them.

    Raises:
        ArgumentError: `filters` is no list of filters with encode and decode; one that is not the
            last chooses no numbers; one that is not the first reads the variable's value; one
            excludes the feedback of another.
    """

    filters: Sequence[Filter]
    feedback: bool = field(default=False, init=False, repr=False)
    reads_value: bool = field(default=False, init=False, repr=False)
    only_gradients: bool = field(default=False, init=False, repr=False)
    excludes_feedback: bool = field(default=False, init=False, repr=False)
    cached: CachedKeys | None = field(default=None, init=False, repr=False)
    _rules: tuple[Filter, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"Chain at {user_location()}"
        given = self.filters
        if not isinstance(given, list | tuple) or not given:
            raise ArgumentError(f"{where}: filters must be a list of filters, not {given!r}")
        rules = [rule for rule in given if not isinstance(rule, KeyCache)]
        cached = self._find_keys(where, given, rules)
        for number, rule in enumerate(rules):
            if not isinstance(rule, Filter) or type(rule).encode is Filter.encode:
                raise ArgumentError(
                    f"{where}: {rule!r} cannot be in a chain, which takes filters with encode and "
                    "decode, such as TopK(0.01) and FixedPoint(8)"
                )
            if number + 1 < len(rules) and not isinstance(rule, Selection):
                raise ArgumentError(
                    f"{where}: {rule!r} chooses no numbers of a tensor, so nothing can come after "
                    "it; make it the last filter"
                )
            if number and rule.reads_value:
                raise ArgumentError(
                    f"{where}: {rule!r} reads the values of all weights; make it the first filter"
                )
        excluding = [rule for rule in rules if rule.excludes_feedback]
        if excluding and any(rule.feedback for rule in rules):
            raise ArgumentError(
                f"{where}: {excluding[0]!r} does not go with the feedback of another filter, which "
                "would bring back what it leaves out, or multiply it again; use filters without "
                "feedback"
            )
        set_frozen_fields(
            self,
            filters=tuple(given),
            feedback=any(rule.feedback for rule in rules),
            reads_value=rules[0].reads_value,
            only_gradients=any(rule.only_gradients for rule in rules),
            excludes_feedback=bool(excluding),
            cached=cached,
            _rules=tuple(rules),
        )

    def _find_keys(
        self, where: str, given: Sequence[Filter], rules: Sequence[Filter]
    ) -> CachedKeys | None:
        """Return the positions of a `KeyCache`; None without one.

        Raises:
            ArgumentError: it does not follow a first filter that sends positions.
        """
        caches = [rule for rule in given if isinstance(rule, KeyCache)]
        if not caches:
            return None
        first = rules[0] if rules else None
        if len(caches) > 1 or list(given[1:2]) != caches or not isinstance(first, Selection):
            raise ArgumentError(
                f"{where}: a KeyCache comes second, after a filter that sends positions, as in "
                f"[Kkt(0.1), KeyCache()], not in {list(given)!r}"
            )
        if not first.sends_positions:
            raise ArgumentError(f"{where}: {first!r} sends no positions; leave out the KeyCache")
        return CachedKeys(-first.others, caches[0].share)

    def applies(self, spec: TensorSpec) -> bool:
        """Return True if each filter applies to what it gets."""
        return all(rule.applies(each) for rule, each in self._stages(spec))

    def initial(self, spec: TensorSpec) -> Sequence[Array | init.Initializer]:
        """Return the first states of all filters, one after the other."""
        return [first for rule, each in self._stages(spec) for first in rule.initial(each)]

    def _stages(self, spec: TensorSpec) -> list[tuple[Filter, TensorSpec]]:
        """Return each filter with the spec of what it gets."""
        found = []
        for rule in self._rules:
            found.append((rule, spec))
            if isinstance(rule, Selection):
                spec = rule.numbers_spec(spec)
        return found

    def encode(self, tensor: Tensor, state: State) -> tuple[Parts, State]:
        """Return the parts of the last filter's message, then the other parts of the ones before,
        the last of these first."""
        given, after = list(state), list[Tensor]()
        parts, rest = Parts(), Parts()
        for rule, spec in self._stages(tensor.spec):
            count = len(rule.initial(spec)) + rule.reads_value
            own, given = given[:count], given[count:]
            used = used_rows_of(tensor)
            whole = tensor if used is None else used[0]
            made, new = rule.encode(whole, tuple(own))
            parts = tuple(made) if used is None else rule.mark(tuple(made), used[1], used[2])
            after += new
            if rule is not self._rules[-1]:
                tensor, rest = parts[0], (*parts[1:], *rest)
        return (*parts, *rest), tuple(after)

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the tensor that a message stands for."""
        stages = self._stages(spec)
        numbers = [rule.others for rule, _ in stages[:-1] if isinstance(rule, Selection)]
        own = len(parts) - sum(numbers)
        rule, last = stages[-1]
        found, rest = rule.decode(parts[:own], last), parts[own:]
        for (rule, before), count in zip(reversed(stages[:-1]), reversed(numbers), strict=True):
            found, rest = rule.decode((found, *rest[:count]), before), rest[count:]
        return found


__all__ = ["Chain"]
