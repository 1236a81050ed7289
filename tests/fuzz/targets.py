"""Every decoder of what comes from outside this process: how to feed it bytes, and its seeds.

A target takes any bytes. It may raise the errors that its decoder documents, nothing else, in a
time and a memory that do not depend on what the bytes claim.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import struct
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
from rich.console import Console

import graphflow as gf
from graphflow.cli import status as cli_status
from graphflow.errors import (
    CheckpointError,
    ClusterError,
    KeyFileError,
    OnnxError,
    OpError,
    PlanError,
    ProtocolError,
    TransportError,
)
from graphflow.ir.graph import Graph
from graphflow.ops.kernels.jit.object_cache import ObjectCache
from graphflow.placement.calibration import corrections_file, profile_file
from graphflow.placement.calibration import trace_corrections as learned
from graphflow.placement.clusters import table_reader
from graphflow.placement.plans import plan_file
from graphflow.runtime import checkpoint
from graphflow.runtime.checkpoint import shard
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.partitioning.partition import partition
from graphflow.runtime.protocol import coordinator_events as c
from graphflow.runtime.protocol import worker_events as w
from graphflow.runtime.protocol.fast_path import (
    FastPathCoordinator,
    FastPathWorker,
    SteadyStateStep,
)
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.security.keys import WORKER, Keyring, PublicKey
from graphflow.runtime.telemetry import metrics_endpoint as endpoint
from graphflow.runtime.transport import bulk_tcp as pipe
from graphflow.runtime.transport import unix_socket as lane
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
from graphflow.runtime.wire import array_codec
from graphflow.runtime.wire import frame_codec as wire
from graphflow.runtime.wire import graph_codec as codec
from graphflow.runtime.wire import step_frame_codec as packed
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.graph_limits import GraphLimits
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    KINDS,
    Chunk,
    Close,
    Commit,
    Compute,
    Done,
    Envelope,
    Hello,
    Load,
    Measure,
    Measured,
    Message,
    Open,
    Ping,
    Probe,
    Read,
    Ready,
    Spans,
    Tensor,
    Welcome,
    Write,
)
from graphflow.runtime.wire.step_values import Computed
from graphflow.runtime.worker import worker_status as status
from tests.runtime.programs import CPU, place_nodes

SMALL = GraphLimits(nodes=10_000, nbytes=1 << 20)
SESSION, TOKEN = "5" * 32, "7" * 32


@dataclass(frozen=True)
class Target:
    """One decoder.

    Args:
        form: what its input is: msgpack, json, text or bytes.
        errors: that it may raise.
        cost: an input's time, in those of a control frame.
    """

    name: str
    form: str
    seeds: tuple[bytes, ...]
    feed: Callable[[bytes], object]
    errors: type[Exception] | tuple[type[Exception], ...]
    cost: int = 1

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(self.errors):
            self.feed(data)


# Frames ----------------------------------------------------------------------------------------

OWN = Version.own()
HELLO = Hello(1, OWN.version, OWN.wire, OWN.python)
PEERS = ["tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"]
PART = Chunk("part", 3, 0, "uint8", [4], [0], 4, 0)
EDGE = Chunk("edge", 1, 7, "float32", [2, 3], [1, 0], 24, 0)


def inside(name: int | str, *shape: int) -> Any:
    """An array that is small enough to go inside a message."""
    return array_codec.encode_small(name, np.zeros(shape, "float32"))


SAMPLES: list[Message] = [
    HELLO,
    Welcome(1, OWN.version, OWN.wire, OWN.python, ["cpu:0"]),
    Open(2, 0, PEERS, 30.0, ["my_ops"], ["", "0" * 64], True),
    Load(3, "p", 1),
    Compute(4, "p", {"n": 128}, ["x"], True, 2.5),
    Compute(4, "p", {}, ["x"], False, 5.0, -1, [inside("x", 2, 3)]),
    Done(4, ["y"], {}, [inside("y", 2, 0)]),
    Tensor(inside(7, 2, 3)),
    PART,
    EDGE,
    Measured(5, {"flops": 1e9, "sizes": [1, 2], "gpu": None, "fast": True}),
    Spans(4, [("/worker:0/cpu:0", "matmul", 1, 2)]),
    Done(4, ["loss"], {"/worker:0/cpu:0": 4096}),
    Ping(),
]


def make_message(kind: type[Message]) -> Message:
    """A message of a kind, with the plainest values that its fields take."""
    hints = get_type_hints(kind)
    return kind(**{name: _plainest(hints[name]) for name in hints})


def _plainest(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple(_plainest(each) for each in get_args(hint))
    if get_origin(hint) in (list, dict):
        return get_origin(hint)()
    if get_origin(hint) is UnionType:
        return _plainest(get_args(hint)[0])
    return None if hint is Any else hint()


KNOWN = {type(message) for message in SAMPLES}
EVERY = [*SAMPLES, *(make_message(kind) for kind in KINDS.values() if kind not in KNOWN)]


def envelope(sequence: int = 1, step: int = 0, origin: int = COORDINATOR) -> Envelope:
    return Envelope(SESSION, 1, origin, step, sequence, 0, TOKEN)


def chunk_run(data: bytes) -> None:
    """Chunks, as a list of [fields, data], into one assembler."""
    inbox = ChunkAssembler(budget=1 << 20, entries=100)
    for fields, piece in _pairs(data):
        head = msgpack.packb(["Chunk", list(envelope()), fields])
        with contextlib.suppress(ProtocolError):
            _, message, frame = wire.decode_frames([head, piece])
            if isinstance(message, Chunk) and frame is not None and inbox.add(0, message, frame):
                inbox.take(0, message.purpose, message.number, message.name)


def _pairs(data: bytes) -> Iterable[tuple[Any, bytes]]:
    """What there is of (anything, bytes) in a list."""
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
    except Exception:  # changed into something that is no msgpack
        return
    for each in value if isinstance(value, list) else []:
        if isinstance(each, list) and len(each) == 2 and isinstance(each[1], bytes):
            yield each[0], each[1]


def fields_of(message: Message) -> Any:
    """The body of a message: a list in the order of its fields, by name where versions differ."""
    found = {each.name: getattr(message, each.name) for each in dataclass_fields(message)}
    return found if isinstance(message, Hello | Welcome) else list(found.values())


def chunk_seeds() -> tuple[bytes, ...]:
    arrays = [np.arange(6, dtype="f4").reshape(2, 3), np.zeros(0), np.ones((2, 2), "c16").T]
    runs = [
        [
            [fields_of(chunk), bytes(piece)]
            for chunk, piece in array_codec.split_array("edge", 1, "e", array)
        ]
        for array in arrays
    ]
    return tuple(msgpack.packb(run) for run in [*runs, [*runs[0], *runs[2], *runs[0]]])


# Graphs ----------------------------------------------------------------------------------------


@functools.cache
def graphs() -> tuple[bytes, list[Any]]:
    """The header of some partitions, and their buffers."""
    x = gf.placeholder("float32", ("n", 4), name="x")
    v = gf.variable(gf.init.normal((4, 3)), name="w")
    b = gf.variable(np.zeros(3, "float32"), name="b")
    y = gf.reshape(gf.tanh(gf.matmul(x, v) + b + gf.constant([1.0, 2.0, 3.0])), (-1,))
    far = gf.exp(y, name="far")
    first = Graph([gf.sum(y), gf.assign(b, b - 1.0), far])
    end = gf.while_loop(lambda s: s < 9.0, lambda s: s * 2.0, gf.sum(x))
    total, _ = gf.scan(lambda s, row: (s + gf.sum(row), s), gf.constant(0.0), x)
    second = Graph([gf.cond(end > total, lambda: end, lambda: total), gf.random.normal((2, 2))])
    parts = [
        partition(first, place_nodes(first, far="/worker:1/cpu:0")),
        partition(second, place_nodes(second)),
    ]
    return codec.encode([part[CPU] for part in parts])


def graph(data: bytes) -> None:
    codec.decode(data, graphs()[1], SMALL)


def lane_seeds() -> tuple[bytes, ...]:
    """Packets of one frame, and of two."""
    head = wire.encode(envelope(), PART)
    return _frames()[0], struct.pack("<cI", b"\0", len(head)) + head + bytes(4)


def lane_packet(data: bytes) -> None:
    wire.decode_frames(lane.split_packet(data))


class Poured:
    """What comes over a pipe, in place of its connection."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def setblocking(self, blocks: bool) -> None:
        return

    def setsockopt(self, *given: object) -> None:
        return

    def recvmsg_into(self, places: list[memoryview], *_: int) -> tuple[int]:
        count = 0
        for place in places:
            part, self._left = self._left[: place.nbytes], self._left[place.nbytes :]
            place[: part.nbytes] = part
            count += part.nbytes
        if not count:
            raise BlockingIOError
        return (count,)


