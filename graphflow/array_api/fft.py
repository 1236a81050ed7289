"""The extension `fft` of the array API standard: the functions of `gf.fft`."""

from __future__ import annotations

from typing import Any

from graphflow.array_api.creation import pin_to
from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError
from graphflow.ir.op import Tensor
from graphflow.ops.spectral import fft as ours
from graphflow.ops.spectral.fft import (
    fft,
    fftn,
    fftshift,
    hfft,
    ifft,
    ifftn,
    ifftshift,
    ihfft,
    irfft,
    irfftn,
    rfft,
    rfftn,
)


@checks_argument_names(ArgumentError)
def fftfreq(n: Any, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Tensor:
    """Return the frequency of each element of an `fft` of n samples."""
    with pin_to(device):
        return ours.fftfreq(n, d, dtype or "float32")


@checks_argument_names(ArgumentError)
def rfftfreq(n: Any, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Tensor:
    """Return the frequency of each element of an `rfft` of n samples."""
    with pin_to(device):
        return ours.rfftfreq(n, d, dtype or "float32")


__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft",
    "irfftn", "rfft", "rfftfreq", "rfftn",
]  # fmt: skip
