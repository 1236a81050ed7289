"""An OpenSSH server on loopback, for tests of what goes by ssh."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import graphflow as gf

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
needs_sshd = pytest.mark.skipif(
    not (os.path.exists(SSHD) and shutil.which("ssh")),
    reason="needs OpenSSH's client and server (apt install openssh-server)",
)


@contextmanager
def ssh_server(folder: Path) -> Iterator[list[str]]:
    """Serve on loopback, and let this user in; yield the options with which ssh reaches it."""
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nPidFile none\n"
        f"AuthorizedKeysFile {folder / 'user.pub'}\nStrictModes no\nUsePAM no\n"
        f"PermitRootLogin yes\nSetEnv PYTHONPATH={Path(gf.__file__).parents[1]}\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=subprocess.DEVNULL) as server:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield [
            "-p", str(port), "-i", str(folder / "user"), "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-F", "none",
        ]  # fmt: skip
        server.terminate()
