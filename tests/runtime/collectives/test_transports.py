"""All transports of collectives give the bits of the plain kernels."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.ir.op import REGISTRY
from graphflow.ir.spec import TensorSpec, as_dtype, kind
from graphflow.ops.communication.reduction_order import shares
from graphflow.ops.kernels.jit.array_address import empty_aligned
from graphflow.runtime.collectives import message_transport as parcels
from graphflow.runtime.collectives import shared_memory_transport as shared
from graphflow.runtime.collectives.message_transport import MessageExchange, MessagePort
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.collectives.shared_counters import SharedCounters
from graphflow.runtime.collectives.shared_memory_transport import (
    MappedTransport,
    SlotTransport,
    private_memory,
    shared_bytes,
)
from graphflow.runtime.transport import nontemporal_copy as bypass
from graphflow.runtime.wire.step_values import TensorParcel

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "uint8", "int64", "bool",
          "complex64", "complex128")  # fmt: skip
ALGORITHMS = ("auto", "direct", "tree", "halving", "ring", "two_level")


def collective(draw: Any) -> tuple[Collective, list[Array]]:
    """Any collective that an API call could make, with its ranks' tensors."""
    count = draw(st.integers(1, 6))
    name = draw(st.sampled_from(
        ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]))  # fmt: skip
    dtype = as_dtype(draw(st.sampled_from(DTYPES)))
    rank = draw(st.integers(0 if name in ("all_reduce", "broadcast") else 1, 3))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=rank, max_size=rank)))
    shapes = [shape] * count
    attrs: dict[str, Any] = {}
    if name in ("all_reduce", "reduce_scatter"):
        choices = {"bool": ["max", "min"], "complex": ["sum", "mean", "prod"],
                   "int": ["sum", "max", "min", "prod"]}.get(
                       kind(dtype), ["sum", "mean", "max", "min", "prod"])  # fmt: skip
        if name == "reduce_scatter":
            choices = [c for c in choices if c in ("sum", "mean")] or ["max"]
        hosts = tuple(draw(st.integers(0, 2)) for _ in range(count))
        algorithm = draw(st.sampled_from(ALGORITHMS))
        attrs = {
            "reduction": draw(st.sampled_from(choices)),
            "algorithm": algorithm,
            "hosts": hosts if draw(st.booleans()) or algorithm == "two_level" else None,
        }
    if name == "reduce_scatter":
        axis = draw(st.integers(0, rank - 1))
        attrs |= {"axis": axis, "sizes": tuple(shares(shape[axis], count))}
    if name == "all_gather":
        axis = draw(st.integers(0, rank - 1))
        attrs = {"axis": axis}
        shapes = [(*shape[:axis], draw(st.integers(0, 5)), *shape[axis + 1 :])
                  for _ in range(count)]  # fmt: skip
    if name == "broadcast":
        attrs, shapes = {"count": count}, [shape]
    if name == "all_to_all":
        split, concat = (draw(st.integers(0, rank - 1)) for _ in range(2))
        attrs = {"split_axis": split, "concat_axis": concat,
                 "sizes": (tuple(shares(shape[split], count)),) * count}  # fmt: skip
    devices = tuple(f"/worker:{draw(st.integers(0, count - 1))}/cpu:0" for _ in range(count))
    what = Collective(name, 0, devices, tuple(TensorSpec(s, dtype) for s in shapes), attrs)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return what, [numbers(rng, spec) for spec in what.specs]


def numbers(rng: Any, spec: TensorSpec) -> Array:
    if kind(spec.dtype) == "complex":
        drawn = rng.normal(size=spec.shape) + 1j * rng.normal(size=spec.shape)
    else:
        drawn = rng.normal(size=spec.shape) * 5
        drawn = np.where(rng.random(spec.shape) < 0.1, -0.0, drawn)
    return np.asarray(drawn).astype(spec.dtype) if spec.shape else np.array(drawn, spec.dtype)


def compute_reference(what: Collective, xs: Sequence[Array]) -> list[Array]:
    op = REGISTRY[what.kind]
    with np.errstate(all="ignore"):
        return [op.run(np, xs, {**what.attrs, "rank": r})[0] for r in range(what.count)]


def run_exchange(what: Collective, xs: Sequence[Array], carry: Any) -> list[Array]:
    """What each device's thread gets when all run together."""
    members = {d: [r for r, at in enumerate(what.devices) if at == d] for d in what.devices}
    ys = [np.zeros(what.result_spec(r).shape, what.dtype) for r in range(what.count)]
    jobs = []
    for ranks in members.values():
        given = {r: (xs[r] if r < len(xs) else None) for r in ranks}
        jobs.append(partial(carry, ranks, given, {r: ys[r] for r in ranks}))
    run_together(jobs)
    return ys


def run_together(jobs: Sequence[Any]) -> None:
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result(timeout=20)


def wait(gates: SharedCounters, value: int) -> None:
    for _ in range(1000):
        if gates.wait_all(value, 0.02) < 0:
            return
    raise AssertionError("a rank did not come")


def have_same_bits(ones: Sequence[Array], others: Sequence[Array]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(ones, others, strict=True)
    )


