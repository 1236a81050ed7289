"""The command line as a stranger uses it: each command, and each way to get it wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from graphflow.cli.main import main
from tests import loaded

MODEL = """
import numpy as np
import graphflow as gf

x = gf.placeholder("float32", (None, 4), name="x")
y = x @ gf.variable(np.ones((4, 3), "float32"), name="w")
fetches = {"y": y, "total": gf.sum(y)}


def build():
    return y


if __name__ == "__main__":
    import sys
    with gf.Session() as s:
        value = s.run(y, {x: np.ones((2, 4), "float32")})
        print(len(s.cluster.workers), float(value.sum()), *sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


LONG = 300 * "x"  # for a file's name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plna"], "No such command"),
        (["plan"], "Missing argument"),
        (["plan", "model.py"], "script.py:name"),
        (["plan", "nowhere.py:fetches"], "no such file"),
        (["plan", f"{LONG}:fetches"], "no such file"),
        (["status", LONG], "nor an existing file"),
        (["worker"], "--listen"),
        (["worker", "--listen", "7001"], "tcp://host:port"),
        (["worker", "--listen", "tcp://0.0.0.0:7001"], "--insecure"),
        (["worker", "--listen", "tcp://127.0.0.1:0x"], "tcp://host:port"),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--devices", "tpu:0"], "tpu:0"),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--threads", "0"], "--threads"),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--allow-ops", "no_such"], "'no_such'"),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--allow-ops", "os.no_such"], "os.no_such"),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--make-key"], "goes with --key NAME"),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--trust", "alice"], "no public key"),
        (
            ["worker", "--listen", "tcp://127.0.0.1:7001", "--log-level", "lod"],
            "--log-level is one",
        ),
        (
            ["worker", "--listen", "tcp://127.0.0.1:7001", "--log-format", "x"],
            "--log-format is one",
        ),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--metrics", "x"], "--metrics: "),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--checkpoints", "x"], "--checkpoints: x"),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--allow-data", "x"], "--allow-data: x"),
        (["worker", "--listen", "tcp://127.0.0.1:7001", "--trust", "x"], "graphflow: --trust is"),
        (["plan", "nowhere.py:y", "--placer", "x"], "--placer: "),
        (["plan", "nowhere.py:y", "--seconds", "-7"], "--seconds "),
        (["plan", "nowhere.py:y", "--cluster", "x"], "--cluster: x"),
        (["plan", "--diff", "x", "y"], "--diff: x"),
        (["dashboard", "127.0.0.1:9100", "--key", "x"], "--key: "),
        (["dashboard", "127.0.0.1:9100", "--token", "x"], "--token "),
        (["run", "nowhere.py"], "no such file"),
        (["run", "nowhere.py", "--workers", "two"], "--workers"),
        (["devices", "--cluster", "nowhere.toml"], "no such file"),
        (["calibrate", "--fast"], "No such option"),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_gets_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1 and not out and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["plan", "-o"], "graphflow plan"),
        (["plan", "model.py:y", "--output"], "graphflow plan"),
        (["status", "--timeout"], "graphflow status"),
        (["keys", "new", "q", "--role"], "graphflow keys new"),
    ],
    ids=str,
)
def test_an_option_without_its_value_points_to_the_help_of_its_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], command: str
) -> None:
    option = arguments[-1]
    assert run(capsys, *arguments) == (
        2,
        "",
        f"{command}: Option '{option}' requires an argument. (see {command} --help)\n",
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--shape", "z=1"], "there are x"),
        (["--shape", "x=a,b"], "name=128,64"),
        (["--shape", "x=2,5"], "x"),
        ([], "'x'"),
        (["--shape", "x"], "name=128,64"),
        (["--shape", "x=2,4", "--shape", "x=3,4"], "'x' are given twice"),
        ([], "--shape x="),
        (["--shape", "x=2,4", "--placer", "fast"], "greedy"),
        (["--shape", "x=2,4", "-o", "plan.pdf"], ".html"),
        (["--shape", "x=2,4", "--workers", "2", "--cluster", "c.toml"], "not both"),
        (["--shape", "x=2,4", "--threads", "2", "--cluster", "c.toml"], "threads in c.toml"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_made_gets_one_line(
    capsys: pytest.CaptureFixture[str], script: Path, options: list[str], says: str
) -> None:
    code, _, err = run(capsys, "plan", f"{script}:fetches", *options)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1 and "Traceback" not in err


def test_a_report_is_printed_on_request_and_two_saved_plans_are_compared(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path
) -> None:
    told = []
    for name, hardware in (("a.json", "t4"), ("b.json", "2xh100")):
        path = tmp_path / name
        code, out, _ = run(
            capsys, "plan", f"{script}:fetches", "--shape", "x=512,4", "--hardware", hardware,
            "--report", "-o", str(path),
        )  # fmt: skip
        assert code == 0
        told.append(out)
    assert "Critical path" in told[0] and "/worker:0/gpu:0" in told[0] and "model.py:" in told[0]
    code, out, _ = run(capsys, "plan", "--diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert code == 0 and "nodes moved" in out and "predicted step" in out


def test_a_plan_searched_for_against_a_clock_says_so(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    limited = ["--placer", "auto", "--seconds", "0.1", "--hardware", "2xt4", "--shape", "x=2,4"]
    code, out, _ = run(capsys, "plan", f"{script}:fetches", *limited)
    assert code == 0 and "not reproducible" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "--diff", "a.json"], "--diff"),
        (["plan", "--diff", "a.json", "b.json"], "no such file"),
        (["plan", "m.py:f", "--diff", "a.json", "b.json"], "leave out"),
        (["plan", "m.py:f", "--hardware", "8xh100", "--workers", "2"], "not two"),
        (["plan", "m.py:f", "--hardware", "8xh1000"], "did you mean 'h100'"),
        (["plan", "m.py:f", "--hardware", "999999999xh100"], "more than 1024 devices, the most"),
        (["plan", "m.py:f", "--workers", "100000"], "more than 1024 devices, the most"),
        (["plan", "SCRIPT", "--shape", "x=2,4", "--seconds", "1"], "--placer auto, not greedy"),
        (["plan", "m.py:f", "--hardware", "2xh100@10gb"], "did you mean '10gbe'"),
    ],
    ids=" ".join,
)
def test_hardware_and_differences_that_make_no_sense_get_one_line(
    capsys: pytest.CaptureFixture[str], script: Path, arguments: list[str], says: str
) -> None:
    arguments = [each.replace("SCRIPT", f"{script}:fetches") for each in arguments]
    code, out, err = run(capsys, *arguments)
    assert code == 2 and says in err
    assert err.count("\n") == 1 and not out and "Traceback" not in err


