"""Keys: CURVE pairs of one's own, and the public keys of those that are trusted, as small files.

    NAME.secret           one's own, readable by its owner only
    NAME.public           what is handed to others
    trusted/NAME.public   what others handed over; removing one takes the trust away

A public key is one line, `graphflow-key-1 ROLE NAME KEY`, in hexadecimal digits, so that it can be
sent in a mail and pasted into a shell. The folder is `$GRAPHFLOW_KEYS`, else `graphflow/keys` in
`$XDG_CONFIG_HOME` or `~/.config`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphflow.base.environment import folder_setting, home_folder
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import KeyFileError

COORDINATOR, WORKER, CLIENT = ROLES = ("coordinator", "worker", "client")
"""A coordinator opens sessions and gives orders; a worker runs them, and sends tensors to other
workers; a client may ask a worker who it is, no more."""

_PUBLIC, _SECRET = "graphflow-key-1", "graphflow-secret-1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[0-9a-f]{64}")
_FILE_CAP = 400  # bytes of a key file
_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_State = tuple[int, ...]  # of a file: another one where it was written, or another file put there


@dataclass(frozen=True)
class PublicKey:
    """Whom a key belongs to.

    Attributes:
        key: 32 bytes in hexadecimal digits.
    """

    name: str
    role: str
    key: str

    def __str__(self) -> str:
        return f"{_PUBLIC} {self.role} {self.name} {self.key}"

    @staticmethod
    def parse(text: str, where: str) -> PublicKey:
        """The key of a line; `where` it is from, for errors.

        Raises:
            KeyFileError: it is no such line.
        """
        head, *rest = text.split() or [""]
        if head == _SECRET:
            raise KeyFileError(f"{where} holds a secret key, which stays where it is; give the "
                               "file that ends in .public")  # fmt: skip
        if head != _PUBLIC or len(rest) != 3 or not _KEY.fullmatch(rest[2]):
            raise KeyFileError(f"{where} is no public key: '{_PUBLIC} ROLE NAME KEY' is expected")
        role, name, key = rest
        return PublicKey(check_name(name, where), check_role(role, where), key)


@dataclass(frozen=True)
class KeyPair:
    """A key of one's own; `secret` is never shown."""

    public: PublicKey
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.name!r}, {self.public.role!r})"


def check_name(name: str, where: str) -> str:
    """A key's name, which is a file's name, too.

    Raises:
        KeyFileError: it has other characters than letters, digits, dot, dash and underscore.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise KeyFileError(
            f"{where}: a key's name is up to 64 letters, digits, dots, dashes or underscores, not "
            f"{name!r}"
        )
    return name


def check_role(role: str, where: str) -> str:
    if role not in ROLES:
        raise KeyFileError(f"{where}: a key's role is one of {', '.join(ROLES)}, not {role!r}")
    return role


def keys_folder() -> Path:
    """Where keys are, unless told otherwise.

    Raises:
        ArgumentError: it is in the home of a user who is not there.
    """
    own, base = folder_setting("GRAPHFLOW_KEYS"), folder_setting("XDG_CONFIG_HOME")
    return own or (base or home_folder() / ".config") / "graphflow" / "keys"


def lacks_descriptors(error: KeyFileError) -> bool:
    """Whether nothing is wrong with the keys: this process can open no file for now."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _DESCRIPTORS


def describe_removal(path: Path) -> str:
    """How a file goes that is trusted; for messages."""
    if _NAME.fullmatch(path.stem) and (path.is_symlink() or not path.is_dir()):
        return f"`graphflow keys revoke {path.stem}` removes it"
    return "remove it by hand"


