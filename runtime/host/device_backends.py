"""The backends of a session's devices. CuPy is loaded only if a program runs on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphflow.base.process.interrupts import is_interrupt
from graphflow.errors import DeviceError
from graphflow.ir.device_name import DeviceName
from graphflow.runtime.memory.backend import CpuBackend, DeviceBackend, ResultExporter


class DeviceBackends:
    """The backends of devices. A GPU is opened when it is first used.

    Its context takes part of a second and some hundred MB, in each process. A worker that offers
    GPUs to sessions which use its CPU does without.

    Args:
        devices: full names, "/worker:0/cpu:0".
        threads: threads that share a kernel's work on a CPU.
    """

    def __init__(self, devices: Sequence[str], threads: int) -> None:
        self._names = list(devices)
        self._export: ResultExporter | None = None
        self._opened: dict[str, DeviceBackend] = {
            name: CpuBackend(threads) for name in devices if DeviceName.parse(name).kind == "cpu"
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, device: str) -> DeviceBackend:
        """Return the backend of a device.

        Raises:
            DeviceError: the device is a GPU, and CuPy or the GPU is missing or fails.
        """
        if device not in self._opened:
            opened = backend_for(DeviceName.parse(device), threads=1)
            opened.export_result = self._export
            self._opened[device] = opened
        return self._opened[device]

    def open_gpu(self, device: str) -> int:
        """Open a further device, a GPU, and return how many bytes of its memory are free.

        Raises:
            DeviceError: it cannot be opened, or does not compute. It is no device then.
        """
        from graphflow.runtime.gpu.gpu_backend import GpuBackend

        known = self._opened.get(device)  # from a call that Ctrl-C ended
        if isinstance(known, GpuBackend):
            return known.try_out()
        opened = GpuBackend(DeviceName.parse(device).index or 0)
        try:
            free = opened.try_out()
        except Exception as error:  # raised by CuPy, its compiler, or libraries that it loads
            opened.close()
            if is_interrupt(error):
                raise
            raise DeviceError(f"{device} does not compute: {type(error).__name__}: {error}") from (
                error
            )
        self._opened[device] = opened
        self._names.append(device)
        return free

    def set_result_memory(self, keep: ResultExporter | None) -> None:
        """Set the memory for results of steps and of reads."""
        self._export = keep
        for backend in self._opened.values():
            backend.export_result = keep

    def close(self) -> None:
        """Close the backends that were opened."""
        for backend in self._opened.values():
            backend.close()


def backend_for(device: DeviceName, threads: int) -> DeviceBackend:
    """Make the backend of a device.

    Args:
        device: full name of the device.
        threads: threads that share a kernel's work on a CPU.

    Raises:
        DeviceError: the device is a GPU, and CuPy or the GPU is missing.
    """
    if device.kind == "gpu":
        from graphflow.runtime.gpu.gpu_backend import GpuBackend

        return GpuBackend(device.index or 0)
    return CpuBackend(threads)
