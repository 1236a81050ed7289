"""Keys: CURVE pairs of this user, and the public keys that are trusted, as small files.

    NAME.secret           a secret key, readable by its owner only
    NAME.public           its public key, to be given to others
    trusted/NAME.public   the public keys of others; removing a file revokes the key

A public key is one line, `graphflow-key-1 ROLE NAME KEY`, in hexadecimal digits, so that it can be
sent in a mail and pasted into a shell. The folder is `$GRAPHFLOW_KEYS`, else `graphflow/keys` in
`$XDG_CONFIG_HOME` or `~/.config`.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from graphflow.base.environment import folder_setting, home_folder
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import KeyFileError
from graphflow.runtime.security.key_files import (
    FileState,
    check_not_writable_by_others,
    check_private,
    files_in,
    folder_lock,
    is_gone,
    lacks_descriptors,
    read_key_file,
    write_new,
)

COORDINATOR, WORKER, CLIENT = ROLES = ("coordinator", "worker", "client")
"""A coordinator opens sessions and gives orders; a worker runs them, and sends tensors to other
workers; a client may ask a worker who it is, no more."""

_PUBLIC, _SECRET = "graphflow-key-1", "graphflow-secret-1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PublicKey:
    """The public key of a holder with a name and a role.

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
        """Return the key in a line.

        Args:
            where: The place that the line is from, for errors.

        Raises:
            KeyFileError: The line holds no public key.
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
    """A key pair of this user. `secret` is never shown."""

    public: PublicKey
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.name!r}, {self.public.role!r})"


def check_name(name: str, where: str) -> str:
    """Return `name` if it can name a key, and so a file.

    Raises:
        KeyFileError: It has other characters than letters, digits, dot, dash and underscore.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise KeyFileError(
            f"{where}: a key's name is up to 64 letters, digits, dots, dashes or underscores, not "
            f"{name!r}"
        )
    return name


def check_role(role: str, where: str) -> str:
    """Return `role` if there is such a role.

    Raises:
        KeyFileError: There is none.
    """
    if role not in ROLES:
        raise KeyFileError(f"{where}: a key's role is one of {', '.join(ROLES)}, not {role!r}")
    return role


def keys_folder() -> Path:
    """Return the default folder of keys.

    Raises:
        ArgumentError: It is in the home of a user who does not exist.
    """
    own, base = folder_setting("GRAPHFLOW_KEYS"), folder_setting("XDG_CONFIG_HOME")
    return own or (base or home_folder() / ".config") / "graphflow" / "keys"


def describe_removal(path: Path) -> str:
    """Return how to remove a trusted file, for messages."""
    if _NAME.fullmatch(path.stem) and (path.is_symlink() or not path.is_dir()):
        return f"`graphflow keys revoke {path.stem}` removes it"
    return "remove it by hand"