def pipe_seeds() -> tuple[bytes, ...]:
    """Messages with and without a piece of an array, and two in a row."""
    from tests.runtime.transport.test_bulk_tcp import encode_frames

    array = np.arange(200_000, dtype="float32")
    (chunk, data), *_ = array_codec.split_array("edge", 3, 5, array, checked=False)
    ping = encode_frames(wire.encode(envelope(), Ping()))
    return ping, encode_frames(wire.encode(envelope(), chunk), bytes(data)), ping * 2


def pipe_bytes(data: bytes) -> None:
    made = pipe.BulkChannel(Poured(data))  # type: ignore[arg-type]
    while (frames := made.receive()) is not None:
        wire.decode_frames(frames)


# State machines --------------------------------------------------------------------------------


def letter(route: int, number: int, message: Message, data: bytes = b"", step: int = 0) -> Any:
    origin = route if isinstance(message, Chunk) and message.purpose == "edge" else COORDINATOR
    head = list(envelope(number, step, origin))
    return ["message", route, type(message).__name__, head, fields_of(message), data]


def conversations() -> tuple[bytes, ...]:
    """What a worker hears: messages, ticks, and jobs that end."""
    opened = [letter(0, 1, HELLO), letter(0, 2, Open(2, 0, PEERS, 30.0)), ["end", 0]]
    checked = array_codec.checksum(bytes(4)) if hasattr(array_codec, "checksum") else 0
    part = PART if not checked else Chunk(*fields_of(PART)[:-3], checked)
    loaded = [letter(0, 3, part, bytes(4)), letter(0, 4, Load(3, "p", 1)), ["end", 0]]
    step = [
        letter(0, 5, Compute(4, "p", {}, [], False, 5.0), step=1),
        letter(1, 1, EDGE, bytes(24)),
        ["end", 0],
        letter(0, 6, Commit(), step=1),
        ["tick", 1.0],
    ]
    rest = [letter(0, 7, Ping()), letter(0, 8, Read(5, "w")), ["end", 0], letter(0, 9, Measure(6)),
            ["end", 0], letter(0, 10, Probe(7, 1, 8, 1, 1.0)), ["end", 1], letter(0, 11, Close(8)),
            ["tick", 40.0], ["leave"]]  # fmt: skip
    failing = [*step[:1], ["end", 2], letter(0, 6, Write(5, "w"))]
    every = [letter(0, number, message) for number, message in enumerate(EVERY, 3)]
    begun = opened + loaded
    talks = [opened + every, opened, begun, begun + step, begun + step + rest]
    talks.append(begun + failing + rest)
    return tuple(msgpack.packb(talk) for talk in talks)


