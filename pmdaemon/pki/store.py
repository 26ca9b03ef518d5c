"""The files of the certificate authority: one private directory, small files, each written aside and renamed.

    DIR/                        0700, owned by the server's user
      ca.key  ca.crt            the authority
      server.pem                the server's key and certificate, replaced as one file
      ca.lock                   held (flock) while a certificate is issued, renewed or revoked
      issued/GATEWAY.SERIAL.json  one a certificate: name, dates, how it came about
      revoked/SERIAL.json       one a revoked certificate: when and why
      tokens/HASH.json          one a token not used yet; HASH is the SHA-256 of the token
      tokens/used/HASH.json     tokens that were used

A file a fact needs no merging and no lock to read: a revocation is there or not. A token is burnt by renaming
its file, which succeeds for one process only, however many try at the same moment.

Durability: ``write`` and ``move`` are on disk when they return (file and directory synced).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pmdaemon.pki.errors import NoAuthority, PkiError, StateUnusable
from pmdaemon.runtime.files import make_directory, sync_directory, write_whole

CA_KEY: Final = "ca.key"
CA_CERTIFICATE: Final = "ca.crt"
SERVER: Final = "server.pem"
ISSUED: Final = "issued"
REVOKED: Final = "revoked"
TOKENS: Final = "tokens"
USED: Final = "tokens/used"
_DIRECTORIES: Final = (ISSUED, REVOKED, TOKENS, USED)


class CaStore:
    """One directory. Any process and thread; see the module for what is atomic."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, name: str) -> Path:
        """Where a file is."""
        return self.directory / name

    def create(self) -> None:
        """Make the directories, mode 0700.

        Raises:
            StateUnusable: they cannot be made.
            PkiError: the directory exists and is not private.
        """
        try:
            make_directory(self.directory, 0o700)
            for name in _DIRECTORIES:
                make_directory(self.path(name), 0o700)
        except OSError as exc:
            raise StateUnusable(str(self.directory), f"cannot be created ({exc.strerror})") from exc
        self.check()

    def check(self) -> None:
        """The directory must be ours, and no other user's to read.

        Raises:
            NoAuthority: it does not exist.
            PkiError: another owner, or a mode above 0700.
        """
        try:
            status = self.directory.stat()
        except FileNotFoundError as exc:
            raise NoAuthority(str(self.directory)) from exc
        except OSError as exc:
            raise StateUnusable(str(self.directory), f"cannot be opened ({exc.strerror})") from exc
        if status.st_uid != os.geteuid():
            raise PkiError(
                f"{self.directory}: belongs to user {status.st_uid}, this command runs as user "
                f"{os.geteuid()}. Run it as the server's user"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise PkiError(
                f"{self.directory}: others can enter it (mode {mode}). chmod 0700 {self.directory}"
            )

    def read(self, name: str) -> bytes:
        """A file's bytes.

        Raises:
            FileNotFoundError: there is none.
            PkiError: a key that others can read.
            StateUnusable: it cannot be read.
        """
        path = self.path(name)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077 and name in (CA_KEY, SERVER):
                raise PkiError(
                    f"{path}: a private key that others can read (mode {mode:04o}). chmod 0600 {path}"
                )
            return path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise StateUnusable(str(path), f"cannot be read ({exc.strerror})") from exc

    def read_json(self, name: str) -> dict[str, Any]:
        """A file's map.

        Raises:
            FileNotFoundError: there is none.
            StateUnusable: it is no JSON map.
        """
        data = self.read(name)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise StateUnusable(str(self.path(name)), f"is not JSON ({exc})") from exc
        if not isinstance(value, dict):
            raise StateUnusable(str(self.path(name)), "is no JSON map")
        return value

    def write(self, name: str, data: bytes) -> None:
        """Replace a file (mode 0600); on disk when this returns.

        Raises:
            StateUnusable: no room, or not writable.
        """
        path = self.path(name)
        try:
            write_whole(path, data, synced=True)
        except OSError as exc:
            raise StateUnusable(str(path), f"cannot be written ({exc.strerror})") from exc

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """See ``write``."""
        self.write(name, json.dumps(value, indent=1).encode() + b"\n")

    def move(self, name: str, to: str) -> None:
        """Rename; of several that try, one succeeds.

        Raises:
            FileNotFoundError: another was first, or it never was.
            StateUnusable: not writable.
        """
        try:
            self.path(name).rename(self.path(to))
            sync_directory(self.path(to).parent)
            sync_directory(self.path(name).parent)
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise StateUnusable(str(self.path(name)), f"cannot be renamed ({exc.strerror})") from exc

    def names(self, directory: str) -> list[str]:
        """Stems of the JSON files of a directory, sorted.

        Raises:
            StateUnusable: it cannot be listed.
        """
        try:
            return sorted(
                item.name.removesuffix(".json")
                for item in self.path(directory).iterdir()
                if item.name.endswith(".json") and not item.name.startswith(".")
            )
        except OSError as exc:
            raise StateUnusable(str(self.path(directory)), f"cannot be listed ({exc.strerror})") from exc

    def version(self, name: str) -> int:
        """A number that changes when a file or directory does; 0 when it is not there."""
        try:
            return self.path(name).stat().st_mtime_ns
        except OSError:
            return 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from issuing and revoking meanwhile; raises as ``check``, too."""
        self.check()
        try:
            fd = os.open(self.path("ca.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise StateUnusable(str(self.path("ca.lock")), f"cannot be opened ({exc.strerror})") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
