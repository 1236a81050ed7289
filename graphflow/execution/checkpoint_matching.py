"""Match the names in a checkpoint with the names of a model's variables.

    checkpoint ─rename→ names of the model ─differences→ loaded, missing, unexpected

Only names, dtypes and shapes are needed here; `variable_store` holds the variables and values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import field
from difflib import SequenceMatcher
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from graphflow.base.argument_checks import check_flag, did_you_mean, format_value
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, CheckpointError
from graphflow.ir.op import Node
from graphflow.runtime import checkpoint as checkpoints
from graphflow.runtime.checkpoint import Checkpoint, differences
from graphflow.runtime.checkpoint.manifest import Groups, Signature, list_some

T = TypeVar("T")
Rename = Mapping[str, str]
_SEPARATOR = re.compile(r"[/.]")  # of scopes here, and of modules in PyTorch
_MIN_LIKENESS = 0.5  # of a missing and an unexpected name for a suggestion
_MAX_COMPARED = 200  # names; the comparison is quadratic
_SUGGESTED = 4


@dataclass(frozen=True)
class Loaded:
    """The variables that a session loaded from a checkpoint, by name. Print it.

    Attributes:
        source: the folder or file.
        step: the number of steps from which the session continued.
        loaded: variables of the session that have the checkpoint's values.
        missing: variables of the session that the checkpoint lacks.
        unexpected: names in the checkpoint for which the session has no variable yet. Their
            values wait, since a later fetch may bring the variable.
    """

    source: str
    step: int
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.source}, step {self.step}: {len(self.loaded)} variables loaded"]
        parts += [f"missing in it: {list_some(self.missing)}"] * bool(self.missing)
        parts += [f"no variable yet for: {list_some(self.unexpected)}"] * bool(self.unexpected)
        return "; ".join(parts)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The last checkpoint that a session loaded.

    Attributes:
        source: the folder or file.
        signatures: dtypes and shapes in it, by the model's names.
        strict: True if a variable that it lacks is an error.
        unnamed: groups of variables without names, which were numbered in the order of their
            creation.
    """

    source: str
    step: int = 0
    signatures: Mapping[str, Signature] = field(default_factory=dict)
    strict: bool = True
    unnamed: Groups = ()

    def report(self, known: Iterable[str]) -> Loaded:
        """Report which of its variables are in use.

        Args:
            known: names of the variables that the session has seen.
        """
        met = sorted(known)
        return Loaded(
            self.source,
            self.step,
            tuple(name for name in met if name in self.signatures),
            tuple(name for name in met if name not in self.signatures),
            tuple(sorted(self.signatures.keys() - set(met))),
        )


def check_order(nodes: Mapping[str, Node], origin: LoadedCheckpoint) -> None:
    """Refuse unnamed variables that the program used in another order than the checkpoint's.

    Unnamed variables are numbered in the order of use. In another order, variables of one shape
    would swap their values.

    Args:
        nodes: the variables that the session has seen, by name.

    Raises:
        CheckpointError: two variables were created in the other order there.
    """
    for group in origin.unnamed:
        met = [name for name in group if name in nodes and not nodes[name].attrs["named"]]
        for first, second in itertools.pairwise(met):
            a, b = nodes[first], nodes[second]
            if a.name == b.name and a.serial > b.serial:
                raise CheckpointError(
                    f"checkpoint {origin.source} does not tell {first!r} (made at {a.location}) "
                    f"from {second!r} (made at {b.location}): these variables have no names, and "
                    "the program that wrote it used them in another order, so that each may get "
                    "the other's value. Fetch them in that order, or give them names and load with "
                    "rename={'"
                    f"{first}': 'its name', …}}"
                )


def ambiguous_names(
    fresh: Mapping[str, Node], nodes: Mapping[str, Node], origin: LoadedCheckpoint
) -> list[str]:
    """Return the new unnamed variables that may be confused with others of the checkpoint.

    That is so while more variables of the same group, dtype and shape are still to come.
    """
    found = []
    for group in origin.unnamed:
        waiting = {origin.signatures.get(name) for name in group if name not in nodes}
        own = [name for name in group if name in fresh and not fresh[name].attrs["named"]]
        found += [name for name in own if origin.signatures.get(name) in waiting]
    return found