OUTCOMES = (
    None, Computed({"y": np.ones(2, "f4")}, [("t", "n", 1, 2)], {"cpu:0": 8}), OpError("it failed"),
    np.zeros(3), {"flops": 1.0}, 0.5,
)  # fmt: skip


def worker_machine(data: bytes) -> None:
    machine = FastPathWorker(["cpu:0"])
    now, jobs = 0.0, []
    for entry in _entries(data):
        event: Any = None
        match entry:
            case ["message", int(route), kind, head, body, bytes(piece)]:
                decoded = _decode_message(kind, head, body, piece)
                event = decoded and w.MessageReceived(bytes([route % 4]), *decoded, route % 2 > 0)
                run = decoded and machine.accept_order(event.route, wire.encode(*decoded[:2]), now)
                if run:
                    jobs.append(run)
                    continue
            case ["tick", int(seconds) | float(seconds)] if 0 <= seconds < 1e6:
                now += seconds
                event = w.WorkerTick()
            case ["end", int(which)] if jobs:
                run = jobs.pop(0)
                event = w.JobFinished(
                    run.session, run.job, run.step, run.epoch, _outcome(run, which)
                )
                if which % 2 and machine.encode_answer(event) is not None:
                    continue
            case ["leave"]:
                event = w.EndWorker("it was asked to end")
        for action in machine.handle(event, now) if event else ():
            if isinstance(action, w.RunJob):
                jobs.append(action)
            elif isinstance(action, w.SendMessage):
                wire.encode(action.envelope, action.message)


