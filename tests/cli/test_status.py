"""`graphflow status`: what workers tell, to whom, and what is said when they do not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import graphflow as gf
from graphflow.cli.main import main
from graphflow.cli.status import render_answers, show_age
from graphflow.parallel.searching.measurement import measure_best
from graphflow.parallel.searching.search_result import CandidateResult
from graphflow.runtime.security.keys import CLIENT, COORDINATOR, WORKER, Keyring
from graphflow.runtime.worker.worker_status import WorkerAddress
from graphflow.sessions.session import Session
from tests import loaded
from tests.house.sources import ROOT
from tests.runtime.workers import serve_worker

DEVICE = 'devices = [{ name = "cpu:0", flops = 5e10, bandwidth = 1e10, launch = 1e-6 }]'


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["status", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[str, str]]:
    quiet = {"GRAPHFLOW_LOG_LEVEL": "error"}
    with (
        serve_worker(**quiet) as first,
        serve_worker("--devices", "cpu:0,cpu:1", **quiet) as second,
    ):
        yield first, second


@pytest.fixture
def cluster(workers: tuple[str, str], tmp_path: Path) -> Path:
    file = tmp_path / "cluster.toml"
    file.write_text("\n".join(f'[[workers]]\naddress = "{a}"\n{DEVICE}' for a in workers))
    return file


def test_an_idle_worker_tells_what_it_is(
    capsys: pytest.CaptureFixture[str], workers: tuple[str, str]
) -> None:
    code, out, err = status(capsys, workers[1])
    assert code == 0 and not err
    assert workers[1] in out and "cpu:0, cpu:1" in out and gf.__version__ in out
    assert "Sessions" not in out and "MiB" in out


def test_a_session_at_work_is_shown_with_its_steps_memory_and_links(
    capsys: pytest.CaptureFixture[str], cluster: Path, workers: tuple[str, str]
) -> None:
    x = gf.placeholder("float32", (256,), name="x")
    with gf.device("/worker:0"):
        a = gf.tanh(x) + gf.variable(np.ones(256, np.float32), name="secret_name")
    with gf.device("/worker:1"):
        b = gf.exp(a)
    with gf.Session(cluster, trial=False) as session:
        for _ in range(20):
            session.run(b, {x: np.ones(256, np.float32)})
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # a worker answers a step before it counts it
            code, out, _ = status(capsys, str(cluster), "--json")
            told = json.loads(out)["workers"]
            if all(each["step"] >= 20 for worker in told for each in worker["sessions"]):
                break
        code_table, table, _ = status(capsys, str(cluster))
    assert code == code_table == 0
    for index, worker in enumerate(told):
        assert worker["address"] == workers[index] and worker["resident"] > 1 << 20
        (seen,) = worker["sessions"]
        assert len(seen["session"]) == 8 and session._life.hosts.session.startswith(seen["session"])
        assert (seen["worker"], seen["epoch"]) == (index, 1) and seen["committed"] >= 20
        assert seen["programs"] == 1 and seen["step"] >= 20 and not seen["parked"]
        assert seen["steps_per_second"] > 0 and 0 < seen["last_step_seconds"] < 10
        assert sum(seen["arenas"].values()) > 0
    assert sum(told[0]["sessions"][0]["variables"].values()) == 1024
    (link,) = told[0]["links"]
    assert link["peer"] == workers[1] and link["sent"] >= 20 * 1024
    assert told[1]["links"][0]["received"] == link["sent"]
    assert "Sessions" in table and "Tensors between workers" in table and seen["session"] in table
    assert session._life.hosts.session not in out + table


def test_bytes_of_collectives_are_those_of_a_link(
    capsys: pytest.CaptureFixture[str], cluster: Path
) -> None:
    def read_sent_bytes() -> list[int]:
        _, out, _ = status(capsys, str(cluster), "--json")
        told = json.loads(out)["workers"]
        return [link["sent"] for each in told for link in each["links"]]

    xs = []
    for index in range(2):
        with gf.device(f"/worker:{index}"):
            xs.append(gf.placeholder("float32", (1000,), name=f"x{index}"))
    total = gf.parallel.all_reduce(xs, "sum")
    with gf.Session(cluster, trial=False) as session:
        feeds = {x: np.ones(1000, np.float32) for x in xs}
        session.run(total, feeds)
        before = read_sent_bytes()
        for _ in range(10):
            session.run(total, feeds)
        assert [b - a for a, b in zip(before, read_sent_bytes(), strict=True)] == [10 * 4000] * 2


def test_what_is_only_tried_out_is_not_counted(
    capsys: pytest.CaptureFixture[str], cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_sessions_and_links() -> list[tuple[Any, Any]]:
        code, out, _ = status(capsys, str(cluster), "--json")
        assert code == 0
        return [(each["sessions"], each["links"]) for each in json.loads(out)["workers"]]

    x = gf.placeholder("float32", (256,), name="x")
    with gf.device("/worker:0"):
        a = gf.tanh(x)
    with gf.device("/worker:1"):
        b = gf.exp(a)
    before, seen = read_sessions_and_links(), []
    run = Session.run

    def record_status_and_run(self: Session, *args: Any, **kwargs: Any) -> Any:
        seen.append(read_sessions_and_links())
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Session, "run", record_status_and_run)
    trials = [CandidateResult("a", None, 1.0, 0)]
    feeds = {x: np.ones(256, np.float32)}
    (found,) = measure_best(trials, 1, lambda strategy: [b], gf.Cluster.load(cluster), feeds)
    assert found.measured and found.measured > 0
    assert len(seen) > 4 and all(each == before for each in [*seen, read_sessions_and_links()])


def test_a_step_that_waits_says_for_what(
    capsys: pytest.CaptureFixture[str], cluster: Path, tmp_path: Path
) -> None:
    """A worker that is stopped delivers nothing: the other one says so."""
    x = gf.placeholder("float32", (1000, 1000), name="x")
    with gf.device("/worker:1"):
        slow = x
        for _ in range(40):
            slow = slow @ x
    with gf.device("/worker:0"):
        y = gf.sum(slow)
    seen = ""
    with gf.Session(cluster, trial=False) as session:
        future = session.run_async(y, {x: np.zeros((1000, 1000), np.float32)})
        until = time.monotonic() + 60
        while "waits for edge" not in seen and time.monotonic() < until and not future.done():
            seen = status(capsys, str(cluster))[1]
        future.result(100)
    assert "compute step" in seen and "waits for edge" in seen and "/worker:1/cpu:0" in seen


def test_who_does_not_answer_is_named_within_the_timeout_and_the_others_are_shown(
    capsys: pytest.CaptureFixture[str], workers: tuple[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # listens, and never says anything
        mute = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        code, out, err = status(
            capsys, workers[0], "tcp://127.0.0.1:1", mute, "--timeout", "1", "--json"
        )
        assert time.monotonic() - started < 10
    told = {each["address"]: each for each in json.loads(out)["workers"]}
    assert code == 1 and not err
    assert "pid" in told[workers[0]]
    for address in ("tcp://127.0.0.1:1", mute):
        assert told[address]["error"] == "RendezvousTimeout" and address in told[address]["text"]
    assert "said nothing within 1 s" in told[mute]["text"]
    assert "nobody answered" in told["tcp://127.0.0.1:1"]["text"]
    code, out, _ = status(capsys, "tcp://127.0.0.1:1", "--timeout", "0.3")
    assert (
        code == 1
        and out.strip().startswith("nobody answered")
        and "graphflow worker --listen" in out
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tcp://127.0.0.1"], "tcp://host:port"),
        (["nowhere.toml"], "nor an existing file"),
        (["7001"], "nor an existing file"),
        (["tcp://10.0.0.2:7001"], "keys new"),
        (["tcp://127.0.0.1:1", "here.toml"], "one cluster file"),
        (["tcp://127.0.0.1:1", "--watch", "--json"], "one of them"),
        (["tcp://127.0.0.1:1", "--timeout", "0"], "--timeout"),
        (["tcp://127.0.0.1:1", "--worker-key", "a", "--worker-key", "b"], "one for each"),
        ([], "graphflow up"),
    ],
    ids=str,
)
def test_a_wrong_argument_gets_one_line(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # where no cluster is up
    code, out, err = status(capsys, *arguments)
    assert code == 2 and says in err and not out
    assert err.count("\n") == 1 and "Traceback" not in err


def test_a_host_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = status(capsys, "tcp://no.such.host.invalid:7001", "--insecure")
    assert code == 1 and "no.such.host.invalid" in out and "unknown" in out


def told_by(workers: tuple[str, str], waits: str) -> list[tuple[WorkerAddress, dict[str, Any]]]:
    """Reports of two workers with a session, whose numbers are all different."""
    answers = []
    for index, address in enumerate(workers):
        session = {
            "session": "3f1c2a90", "worker": index, "epoch": 41 + index, "age": 3700.0,
            "programs": 51 + index, "step": 100_200 + index, "committed": 100, "parked": False,
            "steps_per_second": 3.94 + index, "last_step_seconds": 0.00315 + index,
            "doing": "compute step 100201", "doing_seconds": 0.5, "queued": 0,
            "arenas": {"cpu:0": 61 << 10 + index}, "variables": {"cpu:0": 71 << 10 + index},
            "waiting": 3, "waits": [[waits, 0.25]],
        }  # fmt: skip
        link = {"peer": workers[1 - index], "sent": 81 << 20, "received": 91 << 20}
        report = {
            "version": gf.__version__, "host": f"host-{index}.of.a.long.domain.example",
            "pid": 12345 + index, "devices": ["cpu:0", "cpu:1"], "uptime": 90_000.0,
            "resident": 811 << 20, "resident_peak": 822 << 20, "refused": 17, "links": [link],
            "sessions": [session],
        }  # fmt: skip
        answers.append((WorkerAddress(address), report))
    return answers


def remove_spaces(text: str) -> str:
    """Without what lies between the lines on which something goes on."""
    return "".join(text.split())


@pytest.mark.parametrize("width", [30, 60, 80, 100, 180, 400])
@pytest.mark.parametrize("host", ["127.0.0.1", f"{'gpu-machine.' * 7}example"], ids=["here", "far"])
def test_all_that_is_told_is_shown_on_terminals_of_any_width(width: int, host: str) -> None:
    workers = (f"tcp://{host}:7001", f"tcp://{host}:7002")
    waits = "edge 3 from /worker:1/cpu:0 ('decoder/block_11/attention/matmul', made at model.py:7)"
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render_answers(told_by(workers, waits)))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
    values = [
        *workers, "1 d 1 h", "811 MiB", "822 MiB", "17", "3f1c2a90", "1 h 1 min", "41", "52",
        "100200", "100201", "3.94", "4.94", "3.15 ms", "1 s", "61 KiB", "142 KiB", "81 MiB",
        "91 MiB", "compute step 100201, 500 ms", f"waits for {waits} and 2 more, 250 ms",
        f"host-1.of.a.long.domain.example, process 12346, cpu:0, cpu:1, version {gf.__version__}",
        *(f"{index} at {host}:{7001 + index}" for index in (0, 1)),
    ]  # fmt: skip
    assert [value for value in values if remove_spaces(value) not in remove_spaces(text)] == []


def test_what_there_is_room_for_is_a_table_and_else_some_lines_for_each() -> None:
    answers = told_by(("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"), "edge 3")
    told = {}
    for width in (80, 180):
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(render_answers(answers))
        told[width] = console.export_text()
    assert "session: 3f1c2a90  worker: 0 at 127.0.0.1:7001\n  age: 1 h 1 min  epoch: 41" in told[80]
    assert told[80].count("steps/s: ") == 2
    assert told[180].count("steps/s") == 1 and "session: " not in told[180]


def test_what_a_worker_says_cannot_steer_the_terminal() -> None:
    report = {
        "version": "\x1b[2J", "host": "[red]h\u202e", "pid": 1, "devices": ["cpu:0\n\x9b"],
        "uptime": 1.0, "resident": 1, "resident_peak": 1, "refused": 0, "links": [], "sessions": [],
    }  # fmt: skip
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render_answers([(WorkerAddress("tcp://127.0.0.1:1"), report)]))
    text = console.export_text()
    assert "\x1b" not in text and "\x9b" not in text and "\u202e" not in text and "[red]h" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (3700, "1 h 1 min"), (200_000, "2 d 7 h")],
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert show_age(seconds) == text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--metrics", "0.0.0.0:9100"], "insecure://"),
        (["--metrics", "nowhere"], "127.0.0.1:9100"),
        (["--log-format", "yaml"], "--log-format is one of text, json"),
        (["--log-level", "loud"], "--log-level is one of debug, info"),
    ],
    ids=str,
)
def test_a_worker_that_cannot_tell_as_asked_does_not_start(options: list[str], says: str) -> None:
    command = ["-m", "graphflow", "worker", "--listen", "tcp://127.0.0.1:*", *options]
    done = loaded.run_python(command, {**os.environ, "PYTHONPATH": str(ROOT)}, ROOT)
    assert done.returncode in (1, 2) and says in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize("colour", ["1", ""], ids=["terminal", "pipe"])
def test_watching_goes_on_until_an_interrupt(workers: tuple[str, str], colour: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "graphflow", "status", workers[0], "--watch", "--every", "0.2"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": colour, "COLUMNS": "150"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        seen = ""
        while seen.count("Workers") < 2:
            line = process.stdout.readline()
            assert line, process.communicate()
            seen += line
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert workers[0] in seen


# With keys --------------------------------------------------------------------------------------


@pytest.fixture
def keyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, Keyring], str]]:
    """A worker with a key, and keyrings of who may ask it: its address, they, its public key."""
    there = Keyring(tmp_path / "there")
    own = there.create_pair("box", WORKER).public
    rings = {}
    for role in (CLIENT, COORDINATOR, WORKER):
        rings[role] = Keyring(tmp_path / role)
        pair = rings[role].create_pair(f"my-{role}", role)
        rings[role].add(str(own), "here")
        there.add(str(pair.public), "there")
    rings["stranger"] = Keyring(tmp_path / "stranger")
    rings["stranger"].create_pair("eve", CLIENT)
    rings["stranger"].add(str(own), "here")
    folder = {"GRAPHFLOW_KEYS": str(there.folder)}
    with serve_worker("--key", "box", GRAPHFLOW_LOG_LEVEL="error", **folder) as address:
        yield address, rings, own.key


def test_a_clients_key_may_ask_and_is_shown_no_names_of_models(
    capsys: pytest.CaptureFixture[str],
    keyed: tuple[str, dict[str, Keyring], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, rings, _ = keyed
    for role in (CLIENT, COORDINATOR):
        monkeypatch.setenv("GRAPHFLOW_KEYS", str(rings[role].folder))
        code, out, err = status(capsys, address, "--worker-key", "box", "--json")
        assert code == 0, (role, out, err)
        assert json.loads(out)["workers"][0]["devices"] == ["cpu:0"]


def test_workers_with_keys_of_their_own_are_asked_by_these(
    capsys: pytest.CaptureFixture[str],
    keyed: tuple[str, dict[str, Keyring], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, rings, key = keyed
    there, asking = Keyring(tmp_path / "other"), rings[CLIENT]
    other = there.create_pair("crate", WORKER).public
    there.add(str(asking.pairs()[0]), "there")
    asking.add(str(other), "here")
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(asking.folder))
    folder = {"GRAPHFLOW_KEYS": str(there.folder)}
    with serve_worker("--key", "crate", GRAPHFLOW_LOG_LEVEL="error", **folder) as second:
        named = ["--worker-key", key, "--worker-key", "crate"]
        code, out, err = status(capsys, address, second, *named, "--json")
    assert code == 0, (out, err)
    assert [worker["address"] for worker in json.loads(out)["workers"]] == [address, second]


def test_a_cluster_file_names_the_key_to_ask_with_for_those_who_have_it(
    capsys: pytest.CaptureFixture[str],
    keyed: tuple[str, dict[str, Keyring], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, rings, key = keyed
    file = tmp_path / "keyed.toml"
    worker = f'[[workers]]\naddress = "{address}"\nkey = "{key}"\n{DEVICE}'
    file.write_text(f'key = "my-coordinator"\n{worker}')
    rings[COORDINATOR].create_pair("another", COORDINATOR)  # which the worker does not trust
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(rings[COORDINATOR].folder))
    assert status(capsys, str(file), "--json")[0] == 0
    code, out, _ = status(capsys, str(file), "--key", "another", "--timeout", "1")
    assert code == 1 and address in out
    file.write_text(worker)
    code, _, err = status(capsys, str(file))
    assert code == 2 and "another, my-coordinator: name one" in err
    file.write_text(f'key = "my-coordinator"\n{worker}')
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(rings[CLIENT].folder))
    assert status(capsys, str(file), "--json")[0] == 0


@pytest.mark.slow  # eight seconds of refused handshakes
def test_a_workers_key_and_a_strangers_may_not(
    capsys: pytest.CaptureFixture[str],
    keyed: tuple[str, dict[str, Keyring], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, rings, key = keyed
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(rings["stranger"].folder))
    code, out, _ = status(capsys, address, "--worker-key", key, "--timeout", "8")
    assert code == 1 and "graphflow keys add" in out
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(rings[WORKER].folder))
    code, _, err = status(capsys, address, "--worker-key", "box", "--key", "my-worker")
    assert code != 0 and "client" in err


def test_without_a_key_a_worker_with_one_says_nothing(
    capsys: pytest.CaptureFixture[str], keyed: tuple[str, dict[str, Keyring], str]
) -> None:
    code, out, _ = status(capsys, keyed[0], "--timeout", "1")
    assert code == 1 and "asks for a key" in out and "--worker-key" in out


@pytest.mark.slow  # the workers measure themselves, as on other machines
def test_the_example_looks_in_by_all_ways(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "inspect_cluster.py", "--steps", "3", "--width", "8",
         "--metrics", metrics],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("Sessions", "Tensors between workers", "20 traced steps", "session.opened",
                 "graphflow_steps_total{outcome=\"committed\"}"):  # fmt: skip
        assert part in done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["ph"] == "s" for event in events)
