"""Ops of users: in their own module, on real workers that allow it, and refused elsewhere."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.process.user_modules import allowed_function
from graphflow.cli.main import main
from graphflow.errors import (
    ArgumentError,
    GraphError,
    GraphLimitError,
    ModuleNotAllowed,
    OpCheckError,
    OpError,
)
from graphflow.ir.op import REGISTRY
from graphflow.runtime.partitioning.partition import partition
from graphflow.runtime.wire.graph_codec import decode, encode
from tests import loaded
from tests.runtime.workers import serve_worker

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def users_ops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The user's module, in a folder that only this process's path holds."""
    folder = tmp_path_factory.mktemp("user")
    source = Path(__file__).with_name("users_ops.py").read_text()
    (folder / "users_ops.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("users_ops")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("users_ops", None)
        for name in [name for name in REGISTRY if name.startswith("users.")]:
            del REGISTRY[name]


def losses(session: gf.Session, ops: ModuleType, steps: int = 5) -> list[float]:
    """Train a small network of the user's ops, over as many workers as there are."""
    rng = np.random.default_rng(0)
    x, labels = gf.placeholder("float32", (None, 8)), gf.placeholder("int64", (None,))
    w = gf.variable(rng.normal(size=(8, 16)).astype("float32"))
    v = gf.variable(rng.normal(size=(16, 3)).astype("float32"))
    last = f"/worker:{len(session.cluster.workers) - 1}"
    with gf.device("/worker:0"):
        hidden = ops.softsign(x @ w)
    with gf.device(last):
        half = gf.host_call(
            ops.halve, hidden, spec=gf.spec("float32", hidden.shape), vjp=ops.halve_back
        )
        loss = gf.mean(gf.nn.cross_entropy(half @ v, labels))
    train = gf.optim.SGD(0.5).minimize(loss)
    feeds = {
        x: rng.normal(size=(20, 8)).astype("float32"),
        labels: rng.integers(0, 3, 20),
    }
    return [session.run([loss, train], feeds)[0].item() for _ in range(steps)]


def test_workers_train_with_a_users_ops_bit_by_bit_as_this_process_does(
    users_ops: ModuleType,
) -> None:
    with gf.Session(ops=["users_ops"]) as session:
        here = losses(session, users_ops)
    assert here[-1] < here[0]
    cluster = gf.Cluster.local(workers=2, threads=1)
    with gf.Session(cluster, ops=["users_ops"]) as session:
        assert losses(session, users_ops) == here


def test_what_the_session_does_not_name_is_refused_before_it_is_sent(
    users_ops: ModuleType,
) -> None:
    x = gf.placeholder("float32", (3,))
    local = gf.host_call(lambda a: a, x, spec=x.spec)
    named = gf.host_call("users_ops:halve", x, spec=x.spec)
    inside = gf.scan(lambda c, row: (users_ops.softsign(c) * row, None), gf.sum(x), x)[0]
    feeds = {x: np.zeros(3)}
    with gf.Session(gf.Cluster.local(workers=1, threads=1)) as session:
        for y in (users_ops.softsign(x), inside):
            with pytest.raises(
                ModuleNotAllowed,
                match=r"users.softsign .*test_custom_ops\.py:\d+.*ops=\['users_ops'\].*--allow-ops",
            ):
                session.run(y, feeds)
        with pytest.raises(ModuleNotAllowed, match=r"calls users_ops:halve.*ops=\['users_ops'\]"):
            session.run(named, feeds)
        with pytest.raises(ModuleNotAllowed, match=r"lambda.*this process only.*feed it"):
            session.run(local, feeds)
        assert session.run(x * 2.0, feeds).tolist() == [0, 0, 0]  # nothing was harmed


# Workers that somebody else started -------------------------------------------------------------


@contextmanager
def start_worker(folder: Path, *arguments: str, path: str = "") -> Iterator[Path]:
    """A worker that finds modules on a path, as the file of a cluster of one."""
    with serve_worker(*arguments, PYTHONPATH=f"{ROOT}{os.pathsep}{path}") as address:
        file = folder / "cluster.toml"
        file.write_text(f'[[workers]]\naddress = "{address}"\n')
        yield file


def test_a_worker_imports_only_what_it_was_started_with(
    users_ops: ModuleType, tmp_path: Path
) -> None:
    with (
        start_worker(tmp_path) as cluster,
        pytest.raises(
            ModuleNotAllowed, match=r"started with no modules allowed.*--allow-ops users_ops"
        ),
    ):
        gf.Session(cluster, ops=["users_ops"])
    x = gf.placeholder("float32", (3,))
    y = users_ops.softsign(x)
    folder = str(Path(str(users_ops.__file__)).parent)
    with start_worker(
        tmp_path, "--allow-ops", "users_ops", "--allow-ops", "colorsys", path=folder
    ) as cluster:
        with gf.Session(cluster, ops=["users_ops"]) as session:
            assert session.run(y, {x: [1.0, 0.0, -1.0]}).tolist() == [0.5, 0, -0.5]
        with pytest.raises(ModuleNotAllowed, match=r"users_ops, colorsys|colorsys, users_ops"):
            gf.Session(cluster, ops=["json"])


def test_the_command_line_takes_names_of_modules_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--listen", "tcp://127.0.0.1:*", "--allow-ops", "my-ops"]) == 2
    assert "--allow-ops must hold names of modules, such as 'my_ops', not 'my-ops'" in (
        capsys.readouterr().err
    )


def test_a_worker_that_cannot_import_the_module_says_so(
    users_ops: ModuleType, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "users_ops.py").write_text("import nowhere_to_be_found\n")
    with (
        start_worker(tmp_path, "--allow-ops", "users_ops", path=str(broken)) as cluster,
        pytest.raises(OpError, match=r"cannot import 'users_ops'.*PYTHONPATH"),
    ):
        gf.Session(cluster, ops=["users_ops"])


# What comes over the wire -----------------------------------------------------------------------


def encode_graph(y: gf.Tensor) -> Any:
    graph = gf.Graph(y)
    nodes = {n: "/worker:0/cpu:0" for n in graph.nodes if n.op.name not in ("placeholder",)}
    return encode(list(partition(graph, nodes).values()))


def test_an_op_that_a_worker_does_not_know_is_named_with_the_remedy(
    users_ops: ModuleType,
) -> None:
    header = encode_graph(users_ops.softsign(gf.placeholder("float32", (3,))))
    known = REGISTRY.pop("users.softsign")
    try:
        with pytest.raises(GraphLimitError, match=r"'users.softsign'.*ops=\[\.\.\.\]"):
            decode(*header)
    finally:
        REGISTRY["users.softsign"] = known


def test_a_function_from_the_wire_is_one_that_an_admitted_module_defines() -> None:
    x = gf.placeholder("float32", (3,))
    header, buffers = encode_graph(gf.host_call("posixpath:normpath", x, spec=x.spec))
    with pytest.raises(ModuleNotAllowed, match=r"'posixpath:normpath'.*ops=\['posixpath'\]"):
        decode(header, buffers)
    for place in ("os:system", "os", "", ":", "graphflow.ops.host_calls.host_samples:Any"):
        with pytest.raises(ModuleNotAllowed):
            allowed_function(place)
    for place in (
        "graphflow.ops.host_calls.host_samples:__loader__",
        "graphflow.ops.host_calls.host_samples:add_and_compare.__call__",
    ):
        with pytest.raises(ModuleNotAllowed, match="defines no such function"):
            allowed_function(place)


# Registering and checking -----------------------------------------------------------------------


def test_names_that_are_taken_are_refused_with_who_has_them(users_ops: ModuleType) -> None:
    with pytest.raises(
        GraphError, match=r"'tanh' at .*test_custom_ops\.py:\d+ is registered twice.*graphflow"
    ):
        gf.register_op(gf.Op("tanh", infer=lambda x: x))
    with pytest.raises(GraphError, match=r"'users.softsign'.*there is one by .*users_ops\.py:\d+"):
        gf.register_op(gf.Op("users.softsign", infer=lambda x: x))


def test_a_module_imported_again_by_mistake_says_where_it_was_first(
    users_ops: ModuleType,
) -> None:
    with pytest.raises(GraphError, match=r"users_ops\.py:\d+ is registered twice"):
        importlib.reload(users_ops)


def test_the_users_ops_pass_the_checks(users_ops: ModuleType) -> None:
    gf.check_op(users_ops.softsign)
    gf.check_op(users_ops.softsign_grad)


F = gf.spec("float32", (3, 4))
SPARE: dict[str, Any] = {
    "infer": lambda x: x,
    "kernel": lambda xp, x: x * 2,
    "samples": (gf.sample(F),),
}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"infer": lambda x: x.with_shape((3,))}, r"kernel gives float32\(3, 4\); infer says"),
        ({"kernel": lambda xp, x: xp.multiply(x, 2, out=x)}, "kernel failed.*read-only"),
        (
            {"kernel": lambda xp, x: np.random.random(x.shape).astype("f")},
            "other bits when it runs",
        ),
        ({"kernel": lambda xp, x: (x.T.copy() * 2).T}, "not contiguous"),
        ({"into": lambda xp, out, x: xp.multiply(x, 3, out=out)}, "into gives other bits"),
        ({"vjp": lambda g, y, x: (g * 3,)}, "first derivative along a direction is .*differences"),
        (
            {
                "kernel": lambda xp, x: x**3,
                "vjp": lambda g, y, x: (g * gf.stop_gradient(3 * x * x),),
            },
            "second derivative",
        ),
        ({"vjp": lambda g, y, x: (gf.sum(g),)}, r"gradient of input 0, \(3, 4\), is"),
        ({"cost": lambda x: gf.Cost(flops=-1)}, "costs -1 flops"),
        ({"samples": (gf.sample(F), gf.sample(gf.spec("float32", ("n",))))}, "have known sizes"),
        (
            {"batch": lambda op, inputs, batched: op(inputs[0]) * 2.0},
            r"vmap over inputs \[0\] gives .*single calls give",
        ),
    ],
)
def test_an_op_that_breaks_a_promise_is_found_out(wrong: dict[str, Any], message: str) -> None:
    gf.check_op(gf.Op("spare", **SPARE))
    with pytest.raises(OpCheckError, match=f"(?s)spare, sample [01]: .*{message}"):
        gf.check_op(gf.Op("spare", **{**SPARE, **wrong}))


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ArgumentError, match=r"check_op at .*test_custom_ops\.py:\d+: give a gf.Op"):
        gf.check_op(gf.nn.softmax)
    with pytest.raises(ArgumentError, match="has no samples"):
        gf.check_op(gf.Op("bare", infer=lambda x: x))
    for ops in ("users_ops", 3, [3], ["no-name"], ["a b"], [""]):
        with pytest.raises(ArgumentError, match=r"ops must (be a list|hold names)"):
            gf.Session(ops=ops)  # type: ignore[arg-type]
    with pytest.raises(OpError, match="cannot import 'no_such_module'"):
        gf.Session(ops=["no_such_module"])


# The documentation --------------------------------------------------------------------------------


def test_the_python_of_the_documentation_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "models" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in blocks] == [
        "my_ops.py",
        "test_my_ops.py",
        "train.py",
        "per_example.py",
    ]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    for name, expected in (
        ("test_my_ops.py", r""),
        ("train.py", r"([\d.]+) ([\d.]+)\n"),
        ("per_example.py", r"\(5, 8, 3\)\n"),
    ):
        done = loaded.run_python([name], {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path)
        assert done.returncode == 0, done.stderr
        found = re.fullmatch(expected, done.stdout)
        assert found, done.stdout
        if found.groups():
            loss, half = map(float, found.groups())
            assert half == pytest.approx(loss / 2)