def _outcome(run: Any, which: int) -> Any:
    """What such a job can end with: an error, or what it is for."""
    if which % 3 == 2:
        return OUTCOMES[2]
    right = {Compute: 1, Read: 3, Measure: 4, Probe: 5}
    return OUTCOMES[right.get(type(run.job), 0)]


def replies() -> tuple[bytes, ...]:
    """What a coordinator sees: its own operations, links, and what two workers answer."""
    own = Welcome(1, OWN.version, OWN.wire, OWN.python, ["cpu:0"])

    def letters_of_both(number: int, message: Message, step: int = 0) -> list[Any]:
        made = [letter(worker, number, message, step=step) for worker in (0, 1)]
        for worker, each in enumerate(made):
            each[3][2] = worker
        return made

    start = [["link", 0, True], ["link", 1, True], ["begin", 0], *letters_of_both(1, own)]
    opened = [*start, ["begin", 1], *letters_of_both(2, Ready(2))]
    step = [*opened, ["begin", 3], *letters_of_both(3, Done(4, [], {"cpu:0": 4}), 1), ["tick", 1.0]]
    late = [*opened, ["begin", 3], ["tick", 9.0], ["link", 0, False], ["tick", 9.0]]
    spans = [
        *opened,
        ["begin", 3],
        *letters_of_both(3, Spans(4, [("a", "b", 1, 2)]), 1),
        ["cancel"],
    ]
    every = [each for number, one in enumerate(EVERY, 3) for each in letters_of_both(number, one)]
    talks = (start, opened, step, late, spans, [*opened, *every])
    return tuple(msgpack.packb(each) for each in talks)


ORDERS: list[tuple[Message, list[Any]]] = [
    (HELLO, []), (Open(2, 0, PEERS, 30.0), []), (Load(3, "p", 1), [("part", 0, np.zeros(3))]),
    (Compute(4, "p", {}, ["x"], False, 5.0), [("feed", "x", np.ones(2))]), (Read(5, "w"), []),
    (Measure(6), []), (Measure(7, True), []), (Close(8), []),
]  # fmt: skip


def coordinator_machine(data: bytes) -> None:
    now, used = 0.0, set[int]()
    machine = FastPathCoordinator(SESSION, PEERS, now, token=TOKEN)
    for entry in _entries(data):
        event: Any = None
        match entry:
            case ["message", int(route), kind, head, body, bytes(piece)]:
                decoded = _decode_message(kind, head, body, piece)
                if (
                    decoded
                    and machine.accept_answer(route % 2, wire.encode(*decoded[:2]), now) is None
                ):
                    event = c.WorkerMessageReceived(route % 2, *decoded)
            case ["tick", int(seconds) | float(seconds)] if 0 <= seconds < 1e6:
                now += seconds
                event = c.CoordinatorTick()
            case ["begin", int(which)]:
                message, arrays = ORDERS[which % len(ORDERS)]
                request = which % len(ORDERS) + 1
                if request not in used:
                    used.add(request)
                    orders = dict.fromkeys((0, 1), c.Order(message, arrays))
                    event = c.BeginOperation(request, orders, 5.0, step=request)
                    repeat = SteadyStateStep(request, request, message, [0, 1], {})
                    if type(message) is Compute and machine.begin_step(repeat, now) is not None:
                        event = None
            case ["link", int(worker), bool(up)]:
                event = c.LinkUp(worker % 2) if up else c.LinkDown(worker % 2, "gone")
            case ["cancel"]:
                event = c.CancelSteps()
        for action in machine.handle(event, now) if event else ():
            if isinstance(action, c.SendToWorker):
                wire.encode(action.envelope, action.message)


def _entries(data: bytes) -> list[list[Any]]:
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
    except Exception:  # changed into something that is no msgpack
        return []
    return [each for each in value if isinstance(each, list)] if isinstance(value, list) else []


def _decode_message(kind: Any, head: Any, body: Any, piece: bytes) -> tuple[Any, ...] | None:
    """A message as it would come out of frames; None where it would be refused there."""
    frames: list[bytes | memoryview] = [msgpack.packb([kind, head, body])]
    if kind == "Chunk":
        frames.append(memoryview(piece))
    try:
        return wire.decode_frames(frames)
    except ProtocolError:
        return None


# Files -----------------------------------------------------------------------------------------


@functools.cache
def folder() -> Path:
    """A place for the files of all targets, which ends with the process."""
    made = tempfile.TemporaryDirectory(prefix="graphflow-fuzz-")
    _KEPT.append(made)
    return Path(made.name)


