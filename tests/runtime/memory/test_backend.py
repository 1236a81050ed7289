from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import DeviceError, MemoryLimitError
from graphflow.ir.device_name import DeviceName
from graphflow.ops.kernels.jit.array_address import ALIGNMENT
from graphflow.ops.kernels.jit.thread_pool import current_pool
from graphflow.runtime.host.device_backends import backend_for
from graphflow.runtime.memory.backend import CpuBackend


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@given(st.integers(1, 5000))
def test_memory_is_aligned_and_of_the_size_that_was_asked(nbytes: int) -> None:
    memory = CpuBackend().empty(nbytes)
    assert memory.nbytes == nbytes
    assert address(memory) % ALIGNMENT == 0


def test_more_memory_than_there_is_becomes_an_error_that_says_how_much() -> None:
    with pytest.raises(MemoryLimitError, match=r"cannot allocate 1e\+09 GB"):
        CpuBackend().empty(10**18)
    with pytest.raises(MemoryLimitError, match=r"cannot allocate \S+ GB"):
        CpuBackend().empty(2**63 - 1 - ALIGNMENT)


def test_an_aligned_array_is_used_as_it_is_and_any_other_is_copied() -> None:
    backend = CpuBackend()
    aligned = backend.empty(400).view(np.float32)
    aligned[:] = np.arange(100)
    assert backend.to_device(aligned) is aligned
    for other in (aligned[1:], aligned[::2], aligned[:16].reshape(4, 4).T):
        copy = backend.to_device(other)
        assert copy is not other
        assert copy.flags.c_contiguous
        assert address(copy) % ALIGNMENT == 0
        assert (copy == other).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (3,)])
def test_scalars_and_empty_arrays_get_in_and_out(shape: tuple[int, ...]) -> None:
    backend = CpuBackend()
    array = np.full(shape, 7, np.int16)
    assert np.array_equal(backend.to_host(backend.to_device(array)), array)


def test_what_comes_out_belongs_to_the_caller() -> None:
    backend = CpuBackend()
    array = np.arange(6.0).reshape(2, 3).T
    out = backend.to_host(array)
    assert not np.shares_memory(out, array)
    assert out.flags.c_contiguous and out.flags.writeable


def test_blas_keeps_to_one_thread_while_a_program_runs_and_is_restored() -> None:
    """In a process of its own, where numpy's BLAS is the only one: scipy brings another."""
    done = subprocess.run(
        [sys.executable, "-c", BLAS_THREADS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1", "2"]


BLAS_THREADS = """
from threadpoolctl import threadpool_info, threadpool_limits
from graphflow.runtime.memory.backend import CpuBackend

def show():
    print(*{i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"})

with threadpool_limits(2, "blas"):
    with CpuBackend().active():
        with CpuBackend().active():
            show()
        show()
    show()
"""


def test_a_program_s_kernels_share_the_threads_of_its_device() -> None:
    backend = CpuBackend(3)
    before = current_pool()
    with backend.active():
        pool = current_pool()
        assert pool is not None
        assert pool.threads == 3
    assert current_pool() is before
    backend.close()


def test_the_threads_of_a_closed_device_have_ended() -> None:
    before = set(threading.enumerate())
    backend = CpuBackend(3)
    assert len(set(threading.enumerate()) - before) == 2
    backend.close()
    assert set(threading.enumerate()) <= before


def test_a_gpu_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"pip install 'graphflow\[gpu\]'"):
        backend_for(DeviceName.parse("/worker:0/gpu:0"), 1)