class Keyring:
    """The keys in a folder."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = keys_folder() if folder is None else Path(folder)
        self._trusted = self.folder / "trusted"
        self._last: dict[Path, tuple[_State, PublicKey]] = {}  # what `trusted` has read

    # One's own ------------------------------------------------------------------------------------

    def create_pair(self, name: str, role: str) -> KeyPair:
        """Make a pair, and write both of its files.

        Raises:
            KeyFileError: a bad name or role, a name that is taken, a folder that cannot be written.
        """
        import zmq
        from zmq.utils import z85

        check_name(name, "graphflow keys new")
        check_role(role, "graphflow keys new")
        public, secret = (z85.decode(half) for half in zmq.curve_keypair())
        pair = KeyPair(PublicKey(name, role, public.hex()), secret)
        text = f"{_SECRET} {role} {name} {pair.public.key} {secret.hex()}"
        kept = self.folder / f"{name}.secret"
        _write_new(kept, text, 0o600)
        try:
            _write_new(self.folder / f"{name}.public", str(pair.public), 0o644)
        except KeyFileError:
            kept.unlink()  # half a pair would only be in the way of the next try
            raise
        return pair

    def own_pair(self, name: str | None, role: str) -> KeyPair:
        """One's own key of a name; None: the only one of the role.

        Raises:
            KeyFileError: it is not there, of another role, damaged, or others could read it; there
                is none, or more than one, of the role; the folder cannot be read.
        """
        if name is None:
            names = [key.name for key in self.pairs() if key.role == role]
            if len(names) != 1:
                remedy = f"make one with `graphflow keys new NAME --role {role}`"
                if names:
                    remedy = f"there are {', '.join(names)}: name one"
                raise KeyFileError(f"which {role}'s key? In {self.folder}: {remedy}")
            name = names[0]
        path = self.folder / f"{check_name(name, 'a key')}.secret"
        _check_private(path)
        pair = _read_pair(path)
        if pair.public.role != role:
            raise KeyFileError(f"{path} is a {pair.public.role}'s key; a {role}'s is wanted here")
        return pair

    def pairs(self) -> list[PublicKey]:
        """The public halves of one's own keys, by name: as the secrets tell them, or, where another
        user's cannot be read, the files beside them.

        Raises:
            KeyFileError: one is damaged, or the folder cannot be read.
        """
        own: dict[str, PublicKey | None] = {}
        for path in _files_in(self.folder, ".secret"):
            beside = path.with_suffix(".public")
            own[path.stem] = _read_pair(path).public if _is_secret(path) else _key_in_file(beside)
        return [key for name, key in own.items() if key and name == key.name]  # others are copies

    # Others ---------------------------------------------------------------------------------------

    def add(self, text: str, where: str) -> PublicKey:
        """Trust a public key: the line itself.

        Raises:
            KeyFileError: it is no public key, the name is another key's already, or the key has
                another name or role here.
        """
        key = PublicKey.parse(text, where)
        with _folder_lock(self._trusted):
            for known in self.read_trusted():
                if known == key:
                    return key
                if known.name == key.name:
                    raise KeyFileError(
                        f"another key is trusted as {key.name!r} already; revoke it first, or make "
                        "a key of another name"
                    )
                if known.key == key.key:
                    raise KeyFileError(
                        f"this key is trusted already, as {known.name!r}, a {known.role}'s; revoke "
                        "that first"
                    )
            _write_new(self._trusted / f"{key.name}.public", str(key), 0o644)
        return key

    def read_trusted(self) -> list[PublicKey]:
        """The keys that are trusted, by name; none where there is no folder of them.

        Raises:
            KeyFileError: others could change what is trusted; a file is no public key or has
                another name than its key; a key has two names; something cannot be read.
        """
        try:
            found = self._read_trusted_files()
        except KeyFileError as error:
            if not lacks_descriptors(error):
                self._last = {}
            raise
        self._last = found
        return [key for _, key in found.values()]

    def unchanged_keys(self) -> list[PublicKey]:
        """Of the keys that `trusted` has read, those whose files were not touched since: for who
        has no descriptor to read them anew. A look at a file takes none.

        Raises:
            KeyFileError: others could change what is trusted.
        """
        _check_not_writable_by_others(self._trusted)
        kept = self._last.items()
        return [
            key
            for path, (state, key) in kept
            if state and _check_not_writable_by_others(path) == state
        ]

    def _read_trusted_files(self) -> dict[Path, tuple[_State, PublicKey]]:
        _check_not_writable_by_others(self._trusted)
        found: dict[Path, tuple[_State, PublicKey]] = {}
        names: dict[str, PublicKey] = {}
        for path in _files_in(self._trusted, ".public"):
            try:
                _, key = found[path] = _check_not_writable_by_others(path), _read_trusted_key(path)
            except KeyFileError as error:
                if _is_gone(path):
                    continue  # it was revoked meanwhile, which is no reason to refuse the others
                if lacks_descriptors(error):
                    raise
                raise KeyFileError(f"{error}; {describe_removal(path)}") from error.__cause__
            if (other := names.setdefault(key.key, key)) is not key:
                raise KeyFileError(
                    f"in {self._trusted} one key is trusted as {other.name!r}, a {other.role}'s, "
                    f"and as {key.name!r}, a {key.role}'s; revoke one of them"
                )
        return found

    def revoke(self, name: str) -> PublicKey | None:
        """Remove the file of a name from those that are trusted, whatever is in it; workers that
        run notice it within a second. The key that it held; None: none that can be read.

        Raises:
            KeyFileError: there is no such file, or it cannot be removed.
        """
        path = self._trusted / f"{check_name(name, 'graphflow keys revoke')}.public"
        try:
            if stat.S_ISDIR(path.lstat().st_mode):
                raise KeyFileError(f"{path} is a folder, no key; {describe_removal(path)}")
            key = _key_in_file(path)
            path.unlink()
        except FileNotFoundError:
            names = ", ".join(each.stem for each in _files_in(self._trusted, ".public")) or "none"
            raise KeyFileError(
                f"no key named {name!r} is trusted here; those that are: {names}"
            ) from None
        except OSError as error:
            raise KeyFileError(f"{path} cannot be removed: {error.strerror}") from error
        return key

    def files_of(self, key: PublicKey) -> list[Path]:
        """The files by which a key is trusted, whatever they call it.

        Raises:
            KeyFileError: the folder cannot be read.
        """
        held = {path: _key_in_file(path) for path in _files_in(self._trusted, ".public")}
        return [path for path, other in held.items() if other and other.key == key.key]

    def key_of(self, name_or_key: str, role: str) -> str:
        """The public key that a name, or the key itself, stands for.

        Raises:
            KeyFileError: no such key is trusted, or it is of another role.
        """
        if _KEY.fullmatch(name_or_key):
            return name_or_key
        for key in self.read_trusted():
            if key.name == name_or_key:
                if key.role != role:
                    raise KeyFileError(f"{key.name!r} is a {key.role}'s key, not a {role}'s")
                return key.key
        raise KeyFileError(
            f"no {role}'s key named {name_or_key!r} is trusted here; run `graphflow keys add "
            f"{name_or_key}.public` with the file from that machine"
        )

    @property
    def version(self) -> int:
        """Changes when what is trusted does; 0 where there is no folder of it.

        Raises:
            KeyFileError: it cannot be looked at.
        """
        try:
            return self._trusted.stat().st_ctime_ns  # of entries, and of who may change them
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise KeyFileError(f"{self._trusted} cannot be read: {error.strerror}") from error


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Let nobody else add to a folder between a look at what is in it and a new file."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KeyFileError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        with suppress(OSError):  # some file systems of a network lock no folders: as without
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write_new(path: Path, text: str, mode: int) -> None:
    """A new file, whole as soon as it is there: a worker may be looking."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                os.fchmod(handle, mode)
                file.write(text + "\n")
            os.link(draft, path)
        except FileExistsError:
            raise KeyFileError(f"{path} is there already; give another name") from None
        finally:
            os.unlink(draft)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from error