class Keyring:
    """The keys in a folder."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = keys_folder() if folder is None else Path(folder)
        self._trusted = self.folder / "trusted"
        self._last: dict[Path, tuple[FileState, PublicKey]] = {}  # of `read_trusted`

    # This user's pairs ----------------------------------------------------------------------------

    def create_pair(self, name: str, role: str) -> KeyPair:
        """Create a key pair and write both of its files.

        Raises:
            KeyFileError: The name or the role is invalid, the name is in use, or the folder cannot
                be written.
        """
        import zmq
        from zmq.utils import z85

        check_name(name, "graphflow keys new")
        check_role(role, "graphflow keys new")
        public, secret = (z85.decode(half) for half in zmq.curve_keypair())
        pair = KeyPair(PublicKey(name, role, public.hex()), secret)
        text = f"{_SECRET} {role} {name} {pair.public.key} {secret.hex()}"
        kept = self.folder / f"{name}.secret"
        write_new(kept, text, 0o600)
        try:
            write_new(self.folder / f"{name}.public", str(pair.public), 0o644)
        except KeyFileError:
            kept.unlink()  # half a pair would block the next try
            raise
        return pair

    def own_pair(self, name: str | None, role: str) -> KeyPair:
        """Return this user's pair.

        Args:
            name: the pair's name, or the path of its secret file, with a slash in it; None for the
                only pair of the role.

        Raises:
            KeyFileError: There is no such pair, or several of the role. Or the file is damaged, of
                another role, readable by others, or in a folder that cannot be read.
        """
        if name is None:
            names = [key.name for key in self.pairs() if key.role == role]
            if len(names) != 1:
                remedy = f"make one with `graphflow keys new NAME --role {role}`"
                if names:
                    remedy = f"there are {', '.join(names)}: name one"
                raise KeyFileError(f"which {role}'s key? In {self.folder}: {remedy}")
            name = names[0]
        is_path = isinstance(name, str) and os.sep in name
        path = Path(name) if is_path else self.folder / f"{check_name(name, 'a key')}.secret"
        check_private(path)
        pair = _read_pair(path)
        if pair.public.role != role:
            raise KeyFileError(f"{path} is a {pair.public.role}'s key; a {role}'s is wanted here")
        return pair

    def pairs(self) -> list[PublicKey]:
        """Return the public halves of this user's pairs, sorted by name.

        They are read from the secret files or, if these are another user's, from the files beside
        them.

        Raises:
            KeyFileError: A file is damaged, or the folder cannot be read.
        """
        own: dict[str, PublicKey | None] = {}
        for path in files_in(self.folder, ".secret"):
            beside = path.with_suffix(".public")
            own[path.stem] = _read_pair(path).public if _is_secret(path) else _key_in_file(beside)
        return [key for name, key in own.items() if key and name == key.name]  # else a copy

    # Trusted keys ---------------------------------------------------------------------------------

    def add(self, text: str, where: str) -> PublicKey:
        """Trust the public key in the line `text`.

        Raises:
            KeyFileError: The line holds no public key, another key has the name, or the key is
                trusted under another name or role.
        """
        key = PublicKey.parse(text, where)
        with folder_lock(self._trusted):
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
            write_new(self._trusted / f"{key.name}.public", str(key), 0o644)
        return key

    def read_trusted(self) -> list[PublicKey]:
        """Return the trusted keys, sorted by name; none if there is no folder of them.

        Raises:
            KeyFileError: Others could change what is trusted, a file is no public key or has
                another name than its key, a key has two names, or something cannot be read.
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
        """Return the keys of the last `read_trusted` whose files are untouched since.

        For a process without a descriptor to read them again: examining a file needs none.

        Raises:
            KeyFileError: Others could change what is trusted.
        """
        check_not_writable_by_others(self._trusted)
        kept = self._last.items()
        return [
            key
            for path, (state, key) in kept
            if state and check_not_writable_by_others(path) == state
        ]

    def _read_trusted_files(self) -> dict[Path, tuple[FileState, PublicKey]]:
        """Return the state and the key of each trusted file; raises as `read_trusted`."""
        check_not_writable_by_others(self._trusted)
        found: dict[Path, tuple[FileState, PublicKey]] = {}
        names: dict[str, PublicKey] = {}
        for path in files_in(self._trusted, ".public"):
            try:
                _, key = found[path] = check_not_writable_by_others(path), _read_trusted_key(path)
            except KeyFileError as error:
                if is_gone(path):
                    continue  # it was revoked meanwhile: the others stay valid
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
        """Remove the trusted file of `name`, whatever is in it, and return the key that it held.

        Return None if it held none that can be read. Running workers notice within a second.

        Raises:
            KeyFileError: There is no such file, or it cannot be removed.
        """
        path = self._trusted / f"{check_name(name, 'graphflow keys revoke')}.public"
        try:
            if stat.S_ISDIR(path.lstat().st_mode):
                raise KeyFileError(f"{path} is a folder, no key; {describe_removal(path)}")
            key = _key_in_file(path)
            path.unlink()
        except FileNotFoundError:
            names = ", ".join(each.stem for each in files_in(self._trusted, ".public")) or "none"
            raise KeyFileError(
                f"no key named {name!r} is trusted here; those that are: {names}"
            ) from None
        except OSError as error:
            raise KeyFileError(f"{path} cannot be removed: {error.strerror}") from error
        return key

    def files_of(self, key: PublicKey) -> list[Path]:
        """Return the files by which `key` is trusted, whatever they call it.

        Raises:
            KeyFileError: The folder cannot be read.
        """
        held = {path: _key_in_file(path) for path in files_in(self._trusted, ".public")}
        return [path for path, other in held.items() if other and other.key == key.key]

    def key_of(self, name_or_key: str, role: str) -> str:
        """Return the public key that is named, or that is given as itself.

        Raises:
            KeyFileError: No such key is trusted, or it has another role.
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
        """A number that changes when the trusted files do; 0 if there is no folder of them.

        Raises:
            KeyFileError: The folder cannot be examined.
        """
        try:
            return self._trusted.stat().st_ctime_ns  # of the entries, and of the folder's mode
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise KeyFileError(f"{self._trusted} cannot be read: {error.strerror}") from error


def _is_secret(path: Path) -> bool:
    """Return True if a file can be read and is a secret key of ours, complete or not."""
    try:
        return read_key_file(path).split()[:1] == [_SECRET]
    except KeyFileError as error:
        if lacks_descriptors(error):
            raise
        return False


def _read_pair(path: Path) -> KeyPair:
    """Return the pair in a secret file.

    Raises:
        KeyFileError: The file is damaged: its halves do not belong together.
    """
    import zmq
    from zmq.utils import z85

    found = read_key_file(path).split()
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
    """Return the key in a trusted file.

    Raises:
        KeyFileError: It is no public key, or the file has another name than the key.
    """
    key = PublicKey.parse(read_key_file(path), str(path))
    if path.stem != key.name:
        raise KeyFileError(f"{path} holds the key of {key.name!r}: its name must be "
                           f"{key.name}.public, by which it can be revoked")  # fmt: skip
    return key


def _key_in_file(path: Path) -> PublicKey | None:
    """Return the public key in a file; None if it holds none."""
    try:
        return PublicKey.parse(read_key_file(path), str(path))
    except KeyFileError:
        return None
