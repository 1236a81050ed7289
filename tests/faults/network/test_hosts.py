"""Three hosts with own addresses at one switch, with keys: what a cluster meets in a network."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import graphflow as gf
from tests.faults.network.network import Hosts
from tests.faults.recovery import training
from tests.faults.recovery.model import Model
from tests.faults.running import Running, Worker, cluster_file, took

TRAINING = training.__file__
STEPS = 30


@cache
def train_in_one_process(steps: int) -> list[str]:
    """The losses and the final state of a training in one process."""
    run = Running(["-m", "tests.faults.recovery.training", "here", str(steps)], python=True)
    try:
        assert run.wait() == 0, run.describe_output()
    finally:
        run.end()
    return results(run.lines)


def results(lines: list[str]) -> list[str]:
    """Losses by step, and the digest of the state."""
    return [" ".join(w.split()[:3]) for w in lines if w.startswith("step")] + [
        w.split()[1] for w in lines if w.startswith("done")
    ]


class Cluster:
    """A worker on each host; trainings run on the first one."""

    def __init__(
        self, hosts: Hosts, keys: Mapping[str, str], folder: Path, running: list[Running]
    ) -> None:
        self.hosts, self.keys, self.running = hosts, keys, running
        self.workers = [
            Worker(f"tcp://{host.address}:7001", "--key", "box", inside=host.enter, env=keys)
            for host in hosts.hosts
        ]
        running.extend(self.workers)
        addresses = [worker.ready().address for worker in self.workers]
        self.file = cluster_file(folder, addresses, 'key = "boss"', "deadline = 60.0", key="box")

    def train(self, steps: int, **options: object) -> Running:
        given = [f"{name}={json.dumps(value)}" for name, value in options.items()]
        return self._start(TRAINING, str(self.file), str(steps), *given)

    def script(self, text: str, *arguments: str) -> Running:
        """A Python script on the first host; its first argument is the cluster's file."""
        return self._start("-c", text, str(self.file), *arguments)

    def _start(self, *arguments: str) -> Running:
        command = [sys.executable, *arguments]
        self.running.append(
            Running(command, inside=self.hosts.hosts[0].enter, env=self.keys, cwd=self.file.parent)
        )
        return self.running[-1]


@pytest.fixture
def cluster(
    hosts: Hosts, keys: Mapping[str, str], tmp_path: Path, running: list[Running]
) -> Cluster:
    return Cluster(hosts, keys, tmp_path, running)


@pytest.mark.slow
def test_a_training_over_three_hosts_with_keys_equals_one_process_bit_for_bit(
    cluster: Cluster,
) -> None:
    run = cluster.train(STEPS)
    assert run.wait() == 0, run.describe_output()
    assert results(run.lines) == train_in_one_process(STEPS)
    homes = json.loads(run.lines[-1].split(maxsplit=2)[2])
    assert homes == [f"/worker:{i}/cpu:0" for i in range(3)]


@pytest.mark.slow  # a cut of three seconds, and what it takes to find that it healed
@pytest.mark.fault(12)
def test_a_cable_that_is_cut_for_three_seconds_leaves_no_trace(cluster: Cluster) -> None:
    run = cluster.train(STEPS, pause=0.05)
    run.line("step 5 ")
    cluster.hosts.hosts[1].unplug()
    time.sleep(3.0)
    cluster.hosts.hosts[1].plug()
    assert run.wait() == 0, run.describe_output()
    took(12, "longest step over hosts, cut of 3 s", run.gap())
    assert run.gap() > 2.5, "it was cut off from what it needed"
    assert results(run.lines) == train_in_one_process(STEPS)


