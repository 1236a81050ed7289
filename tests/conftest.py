"""Shared by all tests: which tests run by default, how hypothesis draws, and common fixtures."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.shared_fork_servers import SharedForkServers

# Examples are the same on every run and machine, and have no deadline. More of them would find
# nothing new on later runs. To look for new ones: pytest --hypothesis-profile=explore
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _PATIENT, derandomize=True, max_examples=40)
settings.register_profile("ci", _PATIENT, derandomize=True, max_examples=40)
settings.register_profile("slow", _PATIENT, derandomize=True, max_examples=100)
settings.register_profile("explore", _PATIENT, derandomize=False, max_examples=1000)
settings.load_profile("default")

# Tests start hundreds of processes, which must not compile the package anew each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Measurements on a machine that is busy with tests must not reach the user's own cache: after such
# a run, the demo was predicted to take three times as long as it does. Kernels stay for the next.
os.environ.setdefault(
    "GRAPHFLOW_CACHE", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "graphflow")
)

# A plain session takes a GPU where there is one and where that is faster. Tests compare bits, so
# they run on the CPU unless they name a device.
os.environ.setdefault("GRAPHFLOW_DEVICES", "cpu:0")

# A background job of a shell ignores Ctrl-C, and its children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Thresholds of cycle collection: with Python's 700, collections took a twelfth of the time of tests
# that build graphs.
_RARELY = 20_000, 10, 10

_ON_REQUEST = {
    "browser": "drives a real browser: run with --run-browser",
    "slow": "takes more than about ten seconds: run with --run-slow",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("graphflow")
    group.addoption("--run-gpu", action="store_true", help="run gpu tests even if no GPU is found")
    for marker in _ON_REQUEST:
        group.addoption(f"--run-{marker}", action="store_true", help=f"run {marker} tests as well")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--run-slow") and not config.getoption("hypothesis_profile", None):
        settings.load_profile("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Pause cycle collection while tests are collected, and exempt the collected objects later.

    They are millions of objects that live to the end. Scanning them again and again took a minute.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*_RARELY)
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def freeze_objects() -> Iterator[None]:
    """Exempt what a file's tests leave behind (kernels, caches, reports) from cycle collection.

    A full collection took 0.3 s late in a run; collections were a seventh of the time of all tests.
    """
    yield
    gc.freeze()


@cache
def _why_no_gpu() -> str | None:
    """Return why GPU tests cannot run; None if CuPy finds a device."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "CuPy is not installed (pip install 'graphflow[gpu]')"
    except Exception as error:
        return f"CuPy finds no device ({error})"
    return None if count else "CuPy finds no device"


def _skip_most_cases(items: list[pytest.Item]) -> None:
    """Mark all but each n-th case of a test that is marked with `every(n)` as slow."""
    counts: Counter[str] = Counter()
    for item in items:
        if marker := item.get_closest_marker("every"):
            test = item.nodeid.partition("[")[0]
            if counts[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[test] += 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a request or a GPU: of each test, one such case is reported and none runs."""
    without_gpu = None if config.getoption("--run-gpu") else _why_no_gpu()
    _skip_most_cases(items)
    reported: set[str] = set()
    kept, dropped = [], []
    for item in items:
        reason = _reason_to_skip(item, without_gpu)
        test = item.nodeid.partition("[")[0]
        if reason and test in reported:
            dropped.append(item)
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
            reported.add(test)
        kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


def _reason_to_skip(item: pytest.Item, without_gpu: str | None) -> str | None:
    """Return why a test does not run here; None if it does. `without_gpu` says why no GPU is."""
    if item.get_closest_marker("gpu") and without_gpu is not None:
        return f"{without_gpu}: force with --run-gpu"
    for marker, reason in _ON_REQUEST.items():
        if item.get_closest_marker(marker) and not item.config.getoption(f"--run-{marker}"):
            return reason
    return None


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    """Give each test its own random streams, so that its draws do not depend on earlier tests."""
    from graphflow import random

    with random.seed(0):
        yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test an empty cache folder: no kernels, and nothing learned from steps.

    Only the measured speed of this machine is copied, since measuring it takes seconds.
    """
    from graphflow.placement.calibration import calibrate, profile_file

    calibrate.profile()
    measured = profile_file.profile_path()
    if measured.exists():
        shutil.copy(measured, tmp_path)
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session", autouse=True)
def shared_fork_servers() -> Iterator[SharedForkServers]:
    """Share fork servers among sessions of the same environment, and end them with the run."""
    from graphflow.runtime.launch import local
    from tests import loaded
    from tests.shared_fork_servers import SharedForkServers

    servers = SharedForkServers()
    with pytest.MonkeyPatch.context() as patch:
        if local.can_fork():
            patch.setattr(local, "ForkServer", servers)
        yield servers
        servers.close()
        loaded.close_servers()


@pytest.fixture
def own_fork_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each session of local workers start and end its own fork server, as for users."""
    from graphflow.runtime.launch import fork_server as server
    from graphflow.runtime.launch import local

    monkeypatch.setattr(local, "ForkServer", server.ForkServer)