_KEPT: list[Any] = []

CLUSTER = b"""key = "alice"
deadline = 60.0
[defaults]
devices = ["cpu:0"]
memory = "8GiB"
flops = 1.0e12
bandwidth = 4.0e10
launch = 5.0e-6
[defaults.link]
latency = 1.0e-4
bandwidth = 1.0e9
[[workers]]
address = "tcp://127.0.0.1:7001"
devices = ["cpu:0", { name = "gpu:0", memory = "16GiB", flops = 1.0e13 }]
[[workers]]
address = "tcp://127.0.0.1:7002"
key = "box1"
[[links]]
source = "/worker:0"
target = "/worker:1"
latency = 1.0e-4
bandwidth = 1.25e9
"""
HOSTS = b"""[network]
name = "100gbe"
[[hosts]]
name = "a"
count = 2
devices = [{ name = "h100", count = 4, memory = "80GB" }]
link = "nvlink4"
nic = { name = "100gbe", count = 2 }
switches = [{ devices = ["gpu:0", "gpu:1"], uplink = "pcie4" }]
"""


def cluster(data: bytes) -> None:
    path = folder() / "cluster.toml"
    path.write_bytes(data)
    most, table_reader.MAX_DEVICES = table_reader.MAX_DEVICES, 32  # the time grows with its square
    try:
        gf.Cluster.load(path)
    finally:
        table_reader.MAX_DEVICES = most


@functools.cache
def plan_seed() -> bytes:
    x = gf.placeholder("float32", (4, 4), name="x")
    y = gf.sum(gf.tanh(gf.matmul(x, x)))
    made = gf.plan(y, gf.Cluster.hypothetical("2xh100"))
    return plan_file.dumps(made).encode()


def plan(data: bytes) -> None:
    plan_file.loads(data.decode("utf-8", "replace"), "a test")


def key_text(data: bytes) -> None:
    PublicKey.parse(data.decode("latin-1"), "a test")


def secret(data: bytes) -> None:
    ring = Keyring(folder() / "keys")
    ring.folder.mkdir(mode=0o700, exist_ok=True)
    path = ring.folder / "box.secret"
    path.touch(0o600)
    path.write_bytes(data)
    ring.own_pair("box", WORKER)


def read_trusted_keys(data: bytes) -> None:
    ring = Keyring(folder() / "ring")
    place = ring.folder / "trusted"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    (place / "box.public").write_bytes(data)
    ring.read_trusted()


def session_note(data: bytes) -> None:
    """Whose a directory of checkpoints is."""
    root = folder() / "noted"
    root.mkdir(exist_ok=True)
    (root / "session.json").write_bytes(data)
    CheckpointStore(root, 2)


NOTE = json.dumps({"session": "a" * 32, "token": "b" * 32, "epoch": "3", "owner": "c" * 32})


@functools.cache
def report_seed() -> bytes:
    told = {
        "version": "1.0", "wire": 7, "python": "3.12", "host": "box", "pid": 1,
        "devices": ["cpu:0"], "uptime": 1.0, "resident": 1, "resident_peak": 1, "refused": 0,
        "links": [{"peer": "tcp://127.0.0.1:2", "sent": 1, "received": 2}],
        "sessions": [{
            "session": "0123", "worker": 0, "epoch": 1, "age": 1.0, "programs": 1, "step": 3,
            "committed": 2, "steps_per_second": 9.0, "last_step_seconds": 0.1,
            "doing": "compute step 3", "doing_seconds": 0.1, "parked": False, "queued": 0,
            "arenas": {"cpu:0": 1}, "variables": {"cpu:0": 1}, "waiting": 1,
            "waits": [["edge 0", 0.1]],
        }],
    }  # fmt: skip
    return bytes(msgpack.packb(told))


def status_report(data: bytes) -> None:
    """What a worker tells of itself, and what `graphflow status` shows of it."""
    try:
        told = msgpack.unpackb(data, strict_map_key=False)
    except Exception:  # refused before it comes to this
        return
    if (wrong := status.find_misfit(told)) is not None:
        raise ProtocolError(wrong)
    answers = [(status.WorkerAddress("tcp://127.0.0.1:1"), told)]
    Console(file=io.StringIO(), width=180).print(cli_status.render_answers(answers))
    json.dumps(told, allow_nan=False)


