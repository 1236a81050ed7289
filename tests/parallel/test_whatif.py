"""What-if estimates: against published figures, and by what must hold of any."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

import graphflow as gf
from graphflow.errors import ClusterError, MemoryLimitError, ScheduleError
from graphflow.parallel.whatif import GPT, what_if
from graphflow.placement.products import PRODUCTS, product

MEGATRON = [
    # layers, width, heads, tensor parallel, stages, devices, batch, published Tflop/s a GPU
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (30, 3072, 32, 2, 1, 64, 512, 138),
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 155),
]
"""Narayanan et al., SC 2021, table 1: A100-80GB, eight a host, activations recomputed."""


def test_published_speeds_are_met_within_a_fifth_and_a_tenth_in_the_median() -> None:
    ratios = []
    for layers, width, heads, model, stages, devices, batch, published in MEGATRON:
        found = what_if(
            GPT(layers, width, heads), devices=devices, batch=batch, tensor=model, stages=stages,
            recompute=True,
        )  # fmt: skip
        ratios.append(found.best.flops / 1e12 / published)
    assert all(0.8 < ratio < 1.25 for ratio in ratios), ratios
    assert abs(median(ratios) - 1) < 0.12, ratios


def test_the_number_of_weights_is_that_of_the_literature() -> None:
    assert GPT(96, 12288, 96, vocabulary=50257).weights == pytest.approx(174.6e9, rel=0.002)


def test_a_hundred_billion_weights_on_a_thousand_devices_take_no_memory_to_search() -> None:
    found = what_if(GPT(80, 10240, 80), devices=1024, batch=1024)
    assert found.model.weights > 1e11
    assert found.best.memory < 80e9
    assert {e.data * e.model * e.stages for e in found.tried} == {1024}
    assert all(a.seconds <= b.seconds for a, b in pairwise(found.tried))
    assert "billion weights" in str(found) and "bubble" in str(found)


def test_more_devices_make_a_step_shorter_but_each_does_less() -> None:
    steps = [what_if(GPT(24, 2048, 16), devices=n, batch=512).best for n in (8, 64)]
    assert steps[1].seconds < steps[0].seconds
    assert steps[1].flops <= steps[0].flops


def test_recomputing_takes_less_memory_and_more_time() -> None:
    kept, again = (
        what_if(GPT(24, 2048, 16), devices=8, batch=64, tensor=1, stages=2, recompute=r)
        for r in (False, True)
    )
    for a in kept.tried:
        b = next(e for e in again.tried if (e.micro, e.chunks) == (a.micro, a.chunks))
        assert b.memory < a.memory and b.seconds > a.seconds


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: what_if(GPT(96, 12288, 96), devices=8, batch=8), MemoryLimitError,
         "174.6 billion weights take 392.9 GB on each of 8"),
        (lambda: what_if(GPT(2, 64, 2), devices=0, batch=8), ScheduleError, "devices is a number"),
        (lambda: what_if(GPT(2, 64, 2), devices=1, batch="8"), ScheduleError, "batch is a number"),
        (lambda: what_if(GPT(2, 64, 2), "a1000", devices=1, batch=8), ClusterError, "a100"),
        (lambda: what_if(GPT(2, 64, 2), devices=8, batch=8, stages=3), ScheduleError,
         "no mesh.*3 stages"),
        (lambda: what_if(GPT(2, 64, 2), devices=8, batch=8, stages="x"), ScheduleError,
         "stages is a number from 1 up, not 'x'"),
        (lambda: what_if(GPT(2, 64, 2), devices=8, batch=8, recompute="maybe"), ScheduleError,
         "recompute is True or False, not 'maybe'"),
        (lambda: what_if("gpt", devices=8, batch=8), ScheduleError, "a gf.parallel.GPT, not 'gpt'"),
        (lambda: GPT(0, 64, 2), ScheduleError, "layers is a number from 1 up, not 0"),
        (lambda: GPT(2, 64.0, 2), ScheduleError, "width is a number from 1 up, not 64.0"),
        (lambda: GPT(2, 64, 7), ScheduleError, "a width of 64 does not divide into 7 heads"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_tensor_cores_are_faster_than_what_they_stand_beside(name: str) -> None:
    assert product(f"{name}+half").float32 > product(name).float32
    assert gf.Cluster.hypothetical(f"2x{name}+half", network="100gbe").devices
    with pytest.raises(ClusterError, match="no product"):
        product(f"{name}+third")


def test_the_notebook_shows_what_it_computes(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "what_if.ipynb"
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(path), "exec"), names)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert capsys.readouterr().out == shown
