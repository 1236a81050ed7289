"""Checks of `graphflow doctor`: what graphflow needs of a machine, each with its remedy."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from graphflow._version import __version__
from graphflow.base.argument_checks import did_you_mean
from graphflow.base.environment import (
    DESCRIPTIONS,
    check_environment,
    given_names,
    is_on,
    setting,
    thread_limit,
)
from graphflow.base.formatting import show_bytes, show_count, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError

OK, WARNING, FAILURE = "ok", "warning", "failure"
_FEW_FILES = 1024  # descriptors
_LOW_MEMORY = 1 << 30
_LOW_DISK = 200 << 20
_SLOW_CLOCK = 1e-6  # seconds a call
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_WORKER_SECONDS = 30.0
_MODULE_OF_BLAS = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS"}


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: its name.
        state: "ok", "warning" (slower or less than it could be) or "failure".
        text: what was found.
        remedy: what to do; "" if nothing is to be done.
    """

    check: str
    state: str
    text: str
    remedy: str = ""


def _check_versions() -> Iterator[Finding]:
    import numpy as np

    text = (
        f"graphflow {__version__}, Python {platform.python_version()}, numpy {np.__version__}, "
        f"pyzmq {version('pyzmq')}, {platform.system()} {platform.machine()}"
    )
    if sys.platform not in ("linux", "darwin"):
        yield Finding(
            "versions", FAILURE, text, "sessions need Linux or macOS; on Windows, use WSL2"
        )
        return
    yield Finding("versions", OK, text)


def _check_environment() -> Iterator[Finding]:
    from graphflow.placement.clusters.machine.machine_devices import default_devices

    try:
        check_environment()
        default_devices()
    except GraphflowError as error:
        yield Finding("environment", FAILURE, str(error), "unset or correct the variable")
        return
    unknown = [name for name in given_names() if name not in DESCRIPTIONS]
    if unknown:
        hints = (did_you_mean(name, DESCRIPTIONS) for name in unknown)
        text = f"graphflow reads no {', '.join(unknown)}"
        yield Finding("environment", WARNING, text, " ".join(filter(None, hints)) or "unset it")
        return
    text = ", ".join(given_names()) or "no GRAPHFLOW_… variable is set"
    yield Finding("environment", OK, text)


def _check_processor() -> Iterator[Finding]:
    from graphflow.placement.clusters.machine.host_facts import (
        cores,
        default_threads,
        host_memory,
        numa_nodes,
    )

    usable, all_cores = cores(), os.cpu_count() or 1
    of_all = "" if usable == all_cores else f" of {all_cores} (affinity or the cgroup's cpu.max)"
    memory = host_memory()
    nodes = numa_nodes()
    of_nodes = f" in {len(nodes)} NUMA nodes" if len(nodes) > 1 else ""
    limit = thread_limit()
    if limit is not None:
        of_nodes += f", {show_count(default_threads(), 'thread')} (OMP_NUM_THREADS={limit})"
    text = f"{show_count(usable, 'core')}{of_all}{of_nodes}, {show_bytes(memory)} of memory"
    if memory < _LOW_MEMORY:
        remedy = "raise the cgroup's memory limit: a worker with numpy and LLVM takes about 100 MiB"
        yield Finding("processor", WARNING, text, remedy)
        return
    yield Finding("processor", OK, text)


def _check_blas() -> Iterator[Finding]:
    import numpy as np
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))  # loads it
    found = [each for each in threadpool_info() if each["user_api"] == "blas"]
    if not found:
        remedy = "install numpy from PyPI or conda, whose BLAS is optimised"
        yield Finding("BLAS", WARNING, "numpy has no known BLAS: products are slow", remedy)
        return
    parts = [
        f"{_MODULE_OF_BLAS.get(each['internal_api'], each['internal_api'])} {each['version']}"
        f"{' for ' + each['architecture'] if each.get('architecture') else ''}"
        for each in found
    ]
    text = ", ".join(parts) + "; graphflow runs it on one thread and splits the work itself"
    forced = setting("OPENBLAS_CORETYPE")
    if forced:
        yield Finding(
            "BLAS", WARNING, f"{text}; OPENBLAS_CORETYPE={forced}",
            "unset OPENBLAS_CORETYPE: it keeps OpenBLAS from this processor's own kernels",
        )  # fmt: skip
        return
    yield Finding("BLAS", OK, text)


