"""Clusters: constructors, names, files, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphflow.errors import ClusterError, DeviceError
from graphflow.placement import WIRES, Cluster, Device, Link, Worker
from graphflow.placement.clusters.devices import MAX_DEVICES
from graphflow.placement.clusters.machine.host_facts import (
    default_threads,
    device_memory,
    host_memory,
)

TWO = """
insecure = true
deadline = 5

[defaults]
memory = "2GiB"
threads = 1

[[workers]]
address = "tcp://127.0.0.1:7001"

[[workers]]
address = "tcp://127.0.0.1:7002"
devices = ["cpu:0", { name = "cpu:1", threads = 2, memory = 1000000 }]

[[links]]
source = "/worker:0"
target = "/worker:1"
latency = 1e-4
bandwidth = 1e9
"""

HYPOTHETICAL = """
[defaults]
devices = ["gpu:0", "gpu:1"]
memory = "80GB"
flops = 5e13
bandwidth = 3e12
launch = 3e-6

[defaults.link]
latency = 1e-5
bandwidth = 5e10

[[workers]]
[[workers]]

[[links]]
source = "/worker:0"
target = "/worker:1"
latency = 1e-3
bandwidth = 1e9
"""


def load(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text)
    return Cluster.load(path)


# Constructors ---------------------------------------------------------------------------------


def test_here_is_this_process_with_all_its_cores() -> None:
    cluster = Cluster.here()
    assert cluster.kind == "here"
    assert cluster.devices == ("/worker:0/cpu:0",)
    device = cluster.device("/worker:0/cpu:0")
    assert device.threads == default_threads()
    assert device.memory == device_memory() < host_memory()
    assert device.flops is None


def test_several_devices_of_this_process_share_cores_and_memory() -> None:
    cluster = Cluster.here(["cpu:0", "cpu:1"])
    first, second = cluster.workers[0].devices
    assert (first.name, second.name) == ("/worker:0/cpu:0", "/worker:0/cpu:1")
    assert first.threads == default_threads(2)
    assert first.memory + second.memory <= host_memory()


def test_threads_may_be_a_number_of_numpy_but_no_more_than_a_machine_has() -> None:
    made = Cluster.local(2, threads=np.int64(3))  # type: ignore[arg-type]
    assert Cluster.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    for threads in (4097, 2**31):
        with pytest.raises(ClusterError, match="threads must be at most 4096, not"):
            Cluster.here(["cpu:0"], threads=threads)


def test_times_may_be_numbers_of_numpy() -> None:
    cluster = Cluster.local(2, threads=1, deadline=np.int64(7), dead_after=np.float32(2.5))  # type: ignore[arg-type]
    assert (cluster.deadline, cluster.dead_after) == (7, 2.5)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_local_workers_share_the_host() -> None:
    cluster = Cluster.local(workers=3, threads=1, deadline=7.0)
    assert (cluster.kind, cluster.deadline) == ("local", 7.0)
    assert cluster.devices == ("/worker:0/cpu:0", "/worker:1/cpu:0", "/worker:2/cpu:0")
    assert sum(worker.devices[0].memory for worker in cluster.workers) <= host_memory()
    assert all(worker.address is None and worker.loopback for worker in cluster.workers)


def test_hypothetical_clusters_give_all_numbers() -> None:
    cluster = Cluster.hypothetical(
        8,
        ("gpu:0",),
        flops=1e14,
        bandwidth=2e12,
        memory=80 << 30,
        link_latency=1e-5,
        link_bandwidth=4e11,
    )
    assert cluster.kind == "hypothetical"
    assert len(cluster.devices) == 8
    link = cluster.link("/worker:3/gpu:0", "/worker:5/gpu:0")
    assert link is not None and link.bandwidth == 4e11
    assert cluster.link("/client", "/worker:0/gpu:0") is not None


def test_constructors_read_counts_and_device_names_alike() -> None:
    numbers: dict[str, Any] = {"flops": 1e12, "bandwidth": 1e11, "memory": 1 << 30}
    single = Cluster.hypothetical(1, "gpu:0", **numbers)  # type: ignore[arg-type]
    assert single.devices == ("/worker:0/gpu:0",)
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(ClusterError, match="workers must be a whole number >= 1"):
            Cluster.local(workers=wrong)  # type: ignore[arg-type]
        with pytest.raises(ClusterError, match="workers must be a whole number >= 1"):
            Cluster.hypothetical(wrong, **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["tpu:0", "cpu", "cpu:-1", "CPU:0", "", "/worker:0/cpu:0", "cpu:01"]
)
def test_a_malformed_local_name_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="write 'cpu:0'"):
        Cluster.here([name])


def test_a_gpu_needs_cupy_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"CuPy finds no GPU here.*install graphflow\[gpu\]"):
        Cluster.here(["gpu:0"])


# Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ("cpu", ["/worker:0/cpu:0", "/worker:0/cpu:1", "/worker:1/cpu:0", "/worker:1/cpu:1"]),
        ("cpu:1", ["/worker:0/cpu:1", "/worker:1/cpu:1"]),
        ("/worker:1", ["/worker:1/cpu:0", "/worker:1/cpu:1"]),
        ("/worker:1/cpu", ["/worker:1/cpu:0", "/worker:1/cpu:1"]),
        ("/worker:1/cpu:0", ["/worker:1/cpu:0"]),
    ],
)
def test_partial_names_constrain(constraint: str, expected: list[str]) -> None:
    cluster = Cluster.local(workers=2, devices=("cpu:0", "cpu:1"), threads=1)
    assert list(cluster.match(constraint)) == expected


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ("gpu", "no device fits 'gpu'"),
        ("cpu:7", "did you mean 'cpu:0'"),
        ("/worker:9", "did you mean '/worker:1'"),
        ("/wroker:1", "did you mean '/worker:1'"),
        ("CPU:0", "did you mean 'cpu:0'"),
        ("", "not a device name"),
        ("/", "names no part"),
        (3, "not a device name"),
    ],
)
def test_a_name_that_fits_nothing_gets_a_suggestion(constraint: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        Cluster.local(workers=2).match(constraint)


def test_an_unknown_full_name_lists_what_there_is() -> None:
    with pytest.raises(DeviceError, match="there are /worker:0/cpu:0"):
        Cluster.here().device("/worker:0/cpu:4")


# Files ----------------------------------------------------------------------------------------


def test_a_file_with_addresses_describes_remote_workers(tmp_path: Path) -> None:
    cluster = load(tmp_path, TWO)
    assert (cluster.kind, cluster.insecure, cluster.deadline) == ("remote", True, 5)
    assert [worker.address for worker in cluster.workers] == [
        "tcp://127.0.0.1:7001",
        "tcp://127.0.0.1:7002",
    ]
    assert cluster.device("/worker:0/cpu:0") == Device("/worker:0/cpu:0", "cpu", 2 << 30, 1)
    assert cluster.device("/worker:1/cpu:1") == Device("/worker:1/cpu:1", "cpu", 1000000, 2)
    there = cluster.link("/worker:0/cpu:0", "/worker:1/cpu:1")
    back = cluster.link("/worker:1/cpu:1", "/worker:0/cpu:0")
    assert there is not None and back is not None
    assert (there.latency, back.bandwidth) == (1e-4, 1e9)
    assert cluster.link("/worker:1/cpu:0", "/worker:1/cpu:1") is None
    assert str(tmp_path) in str(cluster.source)


def test_a_file_without_addresses_is_hypothetical(tmp_path: Path) -> None:
    cluster = load(tmp_path, HYPOTHETICAL)
    assert cluster.kind == "hypothetical"
    assert cluster.device("/worker:1/gpu:1").memory == 80 * 10**9
    described = cluster.link("/worker:0/gpu:0", "/worker:1/gpu:0")
    default = cluster.link("/worker:0/gpu:0", "/worker:0/gpu:1")
    assert described is not None and described.latency == 1e-3
    assert default is not None and default.latency == 1e-5


@pytest.mark.parametrize("text", [TWO, HYPOTHETICAL])
def test_a_cluster_survives_being_written_as_plain_data(tmp_path: Path, text: str) -> None:
    cluster = load(tmp_path, text)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_addresses_beyond_loopback_are_kept_for_the_runtime_to_judge(tmp_path: Path) -> None:
    cluster = load(tmp_path, '[[workers]]\naddress = "tcp://10.0.0.2:7001"\n')
    assert not cluster.workers[0].loopback
    assert not cluster.insecure


W0 = '[[workers]]\naddress = "tcp://127.0.0.1:1"\n'
W1 = '[[workers]]\naddress = "tcp://127.0.0.1:2"\n'
LINK = '[[links]]\nsource = "/worker:0"\ntarget = "/worker:1"\n'
BAD_FILES = [
    ("not TOML", "x = = 1", "is not TOML.*line 1"),
    ("empty", "", r"no workers; add a \[\[workers\]\]"),
    ("NaN deadline", "deadline = nan\n" + W0, "line 1: deadline.*nan.*finite"),
    ("NaN latency", W0 + W1 + LINK + "latency = nan\nbandwidth = 1e9", "line 8: .*latency.*is nan"),
    (
        "infinite latency",
        W0 + W1 + LINK + "latency = inf\nbandwidth = 1e9",
        "line 8: .*latency.*is inf",
    ),
    (
        "negative latency",
        W0 + W1 + LINK + "latency = -1\nbandwidth = 1e9",
        "line 8: .*latency.*is -1",
    ),
    ("zero bandwidth", W0 + W1 + LINK + "latency = 1\nbandwidth = 0", "line 9: .*bandwidth.*is 0"),
    ("half a link", W0 + W1 + LINK + "latency = 1", "line 5: a link needs 'bandwidth'"),
    (
        "a word for a number",
        W0 + W1 + LINK + 'latency = "1"\nbandwidth = 1e9',
        "line 8: .*latency.*'1'",
    ),
    ("a link to nobody", W0 + LINK + "latency = 1\nbandwidth = 1e9", "no '/worker:1' here"),
    (
        "a link that is no name",
        W0 + LINK.replace("/worker:0", "a") + "latency = 1\nbandwidth = 1e9",
        "line 4: link end 'a'",
    ),
    ("NaN flops", W0 + 'devices = [{ name = "cpu:0", flops = nan }]', "line 3: .*flops.*is nan"),
    ("negative default", "[defaults]\nlaunch = -1.0\n" + W0, "line 2: .*launch.*-1"),
    ("fractional threads", "[defaults]\nthreads = 1.5\n" + W0, "line 2: .*threads.*1.5"),
    ("memory without sense", '[defaults]\nmemory = "8 bananas"\n' + W0, "line 2: .*8 bananas"),
    ("memory beyond measure", '[defaults]\nmemory = "999999999TiB"\n' + W0, "line 2: .*2\\*\\*63"),
    ("flops beyond measure", f"[defaults]\nflops = {10**400}\n" + W0, "line 2: .*1329 bits"),
    ("negative memory", "[defaults]\nmemory = -5\n" + W0, "line 2: .*memory.*-5"),
    (
        "a typo in a worker",
        '[[workers]]\nadress = "tcp://a:1"',
        "line 2: unknown key 'adress'; did you mean 'address'",
    ),
    (
        "a typo at the top",
        '[[worker]]\naddress = "tcp://a:1"',
        "line 1: unknown key 'worker'; did you mean 'workers'",
    ),
    (
        "a typo in a device",
        W0 + 'devices = [{ name = "cpu:0", flop = 1.0 }]',
        "line 3: unknown key 'flop'; did you mean 'flops'",
    ),
    (
        "a device without a name",
        W0 + "devices = [{ flops = 1e9 }]",
        "line 3: a device table needs a name",
    ),
    ("a number for an address", "[[workers]]\naddress = 1", "line 2: 'address' must be a string"),
    ("a word for a flag", 'insecure = "yes"\n' + W0, "line 1: 'insecure' must be"),
    ("workers that are no tables", "workers = 3", r"line 1: 'workers' must be tables"),
    ("a strange address", '[[workers]]\naddress = "http://a:1"', "line 2: .*'tcp://host:port'"),
    ("a port too high", '[[workers]]\naddress = "tcp://a:99999"', "line 2: .*'tcp://host:port'"),
    ("an address twice", W0 + W0, "line 4: workers 0 and 1 share"),
    ("an address missing", W0 + "[[workers]]\n", "line 3: worker 1 has no address"),
    ("an unknown device", W0 + 'devices = ["tpu:0"]', "line 3: 'tpu:0' is not a device"),
    ("a device twice", W0 + 'devices = ["cpu:0", "cpu:0"]', "line 3: .*twice"),
    ("no devices", W0 + "devices = []", "line 3: worker 0 has no devices"),
    ("a GPU of unknown memory", W0 + 'devices = ["gpu:0"]', "line 3: give the memory of gpu:0"),
    (
        "hypothetical without numbers",
        "[[workers]]\n",
        "hypothetical: it cannot be measured, so give 'flops'",
    ),
]


@pytest.mark.parametrize(
    ("text", "message"), [row[1:] for row in BAD_FILES], ids=[row[0] for row in BAD_FILES]
)
def test_a_wrong_file_is_refused_with_file_line_and_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        load(tmp_path, text)
    assert "cluster.toml" in str(caught.value)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_more_local_workers_than_a_cluster_has_room_for_are_refused(devices: list[str]) -> None:
    count = MAX_DEVICES // len(devices)
    with pytest.raises(
        ClusterError, match=rf"local: {count + 1} workers .* more than {MAX_DEVICES}"
    ):
        Cluster.local(count + 1, devices)
    assert len(Cluster.local(count, devices).devices) == MAX_DEVICES


def test_an_address_in_place_of_a_file_is_told_where_it_belongs() -> None:
    for given in ("tcp://127.0.0.1:7001", "tcp://a:1,tcp://b:2"):
        with pytest.raises(ClusterError, match=r"is an address; .*\[\[workers\]\]"):
            Cluster.load(given)


def test_a_device_in_place_of_a_file_is_told_where_it_belongs() -> None:
    for given in ("cpu", "gpu:0"):
        with pytest.raises(ClusterError, match=rf"is a device: .*devices=\['{given}'\]"):
            Cluster.load(given)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read cluster file .*nowhere\.toml"):
        Cluster.load(tmp_path / "nowhere.toml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="cannot read"):
        Cluster.load(tmp_path / "cluster.toml")


# Machines by product, and their wiring --------------------------------------------------------

NETWORK = '[[hosts]]\nname = "a"\ncount = 2\ndevices = ["8xh100"]\n[network]\n'
EIGHT = """
network = "100gbe"

