"""Files that sessions may have a worker read: those below the folders it was started with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphflow as gf
from graphflow.base.process.data_folders import check_data_file, restrict_data_folders
from graphflow.errors import ArgumentError
from graphflow.linear.cocoa.file_ops import svmlight_sizes


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a table in it, and one beside it."""
    for name in ("allowed", "allowed-not"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.svm").write_text("1 1:2.0 3:1.0\n-1 2:1.0\n")
    yield tmp_path
    restrict_data_folders(None)


def test_only_files_below_a_folder_are_read_and_links_out_of_it_are_not(folder: Path) -> None:
    inside, outside = folder / "allowed" / "t.svm", folder / "allowed-not" / "t.svm"
    assert check_data_file(str(outside)) == str(outside)  # a process of one's own
    restrict_data_folders([str(folder / "allowed")])
    assert check_data_file(str(inside)) == str(inside)
    os.symlink(outside, folder / "allowed" / "link.svm")
    climbing = folder / "allowed" / ".." / "allowed-not" / "t.svm"
    for path in (outside, folder / "allowed" / "link.svm", climbing, Path("/etc/passwd")):
        with pytest.raises(ArgumentError, match="start it with --allow-data"):
            check_data_file(str(path))


@pytest.mark.parametrize("allowed", [False, True])
def test_a_worker_for_others_reads_what_it_was_told(folder: Path, allowed: bool) -> None:
    command = [sys.executable, "-m", "graphflow", "worker", "--listen", "tcp://127.0.0.1:*",
               "--devices", "cpu:0"]  # fmt: skip
    command += ["--allow-data", str(folder / "allowed")] if allowed else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split(" on ")[1].split(" ")[0]
        sizes = svmlight_sizes(path=str(folder / "allowed" / "t.svm"), part=0, parts=1)
        cluster = _cluster(folder, address)
        with gf.Session(cluster, trial=False) as session:
            if allowed:
                assert session.run(sizes).tolist()[:2] == [2, 3]
            else:
                with pytest.raises(
                    ArgumentError, match=r"start it with --allow-data.*allowed: none"
                ):
                    session.run(sizes)
    finally:
        process.terminate()
        process.wait(20)


def _cluster(folder: Path, address: str) -> gf.Cluster:
    """Return a cluster of the worker at an address."""
    file = folder / "cluster.toml"
    file.write_text(f'[[workers]]\naddress = "{address}"\n')
    return gf.Cluster.load(file)
