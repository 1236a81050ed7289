"""What is learned from traced steps: medians by bucket and link, kept as plain data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.placement.calibration import trace_corrections as module
from graphflow.placement.calibration.corrections_file import (
    basis_of,
    corrections_path,
    read_corrections,
    write_corrections,
)
from graphflow.placement.calibration.node_bucket import Bucket, half_octaves
from graphflow.placement.calibration.trace_corrections import (
    BUCKETS,
    SAMPLES,
    TraceCorrections,
)
from tests.placement.speeds import profile

MATMUL = Bucket("|cpu|1", False, "matmul", "matmul", "float32", 40, 30)
EXP = Bucket("|cpu|1", False, "elementwise", "exp", "float32", 20, 24)


def learn_ratios(*ratios: float, bucket: Bucket = MATMUL) -> TraceCorrections:
    known = TraceCorrections("basis")
    for ratio in ratios:
        known.observe(bucket, ratio * 1e-3, 1e-3)
    return known


def copy_bucket(bucket: Bucket, **changes: Any) -> Bucket:
    return Bucket(**{name: changes.get(name, getattr(bucket, name)) for name in bucket.__slots__})


def test_a_bucket_has_the_median_of_its_ratios_whatever_one_step_suffered() -> None:
    assert learn_ratios(2.0, 2.1, 1.9, 2.0, 400.0).factor(MATMUL) == pytest.approx(2.0)


def test_the_more_surprising_the_more_observations_it_takes() -> None:
    assert learn_ratios(3.0).factor(MATMUL) == pytest.approx(3.0)
    assert [learn_ratios(*[200.0] * n).factor(MATMUL) for n in (1, 2, 3, 4)] == [
        4.0,
        16.0,
        64.0,
        200.0,
    ]
    assert learn_ratios(0.01).factor(MATMUL) == 0.25


def test_what_was_learned_on_a_busy_machine_is_revised_by_a_few_later_steps() -> None:
    known = learn_ratios(*[300.0] * SAMPLES)
    for _ in range(3):
        known.observe(MATMUL, 2e-3, 1e-3)
    assert known.factor(MATMUL) == pytest.approx(2.0)


def test_the_same_node_beside_busy_neighbours_tells_more_than_another_one() -> None:
    known = learn_ratios(3.0, bucket=EXP)
    known.observe(copy_bucket(EXP, busy=True, flops=21), 9e-3, 1e-3)
    assert known.factor(copy_bucket(EXP, busy=True)) == 3.0
    known.observe(copy_bucket(EXP, busy=True), 5e-3, 1e-3)
    assert known.factor(copy_bucket(EXP, busy=True)) == pytest.approx(4.0)
    assert known.factor(EXP) == 3.0


def test_nothing_learned_corrects_nothing() -> None:
    assert TraceCorrections().factor(MATMUL) == 1.0
    assert TraceCorrections().link("process", (1e-4, 1e9)) == (1e-4, 1e9)
    assert not TraceCorrections()


def test_the_closest_bucket_of_an_op_tells_about_others_the_less_the_farther() -> None:
    known = learn_ratios(3.0, bucket=EXP)
    near, far = copy_bucket(EXP, flops=22, bytes=26), copy_bucket(EXP, flops=60, bytes=64)
    assert 1.0 < known.factor(far) < known.factor(near) < 3.0
    assert known.factor(copy_bucket(EXP, busy=True)) == pytest.approx(3.0, rel=0.2)


def test_an_op_that_was_never_seen_takes_after_what_is_bound_by_the_same_on_its_device() -> None:
    known = learn_ratios(3.0, bucket=EXP)
    known.observe(
        copy_bucket(EXP, op="add", flops=2, bytes=4), 9e-3, 1e-3
    )  # tiny: mostly its launch
    assert known.factor(copy_bucket(EXP, op="tanh")) == pytest.approx(3.0)
    assert known.factor(copy_bucket(EXP, op="sum", kind="other")) == pytest.approx(3.0)
    assert known.factor(MATMUL) == 1.0
    assert known.factor(copy_bucket(EXP, device="|gpu|1")) == 1.0


def test_a_product_that_reads_an_operand_across_is_another_one_of_the_same_op() -> None:
    known = learn_ratios(3.0, bucket=MATMUL)
    across = copy_bucket(MATMUL, op="matmul·b")
    assert 1.0 < known.factor(across) < 3.0
    known.observe(across, 1.5e-3, 1e-3)
    assert known.factor(across) == pytest.approx(1.5)
    assert known.factor(MATMUL) == pytest.approx(3.0)


def test_a_node_shorter_than_a_reading_of_the_clock_is_known_all_the_same() -> None:
    known = TraceCorrections()
    for _ in range(5):
        known.observe(MATMUL, 1e-9, 1e-5)
    assert known.knows(MATMUL)
    assert known.factor(MATMUL) == pytest.approx(1e-3)


@pytest.mark.parametrize("measured", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_what_cannot_be_a_speed_teaches_nothing(measured: float) -> None:
    known = TraceCorrections()
    known.observe(MATMUL, measured, 1e-3)
    known.observe(MATMUL, 1e-3, measured if measured != 1e9 else 1e-12)
    known.observe_link("process", 1 << 20, measured)
    assert not known and known.version == 0


def test_a_link_is_the_line_through_quick_transfers_however_busy_the_machine_was() -> None:
    known = TraceCorrections()
    for nbytes in (1 << 12, 1 << 18, 1 << 22):
        for late in (50.0, 1.0, 50.0, 1.0, 80.0):
            known.observe_link("process", nbytes, late * (3e-4 + nbytes / 5e8))
    latency, bandwidth = known.link("process", (1e-4, 1e9))
    assert latency == pytest.approx(3e-4, rel=0.1)
    assert bandwidth == pytest.approx(5e8, rel=0.1)


def test_one_size_scales_a_link_as_a_whole_and_an_infinite_bandwidth_stays() -> None:
    known = TraceCorrections()
    known.observe_link("process", 1 << 12, 3 * (1e-4 + (1 << 12) / 1e9))
    assert known.link("process", (1e-4, 1e9)) == pytest.approx((3e-4, 1e9 / 3), rel=0.05)
    known.observe_link("thread", 1 << 12, 6e-5)
    latency, bandwidth = known.link("thread", (3e-5, float("inf")))
    assert latency == pytest.approx(6e-5) and bandwidth == float("inf")


def test_samples_and_buckets_are_bounded_and_the_latest_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BUCKETS", 10)
    known = learn_ratios(*[9.0] * SAMPLES, *[2.0] * SAMPLES)
    assert known.factor(MATMUL) == 2.0
    for flops in range(100, 109):
        known.observe(copy_bucket(MATMUL, flops=flops), 5e-3, 1e-3)
    assert len(known) == 10
    known.observe(copy_bucket(MATMUL, flops=200), 5e-3, 1e-3)
    assert len(known) == 10 < BUCKETS
    assert MATMUL not in known._nodes


def test_what_is_kept_is_plain_and_comes_back(tmp_path: Path) -> None:
    known = TraceCorrections(basis_of(profile()))
    known.observe(MATMUL, 3e-3, 1e-3)
    known.observe_link("process", 1 << 20, 1e-2)
    write_corrections(known, tmp_path)
    again = read_corrections(profile(), tmp_path)
    assert again.to_dict() == known.to_dict() == json.loads(corrections_path(tmp_path).read_text())
    assert again.factor(MATMUL) == pytest.approx(3.0)
    assert corrections_path(tmp_path).parent == tmp_path


def test_another_calibration_another_machine_or_another_format_begin_anew(tmp_path: Path) -> None:
    known = learn_ratios(3.0)
    data = known.to_dict()
    assert TraceCorrections.from_dict(data, "basis").factor(MATMUL) == pytest.approx(3.0)
    assert not TraceCorrections.from_dict(data, "another")
    assert not TraceCorrections.from_dict({**data, "key": {}}, "basis")
    assert not TraceCorrections.from_dict({**data, "format": 0}, "basis")
    assert basis_of(profile()) != basis_of(profile(launch=5e-6))


_ODD: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=9),
    max_leaves=20,
)


@given(nodes=_ODD, links=_ODD)
def test_a_damaged_file_is_empty_or_sane(nodes: Any, links: Any) -> None:
    data = {**learn_ratios(2.0).to_dict(), "nodes": nodes, "links": links}
    read = TraceCorrections.from_dict(data, "basis")
    assert 1e-3 <= read.factor(MATMUL) <= 1e3


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "\x00"])
def test_a_file_that_is_no_lesson_is_rebuilt(text: str, tmp_path: Path) -> None:
    corrections_path(tmp_path).write_text(text)
    known = read_corrections(profile(), tmp_path)
    assert not known
    known.observe(MATMUL, 2e-3, 1e-3)
    write_corrections(known, tmp_path)
    assert read_corrections(profile(), tmp_path).factor(MATMUL) == pytest.approx(2.0)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_corrections(learn_ratios(2.0), tmp_path / "file")
    assert not read_corrections(profile(), tmp_path / "file")


def test_half_octaves_tell_sizes_apart_by_their_ratio() -> None:
    assert [half_octaves(2.0**n - 1) for n in range(5)] == [0, 2, 4, 6, 8]
    assert half_octaves(-1.0) == 0


# Steps as a whole ---------------------------------------------------------------------------------


def test_what_a_step_takes_beyond_its_nodes_is_learned_as_a_share_of_steps_like_it() -> None:
    learned = TraceCorrections("a")
    assert learned.step_overhead("process", 1, 1e-3) == 0.0
    for measured in (1.2e-3, 1.3e-3, 9e-3):
        learned.observe_step("process", 1, 1e-3, measured)
    assert learned.step_overhead("process", 1, 1e-3) == pytest.approx(0.3e-3)
    assert learned.step_overhead("process", 1, 1.02e-3) == pytest.approx(0.306e-3)
    assert (
        0 < learned.step_overhead("process", 2, 1e-3) < 0.3e-3
    )  # another number of workers, or size
    assert 0 < learned.step_overhead("process", 1, 1e-1) < 0.3e-1
    assert learned.step_overhead("here", 1, 1e-3) == 0.0


def test_a_step_that_took_less_than_predicted_teaches_that_nothing_comes_on_top() -> None:
    learned = TraceCorrections("a")
    learned.observe_step("here", 1, 1e-3, 0.5e-3)
    assert learned.step_overhead("here", 1, 1e-3) == 0.0 and len(learned) == 1


def test_lessons_about_steps_are_kept() -> None:
    learned = TraceCorrections("a")
    learned.observe_step("process", 2, 1e-3, 1.5e-3)
    again = TraceCorrections.from_dict(learned.to_dict(), "a")
    assert again.step_overhead("process", 2, 1e-3) == learned.step_overhead("process", 2, 1e-3) > 0


# Uncertainty ----------------------------------------------------------------------------------


def test_the_evidence_of_a_bucket_is_what_its_factor_rests_on() -> None:
    known = learn_ratios(*[3.0] * 20, bucket=EXP)
    own, near = known.evidence(EXP), known.evidence(copy_bucket(EXP, flops=30))
    assert own.is_own and not own.busy and len(own.ratios) == module.RECENT
    assert not near.is_own and len(near.ratios) == 1 and near.weight < 1
    assert known.factor(copy_bucket(EXP, flops=30)) == pytest.approx(3.0**near.weight)
    assert known.evidence(copy_bucket(EXP, busy=True)).source == own.source
    assert not known.evidence(copy_bucket(EXP, device="|gpu|1")).ratios


def test_the_errors_of_observed_nodes_tell_of_their_class_once_they_are_several() -> None:
    known = TraceCorrections()
    for i in range(module.FEW):
        assert known.evidence(copy_bucket(EXP, flops=60)).class_deviation == 0.0
        known.observe(copy_bucket(EXP, flops=i), 2e-3, 1e-3)
    deviation = known.evidence(copy_bucket(EXP, flops=60)).class_deviation
    assert deviation == pytest.approx(math.log(2.0) / 0.6745)
    assert known.evidence(copy_bucket(EXP, flops=0)).class_deviation == 0.0
    for _ in range(module.RECENT):
        known.observe(copy_bucket(EXP, flops=3), 4e-3, 1e-3)
        known.observe(copy_bucket(EXP, flops=4), 4e-3, 1e-3)
        known.observe(copy_bucket(EXP, flops=2), 4e-3, 1e-3)
    assert known.evidence(copy_bucket(EXP, flops=60)).class_deviation > deviation


def test_whole_steps_tell_how_far_their_own_predictions_and_others_are_off() -> None:
    known = TraceCorrections()
    assert known.step_deviation("a") == 0.0
    known.observe_error("a", 4e-3, 1e-3)
    assert known.step_deviation("a") > 1.0 and known.step_deviation("b") == 0.0
    for _ in range(5):
        known.observe_error("a", 1e-3, 1e-3)
    assert known.step_deviation("a") < 0.05
    for other in "bcdef":
        known.observe_error(other, 2e-3, 1e-3)
    assert known.step_deviation("new") == pytest.approx(math.log(2.0) / 0.6745)
    assert 0.05 < known.step_deviation("a") < known.step_deviation("new")
    known.observe_error("new", 0.0, 1e-3)  # nothing that can be compared
    known.observe_error("new", 1e-3, 1e3)
    assert known.step_deviation("new") == pytest.approx(math.log(2.0) / 0.6745)


def test_errors_of_steps_are_kept_and_files_without_them_are_read() -> None:
    known = learn_ratios(2.0)
    known.observe_error("a", 4e-3, 1e-3)
    data = json.loads(json.dumps(known.to_dict()))
    assert TraceCorrections.from_dict(data, "basis").step_deviation("a") > 1.0
    del data["errors"]
    older = TraceCorrections.from_dict(data, "basis")
    assert older.factor(MATMUL) == 2.0 and older.step_deviation("a") == 0.0
    data["errors"] = [["a", ["soon"]]]
    assert len(TraceCorrections.from_dict(data, "basis")) == 0


def test_transfers_are_told_relative_to_the_others_of_their_size() -> None:
    known = TraceCorrections()
    for seconds in (1e-3, 1e-3, 3e-3):
        known.observe_link("process", 1000, seconds)
    known.observe_link("process", 1 << 20, 5.0)
    assert sorted(known.link_ratios("process")) == pytest.approx([1.0, 1.0, 1.0, 3.0])
    assert known.link_ratios("thread") == []
