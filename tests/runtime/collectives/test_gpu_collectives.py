"""Collectives between GPUs, on a stand-in for CuPy: the bits of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from tests.gpu import cuda_on_cpu, fake_cupy

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.explain_missing_compiler() is not None,
    reason=str(cuda_on_cpu.explain_missing_compiler()),
)


@pytest.mark.parametrize("size", [(4, 3), (512, 600)])
def test_two_gpus_and_a_cpu_exchange_with_the_bits_of_one_device(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    fake_cupy.install(monkeypatch, devices=2)

    def build_graph(devices: list[str]) -> list[Any]:
        xs = []
        for i, name in enumerate(devices):
            with gf.device(name):
                xs.append(gf.constant(np.arange(size[0] * size[1], dtype="f4").reshape(size)) * i)
        ys = gf.parallel.all_reduce(xs, "sum", "tree")
        parts = gf.parallel.reduce_scatter([y + 1 for y in ys], 1)
        return [*ys, *parts, *gf.parallel.all_gather(parts, 1)]

    names = ["cpu:0", "gpu:0", "gpu:1"]
    with gf.Session(gf.Cluster.here(names)) as several, gf.Session() as one:
        fetches, wanted = build_graph(names), one.run(build_graph(["cpu:0"] * 3))
        for _ in range(3):
            for found, value in zip(several.run(fetches), wanted, strict=True):
                assert found.tobytes() == value.tobytes()
