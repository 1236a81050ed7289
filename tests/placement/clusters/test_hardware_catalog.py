"""The shipped tables: complete, cited, and curves that behave like hardware."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ClusterError
from graphflow.ir.spec import TensorSpec
from graphflow.placement.calibration.cluster_rates import link_matrices, rates
from graphflow.placement.calibration.roofline import interpolate_seconds
from graphflow.placement.clusters.hardware_catalog import (
    ALIASES,
    PRODUCTS,
    WIRES,
    product,
    speeds_of,
    wire,
)

GPUS = ["t4", "a10", "l4", "a100-40gb", "a100-80gb", "h100-pcie", "h100-sxm", "h200", "b200"]
LINKS = ["pcie3", "pcie4", "pcie5", "nvlink2", "nvlink3", "nvlink4", "nvlink5"]
LINKS += ["10gbe", "25gbe", "100gbe", "infiniband-edr", "infiniband-hdr", "infiniband-ndr"]


@pytest.mark.parametrize("name", GPUS)
def test_each_gpu_has_its_maker_s_numbers_and_their_source(name: str) -> None:
    gpu = product(name)
    assert len(gpu.source) > 10
    assert 10e9 <= gpu.memory <= 200e9 and 2e11 < gpu.bandwidth < 1e13
    assert 0 < gpu.sustained < 1 and gpu.peer in WIRES and gpu.bus in WIRES


@pytest.mark.parametrize("name", LINKS)
def test_each_link_has_its_peak_and_its_source(name: str) -> None:
    known = wire(name)
    assert len(known.source) > 10 and 0 < known.share < 1 and 0 < known.latency < 1e-4
    assert known.bandwidth < known.peak


def test_all_other_names_stand_for_something() -> None:
    assert all(full in PRODUCTS or full in WIRES for full in ALIASES.values())
    assert product("A100 80GB") is product("a100_80gb") is product("a100")


@pytest.mark.parametrize("name", PRODUCTS)
def test_larger_work_takes_longer_and_runs_at_a_better_rate_up_to_the_peak(name: str) -> None:
    gpu, speeds = product(name), speeds_of(name)
    for dtype, peak in (("float32", gpu.float32), ("float64", gpu.float64)):
        points = speeds["matmul"][dtype]
        assert points == sorted(points)
        shares = [flops / seconds / peak for flops, seconds in points]
        assert shares == sorted(shares) and 0.9 * gpu.sustained < shares[-1] < gpu.sustained
        assert shares[2] < 0.1  # 128 × 128 × 128 cannot fill the device
    seconds = [t for _, t in speeds["traffic"]]
    assert seconds == sorted(seconds)
    assert interpolate_seconds(speeds["traffic"], 1e9) == pytest.approx(
        1e9 / gpu.bandwidth, rel=0.25
    )
    cached = interpolate_seconds(speeds["traffic"], gpu.cache / 2)
    assert cached < gpu.cache / 2 / gpu.bandwidth  # faster than its memory


def test_a_product_s_rates_are_those_of_its_class_of_op() -> None:
    cluster = gf.Cluster.hypothetical("h100")
    (rate,) = rates(cluster, None, contention=False).values()

    def seconds(op: str, *shapes: tuple[int, ...], out: tuple[int, ...]) -> float:
        from graphflow.ir.op import REGISTRY

        inputs = [TensorSpec(shape, np.dtype("float32")) for shape in shapes]
        return rate.seconds(REGISTRY[op], inputs, [TensorSpec(out, np.dtype("float32"))], {})

    tiny = seconds("add", (4,), (4,), out=(4,))
    assert 4e-6 < tiny < 8e-6  # a launch
    large = seconds("add", (1 << 28,), (1 << 28,), out=(1 << 28,))
    assert large == pytest.approx(3 * (1 << 30) / 3.35e12, rel=0.2)  # memory
    n = 8192
    matmul = seconds("matmul", (n, n), (n, n), out=(n, n))
    assert matmul == pytest.approx(2 * n**3 / (67e12 * 0.75), rel=0.1)  # arithmetic
    small = seconds("matmul", (256, 256), (256, 256), out=(256, 256))
    assert small > 5 * 2 * 256**3 / 67e12


def test_a_given_number_counts_before_the_product_s() -> None:
    slow = gf.Cluster.hypothetical(1, "h100", flops=1e12, launch=1e-3)
    (rate,) = rates(slow, None, contention=False).values()
    assert rate.speeds["launch"] == 1e-3
    flops, seconds = rate.speeds["matmul"]["float32"][-1]
    assert flops / seconds == pytest.approx(1e12)


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (product, "h10", "no product is named 'h10'; did you mean"),
        (wire, "nvlink9", "no link is named 'nvlink9'; did you mean 'nvlink"),
        (wire, "carrier pigeon", "known are pcie3"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(find: object, name: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        find(name)  # type: ignore[operator]


def _towers(width: int) -> gf.Tensor:
    x = gf.placeholder("float32", (256, width), name="x")
    sides = []
    for i in range(4):
        h = x
        for j in range(3):
            h = gf.tanh(h @ gf.variable(gf.init.zeros((width, width)), name=f"w{i}{j}"))
        sides.append(gf.sum(h))
    return sides[0] + sides[1] + sides[2] + sides[3]


def test_a_plan_for_hardware_that_is_not_here_works_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "8xh100.toml"
    path.write_text('[[hosts]]\ndevices = [{ name = "h100", count = 8 }]\n')
    made = gf.plan(_towers(2048), gf.Cluster.load(path))
    one = min(v for k, v in made.baselines.items() if k.startswith("one device"))
    assert len({n.device for n in made.nodes if n.op == "matmul"}) > 1
    assert 0 < made.makespan < one
    again = gf.plan(_towers(2048), str(path))
    assert again.placement == made.placement and again.makespan == made.makespan
    assert gf.Plan.load(made.save(tmp_path / "plan.json")).makespan == made.makespan


def test_faster_hardware_makes_faster_plans() -> None:
    steps = [gf.plan(_towers(2048), gf.Cluster.hypothetical(n)).makespan for n in ("t4", "a100")]
    steps.append(gf.plan(_towers(2048), gf.Cluster.hypothetical("h100")).makespan)
    assert steps[0] > steps[1] > steps[2]


def test_the_client_costs_nothing_where_nobody_says_otherwise() -> None:
    latency, bandwidth = link_matrices(gf.Cluster.hypothetical("2xt4"))
    assert latency[2, 0] == 0.0 and math.isinf(bandwidth[2, 0])


def test_a_session_refuses_hardware_that_is_not_there() -> None:
    with pytest.raises(gf.errors.GraphflowError, match="hypothetical"):
        gf.Session(gf.Cluster.hypothetical("8xh100"))
