"""The variables of a session: their names, the devices they live on, and values without a device
yet.

A variable gets its name when the session first sees it, and its home when it is first placed. The
home gets the value when the workers have a program that reads it. Until then a value that was set
waits here, and so does a value that moves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from graphflow.base.formatting import show_bytes
from graphflow.errors import VariableError
from graphflow.execution.checkpoint_matching import (
    Loaded,
    LoadedCheckpoint,
    ambiguous_names,
    check_order,
    mismatch_error,
    suggest_remedy,
)
from graphflow.execution.compiled_fetches import worker_of
from graphflow.execution.replica_rows import fit_rows, is_loadable
from graphflow.execution.variable_mirrors import VariableMirrors
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import Span, index_of, nbytes
from graphflow.runtime.checkpoint import Checkpoint, differences
from graphflow.runtime.checkpoint.folder import signature
from graphflow.runtime.checkpoint.manifest import (
    PIECED_BYTES,
    Copies,
    Groups,
    Signature,
    VariablePiece,
    list_some,
    mean_of,
)
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray, PiecedArray
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.host.host_variables import MIRROR
from graphflow.runtime.telemetry.logs import Log
from graphflow.strategy import VariableShards

Array = np.ndarray[Any, Any]
StoredValue = Array | LazyArray
LARGEST_WHOLE = 1 << 30
"""The most bytes of a partitioned variable that `get` returns as one array."""
_log = Log("graphflow.session")


class VariableStore:
    """Variables by name, by home, and by value.

    Attributes:
        names: names of the variables, unique in the session.
        variables: the variables by name.
        homes: the device on which each one lives, or will live.
        shards: shards of the variables that a strategy partitioned; these have no home or value
            themselves.
        wholes: the partitioned variables by name; checkpoints store them whole.
        writes: how often values were set, loaded or restored.
        holders: the devices that have the parts of others, after losses; see `planning.mirrors`.
        mirrors: the mirrors of variables.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.names: dict[Node, str] = {}
        self.variables: dict[str, Tensor] = {}
        self.homes: dict[Node, str] = {}
        self.shards: dict[Node, VariableShards] = {}
        self.wholes: dict[str, Node] = {}
        self._hosts = hosts
        self._at_home: set[Node] = set()  # variables whose home has the value
        self._pending: dict[str, StoredValue] = {}
        self._pending_copies: dict[str, Copies] = {}
        self.writes = 0
        self.holders: dict[str, str] = {}
        self.mirrors = VariableMirrors()
        self._loaded_checkpoint: LoadedCheckpoint | None = None

    # Names ------------------------------------------------------------------------------------

    def new_names(self, nodes: Sequence[Node]) -> dict[Node, str]:
        """Return names, unique in the session, for the variables that it does not know yet."""
        names: dict[Node, str] = {}
        fresh = [node for node in nodes if node not in self.names]
        if not fresh:
            return names
        taken = {name: tensor.node for name, tensor in self.variables.items()} | self.wholes
        numbers: dict[
            str, int
        ] = {}  # last number tried for each name, which thousands of variables may share
        for node in fresh:
            name, number = node.name, numbers.get(node.name, 0)
            while name in taken:
                if node.attrs["named"]:
                    raise VariableError(
                        f"two variables are named {name!r}: made at {taken[name].location} and "
                        f"{node.location}; give one another name"
                    )
                number += 1
                name = f"{node.name}_{number}"
            numbers[node.name] = number
            names[node] = name
            taken[name] = node
        return names

    def register(self, names: Mapping[Node, str]) -> None:
        """Keep names that `new_names` returned."""
        for node, name in names.items():
            self.names[node] = name
            self.variables[name] = node.outputs[0]

    def _name(self, node: Node) -> str:
        """Return the variable's name in this session."""
        self.register(self.new_names([node]))
        return self.names[node]

    # Homes ------------------------------------------------------------------------------------

    def check_loaded_checkpoint(
        self,
        names: Mapping[Node, str],
        divided: Mapping[Node, VariableShards] = MappingProxyType({}),
    ) -> None:
        """Refuse new variables that the loaded checkpoint does not fit.

        A variable that the checkpoint lacks is refused while some values of the checkpoint have no
        variable. Once all its values are in use, further variables are new ones.

        Args:
            divided: partitioned variables, whose shards are among the new ones.

        Raises:
            CheckpointError: a value has another dtype or shape, or a variable has no value; the
                message lists all differences. Or unnamed variables are used in another order.
        """
        origin = self._loaded_checkpoint
        if origin is None:
            return
        known = self._user_variables()
        parts = {piece for pieces in divided.values() for piece in pieces.nodes}
        derived = {node for node, pieces in divided.items() if pieces.derived}
        fresh = {name: node for node, name in names.items() if node not in parts}
        fresh |= {name: node for node, name in self._whole_names(divided).items()}
        check_order({**known, **fresh}, origin)
        unclear = ambiguous_names(fresh, {**known, **fresh}, origin)
        if unclear:
            _log.tell("checkpoint.unnamed", folder=origin.source, variables=list_some(unclear))
        wrong = [name for name in fresh if not self._fits(fresh[name], name)]
        lacking = [
            name
            for name, node in fresh.items()
            if name not in origin.signatures and name not in self._pending and node not in derived
        ]
        if origin.strict and not origin.signatures.keys() <= known.keys():
            wrong += lacking
        if wrong:
            nodes = {**known, **fresh}
            raise mismatch_error(nodes, _signatures(nodes), origin.signatures, wrong, origin.source)
        if lacking:
            _log.tell("checkpoint.partial", folder=origin.source, missing=list_some(lacking))

    def _fits(self, node: Node, name: str) -> bool:
        """Return True unless a waiting value has another dtype or shape than the variable."""
        value = self._pending.get(name)
        return value is None or is_loadable(node, signature(value))

    def assign_home(self, node: Node, device: str) -> None:
        """Note where a variable lives, and send its waiting value there.

        The value stays here until it has arrived, since Ctrl-C may come in between.
        """
        self.homes.setdefault(node, device)
        name = self.names[node]
        if name in self._pending:
            self._write(node, np.asarray(self._pending[name]))
            del self._pending[name]
        elif node not in self._at_home and node in self.mirrors.homes:
            self.mirrors.current.add(node)  # both begin with the initial value
        self._at_home.add(node)

    def _write(self, node: Node, value: Array) -> None:
        """Set a variable and its mirror on their workers."""
        name = self.names[node]
        self._hosts.write(self._worker_of(node), name, value)
        if node in self.mirrors.homes:
            self._hosts.write(worker_of(self.mirrors.homes[node]), MIRROR + name, value)
            self.mirrors.note_current([node])

    def release_homes(self, nodes: Collection[Node]) -> dict[int, list[str]]:
        """Take variables from their homes, and keep their values here.

        Return the names that each worker may forget.
        """
        values = {
            self.names[node]: self._hosts.read(self._worker_of(node), self.names[node])
            for node in nodes
            if node in self._at_home
        }
        leaving: dict[int, list[str]] = {}
        for node in nodes:
            leaving.setdefault(self._worker_of(node), []).append(self.names[node])
            if (mirror := self.mirrors.drop(node)) is not None:
                leaving.setdefault(worker_of(mirror), []).append(MIRROR + self.names[node])
        self._pending.update(values)
        for node in nodes:
            del self.homes[node]
            self._at_home.discard(node)
        return leaving

    def drop(self, nodes: Collection[Node]) -> dict[int, list[str]]:
        """Forget variables that others have replaced, with their values.

        Return the names that each worker may forget.
        """
        leaving: dict[int, list[str]] = {}
        self.mirrors.forget(nodes)
        for node in nodes:
            name = self.names.pop(node, None)
            if name is None:
                continue
            if node in self._at_home:
                leaving.setdefault(self._worker_of(node), []).append(name)
            if (mirror := self.mirrors.drop(node)) is not None:
                leaving.setdefault(worker_of(mirror), []).append(MIRROR + name)
            self._at_home.discard(node)
            self._pending.pop(name, None)
            self.homes.pop(node, None)
            del self.variables[name]
        return leaving

    def is_placed(self, node: Node) -> bool:
        """Return True if a worker holds a variable's value."""
        return node in self._at_home

    def placed_homes(self) -> dict[Node, str]:
        """Return the homes of the variables whose values workers hold."""
        return {node: home for node, home in self.homes.items() if node in self._at_home}

    def _worker_of(self, node: Node) -> int:
        """Return the worker that holds a variable."""
        home = self.homes[node]
        return worker_of(self.holders.get(home, home))

    # Pieces -----------------------------------------------------------------------------------

    def split(self, divided: Mapping[Node, VariableShards]) -> dict[int, list[str]]:
        """Replace variables by their shards, which take over the values.

        Return the names that each worker may forget.
        """
        names = {node: self.names[node] for node in divided if node in self.names}
        names |= self._whole_names(divided)
        known = [node for node in divided if node in self.names]
        values = {n: self._pending[name] for n, name in names.items() if name in self._pending}
        values |= {node: self._value(node) for node in known if node not in values}
        leaving = self.release_homes([node for node in known if node in self._at_home])
        for node, name in names.items():
            if self.names.pop(node, None) is not None:
                del self.variables[name]
            self._pending.pop(name, None)
            self.homes.pop(node, None)
            self.wholes[name] = node
        self.shards.update(divided)
        for node, value in values.items():
            self.set(node, value)
        for node, name in names.items():
            if name in self._pending_copies:
                self._set_copies(node, self._pending_copies.pop(name))
        return leaving

    def move_shards(self, moved: Mapping[Node, VariableShards]) -> None:
        """Note that the shards of variables are other parts now, whose values they have."""
        self.shards.update(moved)
        self.writes += 1

    def _whole_names(self, divided: Mapping[Node, VariableShards]) -> dict[Node, str]:
        """Return names of variables that are partitioned before the session knew them whole."""
        fresh = [node for node in divided if node not in self.shards]
        return self.new_names(sorted(fresh, key=lambda node: node.serial))

    def _user_variables(self) -> dict[str, Node]:
        """Return the user's variables by name; a partitioned one is whole."""
        parts = {piece for pieces in self.shards.values() for piece in pieces.nodes}
        nodes = {name: tensor.node for name, tensor in self.variables.items()}
        return {name: node for name, node in nodes.items() if node not in parts} | self.wholes

    def unnamed_groups(self) -> Groups:
        """Return groups of variables that are numbered because they have no names of their own.

        Each group is in the order in which its variables were created.
        """
        groups: dict[str, list[Node]] = {}
        met = self._user_variables()
        names = {node: name for name, node in met.items() if not node.attrs["named"]}
        for node in sorted(names, key=lambda node: node.serial):
            groups.setdefault(node.name, []).append(node)
        found = [tuple(names[n] for n in group) for group in groups.values() if len(group) > 1]
        waiting = self._loaded_checkpoint.unnamed if self._loaded_checkpoint is not None else ()
        kept = [group for group in waiting if not met.keys() >= {*group}]
        grouped = {name for group in kept for name in group}
        return (*kept, *(group for group in found if grouped.isdisjoint(group)))

    def shard_layouts(self) -> dict[str, tuple[Signature, tuple[VariablePiece, ...]]]:
        """Return for each partitioned variable its signature, and names and spans of its shards."""
        found: dict[str, tuple[Signature, tuple[VariablePiece, ...]]] = {}
        for name, node in self.wholes.items():
            signature = _signature(node)
            pieces = tuple(
                (
                    self._name(piece),
                    tuple(map(_plain_span, spans)),
                )
                for piece, spans in _distinct_shards(self.shards[node]).items()
            )
            found[name] = signature, pieces
        return found

    def _assemble(self, node: Node) -> Array:
        """Return the whole value of a partitioned variable."""
        spec, pieces = node.specs[0], self.shards[node]
        value: Array = np.empty(spec.shape, spec.dtype)
        copies: dict[tuple[Span, ...], list[Node]] = {}
        for piece, spans in _distinct_shards(pieces).items():
            copies.setdefault(spans, []).append(piece)
        for spans, own in copies.items():
            used = own if pieces.independent else own[:1]
            value[index_of(spans, spec.shape)] = mean_of([self._value(piece) for piece in used])
        return value

    def copies(self) -> dict[str, Copies]:
        """Return the copies of the partitioned variables whose copies have values of their own."""
        return {
            name: tuple(
                (spans, self._value(piece)) for piece, spans in _distinct_shards(pieces).items()
            )
            for name, node in self.wholes.items()
            if (pieces := self.shards[node]).independent
        }

    def _set_copies(self, node: Node, copies: Copies) -> None:
        """Give the shards of a variable the values that they had in a checkpoint, if they are the
        same parts; otherwise leave them as they are."""
        pieces = _distinct_shards(self.shards[node])
        if self.shards[node].independent and [*pieces.values()] == [spans for spans, _ in copies]:
            for piece, (_, value) in zip(pieces, copies, strict=True):
                self.set(piece, value.reshape(piece.specs[0].shape))

    # Values -----------------------------------------------------------------------------------

    def get(self, node: Node) -> Array:
        """Return a copy of a variable's value: the initial one if no step has used it.

        Raises:
            CheckpointError: the variable is new, and the loaded checkpoint does not fit it.
            VariableError: it is partitioned, and too large for one array.
        """
        if node in self.shards and (size := nbytes(node.specs[0])) > LARGEST_WHOLE:
            raise VariableError(
                f"variable {node.name!r} (made at {node.location}) has {show_bytes(size)} in "
                f"{len(_distinct_shards(self.shards[node]))} shards, and s.get returns at most "
                f"{show_bytes(LARGEST_WHOLE)} as one array; read rows, "
                "s.run(gf.take(variable, rows, 0)), or write all of it to a folder with s.save"
            )
        if node not in self.names and node not in self.shards:
            self.check_loaded_checkpoint(self.new_names([node]))
        return self._value(node)

    def peek(self, node: Node) -> Array:
        """Return a variable's value as `get` does, but do not note that it is in use."""
        if node in self.names or node in self.shards:
            return self._value(node)
        waiting = self._pending.get(self.new_names([node])[node])
        initial = node.attrs["initial"]
        return np.asarray(waiting) if waiting is not None else np.array(initial())

    def _value(self, node: Node) -> Array:
        if node in self.shards:
            return self._assemble(node)
        name = self._name(node)
        if node in self._at_home:
            return self._hosts.read(self._worker_of(node), name)
        if name in self._pending:
            return fit_rows(node, self._pending[name]).copy()
        initial = node.attrs["initial"]
        return np.array(initial() if callable(initial) else initial)

    def set(self, node: Node, value: StoredValue) -> None:
        """Give a variable, with all its copies, a value that fits it."""
        self.writes += 1
        value = fit_rows(node, value)
        if node in self.shards:
            for piece, spans in _distinct_shards(self.shards[node]).items():
                shape = _signature(piece)[1]
                if isinstance(value, PiecedArray):
                    self.set(piece, value.part(spans).reshape(shape))
                    continue
                part = np.asarray(value)[index_of(spans, node.specs[0].shape)]
                self.set(piece, np.ascontiguousarray(part).reshape(shape))
            return
        name = self._name(node)
        if node in self._at_home:
            self._write(node, np.asarray(value))
        else:
            self._pending[name] = value

    def values(self) -> dict[str, StoredValue]:
        """Return all values by name, also those that were loaded for variables not seen yet.

        Those of large partitioned variables are read from workers when they are looked at.
        """
        values = {name: self._value_by_pieces(n) for name, n in self._user_variables().items()}
        return {**{n: v for n, v in self._pending.items() if n not in self.variables}, **values}

    def value_parts(self, nodes: Sequence[Node]) -> list[StoredValue]:
        """Return the values of variables; those of large partitioned ones are read in parts.

        Raises:
            CheckpointError: one is new, and the loaded checkpoint does not fit it.
        """
        fresh = [node for node in nodes if node not in self.names and node not in self.shards]
        self.check_loaded_checkpoint(self.new_names(fresh))
        return [self._value_by_pieces(node) for node in nodes]

    def _value_by_pieces(self, node: Node) -> StoredValue:
        """Return a value; a large partitioned one stays on the workers, one that waits in files
        stays there."""
        pieces = self.shards.get(node)
        waiting = None if node in self._at_home else self._pending.get(self.names.get(node, ""))
        if isinstance(waiting, PiecedArray) and waiting.nbytes >= PIECED_BYTES:
            return fit_rows(node, waiting)
        if pieces is None or pieces.independent or nbytes(node.specs[0]) < PIECED_BYTES:
            return self._value(node)
        shape, dtype = _signature(node)[1], node.specs[0].dtype
        own = {spans: piece for piece, spans in _distinct_shards(pieces).items()}
        parts = [
            (spans, LazyArray(_signature(piece)[1], dtype, partial(self._value, piece)))
            for spans, piece in own.items()
        ]
        return PiecedArray(shape, dtype, parts)

    def load(self, checkpoint: Checkpoint, source: str, *, strict: bool = True) -> None:
        """Take the values of a checkpoint; those of variables not seen yet wait.

        Args:
            source: where it was read from, for errors.
            strict: require all variables. Otherwise, missing variables keep their values, and
                values that wait since an earlier checkpoint go on waiting.

        Raises:
            CheckpointError: it does not fit the variables; nothing is changed.
        """
        there = checkpoint.signatures
        nodes = self._user_variables()
        origin = LoadedCheckpoint(source, checkpoint.step, there, strict, checkpoint.unnamed)
        check_order(nodes, origin)
        wrong = self._mismatched_names(there, strict)
        if wrong:
            raise mismatch_error(nodes, _signatures(nodes), there, wrong, source)
        lacking = [name for name in nodes if name not in there]
        if lacking:
            _log.tell("checkpoint.partial", folder=source, missing=list_some(lacking))
        if strict:  # values of an earlier checkpoint must not leak into new variables
            self._pending = {n: v for n, v in self._pending.items() if n in self.variables}
        self._loaded_checkpoint = origin
        self.writes += 1
        self._set_by_name(checkpoint)

    def values_beyond(self, checkpoint: Checkpoint) -> dict[str, Array]:
        """Return the values of the variables that a checkpoint lacks, by name."""
        nodes = self._user_variables()
        return {n: self._value(nodes[n]) for n in nodes.keys() - checkpoint.variables.keys()}

    def _mismatched_names(self, there: Mapping[str, Signature], strict: bool) -> list[str]:
        """Return the names of variables that a checkpoint does not fit."""
        return [
            name
            for name, node in self._user_variables().items()
            if (name in there or strict) and not is_loadable(node, there.get(name))
        ]

    def report_loaded(self) -> Loaded | None:
        """Report what is in use of the checkpoint that was loaded last; None if there was none."""
        return (
            self._loaded_checkpoint.report(self._user_variables())
            if self._loaded_checkpoint is not None
            else None
        )

    def _set_by_name(self, checkpoint: Checkpoint) -> None:
        """Set variables by name; values of those not seen yet wait."""
        nodes = self._user_variables()
        for name, value in checkpoint.variables.items():
            if name in nodes:
                self.set(nodes[name], value)
            else:
                self._pending[name] = value
        self._pending_copies = {
            name: copies
            for name, copies in checkpoint.copies.items()
            if name not in nodes or nodes[name] not in self.shards
        }
        for name in checkpoint.copies.keys() - self._pending_copies.keys():
            self._set_copies(nodes[name], checkpoint.copies[name])

    def describe_mismatch(self, there: Mapping[str, Signature], *, strict: bool = True) -> str:
        """Say how a checkpoint differs from the variables so far; "" if it fits."""
        wanted = _signatures(self._user_variables())
        if not self._mismatched_names(there, strict):
            return ""
        return f"{differences(wanted, there)}; {suggest_remedy(wanted, there)}"

    def restore(self, checkpoint: Checkpoint, *, homes: bool) -> None:
        """Return to a checkpoint after all homes were lost; the values wait for new homes.

        Args:
            homes: True if variables will live where they did.
        """
        self.writes += 1
        self._at_home.clear()
        self.holders.clear()
        self.mirrors.clear()
        if not homes:
            self.homes.clear()
        self._pending = {}
        self._set_by_name(checkpoint)

    def worker_signatures(self) -> dict[int, dict[str, Signature]]:
        """Return names, dtypes and shapes of the variables that each worker holds."""
        result: dict[int, dict[str, Signature]] = {}
        for name, tensor in self.variables.items():
            if tensor.node in self._at_home:
                of = result.setdefault(self._worker_of(tensor.node), {})
                of[name] = _signature(tensor.node)
        return result

    def client_values(self) -> dict[str, StoredValue]:
        """Return the values that no worker holds, by name; partitioned variables by shard."""
        here: dict[str, StoredValue] = {
            name: self._value(tensor.node)
            for name, tensor in self.variables.items()
            if tensor.node not in self._at_home
        }
        return {**self._pending, **here}


def _plain_span(span: Span) -> tuple[Any, ...]:
    """Return a span without the entries that have their defaults."""
    if span.ranges:
        return tuple(span)
    return (span.start, span.stop) if span.rows == 1 else (*span[:3],)


def _signature(node: Node) -> Signature:
    """Return the dtype and shape of a variable."""
    spec = node.specs[0]
    return spec.dtype.name, tuple(int(size) for size in spec.shape)


def _signatures(nodes: Mapping[str, Node]) -> dict[str, Signature]:
    """Return dtypes and shapes of variables, by name."""
    return {name: _signature(node) for name, node in nodes.items()}


def _distinct_shards(pieces: VariableShards) -> dict[Node, tuple[Span, ...]]:
    """Return each variable that is a shard once, with its spans."""
    return dict(zip(pieces.nodes, pieces.spans, strict=True))