def _check_compiler() -> Iterator[Finding]:
    if not is_on("GRAPHFLOW_JIT"):
        yield Finding("LLVM", WARNING, "GRAPHFLOW_JIT=off: numpy computes", "unset GRAPHFLOW_JIT")
        return
    import llvmlite
    import llvmlite.binding as llvm
    import numpy as np

    from graphflow.frontend.builders import placeholder
    from graphflow.ops.pointwise.transcendental import tanh
    from graphflow.sessions.session import Session

    x = placeholder("float32", (None,), name="x")
    fed = np.linspace(-1.0, 1.0, 1000, dtype="float32")
    start = time.perf_counter()
    with Session(devices=["cpu:0"]) as session:
        got = session.run(tanh(x) * 2.0, {x: fed})
    seconds = time.perf_counter() - start
    number = ".".join(map(str, llvm.llvm_version_info))
    text = f"LLVM {number} (llvmlite {llvmlite.__version__}), first step {show_seconds(seconds)}"
    if not np.allclose(got, np.tanh(fed) * 2.0, atol=1e-5):
        remedy = "run `graphflow cache clear`; if that does not help, reinstall llvmlite"
        yield Finding("LLVM", FAILURE, f"{text}: a compiled kernel computed wrong numbers", remedy)
        return
    yield Finding("LLVM", OK, text)


def _check_amx() -> Iterator[Finding]:
    from graphflow.ops.kernels.jit.amx_permission import describe_obstacle, may_use_amx

    if may_use_amx() and is_on("GRAPHFLOW_JIT"):
        yield Finding("AMX", OK, "tiles multiply matrices of bfloat16")
        return
    obstacle = describe_obstacle()
    slow = "products of bfloat16 are computed in float32"
    if obstacle is not None:
        yield Finding("AMX", OK, f"{obstacle}: {slow}")
        return
    switch = "GRAPHFLOW_JIT" if is_on("GRAPHFLOW_AMX") else "GRAPHFLOW_AMX"
    yield Finding("AMX", WARNING, f"{switch}=off: {slow}", f"unset {switch}")


def _check_gpu() -> Iterator[Finding]:
    from graphflow.placement.clusters.machine.machine_devices import find_gpus, has_cupy
    from graphflow.runtime.program.vendor_libraries import describe_gpus

    found = find_gpus()
    if found.names:
        yield Finding("GPU", OK, "; ".join((", ".join(found.names), *describe_gpus())))
        return
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if not has_driver:
        yield Finding("GPU", OK, "no NVIDIA driver: the CPU computes")
    elif not has_cupy():
        remedy = "pip install 'graphflow[gpu]'; if it is there, look at CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", WARNING, f"there is an NVIDIA driver, but {found.reason}", remedy)
    else:
        remedy = "compare `nvidia-smi` with the CUDA version of the installed CuPy"
        yield Finding("GPU", WARNING, f"CuPy finds no GPU: {found.reason}", remedy)


def _check_shared_memory() -> Iterator[Finding]:
    if not is_on("GRAPHFLOW_SHARED_MEMORY"):
        text = "GRAPHFLOW_SHARED_MEMORY=off: workers of one host copy tensors through sockets"
        yield Finding("shared memory", WARNING, text, "unset GRAPHFLOW_SHARED_MEMORY")
        return
    if not hasattr(os, "memfd_create"):
        text = "this system has no memfd_create: workers of one host copy through sockets"
        yield Finding("shared memory", WARNING, text)
        return
    try:
        descriptor = os.memfd_create("graphflow-doctor")
        try:
            os.ftruncate(descriptor, 1 << 20)
            os.pwrite(descriptor, b"1", (1 << 20) - 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        remedy = "allow memfd_create in the container's seccomp profile, or raise its memory limit"
        text = f"a segment cannot be made: {error.strerror}"
        yield Finding("shared memory", WARNING, text, remedy)
        return
    yield Finding("shared memory", OK, "workers of one host hand tensors over without sockets")


def _check_ports() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0):
                pass
    except OSError as error:
        remedy = "bring loopback up (`ip link set lo up`), or open the firewall for it"
        yield Finding("ports", FAILURE, f"loopback does not connect: {error}", remedy)
        return
    yield Finding("ports", OK, "loopback listens and connects")


def _check_workers() -> Iterator[Finding]:
    import numpy as np

    from graphflow.frontend.builders import placeholder
    from graphflow.ir.nodes.scopes import device
    from graphflow.placement.clusters.cluster import Cluster
    from graphflow.sessions.session import Session

    x = placeholder("float32", (), name="x")
    with device("/worker:0"):
        first = x + 1.0
    with device("/worker:1"):
        second = first * 2.0
    start = time.perf_counter()
    try:
        with Session(Cluster.local(workers=2, deadline=_WORKER_SECONDS)) as session:
            value = session.run(second, {x: np.float32(1.0)})
    except GraphflowError as error:
        remedy = "mend the points above first; else look at GRAPHFLOW_LOG_LEVEL=debug"
        yield Finding("workers", FAILURE, str(error).splitlines()[0], remedy)
        return
    seconds = show_seconds(time.perf_counter() - start)
    state = OK if value == 4.0 else FAILURE
    yield Finding("workers", state, f"two local workers ran a step; start to end took {seconds}")