def test_an_unknown_name_in_a_script_lists_those_that_it_defines(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    code, _, err = run(capsys, "plan", f"{script}:fetch")
    assert code == 2
    assert "fetches" in err and "build" in err


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("it = 3", "it is int: name a tensor"),
        ("it = [1]", "it is list: name a tensor"),
        ("def it(size): ...", "without arguments: missing a required argument: 'size'"),
        (
            "import graphflow as gf\ndef it(): gf.matmul(gf.zeros((2, 3)), gf.zeros((2, 3)))",
            "model.py:2",
        ),
    ],
)
def test_what_cannot_be_planned_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str, says: str
) -> None:
    (tmp_path / "model.py").write_text(code)
    status, _, err = run(capsys, "plan", f"{tmp_path / 'model.py'}:it")
    assert status in (1, 2)
    assert says in err
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("code", ["1 / 0", "def it():\n    1 / 0"])
def test_an_error_of_the_users_code_shows_that_code_and_none_of_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str
) -> None:
    script = tmp_path / "model.py"
    script.write_text(code)
    status, _, err = run(capsys, "plan", f"{script}:it")
    assert status == 1
    assert "ZeroDivisionError" in err and f'{script}", line' in err
    assert "main.py" not in err and "runpy" not in err


@pytest.mark.parametrize("name", ["fetches", "build", "y"])
def test_plan_prints_the_prediction_and_writes_what_is_asked(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path, name: str
) -> None:
    target = tmp_path / "plan.json"
    code, out, _ = run(
        capsys, "plan", f"{script}:{name}", "--workers", "2", "-s", "x=8,4", "-o", str(target)
    )
    assert code == 0
    assert "plan of" in out and "round robin" in out and str(target) in out
    assert json.loads(target.read_text())


def test_devices_lists_this_machine_and_a_cluster_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # names are not shortened for a narrow terminal
    code, out, _ = run(capsys, "devices")
    assert code == 0 and "/worker:0/cpu:0  this process" in out
    seen = "graphflow.runtime.program.vendor_libraries.describe_gpus"
    monkeypatch.setattr(seen, lambda: ["gpu:0 is imaginary"])
    code, out, _ = run(capsys, "devices")
    assert code == 0 and "gpu:0 is imaginary\nsessions take the CPU and each GPU" in out
    assert "gf.Session(gf.Cluster.here(devices=['cpu:0', 'gpu:0']))" in out
    file = tmp_path / "c.toml"
    file.write_text('[[workers]]\naddress = "tcp://127.0.0.1:7009"\n')
    code, out, _ = run(capsys, "devices", "--cluster", str(file))
    assert code == 0 and "/worker:0/cpu:0  tcp://127.0.0.1:7009" in out


@pytest.mark.parametrize("command", ["worker", "plan", "run", "status"])
def test_options_are_told_whole_on_a_narrow_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and not re.findall("--[a-z-]+…|<(?:int|float)", out)


def test_a_cluster_file_with_nan_names_file_and_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[[workers]]\naddress = "tcp://127.0.0.1:7009"\nflops = nan\n')
    code, _, err = run(capsys, "devices", "--cluster", str(file))
    assert code == 2
    assert "c.toml" in err and "nan" in err.lower()


