"""Entries of CAPS about clients of a volume: one client, or all that match a glob, together (ADR 21).

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt

if TYPE_CHECKING:  # the command line uses this module, and no msgpack
    from pmdaemon.wire.messages.base import Header

OTHER_CLIENTS: Final = "*"
"""As the client of an entry: all that ``except`` does not name. No name of a client is a glob."""
EXCEPT: Final = "except"
MAX_EXCEPT: Final = 64  # globs of an entry: 8 KB of the 64 KiB of a header


def except_of(entry: Header) -> Header:
    """Key ``except`` of an entry, if it has one.

    Raises:
        MalformedFrame: it is no list of globs, too long, or of a single client.
    """
    globs = entry.get(EXCEPT)
    if globs is None:
        return {}
    if not isinstance(globs, list | tuple) or not all(isinstance(glob, str) for glob in globs):
        raise MalformedFrame(f"CAPS entry {excerpt(entry)}: key {EXCEPT!r} is no list of globs")
    if not is_glob(str(entry.get("client"))) or len(globs) > MAX_EXCEPT:
        wanted = f"expected at most {MAX_EXCEPT}, and a client that is a glob"
        raise MalformedFrame(f"CAPS entry {excerpt(entry)}: key {EXCEPT!r} has {len(globs)} globs, {wanted}")
    return {EXCEPT: list(globs)}


def is_glob(client: str) -> bool:
    """Whether the client of an entry is clients together."""
    return any(character in client for character in "*?[")


def is_of_glob(client: str, glob: str, others: Iterable[str]) -> bool:
    """Whether a client matches a glob, and none of the ``others``."""
    return fnmatchcase(client, glob) and not any(fnmatchcase(client, other) for other in others)


def caps_client(entry: Header, client: str) -> bool:
    """Whether an entry holds for this client."""
    if is_glob(entry["client"]):
        return is_of_glob(client, entry["client"], entry.get(EXCEPT) or ())
    return bool(entry["client"] == client)