def check_rename(strict: Any, rename: Any, *, again: bool = False) -> Rename:
    """Return the argument `rename` as a dict, {} for None; check `strict` as well.

    Args:
        again: True if later checkpoints, which have the new names, are renamed by it as well.

    Raises:
        ArgumentError: strict is no bool; rename is no dict of names; or, with `again`, a new
            name would be renamed once more.
    """
    check_flag("strict", strict)
    if rename is None:
        return {}
    if not isinstance(rename, Mapping) or not all(
        isinstance(name, str) and name for pair in rename.items() for name in pair
    ):
        raise ArgumentError(
            "rename must be a dict from names in the checkpoint to names of variables, such as "
            f"{{'encoder/w': 'enc/w'}}, not {format_value(rename)}"
        )
    twice = [new for new in rename.values() if again and _rename(new, rename) != new]
    if twice:
        raise ArgumentError(
            f"rename: {twice[0]!r} is a new name and would be renamed again at the next start; "
            "rename by s.load, which is done once"
        )
    return dict(rename)


def rename_variables(found: Mapping[str, T], rename: Rename, source: object) -> dict[str, T]:
    """Return the variables of a checkpoint under the names of the model.

    A key of `rename` is a variable or a scope: `{"encoder": "enc"}` renames "encoder/w" to "enc/w",
    and an optimiser's "train/encoder/w/adam_mean" with it. The longest matching key wins. A key
    without a match is accepted if the new name is there already, so that a session can be restarted
    with the same `rename`.

    Raises:
        CheckpointError: a key matches nothing, or two variables would have one name.
    """
    if not rename:
        return dict(found)
    for old, new in rename.items():
        if not any(_is_in(name, old) or _is_in(name, new) for name in found):
            known = {*found, *(name.rpartition("/")[0] for name in found)} - {""}
            hint = did_you_mean(old, known) or f"it has {list_some(sorted(found))}"
            raise CheckpointError(f"rename: checkpoint {source} has no {old!r}; {hint}")
    result: dict[str, T] = {}
    origins: dict[str, str] = {}
    for name, value in found.items():
        new = _rename(name, rename, found)
        if new in result:
            raise CheckpointError(
                f"rename: checkpoint {source} would have two variables {new!r}, from "
                f"{origins[new]!r} and {name!r}; rename one of them to another name"
            )
        result[new], origins[new] = value, name
    return result


def mismatch_error(
    nodes: Mapping[str, Node],
    wanted: Mapping[str, Signature],
    there: Mapping[str, Signature],
    wrong: Sequence[str],
    source: str,
) -> CheckpointError:
    """Return the error for a checkpoint that does not fit, with all differences and the remedy.

    Args:
        nodes: the model's variables.
        wanted: their dtypes and shapes.
        there: those of the checkpoint.
        wrong: names of the variables that revealed it.
    """
    made = ", ".join(f"{name!r} (made at {nodes[name].location})" for name in wrong[:3])
    return CheckpointError(
        f"checkpoint {source} does not fit {made}{', …' if len(wrong) > 3 else ''}; "
        f"{differences(wanted, there)}; {suggest_remedy(wanted, there)}"
    )


def suggest_remedy(wanted: Mapping[str, Signature], there: Mapping[str, Signature]) -> str:
    """Say what to do about a checkpoint that does not fit."""
    suggested = suggest_rename(wanted, there)
    advice = ""
    if suggested:
        first = dict(list(suggested.items())[:_SUGGESTED])
        rest = ", …" if len(suggested) > _SUGGESTED else ""
        advice = f"did you mean rename={str(first)[:-1]}{rest}}}? "
    if any(name in there and there[name] != kind for name, kind in wanted.items()):
        return f"{advice}load one of this model, or set the variables"
    if not advice:
        advice = "load one of this model. "
    return f"{advice}With strict=False, variables that it lacks keep their own values"


