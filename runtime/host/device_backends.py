"""The backend of each kind of device. CuPy is loaded only if a GPU is named."""

from __future__ import annotations

from graphflow.ir.device_name import DeviceName
from graphflow.runtime.memory.backend import CpuBackend, DeviceBackend


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