[[hosts]]
name = "box"
count = 2
devices = [
  { name = "h100", count = 8 },
]
link = "nvlink4"
nic = { name = "100gbe", count = 2 }
switches = [
  { devices = ["gpu:0", "gpu:1"], uplink = "pcie5" },
]
"""


def test_hosts_of_products_are_workers_with_links_and_ports(tmp_path: Path) -> None:
    cluster = load(tmp_path, EIGHT)
    assert cluster.kind == "hypothetical" and len(cluster.devices) == 16
    device = cluster.device("/worker:1/gpu:7")
    assert (device.product, device.memory, device.flops) == ("h100-sxm", 80 * 10**9, None)
    inside = cluster.link("/worker:0/gpu:0", "/worker:0/gpu:7")
    across = cluster.link("/worker:0/gpu:0", "/worker:1/gpu:0")
    assert inside is not None and inside.bandwidth == WIRES["nvlink4"].bandwidth
    assert across is not None and across.bandwidth == WIRES["100gbe"].bandwidth
    ports = {port.name: port for port in cluster.ports}
    assert ports["box 0 nic"].bandwidth == 2 * WIRES["100gbe"].bandwidth
    assert ports["box 1 switch 0"].inside == ("/worker:1/gpu:0", "/worker:1/gpu:1")
    assert ports["box 1 switch 0"].besides == ("/worker:1",)  # NVLink goes around it
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_short_names_say_the_same_as_a_file(tmp_path: Path) -> None:
    text = '[network]\nname = "10gbe"\n[[hosts]]\ncount = 2\ndevices = ["4xa100-40gb"]\n'
    short = Cluster.hypothetical("2x4xa100-40gb", network="10gbe")
    read = load(tmp_path, text)
    assert (short.workers, short.links) == (read.workers, read.links)
    assert [port.bandwidth for port in short.ports] == [port.bandwidth for port in read.ports]
    assert Cluster.hypothetical(2, "4xA100 40GB", network="10GbE") == short


def test_what_is_given_of_a_product_replaces_the_table(tmp_path: Path) -> None:
    text = '[[workers]]\ndevices = [{ name = "t4", memory = "8GB", flops = 5e12 }]\n'
    cluster = load(tmp_path, text)
    device = cluster.device("/worker:0/gpu:0")
    assert (device.memory, device.flops, device.product) == (8 * 10**9, 5e12, "t4")
    assert device.peaks == (5e12, 320e9)


def test_workers_with_addresses_may_share_a_host_and_its_card(tmp_path: Path) -> None:
    text = '[[hosts]]\nname = "a"\nnic = "10gbe"\n' + "".join(
        f'[[workers]]\naddress = "tcp://127.0.0.1:{port}"\n{host}'
        for port, host in ((1, 'host = "a"\n'), (2, 'host = "a"\n'), (3, ""))
    )
    cluster = load(tmp_path, text)
    assert cluster.kind == "remote"
    assert cluster.link("/worker:0/cpu:0", "/worker:1/cpu:0") is None  # to be measured
    across = cluster.link("/worker:0/cpu:0", "/worker:2/cpu:0")
    assert across is not None and across.bandwidth == WIRES["10gbe"].bandwidth
    assert [(p.name, p.inside) for p in cluster.ports] == [("a nic", ("/worker:0", "/worker:1"))]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[defaults]\nmemory = 16\n" + W0, 'line 2: memory = 16 is 16 bytes; .*memory = "16GB"'),
        ('[defaults]\nmemory = "16"\n' + W0, "line 2: .*'16' is 16 bytes; write \"16GB\""),
        ('[defaults]\nmemory = "16B"\n' + W0, "line 2: .*'16B' is 16 bytes; write \"16GB\""),
        (W0 + 'devices = [{ name = "cpu:0", memory = 8192 }]', "line 3: .* is 8192 bytes"),
        ("[defaults.link]\nlatency = 5\nbandwidth = 1e9\n" + W0, "line 2: latency = 5 is 5 s"),
        ("[defaults.link]\nlatency = 0\nbandwidth = 100\n" + W0, "line 3: bandwidth = 100 is"),
        ("[defaults]\nflops = 10.5\n" + W0, "line 2: flops = 10.5 is 10.5 flop/s"),
        ("[defaults]\nlaunch = 5\n" + W0, "line 2: .* 5 seconds; write launch = 5.0e-6"),
        (NETWORK + 'latency = 0\nbandwidth = 40\n', "bandwidth = 40 is 40 bytes/s"),
        (NETWORK + 'name = "100gbe"\nbackbone = 40\n', "backbone = 40 is 40 bytes/s"),
    ],
)  # fmt: skip
def test_a_number_that_was_meant_in_another_unit_is_refused(
    text: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match=told):
        load(tmp_path, text)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "[::1]", "127.0.0.1"])
def test_one_worker_under_two_names_is_refused(name: str, tmp_path: Path) -> None:
    again = f'[[workers]]\naddress = "tcp://{name}:1"\n'
    with pytest.raises(ClusterError, match=r"line 4: workers 0 and 1 share .*of its own"):
        load(tmp_path, W0 + again)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(W0, encoding="utf-8-sig")
    assert Cluster.load(path).workers[0].address is not None


def test_a_described_link_counts_before_the_wiring(tmp_path: Path) -> None:
    link = '[[links]]\nsource = "/worker:0"\ntarget = "/worker:1"\nlatency = 1\nbandwidth = 2e9\n'
    cluster = load(tmp_path, EIGHT + link)
    across = cluster.link("/worker:1/gpu:3", "/worker:0/gpu:5")
    assert across is not None and (across.latency, across.bandwidth) == (1, 2e9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"h100"', '"h1000"', "line 8: 'h1000' is not a device.*did you mean 'h100'"),
        ("nvlink4", "nvlin4", "line 10: no link is named 'nvlin4'; did you mean 'nvlink4'"),
        ('"gpu:1"', '"gpu:9"', "line 13: no device of this host 'gpu:9'; did you mean 'gpu:"),
        ("uplink", "uplnk", "line 13: unknown key 'uplnk'; did you mean 'uplink'"),
        ("count = 2 }", "count = 0 }", "line 11: count must be a whole number from 1 to 1024"),
        ('= "100gbe"', '= "100gb"', "line 2: no link is named '100gb'; did you mean '100gbe'"),
        ("nic", "nik", "line 11: unknown key 'nik'; did you mean 'nic'"),
        ("[[hosts]]", "[[hsts]]", "line 4: unknown key 'hsts'; did you mean 'hosts'"),
        ("count = 8", "count = true", "line .*: count must be a whole number .* not True"),
        (', uplink = "pcie5"', "", "line 12: a switch needs 'uplink'"),
        ('network = "100gbe"', "network = 7", "'network' must be a name or a table, not 7"),
    ],
)
def test_a_typo_in_the_wiring_gives_line_and_suggestion(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in EIGHT
    with pytest.raises(ClusterError, match=message):
        load(tmp_path, EIGHT.replace(old, new, 1))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("latency = -1.0", "line 2: latency must be a finite number >= 0, not -1.0"),
        ("latency = 1e-5", "'name' needs a name, or 'bandwidth'"),
        ('name = "100gbe"\nbackbone = 0', r"line 3: backbone \(bytes/s\) must be .*> 0, not 0"),
        ('nam = "100gbe"', "line 2: unknown key 'nam'; did you mean 'name'"),
    ],
)
def test_a_wrong_network_gives_its_line(tmp_path: Path, section: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        load(tmp_path, f"[network]\n{section}\n" + '[[hosts]]\ncount = 2\ndevices = ["t4"]\n')


def test_a_worker_on_an_unknown_host_gets_a_suggestion(tmp_path: Path) -> None:
    text = '[[hosts]]\nname = "left"\n' + W0 + 'host = "lefd"\n'
    with pytest.raises(ClusterError, match="line 5: no host 'lefd'; did you mean 'left'"):
        load(tmp_path, text)


def test_hosts_without_a_network_between_them_are_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"/worker:0/gpu:0 -> /worker:1/gpu:0.*\[network\]"):
        load(tmp_path, '[[hosts]]\ncount = 2\ndevices = ["t4"]\n')


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8xh1000", "no product is named 'h1000'; did you mean 'h100'"),
        ("0xh100", "holds no device"),
        ("2000xh100", "2000 h100-sxm are more than 1024 devices, the most that a cluster has"),
        ("2x999999999xh100", "more than 1024 devices"),
        ("200x8xh100", "200 hosts of 8 devices are more than 1024 devices"),
        (f"{30 * '9'}xh100", "'999999999999999999…' is more than 1024 devices"),
        ("  ", "not of the form '8xh100'"),
        ("tpu", "no product is named 'tpu'; known are t4"),
    ],
)
def test_a_short_name_that_is_wrong_or_too_much_is_refused_at_once(name: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.hypothetical(name)


# Programmatic clusters ------------------------------------------------------------------------

NAN = float("nan")
CPU = Device("/worker:0/cpu:0", "cpu", 1000)
BAD_VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: Device("/worker:0/cpu:0", "cpu", 1000, flops=NAN), "flops.*is nan"),
    (lambda: Device("/worker:0/cpu:0", "cpu", 1000, bandwidth=0.0), "bandwidth.*> 0"),
    (lambda: Device("/worker:0/cpu:0", "cpu", 1000, launch=-1.0), "launch.*-1"),
    (lambda: Device("/worker:0/cpu:0", "cpu", 0), "memory.*>= 1"),
    (lambda: Device("/worker:0/cpu:0", "cpu", 1000, threads=0), "threads.*>= 1"),
    (lambda: Device("/worker:0/cpu:0", "gpu", 1000), "kind is 'gpu'"),
    (lambda: Device("cpu:0", "cpu", 1000), "not of the form"),
    (lambda: Link("/worker:0", "/worker:1", NAN, 1.0), "latency.*nan"),
    (lambda: Link("/worker:0", "/worker:1", 0.0, float("inf")), "bandwidth.*inf"),
    (lambda: Link("/worker:0", "worker 1", 0.0, 1.0), "link end 'worker 1'"),
    (lambda: Worker(0, None, ()), "no devices"),
    (lambda: Worker(1, None, (CPU,)), "belongs to another worker"),
    (lambda: Worker(0, None, (CPU, CPU)), "twice"),
    (lambda: Cluster(()), "at least one worker"),
    (lambda: Cluster(["tcp://h:1"]), "made of Workers; got 'tcp://h:1'.*load"),
    (lambda: Cluster("tcp://h:1"), "made of Workers"),
    (lambda: Cluster((Worker(0, None, (CPU,)),), kind="cloud"), "kind 'cloud'"),  # type: ignore[arg-type]
    (lambda: Cluster((Worker(0, None, (CPU,)),), deadline=NAN), "deadline.*nan"),
    (lambda: Cluster((Worker(0, None, (CPU,)), Worker(0, None, (CPU,)))), "numbered"),
    (lambda: Cluster((Worker(0, None, (CPU,)),), kind="remote"), "no address"),
    (lambda: Cluster((Worker(0, None, (CPU,)),), kind="hypothetical"), "give 'flops'"),
    (
        lambda: Cluster((Worker(0, None, (CPU,)),), (Link("/worker:0", "/worker:4", 0.0, 1.0),)),
        "/worker:4",
    ),
    (lambda: Cluster.local(0), "workers must be"),
    (lambda: Cluster.local(2, deadline=0.0), "deadline"),
    (lambda: Cluster.local(2, deadline=True), "deadline"),
    (lambda: Cluster.local(2, deadline=np.float32("nan")), "deadline.*nan"),
    (lambda: Cluster.local(2, threads=0), "threads"),
    (lambda: Cluster.hypothetical(2, flops=1.0, bandwidth=1.0, memory=1), "default link"),
    (lambda: Cluster.from_dict({}), "list 'workers'"),
    (lambda: Cluster.from_dict({"workers": [], "knid": 1}), "did you mean 'kind'"),
    (lambda: Cluster.from_dict({"workers": [{"index": 0}]}), "malformed"),
]


@pytest.mark.parametrize(("build", "message"), BAD_VALUES)
def test_a_wrong_cluster_is_refused_when_it_is_made(
    build: Callable[[], object], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        build()
