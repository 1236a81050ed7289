"""Other systems, imitated: a macOS without Linux's calls runs with the same bits; Windows plans;
registers of four lanes, as ARM has, give right values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import ROOT

MACOS = """
import os, select, signal, sys, types
import llvmlite.binding, threadpoolctl  # they look for this system's libraries

llvmlite.binding.ffi.lib.LLVMPY_AddSymbol
threadpoolctl.sys = types.SimpleNamespace(**vars(sys))
sys.platform = "darwin"
missing = {
    os: "memfd_create pidfd_open eventfd eventfd_read eventfd_write sched_getaffinity "
        "sched_setaffinity sched_getcpu posix_fadvise splice copy_file_range",
    select: "epoll",
    signal: "pidfd_send_signal",
}
for module, names in missing.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
TRAINING = """
import sys
import numpy as np
import graphflow as gf

x = gf.placeholder("float32", (None, 64), name="x")
w = gf.variable(gf.init.glorot((64, 8)), name="w")
loss = gf.mean((x @ w) ** 2)
train = gf.optim.Adam(1e-3).minimize(loss, strategy=gf.parallel.Data(2))
rows = np.linspace(0, 1, 640, dtype="float32").reshape(10, 64)
for cluster in (gf.Cluster.here(["cpu:0", "cpu:1"], threads=1), gf.Cluster.local(2, threads=1)):
    with gf.Session(cluster) as s:
        for _ in range(5):
            value, _ = s.run([loss, train], {x: rows})
        assert all(each.state == "up" for each in s.workers)
        print(value.tobytes().hex(), s.get(w).tobytes().hex())
print(sys.platform, file=sys.stderr)
"""
WINDOWS = '''
import sys

class Missing:
    """Refuses to import what Windows lacks."""

    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pwd", "grp"):
            raise ImportError(f"No module named {name!r}")

import ctypes, os, signal
import highspy, llvmlite.binding, networkx, numpy as np, rich.console, threadpoolctl, zmq

sys.meta_path.insert(0, Missing())
libraries = threadpoolctl.ThreadpoolController()
threadpoolctl.ThreadpoolController = lambda: libraries

class windll:
    class kernel32:
        def GetPhysicallyInstalledSystemMemory(kilobytes):
            kilobytes._obj.value = 16 << 20

ctypes.windll = windll
sys.platform = "win32"
for module, names in (
    (os, "fork getuid geteuid getgroups sysconf statvfs memfd_create sched_getaffinity"),
    (signal, "SIGKILL SIGHUP SIGSTOP pthread_sigmask SIG_BLOCK"),
):
    for name in names.split():
        delattr(module, name)

import graphflow as gf

x = gf.placeholder("float32", (None, 64), name="x")
w = gf.variable(gf.init.glorot((64, 8)), name="w")
loss = gf.mean((x @ w) ** 2)
train = gf.optim.Adam(1e-3).minimize(loss)
plan = gf.plan([loss, train], gf.Cluster.hypothetical("4xh100"), shapes={x: (128, 64)})
print("planned", plan.makespan > 0)
try:
    gf.Session()
except gf.errors.SessionError as error:
    print(error)
'''

FOUR_LANES = """
import llvmlite.binding

find = llvmlite.binding.get_host_cpu_features

def narrow():
    features = find()
    for name in features:
        if name.startswith(("avx", "amx", "vaes", "vpclmul")) and name != "avx":
            features[name] = False
    return features

llvmlite.binding.get_host_cpu_features = narrow
llvmlite.binding.get_host_cpu_name = lambda: "generic"
"""
FOLDERS = [
    str(path.relative_to(ROOT))
    for path in sorted([*ROOT.glob("tests/ops/*"), *ROOT.glob("tests/ops/kernels/*")])
    if path.name.startswith("test_")
    or (path.is_dir() and path.name not in ("kernels", "__pycache__"))
]
TESTS = """
import sys
import pytest
from graphflow.ops.kernels.jit.compiler import vector_width

assert vector_width() == 4
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def run(
    program: str, folder: Path, site: str = "", *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process whose `sitecustomize` is given; workers inherit it."""
    (folder / "sitecustomize.py").write_text(site)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=600 if arguments else 110, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux")
def test_a_system_without_linuxs_calls_trains_with_the_same_bits(tmp_path: Path) -> None:
    mac, linux = run(TRAINING, tmp_path, MACOS), run(TRAINING, tmp_path)
    assert mac.returncode == 0 == linux.returncode, mac.stderr + linux.stderr
    assert mac.stderr.split()[-1] == "darwin" and linux.stderr.split()[-1] == "linux"
    assert mac.stdout == linux.stdout and len({*mac.stdout.split()}) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="removes what Windows lacks")
def test_windows_builds_and_plans_and_is_told_where_sessions_run(tmp_path: Path) -> None:
    done = run(WINDOWS, tmp_path)
    assert done.returncode == 0, done.stderr
    planned, refused = done.stdout.splitlines()
    assert planned == "planned True"
    assert "needs Linux or macOS" in refused and "WSL2" in refused


def check_tests_on_four_lanes(folder: Path, *arguments: str) -> None:
    done = run(TESTS, folder, FOUR_LANES, *arguments)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_registers_of_four_lanes_choose_kernels_that_give_right_values(tmp_path: Path) -> None:
    names = ("conv/test_kernel_table.py", "conv/test_strided_view.py", "codegen")
    check_tests_on_four_lanes(tmp_path, *(f"tests/ops/kernels/{name}" for name in names))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", FOLDERS)
def test_all_tests_of_ops_pass_on_four_lanes(part: str, tmp_path: Path) -> None:
    check_tests_on_four_lanes(tmp_path, part)
