"""The manifests of examples/kubernetes: valid and consistent, and such a container works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphflow.placement.clusters.cluster import Cluster
from graphflow.runtime.security.keys import COORDINATOR, WORKER, Keyring
from tests.house.sources import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    """All manifests, by kind and name."""
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    documents = [d for file in FILES for d in yaml.safe_load_all(file.read_text())]
    return {f"{each['kind']} {each['metadata']['name']}": each for each in documents}


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


def test_each_manifest_is_valid_strictly() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    yaml = pytest.importorskip("yaml")
    newest = validate.latest_version()
    for file in FILES:
        for document in yaml.safe_load_all(file.read_text()):
            validate.validate(document, newest, strict=True)


def test_containers_may_write_to_mounted_volumes_only(manifests: dict[str, Any]) -> None:
    for name in ("StatefulSet graphflow-worker", "Job graphflow-train"):
        spec = pod(manifests[name])
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["runAsNonRoot"] is True
        inside = container["securityContext"]
        assert inside["readOnlyRootFilesystem"] and not inside["allowPrivilegeEscalation"]
        assert inside["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]
        mounted = {each["name"]: each for each in container["volumeMounts"]}
        assert {each["name"] for each in spec["volumes"]} == {*mounted}
        assert mounted["keys"]["readOnly"] is True
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert environment["GRAPHFLOW_KEYS"] == mounted["keys"]["mountPath"]
        assert environment["GRAPHFLOW_CACHE"] == mounted["cache"]["mountPath"]
        (keys,) = (each["secret"] for each in spec["volumes"] if each["name"] == "keys")
        assert keys["defaultMode"] == 0o440, "what a worker takes of a mounted secret"
        held = manifests[f"Secret {keys['secretName']}"]["stringData"]
        assert {each["key"] for each in keys["items"]} == {*held}


def test_names_ports_and_labels_fit_each_other(manifests: dict[str, Any], tmp_path: Path) -> None:
    workers = manifests["StatefulSet graphflow-worker"]
    service = manifests["Service graphflow-workers"]
    labels = workers["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == workers["spec"]["selector"]["matchLabels"]
    assert workers["spec"]["serviceName"] == service["metadata"]["name"]
    policy = manifests["NetworkPolicy graphflow-workers"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    told = manifests["ConfigMap graphflow-cluster"]["data"]
    file = tmp_path / "cluster.toml"
    file.write_text(told["cluster.toml"])
    cluster = Cluster.load(file)
    port = pod(workers)["containers"][0]["ports"][0]["containerPort"]
    assert [each.address for each in cluster.workers] == [
        f"tcp://graphflow-worker-{i}.graphflow-workers:{port}"
        for i in range(workers["spec"]["replicas"])
    ]
    assert policy["ingress"][0]["ports"][0]["port"] == port
    assert f"tcp://0.0.0.0:{port}" in pod(workers)["containers"][0]["args"]
    compile(told["train.py"], "train.py", "exec")


SANDBOX = """
set -e
mount --make-rprivate /
mount --bind {home} /mnt
mount -t tmpfs -o mode=755 tmpfs /root
mkdir -p {home}
mount --bind /mnt {home}
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/keys
cp -a {keys}/. /mnt/keys
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -o remount,ro,bind /
mount -o remount,ro /mnt
ip link set lo up
exec setpriv --reuid=1000 --regid=1000 --clear-groups --no-new-privs --bounding-set=-all \\
  env -i PATH=/usr/bin:/bin HOME=/tmp GRAPHFLOW_KEYS=/mnt/keys GRAPHFLOW_CACHE=/tmp/cache \\
  PYTHONPATH={root} {python} -c '{program}'
"""
PROGRAM = """
import os, subprocess, sys, numpy as np, graphflow as gf
assert os.getuid() == 1000
try:
    open("/work-file", "w")
except OSError as error:
    assert error.errno == 30, error
else:
    raise SystemExit("the root can be written")
command = [sys.executable, "-m", "graphflow", "worker", "--listen", "tcp://127.0.0.1:7001"]
with subprocess.Popen([*command, "--key", "worker"]) as worker:
    lines = ["key = \\"client\\"", "[[workers]]", "address = \\"tcp://127.0.0.1:7001\\""]
    open("/tmp/cluster.toml", "w").write(chr(10).join([*lines, "key = \\"worker\\"", ""]))
    x = gf.placeholder("float32", (None, 4), name="x")
    with gf.Session("/tmp/cluster.toml") as s:
        print("sum", float(s.run(gf.sum(gf.tanh(x)), {x: np.ones((2, 4), "float32")})))
        print("worker", s.workers[0].state)
    worker.terminate()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")),
    reason="needs root, unshare and setpriv (util-linux)",
)
def test_a_worker_runs_as_user_1000_on_a_read_only_root_with_mounted_keys(tmp_path: Path) -> None:
    made = Keyring(tmp_path / "made")
    for name, role in (("client", COORDINATOR), ("worker", WORKER)):
        made.create_pair(name, role)
    version = tmp_path / "keys" / "..2026"
    (version / "trusted").mkdir(parents=True)
    for name in ("client", "worker"):
        secret = version / f"{name}.secret"
        secret.write_bytes((tmp_path / "made" / secret.name).read_bytes())
        secret.chmod(0o440)
        os.chown(secret, 0, 1000)
        public = f"{name}.public"
        (version / "trusted" / public).write_bytes((tmp_path / "made" / public).read_bytes())
        (tmp_path / "keys" / secret.name).symlink_to(f"..data/{secret.name}")
    (tmp_path / "keys" / "..data").symlink_to("..2026")
    (tmp_path / "keys" / "trusted").symlink_to("..data/trusted")
    (version / "trusted").chmod(0o1777)  # as kubelet makes it, on a read-only mount
    home = Path(sys.base_prefix)
    script = SANDBOX.format(
        home=home, keys=tmp_path / "keys", root=ROOT, python=sys.executable,
        program=PROGRAM.replace("'", '"'),
    )  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-c", script],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"this system allows no namespaces: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    assert "worker up" in done.stdout and f"sum {8 * 0.76159418:.2f}"[:8] in done.stdout
