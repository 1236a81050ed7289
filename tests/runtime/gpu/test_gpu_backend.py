"""Programs on a GPU, with a stand-in for CuPy that runs late: what is not ordered by events finds
noise, and a capture that waits or takes memory is noted."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import DeviceError, DeviceLost, DeviceOutOfMemory, OpError
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.cuda.cupy_module import import_cupy
from graphflow.runtime.gpu.gpu_backend import DeviceCopy, GpuBackend
from graphflow.runtime.gpu.input_buffer import InputBuffer
from graphflow.runtime.memory.arenas import Arenas
from graphflow.runtime.partitioning.partition import partition
from graphflow.runtime.program.gpu_program import GpuCode
from graphflow.runtime.program.program import Program
from tests.gpu import cuda_on_cpu, fake_cupy
from tests.runtime.programs import NoChannel, place_nodes

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.explain_missing_compiler() is not None,
    reason=str(cuda_on_cpu.explain_missing_compiler()),
)
GPU = "/worker:0/gpu:0"
X = np.random.default_rng(0).normal(size=(6, 40)).astype("float32")


class Alone(NoChannel):
    def check_cancelled(self, step: int, loop: str, done: int, of: str) -> None:
        """Go on."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.World:
    return fake_cupy.install(monkeypatch)


class GpuFetches:
    """Fetches compiled for a GPU, without a session."""

    def __init__(self, *fetches: Tensor, backend: GpuBackend | None = None) -> None:
        part = partition(graph := Graph(fetches).verify(), place_nodes(graph, GPU))[GPU]
        self.backend = backend or GpuBackend(0)
        self.state = {}
        for node in part.graph.variables:
            initial = node.attrs["initial"]
            initial = np.asarray(initial() if callable(initial) else initial)
            there = self.backend.empty(initial.nbytes).view(initial.dtype).reshape(initial.shape)
            self.backend.write(there, initial)
            self.state[node.name] = there
        self.program = Program(part, {}, self.state, self.backend, Alone())

    @property
    def code(self) -> GpuCode:
        code = self.program._code
        assert isinstance(code, GpuCode)
        return code

    def step(self, **feeds: Any) -> list[np.ndarray[Any, Any]]:
        values = self.program.run(feeds, 1, 0)
        self.program.commit()
        return values


def check_on_gpu(
    function: Callable[[Tensor], Any], x: np.ndarray[Any, Any] = X, runs: int = 4
) -> GpuFetches:
    """A function of a feed gives on the GPU what it gives on a CPU, eager, captured, replayed."""
    fed = gf.placeholder("float32", x.shape, name="x")
    results = function(fed)
    fetches = results if isinstance(results, tuple) else (results,)
    here = GpuFetches(*fetches)
    with gf.Session() as session:
        for run in range(runs):
            wanted = session.run(list(fetches), {fed: x + run})
            for have, want in zip(here.step(x=x + run), wanted, strict=True):
                np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
    return here


def test_a_fused_chain_is_one_kernel_with_the_bits_of_a_cpu(world: fake_cupy.World) -> None:
    x = gf.placeholder("float32", (6, 40), name="x")
    y = gf.nn.gelu(gf.tanh(x * 0.5 + X[0]) - gf.nn.sigmoid(x))
    here = GpuFetches(y)
    with gf.Session() as session:
        assert here.step(x=X)[0].tobytes() == session.run(y, {x: X}).tobytes()
    assert world.launches == 1
    assert here.program.memory.arena == X.nbytes


def test_softmax_and_norms_run_along_rows(world: fake_cupy.World) -> None:
    check_on_gpu(
        lambda x: (gf.nn.softmax(x * 2.0, axis=-1), gf.nn.layer_norm(x), gf.sum(x, axis=0))
    )


