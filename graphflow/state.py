"""State: the variables of a session. Their names, where each lives, and values that wait until a
home takes them.

A variable has a name from when the session first meets it, a home from when it is first placed, and
a value there from when the workers have a program that reads it. What it is set to before that
waits here, and so does what moves.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.compiled import worker_of
from graphflow.errors import CheckpointError, VariableError
from graphflow.op import Node, Tensor
from graphflow.runtime.checkpoint import Checkpoint
from graphflow.runtime.hosts import Hosts
from graphflow.spec import show_shape

Array = np.ndarray[Any, Any]


class State:
    """Variables by name, by home, and by value.

    Attributes:
        names: of the variables, unique in the session.
        variables: the same, by name.
        homes: the device on which each one lives, or will.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.names: dict[Node, str] = {}
        self.variables: dict[str, Tensor] = {}
        self.homes: dict[Node, str] = {}
        self._hosts = hosts
        self._loaded: set[Node] = set()  # variables that their home holds
        self._pending: dict[str, Array] = {}

    # Names ------------------------------------------------------------------------------------

    def new_names(self, nodes: Sequence[Node]) -> dict[Node, str]:
        """Names, unique in this session, of the variables that it does not know yet."""
        names: dict[Node, str] = {}
        fresh = [node for node in nodes if node not in self.names]
        if not fresh:
            return names
        taken = {name: tensor.node for name, tensor in self.variables.items()}
        numbers: dict[str, int] = {}  # the last one tried for each name: thousands may share it
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
        """Keep names that `new_names` gave."""
        for node, name in names.items():
            self.names[node] = name
            self.variables[name] = node.outputs[0]

    def _name(self, node: Node) -> str:
        """The variable's name in this session."""
        self.register(self.new_names([node]))
        return self.names[node]

    # Homes ------------------------------------------------------------------------------------

    def check(self, names: Mapping[Node, str]) -> None:
        """Refuse variables for which a value of another kind waits.

        Raises:
            CheckpointError: one was loaded that does not fit.
        """
        for node, name in names.items():
            if name in self._pending:
                _check_value(node, name, self._pending[name])

    def settle(self, node: Node, device: str) -> None:
        """Note where a variable lives, and give it the value that it was set to before."""
        home = self.homes.setdefault(node, device)
        self._loaded.add(node)
        pending = self._pending.pop(self.names[node], None)
        if pending is not None:
            self._hosts.write(worker_of(home), self.names[node], pending)

    def unsettle(self, nodes: Collection[Node]) -> dict[int, list[str]]:
        """Take variables from their homes; their values wait here. What each worker may forget."""
        values = {
            self.names[node]: self._hosts.read(worker_of(self.homes[node]), self.names[node])
            for node in nodes
        }
        leaving: dict[int, list[str]] = {}
        for node in nodes:
            leaving.setdefault(worker_of(self.homes[node]), []).append(self.names[node])
        self._pending.update(values)
        for node in nodes:
            del self.homes[node]
            self._loaded.discard(node)
        return leaving

    # Values -----------------------------------------------------------------------------------

    def get(self, node: Node) -> Array:
        """A copy of a variable's value: its initial one if no step has used it."""
        name = self._name(node)
        if node in self._loaded:
            return self._hosts.read(worker_of(self.homes[node]), name)
        if name in self._pending:
            _check_value(node, name, self._pending[name])
            return self._pending[name].copy()
        initial = node.attrs["initial"]
        return np.array(initial() if callable(initial) else initial)

    def set(self, node: Node, value: Array) -> None:
        """Give a variable a value that fits it."""
        name = self._name(node)
        if node in self._loaded:
            self._hosts.write(worker_of(self.homes[node]), name, value)
        else:
            self._pending[name] = value

    def values(self) -> dict[str, Array]:
        """All of them by name, also of variables that were loaded and not met yet."""
        values = {name: self.get(tensor.node) for name, tensor in self.variables.items()}
        return {**self._pending, **values}

    def load(self, checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> None:
        """Take the values of a checkpoint; those of variables not met yet, when they are.

        Args:
            folder: where it was read from, for errors.

        Raises:
            CheckpointError: it does not fit the variables; nothing is changed.
        """
        missing = sorted(set(self.variables) - set(checkpoint.variables))
        if missing:
            raise CheckpointError(
                f"checkpoint {folder} has no value for {', '.join(missing)}; it has "
                f"{', '.join(sorted(checkpoint.variables))}"
            )
        for name, tensor in self.variables.items():
            _check_value(tensor.node, name, checkpoint.variables[name])
        for name, value in checkpoint.variables.items():
            known = self.variables.get(name)
            if known is not None and known.node in self._loaded:
                self._hosts.write(worker_of(self.homes[known.node]), name, value)
            else:
                self._pending[name] = value


def _check_value(node: Node, name: str, value: Array) -> None:
    """Refuse a checkpoint's value that does not fit the variable."""
    spec = node.specs[0]
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise CheckpointError(
            f"variable {name!r} (made at {node.location}) is {spec}, but in the checkpoint it is "
            f"{value.dtype}{show_shape(value.shape)}; load one of this model, or set the variable"
        )
