"""Arrays of other libraries as numpy arrays: masked, sparse, or on another device.

All values of users pass through `array_of`: feeds, constants, initial values, values for variables,
and results of host calls.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
_NUMBERS = {bool, int, float, complex}
_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 14: "oneAPI"}
"""Devices whose memory numpy cannot read, by DLPack's number (dlpack.h, DLDeviceType)."""


class NoArrayError(TypeError):
    """A value cannot become an array of numbers. The text is a noun phrase: what it is, and the
    remedy."""


def array_of(value: Any) -> Array:
    """Return a value as an array, through `__array__`, the buffer protocol or DLPack.

    Arrays of other libraries in host memory are not copied: the result is a view of theirs.

    Raises:
        NoArrayError: the value is no array, or some of its elements are masked or missing.
    """
    if type(value) is np.ndarray:
        return value
    _check_masks(value)
    if hasattr(value, "tocsr") and hasattr(value, "toarray"):
        raise NoArrayError(f"a sparse matrix ({type(value).__name__}); give value.toarray()")
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            array: Array = np.from_dlpack(value)
        elif str(getattr(value, "dtype", "")) == "torch.bfloat16":  # numpy has no such dtype
            array = np.asarray(value.view(sys.modules["torch"].int16)).view(ml_dtypes.bfloat16)
        else:
            array = np.asarray(value)
    except MemoryError:
        raise
    except Exception as cause:  # raised by the value's own methods
        where = _device_of(value)
        why = f"an array on {where}" if where else f"no array: {str(cause)[:300].rstrip('.')}"
        raise NoArrayError(f"{why}; {_remedy(value, bool(where))}") from cause
    if array.dtype == object and hasattr(value, "to_numpy"):
        raise NoArrayError(
            f"a {type(value).__name__} of {_columns(value)}, which numpy holds as objects; give "
            "value.to_numpy(dtype), or value.to_numpy(dtype, na_value=…) where values are missing"
        )
    return array


def is_foreign(value: Any) -> bool:
    """Return True for an array or matrix of any library, numpy's included."""
    return any(hasattr(value, name) for name in ("__array__", "__dlpack__", "toarray"))


def cast_in_range(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in another dtype.

    Raises:
        OverflowError: a finite element is out of the range of that dtype.
    """
    if array.dtype.kind in "iu" and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype):
        result = array.astype(dtype)
        beyond = (result != array) | ((result < 0) != (array < 0))
    else:
        try:  # the processor's overflow flag costs nothing to check
            with np.errstate(over="raise", under="ignore", invalid="ignore"):
                return array.astype(dtype)
        except FloatingPointError:
            with np.errstate(all="ignore"):
                result = array.astype(dtype)
            beyond = np.asarray(np.isfinite(array) & ~np.isfinite(result))
    if beyond.any():
        index = tuple(int(i) for i in np.argwhere(beyond)[0])
        where = f" at index {index}" if index else ""
        raise OverflowError(f"{array[index]!s}{where} is out of the range of {dtype}")
    return result


def _check_masks(value: Any) -> None:
    """Refuse masked arrays, and lists of them, if an element is masked."""
    if isinstance(value, np.ma.MaskedArray):
        count = int(np.count_nonzero(np.ma.getmaskarray(value)))
        if count:
            raise NoArrayError(
                f"a masked array with {count} of {value.size} elements masked; give "
                "value.filled(…) with the number to use for these"
            )
    elif type(value) in (list, tuple) and not set(map(type, value)) <= _NUMBERS:
        for item in value:
            _check_masks(item)


def _device_of(value: Any) -> str:
    """Return the device of an array whose memory numpy cannot read; "" for all other values."""
    try:
        kind, index = value.__dlpack_device__()
        return f"{_DEVICES[int(kind)]} device {index}"
    except Exception:  # raised by the value's own method, or it has none
        return ""


def _remedy(value: Any, on_device: bool) -> str:
    steps = ".detach()" if getattr(value, "requires_grad", False) is True else ""
    if on_device:
        # torch's and CuPy's names; others have numpy's function, which asks for a copy
        found = next((f".{name}()" for name in ("cpu", "get") if hasattr(value, name)), "")
        if not found:
            return "copy it to host memory, and give the copy"
        steps += found
    return f"give value{steps}" if steps else "give an array"


def _columns(value: Any) -> str:
    """Name the dtypes of a data frame or a series."""
    dtypes = getattr(value, "dtypes", getattr(value, "dtype", "?"))
    named = dtypes.items() if hasattr(dtypes, "items") else ()
    return ", ".join(f"{n}: {d}" for n, d in list(named)[:8]) or f"dtype {dtypes}"
