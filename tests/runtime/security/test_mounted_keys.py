"""Keys that a platform mounts: Kubernetes Secrets, systemd credentials, Docker secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphflow.errors import KeyFileError
from graphflow.runtime.security import key_files
from graphflow.runtime.security.keys import COORDINATOR, WORKER, Keyring

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make root's files")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A mounted folder as Kubernetes lays it out: links to `..data`, itself a link to a folder."""
    made = Keyring(tmp_path / "made")
    made.create_pair("box1", WORKER)
    alice = made.create_pair("alice", COORDINATOR)
    mount = tmp_path / "mount"
    version = mount / "..2026_01_01"
    (version / "trusted").mkdir(parents=True)
    (version / "box1.secret").write_bytes((tmp_path / "made" / "box1.secret").read_bytes())
    (version / "trusted" / "alice.public").write_text(f"{alice.public}\n")
    (version / "box1.secret").chmod(0o440)
    (mount / "..data").symlink_to("..2026_01_01")
    for name in ("box1.secret", "trusted"):
        (mount / name).symlink_to(f"..data/{name}")
    return mount


@needs_root
@pytest.mark.parametrize("mode", [0o400, 0o440])
def test_a_mounted_secret_is_read_through_its_links(secret: Path, mode: int) -> None:
    (secret / "..data" / "box1.secret").chmod(mode)
    ring = Keyring(secret)
    assert ring.own_pair("box1", WORKER) == ring.own_pair(None, WORKER)
    assert ring.own_pair(str(secret / "box1.secret"), WORKER).public.name == "box1"
    assert [key.name for key in ring.read_trusted()] == ["alice"]


@needs_root
@pytest.mark.parametrize("mode", [0o444, 0o404, 0o640, 0o460, 0o450])
def test_a_mounted_secret_that_others_can_read_or_write_is_refused(secret: Path, mode: int) -> None:
    (secret / "..data" / "box1.secret").chmod(mode)
    with pytest.raises(KeyFileError, match=r"can be read by others.*0400 or 0440"):
        Keyring(secret).own_pair("box1", WORKER)


@needs_root
def test_a_group_of_other_processes_may_not_read_a_secret(secret: Path) -> None:
    os.chown(secret / "..data" / "box1.secret", 0, 54321)
    with pytest.raises(KeyFileError, match="can be read by others"):
        Keyring(secret).own_pair("box1", WORKER)


@needs_root
@pytest.mark.parametrize("groups", [(54321,), (0,)])
def test_another_user_reads_what_root_mounted_for_its_group(
    secret: Path, groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(secret / "..data" / "box1.secret", 0, groups[0])
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: list(groups))
    assert Keyring(secret).own_pair("box1", WORKER).public.role == WORKER
    os.chown(secret / "..data" / "box1.secret", 2000, groups[0])
    with pytest.raises(KeyFileError, match="belongs to another user"):
        Keyring(secret).own_pair("box1", WORKER)


@pytest.mark.parametrize("link", ["../made/box1.secret", "box1.secret"])
def test_a_link_that_leads_out_or_to_itself_is_refused(secret: Path, link: str) -> None:
    (secret / "box1.secret").unlink()
    (secret / "box1.secret").symlink_to(link)
    with pytest.raises(KeyFileError, match=r"leads out of|leads to itself|cannot be read"):
        Keyring(secret).own_pair("box1", WORKER)


def test_a_link_to_a_missing_file_says_that_there_is_no_key(secret: Path) -> None:
    (secret / "..data").unlink()
    with pytest.raises(KeyFileError, match="there is no key"):
        Keyring(secret).own_pair("box1", WORKER)


def test_a_folder_of_any_mode_is_trusted_on_a_read_only_file_system(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (secret / "..data" / "trusted").chmod(0o1777)
    with pytest.raises(KeyFileError, match="can be changed by others"):
        Keyring(secret).read_trusted()

    class ReadOnly:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(key_files.os, "statvfs", lambda path: ReadOnly)
    assert [key.name for key in Keyring(secret).read_trusted()] == ["alice"]


def test_a_secret_given_by_its_path_needs_no_folder_of_keys(tmp_path: Path) -> None:
    pair = Keyring(tmp_path / "elsewhere").create_pair("box1", WORKER)
    path = tmp_path / "elsewhere" / "box1.secret"
    assert Keyring(tmp_path / "none").own_pair(str(path), WORKER) == pair
    with pytest.raises(KeyFileError, match="there is no key"):
        Keyring(tmp_path / "none").own_pair(str(tmp_path / "box2.secret"), WORKER)