class Box:
    """Parcels between the threads of a test, and the bytes from rank to rank."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[int, int]] = Counter()
        self.changed = threading.Condition()
        self.arrays: dict[Any, Array] = {}

    def put(self, parcel: TensorParcel) -> None:
        with self.changed:
            assert parcel.edge not in self.arrays
            self.arrays[parcel.edge] = parcel.array
            source, target = str(parcel.edge).removeprefix("collective/p/0/").split("/")[:2]
            self.sent[int(source), int(target)] += parcel.array.nbytes
            self.changed.notify_all()

    def take(self, step: int, key: Any, what: str) -> Array:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.arrays, 20), what
            return self.arrays.pop(key)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_parcels_give_the_bits_of_the_plain_kernel(data: Any) -> None:
    what, xs = collective(data.draw)
    box = Box()
    post = MessagePort("s", "p/0", "'y'", box.put, box.take)

    def carry(ranks: Sequence[int], given: Mapping[int, Any], results: Any) -> None:
        MessageExchange(what, ranks, post).run(1, given, results)

    before, parcels.CHUNK_BYTES = parcels.CHUNK_BYTES, data.draw(st.sampled_from([16, 1 << 20]))
    try:
        assert have_same_bits(run_exchange(what, xs, carry), compute_reference(what, xs))
    finally:
        parcels.CHUNK_BYTES = before
    assert box.arrays == {}
    if what.kind != "broadcast" and (what.kind != "all_reduce" or what.algorithm == "direct"):
        pairs = {(a, b) for a, b in product(what.workers, what.workers) if a != b}
        went = {(a, b, sum_bytes_between(what, box.sent, a, b)) for a, b in pairs}
        assert list_traffic(what) == {each for each in went if each[2]}


def list_traffic(what: Collective) -> set[tuple[int, int, int]]:
    """Return the bytes that workers count for a collective: from, to, bytes."""
    found = set()
    for worker in set(what.workers):
        for how, peer, nbytes in what.traffic(
            [r for r, w in enumerate(what.workers) if w == worker]
        ):
            found.add((worker, peer, nbytes) if how == "sent" else (peer, worker, nbytes))
    return found


def sum_bytes_between(what: Collective, sent: Mapping[tuple[int, int], int], a: int, b: int) -> int:
    """Return the bytes that ranks of one worker have sent to those of another."""
    ends = {(x, y) for (x, y) in sent if (what.workers[x], what.workers[y]) == (a, b)}
    return sum(sent[end] for end in ends)


def in_shared_memory(what: Collective, xs: Sequence[Array], ys: Sequence[Array]) -> None:
    """Three times, by slots where a collective is small."""
    small = shared.is_small(what)
    memory = private_memory(max(1, shared_bytes(what)))
    members = {d: [r for r, at in enumerate(what.devices) if at == d] for d in what.devices}
    given = [xs[r] if r < len(xs) else None for r in range(what.count)]
    seen = [np.empty(0, what.dtype) if x is None else x for x in given]

    def carry(ranks: Sequence[int]) -> None:
        way = (
            SlotTransport(what, ranks, memory)
            if small
            else MappedTransport(what, ranks, memory, seen, ys)
        )
        for _ in range(3):
            if isinstance(way, SlotTransport):
                way.publish({r: given[r] for r in ranks})
                way.collect({r: ys[r] for r in ranks}, wait)
            else:
                way.run(wait)

    run_together([partial(carry, ranks) for ranks in members.values()])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_shared_memory_gives_the_bits_of_the_plain_kernel(data: Any) -> None:
    what, xs = collective(data.draw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "SMALL_BYTES", data.draw(st.sampled_from([1 << 20, -1])))
        cache = data.draw(st.sampled_from([0, 1 << 40]))
        patch.setattr(bypass, "_last_cache", lambda: cache)
        ys = [np.zeros(what.result_spec(r).shape, what.dtype) for r in range(what.count)]
        in_shared_memory(what, xs, ys)
    assert have_same_bits(ys, compute_reference(what, xs))


@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32"])
@pytest.mark.parametrize(
    ("name", "reduction", "algorithm"),
    [
        ("all_gather", "", ""),
        *product(("all_reduce", "reduce_scatter"), ("sum", "mean", "max"), ("auto", "ring")),
    ],
)
def test_what_lies_in_no_cache_is_exchanged_with_the_same_bits(
    name: str, dtype: str, reduction: str, algorithm: str, past: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(shared, "SMALL_BYTES", -1)
    monkeypatch.setattr(bypass, "_last_cache", lambda: 0 if past else 1 << 40)
    if dtype == "int32" and reduction == "mean":
        pytest.skip("integers have no mean")
    rng = np.random.default_rng(0)
    for shape, astray in (((1001,), 0), ((1001,), 1), ((40, 33), 5), ((3,), 0), ((0,), 0)):
        attrs: dict[str, Any] = {"reduction": reduction, "algorithm": algorithm, "hosts": None}
        if name == "reduce_scatter":
            attrs |= {"axis": 0, "sizes": tuple(shares(shape[0], 2))}
        if name == "all_gather":
            attrs = {"axis": 0}
        spec = TensorSpec(shape, as_dtype(dtype))
        what = Collective(name, 0, ("/worker:0/cpu:0", "/worker:1/cpu:0"), (spec, spec), attrs)
        xs = [numbers(rng, spec) for _ in range(2)]
        if dtype.startswith("float"):
            for x, sign in zip(xs, (1, -1), strict=True):
                x.reshape(-1)[:: 7 + sign] = np.nan
                x.reshape(-1)[1::9] = np.inf * sign
        ys = []
        for rank in range(2):
            result = what.result_spec(rank)
            count = int(np.prod(result.shape))
            room = empty_aligned((count + astray) * what.dtype.itemsize).view(what.dtype)
            ys.append(room[astray:].reshape(result.shape))
        in_shared_memory(what, xs, ys)
        assert have_same_bits(ys, compute_reference(what, xs)), shape
