"""The variables of one session on a host: their memory on each device, and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.process.memory_pages import PrivatePages
from graphflow.errors import SessionError, VariableError
from graphflow.init import Initializer
from graphflow.ir.spec import TensorSpec, as_dtype, nbytes
from graphflow.ops.kernels.jit.kept_layouts import DeviceLayouts
from graphflow.runtime.host.device_backends import DeviceBackends
from graphflow.runtime.memory.backend import DeviceBackend
from graphflow.runtime.partitioning.partition import Partition

Array = np.ndarray[Any, Any]

MIRROR = "<mirror>/"
"""Prefix of the name under which a host keeps the mirror of another host's variable.

Checkpoints hold no mirrors."""


class HostVariables:
    """One session's variables on this host, by device and name.

    Attributes:
        layouts: the layouts of each device's variables that kernels keep, discarded where a method
            changes variables. A program that commits discards those of the variables it assigns.

    Raises:
        VariableError: a method is given a variable that has no value here, or a value of another
            shape or dtype.
    """

    def __init__(self, worker: int, backends: DeviceBackends) -> None:
        self._worker = worker
        self._backends = backends
        self._by_device: dict[str, dict[str, Any]] = {device: {} for device in backends}
        self.layouts = {device: DeviceLayouts() for device in backends}
        self._private = PrivatePages()

    def add_device(self, device: str) -> None:
        self._by_device[device] = {}
        self.layouts[device] = DeviceLayouts()

    def of_device(self, device: str) -> dict[str, Any]:
        """Return the variables of a device by name; programs read and replace them there."""
        return self._by_device[device]

    def close(self) -> None:
        self._by_device.clear()
        self._private = PrivatePages()

    def create(self, partitions: Sequence[Partition]) -> None:
        """Create the variables of partitions that are new here: all of them, or none.

        Raises:
            SessionError: this worker has no such device.
        """
        fresh = {}
        for partition in partitions:
            if partition.device not in self._backends:
                raise SessionError(f"worker {self._worker} has no device {partition.device}")
            fresh[partition.device] = self._new_variables(partition)
        for device, variables in fresh.items():
            self._by_device[device].update(variables)

    def _new_variables(self, partition: Partition) -> dict[str, Any]:
        """Return the partition's variables that are new here, with their initial values."""
        mine = self._by_device[partition.device]
        backend = self._backends[partition.device]
        fresh = {}
        for node in partition.graph.variables:
            if node.name in mine:
                _check_signature(
                    node.name, mine[node.name], node.specs[0].shape, node.specs[0].dtype
                )
            else:
                fresh[node.name] = self._initial_value(backend, node.attrs["initial"])
        return fresh

    def _initial_value(self, backend: DeviceBackend, initial: Any) -> Any:
        """Return memory with an initial value, which is drawn in place where the host can."""
        if not isinstance(initial, Initializer) or backend.xp is not np:
            return self._allocate(backend, initial() if callable(initial) else initial)
        spec = TensorSpec(initial.shape, as_dtype(initial.dtype))
        memory = backend.empty(nbytes(spec)).view(spec.dtype).reshape(initial.shape)
        initial.fill(memory)
        return memory

    def _allocate(self, backend: DeviceBackend, value: Array) -> Any:
        shared = self._private.array(value) if backend.xp is np else None
        if shared is not None:
            return shared
        memory = backend.empty(value.nbytes).view(value.dtype).reshape(value.shape)
        backend.write(memory, value)
        return memory

    def read(self, variable: str) -> Array:
        """Return a copy of a variable's value, in the memory for results."""
        device, value = self._find(variable)
        backend = self._backends[device]
        return backend.to_hosts((value,), backend.export_result)[0]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the variables on each device."""
        return {
            device: sum(value.nbytes for value in list(mine.values()))
            for device, mine in self._by_device.items()
        }

    def snapshot(self) -> dict[str, Array]:
        """Return copies of all values but those of mirrors, by name."""
        return {
            name: self._backends[device].to_host(value)
            for device, variables in self._by_device.items()
            for name, value in variables.items()
            if not name.startswith(MIRROR)
        }

    def write(self, variable: str, value: Array) -> None:
        """Give a variable a value of its shape and dtype."""
        device, current = self._find(variable)
        _check_signature(variable, current, value.shape, value.dtype)
        self.layouts[device].clear([variable])
        self._backends[device].write(current, value)

    def adopt(self, moved: Mapping[str, str], copied: Mapping[str, str]) -> None:
        """Give variables other names. Names that were moved before stay, so it can be repeated.

        No loaded program may use the variables.
        """
        for layouts in self.layouts.values():
            layouts.clear([*moved, *copied])
        for name, old in moved.items():
            if any(old in mine for mine in self._by_device.values()):
                device, value = self._find(old)
                del self._by_device[device][old]
                self._by_device[device][name] = value
            else:
                self._find(name)
        for name, source in copied.items():
            device, value = self._find(source)
            copy = self._backends[device].to_host(value)
            self._by_device[device][name] = self._allocate(self._backends[device], copy)

    def _find(self, variable: str) -> tuple[str, Any]:
        for device, variables in self._by_device.items():
            if variable in variables:
                return device, variables[variable]
        raise VariableError(f"variable {variable!r} has no value on worker {self._worker} yet")

    def forget(self, variables: Sequence[str]) -> None:
        """Free the memory of variables."""
        for mine in self._by_device.values():
            for name in variables:
                mine.pop(name, None)


def _check_signature(variable: str, current: Any, shape: Sequence[Any], dtype: Any) -> None:
    if current.shape != shape or current.dtype != dtype:
        raise VariableError(
            f"variable {variable!r} is {current.dtype}{current.shape}, not {dtype}{shape}"
        )