_HALF = (
    b"0faa684ed28867b97f4a6a2dee5df8ce974e76b7018e3f22a1c4cf2678570f20"  # CURVE's, of 32 times 0x22
)
SECRET = b"graphflow-secret-1 worker box " + _HALF + b" " + b"2" * 64
PUBLIC = b"graphflow-key-1 worker box " + b"1" * 64


@functools.cache
def save_checkpoint() -> tuple[bytes, bytes]:
    """The manifest and the shard of a checkpoint in the folder."""
    state = {"w": np.arange(6, dtype="f4").reshape(2, 3), "z": np.ones(2, "c8")}
    checkpoint.save(checkpoint.Checkpoint(state, 7), folder() / "checkpoint")
    (file,) = (folder() / "checkpoint").glob("*.safetensors")
    return (folder() / "checkpoint" / "manifest.json").read_bytes(), file.read_bytes()


def manifest(data: bytes) -> None:
    save_checkpoint()
    (folder() / "checkpoint" / "manifest.json").write_bytes(data)
    checkpoint.load(folder() / "checkpoint")


def tensors(data: bytes) -> None:
    shard.read_metadata(data)
    shard.read_arrays(data, {"w": np.dtype("f4"), "z": np.dtype("c8")})


def read_learned(data: bytes) -> None:
    """What was learned, as it is kept in a file."""
    path = corrections_file.corrections_path(folder())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    made = corrections_file.read_corrections({"devices": {}}, folder())
    bucket = learned.Bucket("|cpu|1", False, "matmul", "matmul", "float32", 3, 4)
    assert made.factor(bucket) > 0


def taught_seed() -> bytes:
    made = learned.TraceCorrections(corrections_file.basis_of({"devices": {}}))
    bucket = learned.Bucket("|cpu|1", False, "matmul", "matmul", "float32", 3, 4)
    for ratio in (1.0, 2.0, 3.0):
        made.observe(bucket, ratio, 1.0)
    made.observe_link("here", 1000, 1e-3)
    made.observe_step("here", 3, 1e-3, 2e-3)
    return json.dumps(made.to_dict()).encode()


def profile(data: bytes) -> None:
    path = profile_file.profile_path(folder())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    profile_file.read_profile(path)


def profile_seed() -> bytes:
    speeds = {"launch": 1e-6, "handoff": 1e-5, "cache_bytes": 1 << 20, "traffic": [[1e6, 1e-4]],
              "matmul": {name: [[1e6, 1e-4]] for name in ("float32", "float64", "other")},
              "ops": {}, "classes": {},
              "contention": {"threads": [1], "compute": [1.0]}}  # fmt: skip
    return json.dumps(
        {"format": profile_file.FORMAT, "key": profile_file.machine_key(),
         "devices": {"cpu": speeds}, "links": {"process": [1e-5, 1e9]},
         "steps": {"here": [1e-5, 1e-6]}}
    ).encode()  # fmt: skip


def kernel(data: bytes) -> None:
    """Object code, as it is kept in a file: whatever is not as it was written is not there."""
    store = ObjectCache(folder() / "cache")
    store.put("key", b"code")
    store._path("key").write_bytes(data)
    assert store.get("key") in (None, b"code")


def kernel_seed() -> bytes:
    store = ObjectCache(folder() / "cache")
    store.put("key", b"code")
    return store._path("key").read_bytes()


def segment(data: bytes) -> None:
    SharedMemorySegment.attach(data.decode("latin-1")).close()


def segment_seed() -> bytes:
    try:
        made = SharedMemorySegment.create(4096)
    except TransportError:  # not on this system
        return b"memfd:0:0:0:0:0"
    _KEPT.append(made)
    return made.token.encode()


class Heard:
    """What a browser says, in place of its connection."""

    def __init__(self, data: bytes) -> None:
        self._pieces = [data[:100], data[100:], b""]

    def settimeout(self, seconds: float) -> None:
        return

    def recv(self, most: int) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


HTTP = b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost:9100\r\nAccept: text/plain\r\n\r\n"


def http(data: bytes) -> None:
    """A request for metrics, and whether it is for this machine."""
    request: Any = endpoint._read_request(Heard(data), float("inf"))  # type: ignore[arg-type]
    server: Any = endpoint.MetricsServer.__new__(endpoint.MetricsServer)
    server._names, server._is_open = {"localhost", "127.0.0.1"}, True
    for header in getattr(request, "headers", {}).values():
        server._is_own_host(header)