def _check_keys() -> Iterator[Finding]:
    from graphflow.runtime.security.keys import Keyring

    try:
        ring = Keyring()
        own, trusted = ring.pairs(), ring.read_trusted()
        for key in own:
            ring.own_pair(key.name, key.role)
    except GraphflowError as error:
        yield Finding("keys", FAILURE, str(error), "see docs/deployment/security.md")
        return
    if not own and not trusted:
        text = f"none in {ring.folder}; needed beyond this machine only"
    else:
        text = f"{show_count(len(own), 'own key')}, {len(trusted)} trusted, in {ring.folder}"
    yield Finding("keys", OK, text)


def _check_clock() -> Iterator[Finding]:
    from graphflow.runtime.program.span_recorder import reading_nanoseconds

    each = reading_nanoseconds(time.monotonic_ns) / 1e9
    try:
        source = _CLOCK_SOURCE.read_text().strip()
    except OSError:
        source = "unknown source"
    text = f"{source}, {show_seconds(each)} a reading"
    if each > _SLOW_CLOCK:
        remedy = "choose a clock that is read without the kernel: clocksource=tsc at boot"
        yield Finding("clock", WARNING, f"{text}: traces and small steps are slower", remedy)
        return
    yield Finding("clock", OK, text)


def _check_cache() -> Iterator[Finding]:
    from graphflow.ops.kernels.jit.object_cache import ObjectCache, cache_folder
    from graphflow.placement.calibration.profile_file import profile_path

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}): each process compiles anew"
        yield Finding("cache", WARNING, text, "set GRAPHFLOW_CACHE to a folder that you can write")
        return
    usage = ObjectCache().usage()
    text = f"{show_count(usage.entries, 'compiled kernel')} in {folder}, {show_bytes(free)} free"
    if free < _LOW_DISK:
        yield Finding("cache", WARNING, text, "free some space, or set GRAPHFLOW_CACHE elsewhere")
        return
    yield Finding("cache", OK, text)
    if profile_path().exists():
        yield Finding("calibration", OK, f"measured, {profile_path().name}")
    else:
        remedy = "`graphflow calibrate` measures it now; else the first plan does"
        yield Finding("calibration", OK, "this machine is not measured yet", remedy)


def _check_limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{files if files != resource.RLIM_INFINITY else 'any number of'} open files"
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        remedy = f"ulimit -n {min(4096, most) if most > 0 else 4096}: a worker takes four a peer"
        yield Finding("ulimit", WARNING, text, remedy)
    elif space != resource.RLIM_INFINITY:
        text += f", {show_bytes(space)} of address space"
        yield Finding("ulimit", WARNING, text, "ulimit -v unlimited: maps count, not only memory")
    else:
        yield Finding("ulimit", OK, text)


def _check_cgroup() -> Iterator[Finding]:
    folder = Path("/sys/fs/cgroup")
    if not (folder / "cgroup.controllers").exists():
        text = "no cgroup of version 2: limits of a container around this process are not seen"
        yield Finding("cgroup", OK, text)
        return
    told = []
    for name in ("cpu.max", "memory.max", "pids.max"):
        try:
            told.append(f"{name} {(folder / name).read_text().strip()}")
        except OSError:
            continue
    yield Finding("cgroup", OK, ", ".join(told) or "no limits")


CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("versions", _check_versions),
    ("environment", _check_environment),
    ("processor", _check_processor),
    ("cgroup", _check_cgroup),
    ("ulimit", _check_limits),
    ("BLAS", _check_blas),
    ("LLVM", _check_compiler),
    ("AMX", _check_amx),
    ("GPU", _check_gpu),
    ("clock", _check_clock),
    ("cache", _check_cache),
    ("keys", _check_keys),
    ("shared memory", _check_shared_memory),
    ("ports", _check_ports),
    ("workers", _check_workers),
)
"""The checks in the order in which they run: later ones need what earlier ones look at."""


def run_checks() -> Iterator[Finding]:
    """Run all checks. One that raises is a failure and does not end the others."""
    for name, check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            remedy = "this check should not fail so: please report it"
            yield Finding(name, FAILURE, f"{type(error).__name__}: {error}", remedy)
