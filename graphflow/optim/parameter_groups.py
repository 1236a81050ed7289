"""Parameter groups: variables that are updated by different rules, chosen by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from graphflow.base.argument_checks import checks_argument_names, did_you_mean
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, VariableError
from graphflow.ir.op import Tensor, user_location
from graphflow.optim.optimizer_base import Optimizer
from graphflow.optim.optimizer_checks import check_numbers
from graphflow.optim.update_targets import ProximalTerm


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Groups(Optimizer):
    """Update each variable by the rule of the first pattern that its name fits.

    Weights decay, biases and norms do not:

        adamw = gf.optim.AdamW(1e-3, weight_decay=0.1)
        plain = gf.optim.AdamW(1e-3, weight_decay=0.0)
        gf.optim.Groups({"*bias": plain, "*norm*": plain}, adamw).minimize(loss)

    The `transform` of `minimize` gets the gradients of all groups.

    Args:
        rules: optimisers by pattern, in which * stands for any characters. None: such variables are
            not trained.
        rest: the optimiser of all other variables; None: they are not trained.

    Raises:
        ArgumentError: a rule is no optimiser.
        VariableError: a pattern fits no variable, when `minimize` is called.
    """

    rules: Mapping[str, Optimizer | None]
    rest: Optimizer | None

    def __post_init__(self) -> None:
        check_numbers(self)
        if not isinstance(self.rules, Mapping):
            self._refuse('rules must be a dict such as {"*bias": gf.optim.SGD(0.1)}', self.rules)
        for pattern, rule in (*self.rules.items(), ("rest", self.rest)):
            if not isinstance(pattern, str):
                self._refuse("a pattern must be a string", pattern)
            if not (rule is None or isinstance(rule, Optimizer)) or isinstance(rule, Groups):
                self._refuse(f"the rule of {pattern!r} must be an optimiser or None", rule)
        if self.sparse:
            self._refuse("sparse is for the optimisers of groups", self.sparse)
        object.__setattr__(self, "rules", dict(self.rules))

    def __hash__(self) -> int:
        return hash((tuple(self.rules.items()), self.rest))

    def _select(self, variables: Sequence[Tensor]) -> list[Tensor]:
        self._check_patterns([v for v in variables if isinstance(v, Tensor)])
        return [v for v in variables if not isinstance(v, Tensor) or self._find(v) is not None]

    def _check_patterns(self, variables: Sequence[Tensor]) -> None:
        names = [variable.node.name for variable in variables]
        for pattern in self.rules:
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = did_you_mean(pattern, names) or f"they are {', '.join(names[:8])}"
                raise VariableError(
                    f"Groups at {user_location()}: no variable's name fits {pattern!r}; {hint}"
                )

    def _find(self, variable: Tensor) -> Optimizer | None:
        """Return the optimiser of a variable; None: it is not trained."""
        name = variable.node.name
        return next((r for p, r in self.rules.items() if fnmatchcase(name, p)), self.rest)

    def _rule_of(self, variable: Tensor) -> Optimizer:
        return self._find(variable) or self

    def _build_updates(
        self, grads: Sequence[Tensor], variables: Sequence[Tensor], term: ProximalTerm | None = None
    ) -> list[Tensor]:
        members: dict[int, list[int]] = {}
        for i, variable in enumerate(variables):
            if self._find(variable) is not None:
                members.setdefault(id(self._find(variable)), []).append(i)
        updates = []
        for indices in members.values():
            rule = self._rule_of(variables[indices[0]])
            updates += rule._build_updates(
                [grads[i] for i in indices], [variables[i] for i in indices], term
            )
        return updates
