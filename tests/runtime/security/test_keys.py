"""Key files: what is written, what is refused, and that a secret stays one."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphflow.cli.main import app, main
from graphflow.errors import ArgumentError, KeyFileError
from graphflow.runtime.security import keys
from graphflow.runtime.security.keys import CLIENT, COORDINATOR, ROLES, WORKER, Keyring, PublicKey


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "keys")


def test_a_new_key_is_found_again_by_its_name_and_as_the_only_one_of_its_role(
    ring: Keyring,
) -> None:
    pair = ring.create_pair("box1", WORKER)
    assert ring.own_pair("box1", WORKER).secret == pair.secret
    assert ring.own_pair(None, WORKER).public == pair.public
    assert [key.name for key in ring.pairs()] == ["box1"]
    assert pair.secret.hex() not in repr(pair)


def test_the_secret_is_readable_by_its_owner_only(ring: Keyring) -> None:
    ring.create_pair("box1", WORKER)
    assert (ring.folder / "box1.secret").stat().st_mode & 0o777 == 0o600
    assert ring.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o666])
def test_a_secret_that_others_can_read_is_refused(ring: Keyring, mode: int) -> None:
    ring.create_pair("box1", WORKER)
    (ring.folder / "box1.secret").chmod(mode)
    with pytest.raises(KeyFileError, match="can be read by others"):
        ring.own_pair("box1", WORKER)


def test_a_link_to_a_secret_elsewhere_is_refused(ring: Keyring, tmp_path: Path) -> None:
    ring.create_pair("box1", WORKER)
    moved = tmp_path / "elsewhere"
    (ring.folder / "box1.secret").rename(moved)
    (ring.folder / "box1.secret").symlink_to(moved)
    with pytest.raises(KeyFileError, match="leads out of"):
        ring.own_pair("box1", WORKER)


@pytest.mark.parametrize("text", ["", "nonsense", "graphflow-secret-1 worker box1 00 00", "é"])
def test_a_damaged_secret_is_refused(ring: Keyring, text: str) -> None:
    ring.create_pair("box1", WORKER)
    (ring.folder / "box1.secret").write_text(text)
    with pytest.raises(KeyFileError, match=r"damaged|cannot be read"):
        ring.own_pair("box1", WORKER)


@pytest.mark.parametrize("half", [3, 4], ids=["public", "secret"])
def test_halves_that_do_not_belong_together_are_refused(ring: Keyring, half: int) -> None:
    ring.create_pair("box1", WORKER)
    path = ring.folder / "box1.secret"
    words = path.read_text().split()
    words[half] = words[half][:20] + ("0" if words[half][20] != "0" else "1") + words[half][21:]
    path.write_text(" ".join(words))
    with pytest.raises(KeyFileError, match=r"box1\.secret is damaged; put a copy"):
        ring.own_pair("box1", WORKER)


def test_a_pair_whose_public_file_is_missing_is_used_all_the_same(ring: Keyring) -> None:
    pair = ring.create_pair("box1", WORKER)
    (ring.folder / "box1.public").unlink()
    assert ring.pairs() == [pair.public] and ring.own_pair(None, WORKER) == pair


def test_a_copy_of_a_secret_is_no_other_key(ring: Keyring) -> None:
    pair = ring.create_pair("box1", WORKER)
    (ring.folder / "box1-old.secret").write_bytes((ring.folder / "box1.secret").read_bytes())
    assert ring.own_pair(None, WORKER) == pair


def test_a_key_of_another_role_is_refused(ring: Keyring) -> None:
    ring.create_pair("alice", COORDINATOR)
    with pytest.raises(KeyFileError, match="coordinator's key; a worker's is wanted"):
        ring.own_pair("alice", WORKER)


def test_no_key_and_several_keys_say_what_to_do(ring: Keyring) -> None:
    with pytest.raises(KeyFileError, match="keys new NAME --role worker"):
        ring.own_pair(None, WORKER)
    ring.create_pair("a", WORKER)
    ring.create_pair("b", WORKER)
    with pytest.raises(KeyFileError, match="a, b: name one"):
        ring.own_pair(None, WORKER)


def test_a_name_is_taken_once(ring: Keyring) -> None:
    first = ring.create_pair("box1", WORKER)
    with pytest.raises(KeyFileError, match="already"):
        ring.create_pair("box1", COORDINATOR)
    assert ring.own_pair("box1", WORKER).public == first.public


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "a b", "x" * 65])
def test_names_that_are_no_file_names_are_refused(ring: Keyring, name: str) -> None:
    with pytest.raises(KeyFileError, match="letters, digits"):
        ring.create_pair(name, WORKER)
    key = "0" * 64
    with pytest.raises(KeyFileError):
        ring.add(f"graphflow-key-1 worker {name} {key}", "a test")
    assert not list(ring.folder.rglob("*")) if ring.folder.exists() else True


def test_trust_is_given_and_taken_away(ring: Keyring, tmp_path: Path) -> None:
    other = Keyring(tmp_path / "other").create_pair("box1", WORKER).public
    before = ring.version
    assert ring.add(str(other), "box1.public") == other
    assert ring.read_trusted() == [other]
    assert ring.version != before
    assert ring.key_of("box1", WORKER) == other.key == ring.key_of(other.key, WORKER)
    ring.revoke("box1")
    assert ring.read_trusted() == []
    with pytest.raises(KeyFileError, match="none"):
        ring.revoke("box1")


def test_another_key_of_a_trusted_name_is_refused(ring: Keyring, tmp_path: Path) -> None:
    first, second = (Keyring(tmp_path / n).create_pair("box1", WORKER).public for n in ("a", "b"))
    ring.add(str(first), "a")
    ring.add(str(first), "a")  # the same once more changes nothing
    with pytest.raises(KeyFileError, match="revoke it first"):
        ring.add(str(second), "b")


def test_a_secret_is_not_taken_for_a_public_key(ring: Keyring, tmp_path: Path) -> None:
    other = Keyring(tmp_path / "other")
    other.create_pair("box1", WORKER)
    with pytest.raises(KeyFileError, match="secret"):
        ring.add((other.folder / "box1.secret").read_text(), "box1.secret")


def test_a_list_of_trusted_keys_that_others_may_change_is_refused(ring: Keyring) -> None:
    ring.add(str(ring.create_pair("box1", WORKER).public), "own")
    (ring.folder / "trusted").chmod(0o777)
    with pytest.raises(KeyFileError, match="changed by others"):
        ring.read_trusted()


@pytest.mark.parametrize("mode", [0o620, 0o646, 0o666])
def test_a_trusted_file_that_others_may_change_is_refused(ring: Keyring, mode: int) -> None:
    ring.add(str(ring.create_pair("box1", WORKER).public), "own")
    (ring.folder / "trusted" / "box1.public").chmod(mode)
    with pytest.raises(KeyFileError, match=r"box1\.public can be changed by others"):
        ring.read_trusted()


def test_half_a_pair_is_not_left_behind(ring: Keyring) -> None:
    ring.create_pair("box1", WORKER)
    (ring.folder / "box1.secret").unlink()
    with pytest.raises(KeyFileError, match=r"box1\.public is there already"):
        ring.create_pair("box1", WORKER)
    assert [path.name for path in ring.folder.iterdir()] == ["box1.public"]
    (ring.folder / "box1.public").unlink()
    assert ring.create_pair("box1", WORKER).public in ring.pairs()


def test_what_is_revoked_is_trusted_under_no_other_files_name(ring: Keyring) -> None:
    """A copy by hand under another name would outlive `graphflow keys revoke`."""
    ring.add(str(ring.create_pair("box1", WORKER).public), "own")
    kept = ring.folder / "trusted" / "box1.public"
    (kept.parent / "other.public").write_bytes(kept.read_bytes())
    with pytest.raises(KeyFileError, match=r"other.public holds the key of 'box1'"):
        ring.read_trusted()


def test_one_key_has_one_name_and_one_role(ring: Keyring) -> None:
    key = ring.create_pair("box1", WORKER).public
    ring.add(str(key), "own")
    raised = PublicKey("zoe", COORDINATOR, key.key)
    with pytest.raises(KeyFileError, match="trusted already, as 'box1', a worker's"):
        ring.add(str(raised), "a mail")
    (ring.folder / "trusted" / "zoe.public").write_text(f"{raised}\n")
    with pytest.raises(KeyFileError, match=r"as 'box1', a worker's, and as 'zoe', a coordinator's"):
        ring.read_trusted()
    assert ring.revoke("zoe") == raised and ring.read_trusted() == [key]


def test_a_key_that_is_not_a_plain_file_is_refused_and_not_waited_for(ring: Keyring) -> None:
    trusted = ring.folder / "trusted"
    trusted.mkdir(parents=True, mode=0o700)
    os.mkfifo(trusted / "box1.public", 0o600)
    with pytest.raises(KeyFileError, match="not a plain file"):
        ring.read_trusted()


def test_a_key_that_vanishes_while_the_others_are_read_is_none(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [ring.create_pair(name, WORKER).public for name in ("a", "b")]
    for key in keys:
        ring.add(str(key), "own")
    first = Path.is_file

    def remove_then_check(path: Path) -> bool:
        if path.name == "a.public":
            path.unlink(missing_ok=True)
        return first(path)

    monkeypatch.setattr(Path, "is_file", remove_then_check)
    assert ring.read_trusted() == keys[1:]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder can be opened. Not by its mode: nothing is unreadable for root."""

    def fail(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", fail)


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(ring: Keyring, refused: None) -> None:
    ring.create_pair("box1", WORKER)
    for read in (ring.read_trusted, ring.pairs, lambda: ring.key_of("box1", WORKER)):
        with pytest.raises(KeyFileError, match="cannot be read: Permission denied"):
            read()


def test_a_file_in_place_of_a_folder_is_not_an_empty_one(ring: Keyring, tmp_path: Path) -> None:
    ring.folder.mkdir()
    (ring.folder / "trusted").write_text("")
    for read in (ring.read_trusted, Keyring(tmp_path / "keys" / "trusted").pairs):
        with pytest.raises(KeyFileError, match="cannot be read: Not a directory"):
            read()


def test_a_folder_that_cannot_be_looked_at_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    ring = Keyring(tmp_path / "loop")
    for look in (ring.read_trusted, lambda: ring.version):
        with pytest.raises(KeyFileError, match="cannot be read"):
            look()


def _garbage(path: Path) -> None:
    path.write_text("nonsense")


def _make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _make_looping_link(path: Path) -> None:
    path.symlink_to(path.name)


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _no_text(path: Path) -> None:
    path.write_bytes(b"\xff")


SPOILT = [_garbage, _make_dangling_link, _make_looping_link, _fifo, _no_text]


@pytest.mark.parametrize("spoil", SPOILT)
def test_what_is_no_key_among_those_trusted_is_told_with_what_removes_it(
    ring: Keyring, spoil: Callable[[Path], None]
) -> None:
    ring.add(str(ring.create_pair("box1", WORKER).public), "own")
    spoil(ring.folder / "trusted" / "odd.public")
    with pytest.raises(KeyFileError, match=r"`graphflow keys revoke odd` removes it") as failure:
        ring.read_trusted()
    assert "keys new" not in str(failure.value)
    with pytest.raises(KeyFileError, match="those that are: box1, odd"):
        ring.revoke("nobody")
    assert ring.revoke("odd") is None
    assert [key.name for key in ring.read_trusted()] == ["box1"]


def test_a_folder_among_those_trusted_is_removed_by_hand(ring: Keyring) -> None:
    (ring.folder / "trusted" / "odd.public").mkdir(parents=True)
    for refuse in (ring.read_trusted, lambda: ring.revoke("odd")):
        with pytest.raises(KeyFileError, match="remove it by hand"):
            refuse()


def test_a_file_whose_name_is_no_keys_is_removed_by_hand(ring: Keyring) -> None:
    (ring.folder / "trusted").mkdir(parents=True)
    (ring.folder / "trusted" / "my odd.public").write_text("nonsense")
    with pytest.raises(KeyFileError, match="remove it by hand"):
        ring.read_trusted()


def test_a_folder_whose_name_is_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be removed: File name too long"):
        Keyring(tmp_path / ("x" * 300)).revoke("box1")


def call_at_once(count: int, work: Callable[[int], object]) -> list[object]:
    """What calls return or raise that begin together, each on a thread."""
    barrier = Barrier(count)

    def call(number: int) -> object:
        barrier.wait()
        try:
            return work(number)
        except KeyFileError as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(call, range(count)))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time goes by between a look at what is trusted and a new file."""
    write = keys.write_new

    def later(path: Path, text: str, mode: int) -> None:
        time.sleep(0.05)
        write(path, text, mode)

    monkeypatch.setattr(keys, "write_new", later)


def test_one_key_that_is_added_at_once_under_many_names_gets_one(
    ring: Keyring, tmp_path: Path, slow: None
) -> None:
    key = Keyring(tmp_path / "other").create_pair("box", WORKER).public.key
    lines = [str(PublicKey(f"box{n}", WORKER, key)) for n in range(8)]
    told = call_at_once(8, lambda n: Keyring(ring.folder).add(lines[n], "a test"))
    (known,) = ring.read_trusted()
    assert [each for each in told if isinstance(each, PublicKey)] == [known]


def test_one_key_that_is_added_many_times_at_once_is_trusted(
    ring: Keyring, tmp_path: Path, slow: None
) -> None:
    key = Keyring(tmp_path / "other").create_pair("box", WORKER).public
    assert call_at_once(8, lambda n: Keyring(ring.folder).add(str(key), "a test")) == [key] * 8
    assert ring.read_trusted() == [key]
    assert [path.name for path in (ring.folder / "trusted").iterdir()] == ["box.public"]


def test_a_key_is_asked_for_in_its_own_role(ring: Keyring) -> None:
    ring.add(str(ring.create_pair("alice", COORDINATOR).public), "own")
    with pytest.raises(KeyFileError, match="not a worker's"):
        ring.key_of("alice", WORKER)
    with pytest.raises(KeyFileError, match=r"keys add nobody\.public"):
        ring.key_of("nobody", WORKER)


@given(st.text(max_size=200))
def test_no_text_makes_a_public_key_but_its_own_form(text: str) -> None:
    try:
        key = PublicKey.parse(text, "a test")
    except KeyFileError:
        return
    assert key.role in ROLES and PublicKey.parse(str(key), "again") == key


@given(
    st.sampled_from(ROLES),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.binary(min_size=32, max_size=32),
)
def test_a_public_key_is_read_as_it_was_written(role: str, name: str, digits: bytes) -> None:
    key = PublicKey(name, role, digits.hex())
    assert PublicKey.parse(str(key), "a test") == key


# The command ------------------------------------------------------------------------------------


def test_the_command_makes_trusts_lists_and_revokes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CliRunner()
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(tmp_path / "alice"))
    made = run.invoke(app, ["keys", "new", "alice"])
    assert made.exit_code == 0 and "graphflow-key-1 coordinator alice" in made.output
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(tmp_path / "box"))
    public = str(tmp_path / "alice" / "alice.public")
    assert "trusting alice" in run.invoke(app, ["keys", "add", public]).output
    listed = run.invoke(app, ["keys", "list"]).output
    assert "alice" in listed and "trusted" in listed
    assert "no longer" in run.invoke(app, ["keys", "revoke", "alice"]).output
    assert "no keys" in run.invoke(app, ["keys", "list"]).output


def run_keys(run: CliRunner, *arguments: str) -> str:
    return " ".join(run.invoke(app, ["keys", *arguments]).output.split())


def test_revoking_a_copy_says_that_the_key_is_trusted_still(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(ring.folder))
    run, trusted = CliRunner(), ring.folder / "trusted"
    ring.add(str(ring.create_pair("alice", COORDINATOR).public), "own")
    (trusted / "copy.public").write_bytes((trusted / "alice.public").read_bytes())
    said = run_keys(run, "revoke", "copy")
    assert said.startswith("removed copy.public, which held the key of alice")
    assert "no longer" not in said and f"trusted still, by {trusted}/alice.public" in said
    assert "`graphflow keys revoke alice` removes it" in said
    (trusted / "alice.public").rename(trusted / "copy.public")
    assert run_keys(run, "revoke", "copy").endswith("…, trusted no longer")
    assert ring.read_trusted() == []


def test_revoking_what_is_no_key_says_so(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(ring.folder))
    (ring.folder / "trusted").mkdir(parents=True)
    (ring.folder / "trusted" / "odd.public").write_text("nonsense")
    run = CliRunner()
    assert (
        run_keys(run, "revoke", "odd") == "removed odd.public, which held no key that can be read"
    )
    assert "no keys" in run_keys(run, "list")


def test_a_list_that_cannot_be_read_is_not_shown_as_empty(
    ring: Keyring,
    monkeypatch: pytest.MonkeyPatch,
    refused: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(ring.folder))
    assert main(["keys", "list"]) != 0
    said = capsys.readouterr()
    assert "Permission denied" in said.err and "no keys" not in said.out


def test_a_public_file_that_is_missing_is_told_with_what_belongs_in_it(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(ring.folder))
    pair = ring.create_pair("box1", WORKER)
    (ring.folder / "box1.public").unlink()
    said = run_keys(CliRunner(), "list")
    assert "box1.public is missing" in said and str(pair.public) in said


def test_only_a_dash_is_standard_input(
    ring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(ring.folder))
    monkeypatch.chdir(tmp_path)
    lines = [str(Keyring(tmp_path / name).create_pair(name, WORKER).public) for name in "abc"]
    Path("stdin").write_text(lines[0])
    Path("-").write_text(lines[1])
    for file, name in (("stdin", "a"), ("./-", "b"), ("-", "c")):
        said = CliRunner().invoke(app, ["keys", "add", file], input=lines[2]).output
        assert f"trusting {name}," in said


@pytest.mark.parametrize(
    "arguments",
    [["new", "a/b"], ["new", "x", "--role", "king"], ["add", "missing.public"], ["revoke", "x"],
     ["revoke", "../x"], ["add", "/dev/zero"], ["add", "/dev/null"], ["add", "/"]],
)  # fmt: skip
def test_a_wrong_argument_is_one_line_and_no_traceback(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(tmp_path))
    assert main(["keys", *arguments]) != 0
    told = capsys.readouterr().err
    assert told.strip() and "Traceback" not in told


def test_a_folder_that_cannot_be_is_told_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", "~nobody-of-this-name/keys")
    with pytest.raises(ArgumentError, match="GRAPHFLOW_KEYS"):
        Keyring()
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop"):
        with pytest.raises(KeyFileError, match="cannot be written"):
            Keyring(tmp_path / name).create_pair("alice", COORDINATOR)


def test_the_folder_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPHFLOW_KEYS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert Keyring().folder == tmp_path / "graphflow" / "keys"
    assert os.fspath(Keyring("here").folder) == "here"
    assert Keyring(tmp_path / "none").pairs() == []
    assert CLIENT in ROLES


def test_what_is_no_secret_of_ours_or_cannot_be_read_stands_in_no_other_keys_way(
    tmp_path: Path,
) -> None:
    ring = Keyring(tmp_path)
    alice, box = ring.create_pair("alice", "coordinator"), ring.create_pair("box1", "worker")
    (tmp_path / "db.secret").write_text("a password\n")
    secret = tmp_path / "box1.secret"
    secret.unlink()
    secret.mkdir()  # what cannot be read, by root either
    assert ring.pairs() == [alice.public, box.public]
    assert ring.own_pair(None, "coordinator") == alice
    with pytest.raises(KeyFileError, match="not a plain file"):
        ring.own_pair(None, "worker")