def suggest_rename(
    wanted: Mapping[str, Signature], there: Mapping[str, Signature]
) -> dict[str, str]:
    """Return a `rename` from unexpected variables to missing ones with similar names.

    Only variables of equal dtype and shape are paired. Where a whole scope was renamed, the scopes
    are named instead of their variables.
    """
    missing = [name for name in wanted if name not in there][:_MAX_COMPARED]
    spare = [name for name in there if name not in wanted][:_MAX_COMPARED]
    scores = []
    for new in missing:
        alike = [old for old in spare if there[old] == wanted[new]]
        only = len(alike) == 1 and sum(wanted[name] == wanted[new] for name in missing) == 1
        scores += [(_likeness(old, new) + only, old, new) for old in alike]
    found: dict[str, str] = {}
    for score, old, new in sorted(scores, reverse=True):
        if score >= _MIN_LIKENESS and old not in found and new not in found.values():
            found[old] = new
    fitting = [name for name in there if name in wanted]
    short: dict[str, str] = {}
    for old, new in found.items():
        before, after = _without_common_end(old, new)
        clear = short.get(before, after) == after and not any(_is_in(n, before) for n in fitting)
        short |= {before: after} if clear else {old: new}
    for old in sorted(short, key=len, reverse=True):  # a slot is renamed with its variable
        rest = {key: value for key, value in short.items() if key != old}
        if all(_rename(key, rest, there) == new for key, new in found.items()):
            short = rest
    return short


def load_renamed(folder: Path, rename: Rename = MappingProxyType({})) -> Checkpoint:
    """Read a checkpoint under the names of the model.

    Raises:
        CheckpointError: it cannot be read, or a name of `rename` is not in it.
    """
    checkpoint = checkpoints.load(folder)
    return rename_checkpoint(checkpoint, rename, folder)


def rename_checkpoint(checkpoint: Checkpoint, rename: Rename, source: object) -> Checkpoint:
    """Return a checkpoint under the names of the model; see `rename_variables`."""
    found = checkpoint.variables
    unnamed = tuple(tuple(_rename(n, rename, found) for n in g) for g in checkpoint.unnamed)
    copies = {_rename(name, rename, found): own for name, own in checkpoint.copies.items()}
    return Checkpoint(rename_variables(found, rename, source), checkpoint.step, unnamed, copies)


def _rename(name: str, rename: Rename, found: Container[str] = ()) -> str:
    old = max((old for old in rename if _is_in(name, old)), key=len, default=None)
    if old is not None:
        return rename[old] + name[len(old) :]
    # An optimiser's variable is named after its own: "train/encoder/w/adam_mean".
    stem, _, slot = name.rpartition("/")
    for start in (0, *(i + 1 for i, letter in enumerate(stem) if letter == "/")):
        if stem[start:] in found:
            return f"{stem[:start]}{_rename(stem[start:], rename)}/{slot}"
    return name


def _is_in(name: str, scope: str) -> bool:
    """Return True if a name is the scope's own name or lies in the scope."""
    if not scope:  # what a beginning of names is renamed to that is left out
        return False
    rest = name[len(scope) :]
    ends = not rest or scope[-1] in "/." or rest[0] in "/."
    return name.startswith(scope) and ends


def _likeness(old: str, new: str) -> float:
    """Return a similarity from 0 to 1; equal last parts count for half of it."""
    parts, others = _SEPARATOR.split(old), _SEPARATOR.split(new)
    same = 0.5 if parts[-1] == others[-1] else 0.0
    return same + SequenceMatcher(None, "/".join(parts), "/".join(others)).ratio() / 2


def _without_common_end(old: str, new: str) -> tuple[str, str]:
    """Return two names without the scopes at the end in which they agree."""
    while True:
        before, _, end = old.rpartition("/")
        after, _, other = new.rpartition("/")
        if not before or not after or end != other or before == after:
            return old, new
        old, new = before, after