def test_steps_are_captured_when_they_run_again_and_replayed_from_then_on(
    world: fake_cupy.World, caplog: pytest.LogCaptureFixture
) -> None:
    w = gf.constant(np.random.default_rng(1).normal(size=(40, 40)).astype("float32"))
    here = check_on_gpu(lambda x: gf.tanh(gf.tanh(gf.tanh(x @ w) @ w) @ w))
    assert here.code.steps.graphs == 1
    assert world.replays == 3  # of four steps the first ran one by one
    assert world.violations == []
    assert caplog.records == []


def test_an_optimisers_update_is_captured_in_the_commit_part(world: fake_cupy.World) -> None:
    x = gf.placeholder("float32", (8, 5), name="x")
    w = gf.variable(np.ones((5, 4), "float32"), name="w")
    v = gf.variable(np.ones((4, 1), "float32"), name="v")
    loss = gf.mean((gf.nn.relu(x @ w) @ v - 1.0) ** 2)
    train = gf.optim.Adam(0.05).minimize(loss)
    data = np.random.default_rng(0).random((8, 5), "float32")
    here = GpuFetches(loss, train)
    losses = [float(here.step(x=data)[0]) for _ in range(6)]
    with gf.Session() as session:
        wanted = [float(session.run([loss, train], {x: data})[0]) for _ in range(6)]
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        np.testing.assert_allclose(
            here.backend.to_host(here.state[w.node.name]), session.get(w), rtol=1e-5
        )
    assert here.code.commit_steps.graphs + here.code.steps.graphs >= 1
    assert world.violations == []