@functools.cache
def onnx_seeds() -> tuple[bytes, ...]:
    from tests.onnx.test_hostile import SEEDS

    return tuple(SEEDS)


def onnx(data: bytes) -> None:
    gf.onnx.load(data)


# All of them -----------------------------------------------------------------------------------


def _frames() -> tuple[bytes, ...]:
    """Of all messages, also of those that mostly go packed."""
    return tuple(msgpack.packb(letter(0, 1, message)[2:5]) for message in EVERY)


def _packed_frames() -> tuple[bytes, ...]:
    array = array_codec.encode_small("x", np.zeros(2, "float32"))
    assert array is not None
    step = (
        Compute(4, "p", {"n": 3, "m": 4}, ["y"], False, 2.5, 3, [array, array]),
        Compute(4, "p", {}, [], True, 2.5), Done(4, [], {}, [array]), Done(4, [], {}),
        Tensor(array),
    )  # fmt: skip
    return tuple(wire.encode(envelope(), message) for message in step)


def dialogue_frames() -> tuple[bytes, ...]:
    order = Compute(4, "p", {"n": 3, "m": 4}, [], False, 2.5, 3, [inside("x", 2), inside("y")])
    answers = Done(4, [], {}, [inside("x", 2, 3)]), Done(4, [], {})
    asked, told = envelope(), envelope()._replace(origin=1)
    return wire.encode(asked, order), *(wire.encode(told, each) for each in answers)


def dialogue(data: bytes) -> None:
    """What is read by those who know each other: what everybody reads, or nothing."""
    known = packed.StepCodec.for_worker(envelope().session, envelope().epoch, 1, envelope().token)
    assert known is not None
    order, answer = known.read_order(data), known.read_answer(data)
    if order is not None or answer is not None:
        said, message = wire.decode(data)
        numbers = said.step, said.sequence, said.acknowledged
        assert order in (None, (*numbers, message)), "another order"
        small = message.small if isinstance(message, Compute | Done) else []
        assert answer is None or answer == (*numbers, message.request, small), "another answer"
        for each in small:
            array_codec.decode_small(each, aligned=False)


def targets() -> list[Target]:
    """Every decoder; those whose libraries are not installed are left out."""
    found = [
        Target("control", "msgpack", _frames(), wire.decode, ProtocolError),
        Target("packed", "bytes", _packed_frames(), wire.decode, ProtocolError),
        Target("dialogue", "bytes", dialogue_frames(), dialogue, ProtocolError),
        Target("lane", "bytes", lane_seeds(), lane_packet, ProtocolError),
        Target("pipe", "bytes", pipe_seeds(), pipe_bytes, ProtocolError, 5),
        Target("chunks", "msgpack", chunk_seeds(), chunk_run, (), 2),
        Target("graph", "msgpack", (graphs()[0],), graph, ProtocolError, 10),
        Target("worker", "msgpack", conversations(), worker_machine, (), 10),
        Target("coordinator", "msgpack", replies(), coordinator_machine, (), 10),
        Target("cluster file", "text", (CLUSTER, HOSTS), cluster, ClusterError, 20),
        Target("plan file", "json", (plan_seed(),), plan, PlanError, 30),
        Target("public key", "text", (PUBLIC,), key_text, KeyFileError),
        Target("secret key", "text", (SECRET,), secret, KeyFileError, 2),
        Target("trusted keys", "text", (PUBLIC,), read_trusted_keys, KeyFileError, 2),
        Target("manifest", "json", (save_checkpoint()[0],), manifest, CheckpointError, 5),
        Target("session note", "json", (NOTE.encode(),), session_note, CheckpointError, 5),
        Target("status report", "msgpack", (report_seed(),), status_report, ProtocolError, 30),
        Target("tensors", "bytes", (save_checkpoint()[1],), tensors, CheckpointError, 2),
        Target("learned", "json", (taught_seed(),), read_learned, (), 5),
        Target("profile", "json", (profile_seed(),), profile, (), 5),
        Target("kernel", "bytes", (kernel_seed(),), kernel, (), 5),
        Target("http", "text", (HTTP,), http, (), 2),
        Target("segment", "text", (segment_seed(),), segment, TransportError, 2),
    ]
    with contextlib.suppress(ImportError):
        found.append(Target("onnx", "bytes", onnx_seeds(), onnx, OnnxError, 30))
    return found