@pytest.mark.slow  # a cut of thirty seconds
@pytest.mark.fault(13)
def test_a_cable_that_is_cut_for_thirty_seconds_is_planned_around(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.train(STEPS, pause=0.05, checkpoint=str(tmp_path / "c"), every=2, rejoin=2.0)
    run.line("step 5 ")
    cut = time.monotonic()
    cluster.hosts.hosts[1].unplug()
    run.line("done", seconds=30.0)
    assert time.monotonic() - cut < 30.0, "over the hosts that remain"
    took(13, "longest step over hosts, found and planned anew", run.gap())
    assert run.gap() > 4.0, "it was cut off from what it needed"
    time.sleep(max(0.0, cut + 30.0 - time.monotonic()))
    cluster.hosts.hosts[1].plug()
    assert run.wait() == 0, run.describe_output()
    assert results(run.lines) == train_in_one_process(STEPS)
    homes = json.loads(run.lines[-1].split(maxsplit=2)[2])
    assert len(homes) < 3, "planned around the host that was cut off"


CHAIN = """
import sys, time, graphflow as gf
from tests.faults.recovery.model import Model
model = Model(3)
with gf.Session(sys.argv[1], trial=False, checkpoint=sys.argv[2], every=4, rejoin=2.0) as s:
    for number in range(30):
        loss, _ = s.run([model.loss, model.train], model.feed(number))
        print("step", number, float(loss).hex(), flush=True)
        time.sleep(0.05)
    print("done", len(s.cluster.workers), flush=True)
"""


@pytest.mark.slow  # cuts that last
@pytest.mark.fault(13, 14)
@pytest.mark.parametrize("ways", [1, 2], ids=["one way", "both ways"])
def test_two_hosts_that_do_not_reach_each_other_are_planned_around(
    cluster: Cluster, tmp_path: Path, ways: int
) -> None:
    """Both reach the one where the session is."""
    model = Model(1)
    with gf.Session(gf.Cluster.here(devices=["cpu:0"], threads=1)) as s:
        wanted = [
            f"step {n} {float(s.run([model.loss, model.train], model.feed(n))[0]).hex()}"
            for n in range(30)
        ]
    run = cluster.script(CHAIN, str(tmp_path / "c"))
    run.line("step 5 ")
    cut = time.monotonic()
    _, a, b = cluster.hosts.hosts
    for end, other in [(a, b), (b, a)][:ways]:
        end.lose(other)
    told = run.line("done", seconds=30.0)
    took(13, f"longest step, two hosts cut off from each other, ways: {ways}", run.gap())
    assert time.monotonic() - cut < 30.0 and run.gap() > 4.0
    assert run.wait() == 0, run.describe_output()
    assert run.lines[:-1] == wanted
    assert told == "done 2", "planned around one of them"


THROTTLED = """
import os, sys, time, numpy as np, graphflow as gf
with gf.device("/worker:0"):
    data = gf.variable(gf.init.full((512, 2048), 0.5), name="data")
    weights = [gf.variable(gf.init.full((2048, 2048), 1e-3), name=f"w{i}") for i in range(1)]
def branch(scale):
    y = data * scale
    for _ in range(3):
        y = gf.tanh(y @ gf.variable(gf.init.full((2048, 2048), 1e-3)))
    return gf.sum(y)
total = branch(1.0) + branch(2.0)
def homes(s):
    return sorted({place for name, place in s.plan(total).placement.items() if "matmul" in name})
with gf.Session(sys.argv[1]) as s:
    print("value", float(s.run(total)).hex(), *homes(s), flush=True)
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    start = time.monotonic()
    told = s.replan()
    print("replanned", time.monotonic() - start, told, flush=True)
    print("value", float(s.run(total)).hex(), *homes(s), flush=True)
"""


@pytest.mark.slow  # probes of four megabytes over a slow link
def test_calibration_sees_a_throttled_link_and_moves_the_placement(
    hosts: Hosts, keys: Mapping[str, str], tmp_path: Path, running: list[Running]
) -> None:
    two = hosts.hosts[:2]
    for host in two:
        running.append(
            Worker(f"tcp://{host.address}:7001", "--key", "box", inside=host.enter, env=keys)
        )
    file = tmp_path / "cluster.toml"
    file.write_text(
        'key = "boss"\n[defaults]\nflops = 1e11\nbandwidth = 2e10\nlaunch = 1e-5\n'
        + "".join(
            f'[[workers]]\naddress = "{each.ready().address}"\nkey = "box"\ndevices = ["cpu:0"]\n'
            for each in running
            if isinstance(each, Worker)
        )
    )
    there = tmp_path / "throttled"
    run = Running(
        [sys.executable, "-c", THROTTLED, str(file), str(there)], inside=two[0].enter, env=keys
    )
    running.append(run)
    _, before, *homes = run.line("value").split()
    assert homes == ["/worker:0/cpu:0", "/worker:1/cpu:0"], "both are used where links are fast"
    two[1].throttle("100mbit")
    there.touch()
    told = run.line("replanned")
    took(17, "replanned over a throttled link", float(told.split()[1]))
    _, after, *homes = run.line("value").split()
    assert homes == ["/worker:0/cpu:0"], told
    assert after == before
    assert run.wait() == 0, run.describe_output()


FED = """
import sys, time, numpy as np, graphflow as gf
x = gf.placeholder("float32", (512, 1024), name="x")
def tower():
    y = x
    for _ in range(3):
        y = gf.tanh(y @ gf.variable(gf.init.full((1024, 1024), 1e-3)))
    return gf.sum(y)
total = tower() + tower()
with gf.Session(sys.argv[1], trial=False) as s:
    s.run(total, {x: np.ones((512, 1024), "float32")})
    plan = s.plan(total)
    print("used", *sorted({n.device for n in plan.nodes if n.op == "matmul"}), flush=True)
    by = {tuple(sorted(pair)): link for pair, link in s._planner._survey.links.items()}
    print("rate", by["/client", "/worker:0"][1], by["/client", "/worker:1"][1], flush=True)
"""


@pytest.mark.slow  # probes of four megabytes over a slow link
def test_a_worker_behind_a_throttled_link_is_not_fed(
    hosts: Hosts, keys: Mapping[str, str], tmp_path: Path, running: list[Running]
) -> None:
    two = hosts.hosts[:2]
    for host in two:
        running.append(
            Worker(f"tcp://{host.address}:7001", "--key", "box", inside=host.enter, env=keys)
        )
    addresses = [worker.ready().address for worker in running if isinstance(worker, Worker)]
    two[1].throttle("100mbit")
    file = cluster_file(
        tmp_path, addresses, 'key = "boss"', "deadline = 60.0", key="box", measured=True
    )
    env = {**keys, "GRAPHFLOW_CACHE": str(tmp_path / "cache")}
    run = Running([sys.executable, "-c", FED, str(file)], inside=two[0].enter, env=env)
    running.append(run)
    assert run.line("used").split() == ["used", "/worker:0/cpu:0"]
    near, far = map(float, run.line("rate").split()[1:])
    assert far == pytest.approx(12e6, rel=0.2) and near > 4 * far
    assert run.wait() == 0, run.describe_output()


OPEN = """
import sys, time, numpy as np, graphflow as gf
x = gf.placeholder("float32", (None,), name="x")
with gf.device("/worker:0"):
    there = x * 2.0
    count = gf.variable(np.zeros((), "float32"), name="count")
with gf.device("/worker:1"):
    back = there + 1.0
with gf.device("/worker:0"):
    result, counted = back * 1.0, gf.assign(count, count + 1.0)
rng = np.random.default_rng(0)
with gf.Session(sys.argv[1], trial=False) as s:
    for number in range(40):
        fed = rng.random((10, 300_000, 1 << 20)[number % 3], "float32")
        value, steps = s.run([result, counted], {x: fed})
        right = np.array_equal(value, fed * np.float32(2) + np.float32(1)) and steps == number + 1
        print("step" if right else "wrong", number, flush=True)
        time.sleep(0.05)
print("done", flush=True)
"""


@pytest.mark.slow  # a cut of three seconds
@pytest.mark.fault(12)
def test_hosts_without_keys_have_pipes_and_a_cut_of_three_seconds_costs_no_step(
    hosts: Hosts, tmp_path: Path, running: list[Running]
) -> None:
    two = hosts.hosts[:2]
    for host in two:
        at, env = f"tcp://{host.address}:7001", {"GRAPHFLOW_SHARED_MEMORY": "off"}
        running.append(Worker(at, "--insecure", inside=host.enter, env=env))
    addresses = [worker.ready().address for worker in running if isinstance(worker, Worker)]
    file = cluster_file(tmp_path, addresses, "insecure = true", "deadline = 60.0")
    command = [sys.executable, "-c", OPEN, str(file)]
    running.append(run := Running(command, inside=two[0].enter, env={}, cwd=tmp_path))
    run.line("step 8")
    table = subprocess.run(
        [*two[0].enter, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in table.splitlines()[1:]]
    ends = [(row[1], row[2]) for row in rows if row[3] == "01"]
    port = f":{7001:04X}"
    pipes = [pair for pair in ends if not any(end.endswith(port) for end in pair)]
    assert len(pipes) == 2, ends
    two[1].unplug()
    time.sleep(3.0)
    two[1].plug()
    assert run.wait() == 0, run.describe_output()
    took(12, "longest step over hosts without keys, cut of 3 s", run.gap())
    assert run.gap() > 2.5, "it was cut off from what it needed"
    assert run.lines == [*(f"step {n}" for n in range(40)), "done"]
