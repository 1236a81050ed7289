"""Ten thousand inputs into the decoders of what comes from outside; `make fuzz` feeds a million.

Whatever the bytes are, a decoder raises only the errors that it documents, takes little time, and
takes memory for what is there, not for what the bytes claim.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from graphflow.runtime.wire.messages import KINDS
from tests.fuzz import soak
from tests.fuzz.mutate import NESTS, VALUES, Mutator
from tests.fuzz.targets import Target, _decode_message, targets

INPUTS = 5_000
TARGETS = {each.name: each for each in targets()}
SHARES = soak.shares(list(TARGETS.values()), INPUTS)


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_takes_any_input(name: str) -> None:
    target = TARGETS[name]
    for seed in target.seeds:
        assert soak.feed(target, seed) is None
    soak.reset_peak()
    before, fed = soak.peak(), 0
    for number, data in soak.inputs(target, range(SHARES[name])):
        found = soak.feed(target, data, number)
        assert found is None, f"input {number} of {name}: {found.error}"
        fed += 1
    assert fed == SHARES[name]
    assert soak.peak() - before < soak.GROWTH


@pytest.mark.parametrize("count", [INPUTS, 1_000_000])
def test_all_decoders_together_have_as_many_inputs_as_was_said(count: int) -> None:
    shares = soak.shares(list(TARGETS.values()), count)
    assert shares.keys() == TARGETS.keys() and min(shares.values()) >= count // 1000
    assert count <= sum(shares.values()) < count + 100


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("nest", range(len(NESTS)))
def test_no_depth_and_no_number_is_too_much_for_a_decoder(name: str, nest: int) -> None:
    seed, data = TARGETS[name].seeds[0], NESTS[nest]
    middle = seed.find(b":") + 1 or len(seed) // 2
    sized = len(data).to_bytes(8, "little") + data  # as the header of a shard
    for given in (data, sized, b"x=" + data, seed[:middle] + data + seed[middle:]):
        found = soak.feed(TARGETS[name], given)
        assert found is None, found.error


@pytest.mark.parametrize("path", sorted(soak.REGRESSIONS.glob("*.bin")), ids=lambda path: path.stem)
def test_what_was_found_once_stays_mended(path: Path) -> None:
    name = path.stem.rpartition("-")[0].replace("-", " ")
    assert soak.feed(TARGETS[name], path.read_bytes()) is None


def test_every_decoder_has_seeds_that_it_takes_without_an_error() -> None:
    refused = []
    for target in TARGETS.values():
        try:
            target.feed(target.seeds[0])
        except target.errors as error:
            refused.append((target.name, error))
    assert refused == []


def test_messages_of_all_kinds_are_among_the_seeds() -> None:
    for name in ("control", "worker", "coordinator"):
        seeds = b"".join(TARGETS[name].seeds)
        assert [kind for kind in KINDS if kind.encode() not in seeds] == []


def test_machines_hear_the_messages_of_their_seeds() -> None:
    for name in ("worker", "coordinator"):
        for seed in TARGETS[name].seeds:
            for entry in msgpack.unpackb(seed):
                if entry[0] == "message":
                    assert _decode_message(*entry[2:]) is not None, entry


# The tools themselves ----------------------------------------------------------------------------


def test_the_same_number_makes_the_same_input() -> None:
    target = TARGETS["control"]
    first = list(soak.inputs(target, range(50)))
    assert first == list(soak.inputs(target, range(50)))
    assert len({data for _, data in first}) > 40


def test_changes_keep_the_form_more_often_than_not() -> None:
    import msgpack

    whole = 0
    for number in range(200):
        data = Mutator(number).make(TARGETS["control"].seeds, "msgpack")
        try:
            msgpack.unpackb(data, strict_map_key=False)
            whole += 1
        except Exception:
            continue
    assert whole > 80


def _make_bad_target(error: str) -> Target:
    def decoder(data: bytes) -> None:
        while error in ("computes", "waits"):
            if error == "waits":
                time.sleep(0.001)
        raise KeyError(error)

    return Target("bad", "bytes", (b"seed",), decoder, ValueError)


@pytest.mark.parametrize("error", ["computes", "waits", "other"])
def test_a_decoder_that_does_not_end_or_raises_something_else_is_found(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(soak, "SECONDS", 0.1 if error == "computes" else 100.0)
    monkeypatch.setattr(soak, "HANGS", 0.1 if error == "waits" else 100.0)
    monkeypatch.setattr(soak, "REGRESSIONS", tmp_path)
    monkeypatch.setattr(soak, "targets", lambda: [_make_bad_target(error)])
    assert soak.main(["--inputs", "1"]) == 1
    (kept,) = tmp_path.iterdir()
    assert kept.name == "bad-1.bin"


def test_memory_that_grows_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grown: list[Any] = []

    def greedy(data: bytes) -> None:
        if len(grown) < 10 and hungry:
            grown.append(bytearray(b"x") * (16 << 20))

    hungry: list[int] = []
    target = Target("greedy", "bytes", (b"seed",), greedy, ValueError)
    monkeypatch.setattr(soak, "peak", lambda: sum(map(len, grown)) + 1)
    found = soak.run([target], soak.WARMING, 1)
    assert found == []
    hungry.append(1)
    monkeypatch.setattr(soak, "WARMING", 1)
    assert soak.run([target], 20, 1, told=0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux begins a peak anew")
def test_what_one_input_takes_for_a_moment_is_found_though_others_took_more_before() -> None:
    assert len(bytearray(b"x") * (200 << 20)) == 200 << 20  # as an earlier test may have

    def greedy(data: bytes) -> None:
        bytes(bytearray(b"x") * (soak.GROWTH + (32 << 20)))

    quiet = Target("quiet", "bytes", (b"seed",), lambda data: None, ValueError)
    assert soak.run([quiet], 5, 1) == []
    (found,) = soak.run([Target("greedy", "bytes", (b"seed",), greedy, ValueError)], 5, 1)
    assert "memory grew" in found.error


def test_a_decoder_that_is_not_there_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--only", "nonsense"])
    assert "no decoder is named nonsense" in capsys.readouterr().err


def test_values_that_strangers_send_are_of_every_kind() -> None:
    assert {type(value) for value in VALUES} >= {int, float, str, bool, list, dict, type(None)}
