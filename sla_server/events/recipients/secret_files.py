"""Secrets of recipients: named by documents, kept in files, read for each delivery.

A document has the name of a file in one directory (``notify.secrets_dir``), never a path: whoever may apply
documents could else have any file that the server can read sent somewhere. A secret is read each time it is
used, so a new one counts from the next delivery on. ``hidden`` takes secrets out of texts that go to people.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from pmdaemon.errors import SlaError

MOST_BYTES: Final = 64 << 10
LEAST_PART: Final = 8
"""Shorter parts of an address are no secrets, and would be found in any text."""
_SEPARATORS: Final = re.compile(r"[/?&=;:#,@]")
_FORBIDDEN: Final = 0o027  # group may read (a service account's), others may nothing


class SecretUnusable(SlaError):
    """A file that should hold a secret cannot be used; says what to do. Mended without a new document."""

    retryable = True

    def __init__(self, path: Path, problem: str, fix: str) -> None:
        self.path = path
        super().__init__(f"secret file {path}: {problem}. {fix}")


def read_secret(path: Path, *, may_have_lines: bool = False) -> str:
    """The text of a secret file, without white space around it.

    What goes into a header or a login is one line of ASCII: libraries would repeat anything else in the text
    of their exceptions, written so that ``hidden`` does not find it.

    Args:
        path: of the file.
        may_have_lines: any text is taken, such as a list of addresses.

    Raises:
        SecretUnusable: it is not there, empty, too large, no file, no line of ASCII, or others than its owner
            may use it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hold us up
    except OSError as exc:
        fix = "Make it, readable for the server's user alone (chmod 600)"
        raise SecretUnusable(path, str(exc.strerror).lower(), fix) from exc
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SecretUnusable(path, "is no regular file", "Write the secret into a file")
        if status.st_mode & _FORBIDDEN:
            mode = stat.S_IMODE(status.st_mode)
            raise SecretUnusable(path, f"is open to others (mode {mode:04o})", f"Run: chmod 600 {path}")
        if status.st_uid not in (0, os.geteuid()):
            problem = f"belongs to user {status.st_uid}"
            raise SecretUnusable(path, problem, "Give it to the server's user, or to root")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise SecretUnusable(path, f"is larger than {MOST_BYTES} bytes", "A secret is a line of text")
    try:
        text = content.decode().strip()
    except UnicodeDecodeError as exc:
        raise SecretUnusable(path, "is not UTF-8 text", "Write the secret as text") from exc
    if not text:
        raise SecretUnusable(path, "is empty", "Write the secret into it")
    if not may_have_lines and not (text.isascii() and text.isprintable()):
        problem = "holds more than one line, control characters or characters that are not ASCII"
        raise SecretUnusable(path, problem, "Write the secret as one line of ASCII text")
    return text


def read_address(path: Path) -> str:
    """The address in a secret file.

    Raises:
        SecretUnusable: see ``read_secret``; or it is no address of HTTP.
    """
    address = read_secret(path)
    try:
        parts = urlsplit(address)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its text repeats the port
        is_usable = False
    if not is_usable or " " in address:
        raise SecretUnusable(path, "holds no address", "Write it as https://host.example/path")
    return address


def hidden(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets: what the other side answers may repeat them."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return text


def secrets_of_address(address: str) -> list[str]:
    """An address that is a secret, and what of it may be repeated alone: path, query, their parts."""
    where = address.partition("://")[2]
    authority, slash, path = where.partition("/")
    rest = [slash + path, *path.split("?", 1), *_SEPARATORS.split(path)]
    if "@" in authority:
        rest += _SEPARATORS.split(authority.rpartition("@")[0])
    found = {address} | {text for part in rest for text in (part, unquote(part)) if len(text) >= LEAST_PART}
    return sorted(found, key=lambda text: (-len(text), text))  # the whole before its parts