def _files_in(folder: Path, suffix: str) -> list[Path]:
    """By name; none where there is no such folder. One that is there and cannot be read is not
    empty: who took it for that would end the sessions of all who are trusted."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeyFileError(f"the keys in {folder} cannot be read: {error.strerror}") from error


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # who knows
    return False


def _is_secret(path: Path) -> bool:
    """Whether a file can be read, and is one of ours, whole or not."""
    try:
        return _read(path).split()[:1] == [_SECRET]
    except KeyFileError as error:
        if lacks_descriptors(error):
            raise
        return False


def _read_pair(path: Path) -> KeyPair:
    """One's own key of a file, whose halves belong together."""
    import zmq
    from zmq.utils import z85

    found = _read(path).split()
    if len(found) == 5 and found[0] == _SECRET and all(map(_KEY.fullmatch, found[3:])):
        _, role, name, public, digits = found
        secret = bytes.fromhex(digits)
        if z85.decode(zmq.curve_public(z85.encode(secret))).hex() == public:
            return KeyPair(PublicKey(name, role, public), secret)
    raise KeyFileError(
        f"{path} is damaged; put a copy of it back, or remove it and make a new key with "
        "`graphflow keys new`"
    )


def _read_trusted_key(path: Path) -> PublicKey:
    key = PublicKey.parse(_read(path), str(path))
    if path.stem != key.name:
        raise KeyFileError(f"{path} holds the key of {key.name!r}: its name must be "
                           f"{key.name}.public, by which it can be revoked")  # fmt: skip
    return key


def _key_in_file(path: Path) -> PublicKey | None:
    """The key in a file; None where that holds none."""
    try:
        return PublicKey.parse(_read(path), str(path))
    except KeyFileError:
        return None


def _read(path: Path) -> str:
    try:
        if not path.is_file() and path.exists():
            raise KeyFileError(f"{path} is not a plain file; put the key itself there")
        with path.open("rb") as file:
            return file.read(_FILE_CAP).decode("ascii")
    except FileNotFoundError as error:
        raise KeyFileError(f"{path} is a link to a file that is not there") from error
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read as a key: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path} cannot be read as a key: it is no text") from error


def _check_private(path: Path) -> None:
    """Refuse a secret that somebody else could have read or put there."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise KeyFileError(f"there is no key {path}; `graphflow keys new` makes one") from None
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path} is not a plain file; put the key itself there")
    if status.st_uid != os.getuid():
        raise KeyFileError(
            f"{path} belongs to another user; make a key of your own (`graphflow keys new`)"
        )
    if status.st_mode & 0o077:
        raise KeyFileError(
            f"{path} can be read by others, so its secret may be known: make a new key, or, if you "
            f"are sure that nobody has, `chmod 600 {path}`"
        )


def _check_not_writable_by_others(path: Path) -> _State:
    """Refuse a list of trusted keys, or one of them, that somebody else could change. Its state;
    () where it is not there, and nobody is trusted."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise KeyFileError(f"{path} can be changed by others: `chmod go-w {path}`")
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times
