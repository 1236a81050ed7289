"""What every test shares: which tests run by default, and how hypothesis draws."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.nurseries import Nurseries

# The same examples on every run and machine, and no judgement by the clock. Since they are the
# same, more of them find nothing that the first run did not.
# To look for new ones: pytest --hypothesis-profile=explore
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _PATIENT, derandomize=True, max_examples=40)
settings.register_profile("ci", _PATIENT, derandomize=True, max_examples=40)
settings.register_profile("slow", _PATIENT, derandomize=True, max_examples=100)
settings.register_profile("explore", _PATIENT, derandomize=False, max_examples=1000)
settings.load_profile("default")

# Tests start hundreds of processes: none of them is to compile the package anew, nor is each that
# runs tests to compile all of these.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What steps teach of a machine that tests keep busy is not for the plans of who runs them: after a
# run, the demo was predicted to take three times as long as it does. Kernels stay for the next run.
os.environ.setdefault(
    "GRAPHFLOW_CACHE", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "graphflow")
)

# A shell lets what it runs in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Objects between two searches for cycles: at Python's 700 they took a twelfth of the time of tests
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
    """No search for cycles while tests are collected, and none among them later: they are millions
    of objects that live to the end, and to look through them again and again took a minute."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*_RARELY)
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def freeze_objects() -> Iterator[None]:
    """What a file's tests leave behind (kernels, caches, reports) is looked through no more: a full
    search took 0.3 s late in a run, and searches were a seventh of all that tests compute."""
    yield
    gc.freeze()


@cache
def _why_no_gpu() -> str | None:
    """None where CuPy sees a device, else the reason to show."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "CuPy is not installed (pip install 'graphflow[gpu]')"
    except Exception as error:
        return f"CuPy finds no device ({error})"
    return None if count else "CuPy finds no device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without_gpu = None if config.getoption("--run-gpu") else _why_no_gpu()
    told: set[str] = set()
    kept, dropped = [], []
    for item in items:
        for marker, reason in _ON_REQUEST.items():
            if item.get_closest_marker(marker) and not config.getoption(f"--run-{marker}"):
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and without_gpu is not None:
            item.add_marker(pytest.mark.skip(reason=f"{without_gpu}: force with --run-gpu"))
            test = item.nodeid.partition("[")[0]
            if test in told:  # one of a thousand samples says it
                dropped.append(item)
                continue
            told.add(test)
        kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    """Random streams of the test's own: what it draws does not depend on the tests before it."""
    from graphflow import random

    with random.seed(0):
        yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own: no kernel is in it, and nothing that steps taught. How fast
    this machine is, which takes seconds to measure, is taken over from the run's."""
    from graphflow.placement.calibration import calibrate

    calibrate.profile()
    measured = calibrate.profile_path()
    if measured.exists():
        shutil.copy(measured, tmp_path)
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session", autouse=True)
def shared_nurseries() -> Iterator[Nurseries]:
    """What local workers are forked from stays for the next session of the same environment, and
    what other processes are forked from stays to the end."""
    from graphflow.runtime.launch import local
    from tests import loaded
    from tests.nurseries import Nurseries

    nurseries = Nurseries()
    with pytest.MonkeyPatch.context() as patch:
        if local.can_fork():
            patch.setattr(local, "ForkServer", nurseries)
        yield nurseries
        nurseries.close()
        loaded.close()


@pytest.fixture
def own_nurseries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session of local workers starts and ends its own, as it does for users."""
    from graphflow.runtime.launch import fork_server as nursery
    from graphflow.runtime.launch import local

    monkeypatch.setattr(local, "ForkServer", nursery.ForkServer)