def test_without_graphs_every_step_runs_one_by_one(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CUDA_GRAPHS", "off")
    here = check_on_gpu(lambda x: gf.tanh(gf.matmul(gf.exp(x), x.T)))
    assert (world.replays, here.code.steps.graphs) == (0, 0)


def test_with_jit_off_ops_run_by_cupys_own_kernels(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    check_on_gpu(lambda x: gf.tanh(x * 0.5) + 1.0)
    assert world.launches == 0


def test_what_takes_memory_is_captured_with_what_its_first_run_took(
    world: fake_cupy.World,
) -> None:
    def function(x: Tensor) -> Tensor:
        y = gf.tanh(gf.tanh(x @ x.T) @ x)
        y = gf.sort(gf.cumsum(y, axis=0), axis=-1)
        return gf.exp(gf.tanh(y @ y.T) @ y)

    here = check_on_gpu(function)
    assert here.code.steps.graphs == 1
    assert world.violations == []
    assert here.backend.memory_usage().pool > 0


def test_one_step_that_takes_memory_is_a_graph(world: fake_cupy.World) -> None:
    here = check_on_gpu(lambda x: gf.sort(x, axis=0))
    assert here.code.steps.graphs == 1 and world.violations == []


def test_nothing_else_is_given_the_memory_of_graphs(world: fake_cupy.World) -> None:
    """Values on their way to another GPU live while graphs are replayed."""
    keeps = gf.Op(
        "keeps",
        infer=lambda x: x,
        kernel=lambda xp, x: x,
        into=lambda xp, out, x: xp.copyto(out, (x * 2.0 + 1.0) * 3.0),
        samples=(gf.sample(gf.spec("float32", (3, 4))),),
    )
    here = GpuFetches(keeps(gf.placeholder("float32", (6, 40), name="x")))
    for run in range(4):
        value = here.backend.to_device(X)
        handed = here.backend.hand_over(value, "gpu")
        assert np.array_equal(here.step(x=X + run)[0], ((X + run) * 2.0 + 1.0) * 3.0)
        assert (here.backend.to_host(handed.array) == X).all()
    assert here.code.steps.graphs == 1 and world.violations == []


def test_arrays_of_the_host_are_not_copied_in_graphs(
    world: fake_cupy.World, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay would copy what is there then."""
    op = gf.Op(
        "adds_of_the_host",
        infer=lambda x: x,
        kernel=lambda xp, x: x,
        into=lambda xp, out, x: xp.add(x, xp.asarray(np.ones((6, 40), "f4")), out=out),
        samples=(gf.sample(gf.spec("float32", (3, 4))),),
    )
    x = gf.placeholder("float32", (6, 40), name="x")
    here = GpuFetches(gf.exp(gf.tanh(op(gf.tanh(gf.tanh(x @ x.T) @ x)) @ x.T) @ x))
    with caplog.at_level(logging.INFO, "graphflow.gpu"):
        results = [here.step(x=X)[0] for _ in range(5)]
    assert len({r.tobytes() for r in results}) == 1
    assert "adds_of_the_host" in caplog.text and "cannot copy an array from the host" in caplog.text
    assert here.code.steps.graphs == 2


@pytest.mark.parametrize("groups", [1, 4])
def test_a_strided_convolution_and_its_gradients(groups: int, world: fake_cupy.World) -> None:
    rng = np.random.default_rng(0)
    w = gf.constant(rng.normal(size=(8, 4 // groups, 3, 3)).astype("float32"))

    def both(x: Tensor) -> tuple[Tensor, ...]:
        y = gf.nn.conv(gf.reshape(x, (1, 4, 6, 10)), w, stride=2, padding=1, groups=groups)
        return y, *gf.gradients(gf.sum(y * y), [x, w])

    check_on_gpu(both)


def test_spectra_are_not_captured(world: fake_cupy.World) -> None:
    """CuPy keeps some plans and what they work in, and lets go of the oldest."""
    here = check_on_gpu(lambda x: gf.real(gf.fft.fft(gf.tanh(x @ x.T))))
    assert here.code.steps.graphs == 1  # what comes before


def test_indices_that_are_fed_are_looked_at_on_the_host(world: fake_cupy.World) -> None:
    """The GPU would have to be waited for."""
    table = gf.variable(np.arange(24, dtype="f4").reshape(6, 4), name="table")
    rows = gf.placeholder("int64", (5,), name="rows")
    taken = gf.take(table, rows, 0)
    fetches = [taken, *gf.gradients(gf.sum(taken**2), [table])]
    here = GpuFetches(*fetches)
    given = [np.array([0, 5, -1, 2, 2]), np.array([-6, 1, 1, 3, 4])]
    with gf.Session() as session:
        for run in range(6):
            wanted = session.run(fetches, {rows: given[run % 2]})
            for have, want in zip(here.step(rows=given[run % 2]), wanted, strict=True):
                assert have.tobytes() == want.tobytes()
    assert here.code.steps.graphs >= 1 and world.violations == []
    for wrong in ([0, 6, 1, 1, 1], [-7, 0, 0, 0, 0]):
        with pytest.raises(OpError, match=r"take.*is outside axis 0 of size 6"):
            here.step(rows=np.array(wrong))


def test_indices_that_are_computed_are_looked_at_where_they_are(world: fake_cupy.World) -> None:
    x = gf.placeholder("float32", (6, 40), name="x")
    here = GpuFetches(gf.take(x, gf.argmax(x, axis=0) + gf.astype(x[0] > 100, "int64") * 9, 0))
    for run in range(3):
        wanted = np.take(X + run, (X + run).argmax(0), 0)
        assert (here.step(x=X + run)[0] == wanted).all()
    with pytest.raises(OpError, match=r"take.*is outside axis 0 of size 6"):
        here.step(x=X + 1000)


def test_random_numbers_differ_from_step_to_step(world: fake_cupy.World) -> None:
    x = gf.placeholder("float32", (6, 40), name="x")
    with gf.random.seed(3):
        y = gf.tanh(gf.tanh(x) @ x.T) + gf.random.uniform((6, 6))
    here = GpuFetches(y)
    draws = [here.program.run({"x": X}, step, step)[0] for step in range(4)]
    assert len({d.tobytes() for d in draws}) == 4
    with gf.Session() as session:
        np.testing.assert_allclose(draws[0], session.run(y, {x: X}), rtol=1e-5)


def test_a_step_that_waits_is_left_out_of_graphs_with_one_word(
    world: fake_cupy.World, caplog: pytest.LogCaptureFixture
) -> None:
    waits = gf.Op(
        "waits",
        infer=lambda x: x,
        kernel=lambda xp, x: x,
        into=lambda xp, out, x: xp.copyto(out, float(x[0, 0]) * 0 + 1.0),
        samples=(gf.sample(gf.spec("float32", (3, 4))),),
    )
    x = gf.placeholder("float32", (6, 40), name="x")
    y = gf.tanh(gf.tanh(x @ x.T) @ x)
    z = gf.exp(gf.tanh(waits(y) @ x.T) @ x)
    here = GpuFetches(z)
    with caplog.at_level(logging.INFO, "graphflow.gpu"):
        results = [here.step(x=X)[0] for _ in range(5)]
    assert len({r.tobytes() for r in results}) == 1
    assert world.violations == ["a copy to the host"]
    assert [r.message for r in caplog.records] == [
        f'gpu.uncaptured program={GPU} what="waits (made at {waits_line(z)})" '
        'error=CUDARuntimeError reason="cudaErrorStreamCaptureUnsupported: a copy to the host"'
    ]
    assert here.code.steps.graphs == 2


def waits_line(z: Tensor) -> str:
    return next(str(n.location) for n in Graph([z]).nodes if n.op.name == "waits")


def test_feeds_and_fetches_of_steps_in_flight_do_not_mix(world: fake_cupy.World) -> None:
    """Nothing is fetched in between, so the host runs ahead of the device."""
    x = gf.placeholder("float32", (6, 40), name="x")
    total = gf.variable(np.zeros((6, 40), "float32"))
    here = GpuFetches(REGISTRY["group"](gf.assign(total, total + x)))
    for i in range(7):
        here.step(x=np.full((6, 40), 2.0**i, "float32"))
    assert world.crossings.count("in") == 1 + 7  # the variable's first value, and feeds
    assert "out" not in world.crossings
    value = here.backend.to_host(here.state[total.node.name])
    assert (value == 127).all()


def test_loops_of_a_known_length_are_captured_as_a_whole(world: fake_cupy.World) -> None:
    def function(x: Tensor) -> Any:
        state, ys = gf.scan(lambda h, row: (gf.tanh(h + row), h * row), x[0], x)
        return gf.exp(state), ys

    here = check_on_gpu(function)
    assert here.code.steps.graphs >= 1
    assert world.violations == []


def test_a_predicate_is_the_hosts(world: fake_cupy.World) -> None:
    check_on_gpu(lambda x: gf.cond(gf.sum(x) > 0, lambda: gf.tanh(x), lambda: gf.exp(x)))


def test_more_memory_than_there_is_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, memory=10_000)
    with pytest.raises(DeviceOutOfMemory, match=r"gpu:0 has .*GB free.*20,000 bytes.*smaller"):
        GpuBackend(0).empty(20_000)


@pytest.mark.fault(42)
def test_pools_let_go_of_what_they_keep_before_memory_is_said_to_be_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cupy.install(monkeypatch, memory=10_000)
    backend = GpuBackend(0)
    with backend.active():
        kept = backend.pools.op.malloc(6_000)
        del kept
        assert len(backend.pools.op.held) == 1, "CuPy's pools keep what was freed"
        there = backend.pools.allocate(8_000)
    assert backend.pools.op.held == [] and there.mem.size == 8_000


@pytest.mark.fault(42)
def test_an_op_that_finds_no_memory_is_named_with_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = fake_cupy.install(monkeypatch, memory=1 << 16)
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")  # each op takes memory for its result
    here = GpuFetches(
        gf.cumsum(gf.placeholder("float32", (6, 40), name="x"), axis=1, name="summed")
    )
    world.memory = world.taken
    with pytest.raises(DeviceOutOfMemory) as failure:
        here.step(x=X)
    text = str(failure.value)
    assert "cumsum 'summed'" in text and f"{__file__}:" in text and "960 bytes" in text


@pytest.mark.fault(42)
def test_graphs_keep_their_memory_where_there_is_none(world: fake_cupy.World) -> None:
    here = GpuFetches(gf.sort(gf.placeholder("float32", (6, 40), name="x"), axis=0))
    wanted = [np.sort(X + run, axis=0) for run in range(4)]
    for run in range(3):
        assert (here.step(x=X + run)[0] == wanted[run]).all()
    assert here.code.steps.graphs == 1
    held = len(here.backend.pools.graph.held)
    world.memory = world.taken
    with here.backend.active(), here.backend.graph_memory(), pytest.raises(DeviceOutOfMemory):
        here.backend.xp.empty((1 << 20,), np.uint8)
    assert len(here.backend.pools.graph.held) == held > 0
    assert (here.step(x=X + 3)[0] == wanted[3]).all()


@pytest.mark.fault(42)
def test_a_program_whose_memory_is_not_there_names_its_largest_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cupy.install(monkeypatch, memory=10_000)
    with pytest.raises(
        DeviceOutOfMemory, match=r"gpu:0 does not fit in its memory.*'large' of 40,000 bytes"
    ):
        GpuFetches(gf.cumsum(gf.placeholder("float32", (10_000,), name="x"), axis=0, name="large"))


def test_no_other_process_is_promised_the_memory_of_a_gpu(world: fake_cupy.World) -> None:
    arena = Arenas(GpuBackend(0)).reserve(1000, shared=True)
    assert arena.segment is None and isinstance(arena.memory, fake_cupy.ndarray)


def test_memory_is_one_plain_allocation_and_comes_back(world: fake_cupy.World) -> None:
    here = GpuFetches(gf.tanh(gf.placeholder("float32", (6, 40), name="x")))
    before = here.backend.memory_usage()
    assert before.plain == here.program.memory.arena + X.nbytes  # the place of the feed
    here.step(x=X)
    assert here.backend.memory_usage().pinned == 2 * 1024  # a power of two
    here.program.free()
    del here.program
    world.kept.clear()
    gc.collect()
    assert here.backend.memory_usage().plain == 0


def test_a_gpu_that_is_not_there_is_refused(world: fake_cupy.World) -> None:
    with pytest.raises(DeviceError, match="gpu:7 cannot be used"):
        GpuBackend(7)


def test_a_failing_op_names_the_users_line(world: fake_cupy.World) -> None:
    def fails(xp: Any, out: Any, x: Any) -> None:
        raise ZeroDivisionError("of no use")

    op = gf.Op("fails", infer=lambda x: x, kernel=lambda xp, x: x, into=fails)
    here = GpuFetches(op(gf.placeholder("float32", (2,), name="x")))
    with pytest.raises(OpError, match=r"fails.*test_gpu_backend\.py:\d+.*gpu:0.*of no use"):
        here.step(x=np.ones(2, "float32"))


def test_a_tensor_handed_to_another_gpu_is_a_copy_that_waits_for_its_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = fake_cupy.install(monkeypatch, devices=2)
    one, other = GpuBackend(0), GpuBackend(1)
    value = one.to_device(X)
    with one.active():
        one.xp.copyto(value, 3.0)
    handed = one.hand_over(value, "gpu")
    assert isinstance(handed, DeviceCopy)
    with one.active():
        one.xp.copyto(value, 4.0)  # the next step's
    inlet = InputBuffer(other, TensorSpec(X.shape, X.dtype))
    inlet(handed)
    assert (other.to_host(inlet.array) == 3.0).all()
    assert world.crossings == ["in", "across", "out"]


def test_two_gpus_and_a_cpu_train_as_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    fake_cupy.install(monkeypatch, devices=2)
    x = gf.placeholder("float32", (8, 5))
    with gf.device("gpu:0"):
        w = gf.variable(np.full((5, 4), 0.3, "float32"))
        h = gf.tanh(x @ w)
    with gf.device("gpu:1"):
        v = gf.variable(np.full((4, 3), 0.2, "float32"))
        k = gf.tanh(h @ v)
    with gf.device("cpu"):
        loss = gf.mean((k - 1.0) ** 2)
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(loss)
    data = np.random.default_rng(0).random((8, 5), "float32")
    cluster = gf.Cluster.here(devices=["cpu:0", "gpu:0", "gpu:1"])
    with gf.Session(cluster) as several:
        losses = [float(several.run([loss, train], {x: data})[0]) for _ in range(5)]
    x = gf.placeholder("float32", (8, 5))
    w, v = (
        gf.variable(np.full((5, 4), 0.3, "float32")),
        gf.variable(np.full((4, 3), 0.2, "float32")),
    )
    loss = gf.mean((gf.tanh(gf.tanh(x @ w) @ v) - 1.0) ** 2)
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(loss)
    with gf.Session() as session:
        wanted = [float(session.run([loss, train], {x: data})[0]) for _ in range(5)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_a_device_that_fails_says_how_to_find_the_op(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = GpuFetches(gf.tanh(gf.placeholder("float32", (6, 40), name="x")))

    def fail(self: Any) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")

    monkeypatch.setattr(fake_cupy.Stream, "synchronize", fail)
    with pytest.raises(DeviceLost, match=r"gpu:0 failed: .*IllegalAddress.*LAUNCH_BLOCKING"):
        here.step(x=X)


@pytest.mark.fault(42)
def test_all_of_a_gpus_pools_in_the_process_let_go_where_one_session_lacks_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = fake_cupy.install(monkeypatch, devices=2, memory=10_000)
    backend, other, elsewhere = GpuBackend(0), GpuBackend(0), GpuBackend(1)
    for pool in (other.pools.op, other.pools.persistent, world.pool, elsewhere.pools.op):
        pool.malloc(2_000)
    with backend.active():
        there = backend.pools.allocate(8_000)
    assert there.mem.size == 8_000
    assert [len(p.held) for p in (other.pools.op, other.pools.persistent, world.pool)] == [0, 0, 0]
    assert len(elsewhere.pools.op.held) == 1, "that is another GPU's memory"


def test_a_closed_gpu_lets_go_of_what_cupy_keeps_for_the_process(world: fake_cupy.World) -> None:
    """Plans of Fourier transforms keep memory of the pool in which they were made."""
    backend = GpuBackend(0)
    with backend.active():
        world.plans.append(backend.xp.empty(1000))
    world.pinned.malloc(1000)
    backend.close()
    assert (world.plans, world.pinned.held, backend.pools.op.held) == ([], [], [])
    assert world.taken == 0


def test_pinned_memory_is_counted_as_the_pool_takes_it(world: fake_cupy.World) -> None:
    backend = GpuBackend(0)
    for size in (0, 1, 1000, 1024):
        InputBuffer(backend, TensorSpec((size,), np.dtype("uint8")))(np.zeros(size, "uint8"))
    assert backend.memory_usage().pinned == 2 * (0 + 1 + 1024 + 1024)


def test_a_tensor_that_was_handed_over_is_kept_until_it_has_been_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is the other GPU's again as soon as it is let go, whatever this one has read."""
    fake_cupy.install(monkeypatch, devices=2)
    one, other = GpuBackend(0), GpuBackend(1)
    inlet, read = InputBuffer(other, TensorSpec(X.shape, X.dtype)), []
    for value in range(6):
        there = one.to_device(np.full_like(X, value))
        inlet(one.hand_over(there, "gpu"))
        with other.active():
            read.append(other.empty(X.nbytes).view(X.dtype).reshape(X.shape))
            other.xp.copyto(read[-1], inlet.array)
    assert [other.to_host(each)[0, 0] for each in read] == [0, 1, 2, 3, 4, 5]
    assert len(inlet._unread) == 2, "no more are waited for, nor kept"


def test_the_collector_rests_until_the_last_of_several_captures_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cupy.install(monkeypatch, devices=2)
    one, other = GpuBackend(0), GpuBackend(1)
    begun, ending, resting = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        assert ending.wait(10)

    def second() -> None:
        ending.set()
        thread.join(10)
        resting.append(not gc.isenabled())

    thread = threading.Thread(target=one.capture, args=(first,))
    thread.start()
    assert begun.wait(10)
    other.capture(second)
    assert resting == [True] and gc.isenabled()


def _break(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the device answers every call as CUDA does once an address was illegal."""

    def fail(*given: Any, **named: Any) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")

    for kind, names in (
        (fake_cupy.Device, ["__enter__"]),
        (fake_cupy.Stream, ["synchronize", "wait_event", "add", "begin_capture"]),
        (fake_cupy.Event, ["synchronize", "record"]),
        (fake_cupy.Graph, ["launch"]),
        (fake_cupy.MemoryPool, ["free_all_blocks"]),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, fail)


LOST = r"gpu:0 failed: cudaErrorIllegalAddress.*: start it anew; .*LAUNCH_BLOCKING"


@pytest.mark.parametrize("steps", [1, 3])
def test_a_gpu_that_is_lost_is_told_by_every_way_in_and_blames_no_op(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int
) -> None:
    """Of a step that is captured, of one that is replayed; of a program that is new then."""
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    x = gf.placeholder("float32", (6, 40))
    w = gf.variable(np.ones((40, 40), "float32"))
    with gf.device("gpu"):
        y = gf.tanh(gf.tanh(x @ w) @ w)
        train = gf.assign(w, w * 0.5)
    session = gf.Session(gf.Cluster.here(devices=["cpu:0", "gpu:0"]))
    for _ in range(steps):
        session.run([y, train], {x: X})
    _break(monkeypatch)
    for call in (
        lambda: session.run([y, train], {x: X}),
        lambda: session.run(gf.exp(y), {x: X}),
        lambda: session.get(w),
        lambda: session.set(w, np.ones((40, 40), "float32")),
    ):
        with pytest.raises(DeviceLost, match=LOST):
            call()
    session.close()


def test_a_feed_that_does_not_get_in_is_the_devices_failure_and_no_ops(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(size: int) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered: none to pin")

    monkeypatch.setattr(import_cupy().cuda, "alloc_pinned_memory", fail)
    here = GpuFetches(gf.tanh(gf.placeholder("float32", (6, 40), name="x")))
    with pytest.raises(DeviceError, match=r"gpu:0 failed: .*none to pin") as failure:
        here.step(x=X)
    assert not isinstance(failure.value, DeviceLost)


def test_a_program_of_a_gpu_that_is_lost_lets_go_of_its_memory(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = GpuFetches(gf.tanh(gf.placeholder("float32", (6, 40), name="x")))
    here.step(x=X)
    _break(monkeypatch)
    here.program.free()
    here.backend.close()
    del here.program
    world.kept.clear()
    gc.collect()
    assert here.backend.memory_usage().plain == 0


def test_a_commit_on_a_gpu_that_is_lost_says_so(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = gf.variable(np.ones((6, 40), "float32"))
    here = GpuFetches(REGISTRY["group"](gf.assign(w, w * 2.0)))
    here.program.run({}, 1, 0)
    _break(monkeypatch)
    with pytest.raises(DeviceLost, match=LOST):
        here.program.commit()


Skipped = Callable[[GpuBackend, Any, Any, int], None]


def _skip_event(what: str) -> Skipped:
    """The way in without one of its events."""

    def bring(self: GpuBackend, buffer: Any, pinned: Any, size: int) -> None:
        if what != "readers before":
            self._upload_stream.wait_event(self._step_begun)
        buffer.data.copy_from_host_async(pinned.ptr, size, self._upload_stream)
        self.uploaded = self.record_event(self._upload_stream)
        if what != "arrival":
            self.stream.wait_event(self.uploaded)

    return bring


@pytest.mark.parametrize("what", ["readers before", "arrival"])
def test_a_missing_event_is_seen_by_the_stand_in(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(GpuBackend, "upload", _skip_event(what))
    with pytest.raises(AssertionError):
        test_feeds_and_fetches_of_steps_in_flight_do_not_mix(world)