def graphflow(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, importing the same graphflow."""
    return loaded.run_python(["-m", "graphflow", *arguments], environment(), cwd)


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(root)}


@pytest.mark.parametrize("workers", [0, 2])
def test_run_gives_the_script_its_cluster_and_its_arguments(script: Path, workers: int) -> None:
    options = ["--workers", str(workers)] if workers else []
    done = graphflow("run", str(script), *options, "--", "--epochs", "3", cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(workers or 1), "24.0", "--epochs", "3"]


def test_a_script_imports_what_lies_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "sizes_of_mine.py").write_text("WIDTH = 4\n")
    script = tmp_path / "branch_parallelism.py"
    script.write_text(
        "import graphflow as gf, sizes_of_mine as sizes\n"
        "y = gf.exp(gf.placeholder('float32', (sizes.WIDTH,)))\n"
        "print('width', sizes.WIDTH)\n"
    )
    before = list(sys.path)
    for command in (["run", str(script)], ["plan", f"{script}:y"]):
        sys.modules.pop("sizes_of_mine", None)
        code, out, _ = run(capsys, *command)
        assert code == 0 and "width 4" in out
    assert sys.path == before


def test_ctrl_c_ends_a_command_with_one_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "stopped.py").write_text("raise KeyboardInterrupt\n")
    assert run(capsys, "run", str(tmp_path / "stopped.py")) == (130, "", "interrupted\n")


def test_a_failing_script_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import graphflow as gf\ngf.Session().run('loss')\n")
    done = graphflow("run", "bad.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "FetchError" in done.stderr and 'bad.py", line 2' in done.stderr


def test_a_worker_serves_a_session_and_ends_on_ctrl_c(tmp_path: Path, script: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "graphflow.cli.main", "worker", "--listen"]
    worker = subprocess.Popen(
        [*command, f"tcp://127.0.0.1:{port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert f"listening on tcp://127.0.0.1:{port}" in worker.stdout.readline()
        taken = graphflow("worker", "--listen", f"tcp://127.0.0.1:{port}", cwd=tmp_path)
        assert taken.returncode == 1
        assert "AddressInUse" in taken.stderr and taken.stderr.count("\n") == 1
        (tmp_path / "c.toml").write_text(f'[[workers]]\naddress = "tcp://127.0.0.1:{port}"\n')
        done = graphflow("run", str(script), "--cluster", "c.toml", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["1", "24.0"]
        worker.send_signal(signal.SIGINT)
        assert worker.wait(20) == 0
    finally:
        worker.kill()
        worker.communicate()


def test_cache_tells_of_the_kernels_on_disk_and_removes_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    code, out, _ = run(capsys, "cache")
    assert code == 0 and out.startswith("0 compiled kernels")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.kernel").write_bytes(bytes(1 << 20))
    assert "1 compiled kernel, 1 MiB of at most 64 MiB in" in run(capsys, "cache", "info")[1]
    code, out, _ = run(capsys, "cache", "clear")
    assert code == 0 and "removed 1 compiled kernel," in out
    assert not list((tmp_path / "kernels").iterdir())
    code, _, err = run(capsys, "cache", "burn")
    assert code == 2 and "info or clear, not 'burn'" in err


def test_cache_clear_says_what_it_cannot_remove(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for name in ("a.kernel", "b.kernel"):
        (kernels / name).write_bytes(bytes(100))

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    with monkeypatch.context() as patched:  # root may remove what is in any folder
        patched.setattr(Path, "unlink", refuse)
        code, out, err = run(capsys, "cache", "clear")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert f"cannot remove {kernels / 'a.kernel'} and 1 more file: Permission denied" in err
    assert len(list(kernels.iterdir())) == 2
    (kernels / "c.kernel").mkdir()
    code, out, err = run(capsys, "cache", "clear")
    assert code == 1 and "removed 2 compiled kernels, 200 B" in out
    assert f"cannot remove {kernels / 'c.kernel'}: " in err


def test_a_switch_that_is_neither_on_nor_off_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, script: Path
) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", "of")
    code, _, err = run(capsys, "worker", "--listen", "tcp://127.0.0.1:7001")
    assert (code, err) == (
        2,
        "graphflow: GRAPHFLOW_JIT in the environment must be on or off, not 'of'\n",
    )
    code, _, err = run(capsys, "run", str(script))
    assert code == 1 and "GRAPHFLOW_JIT in the environment must be on or off, not 'of'" in err


@pytest.mark.parametrize("name", ["GRAPHFLOW_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_in_the_home_of_nobody_is_refused_where_a_worker_or_a_session_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, script: Path, name: str
) -> None:
    monkeypatch.setenv(name, "~nobody-of-that-name/x")
    says = f"{name} in the environment is '~nobody-of-that-name/x', but there is no such home"
    code, out, err = run(capsys, "worker", "--listen", "tcp://127.0.0.1:7001")
    assert (code, out, err) == (2, "", f"graphflow: {says}; give the whole path\n")
    code, _, err = run(capsys, "run", str(script))
    assert code == 1 and says in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_goes_nowhere_is_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphflow", "cache", "info"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
            env=environment(),
            cwd=tmp_path,
        )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr


def test_streams_that_are_closed_are_none_to_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["status", "tcp://127.0.0.1:1", "--timeout", "0.1"]) == 1
    for each in (sys.stdin, sys.stdout, sys.stderr):
        each.close()
