"""Entries of CAPS about clients of a volume: one client, or all that no agreement names (ADR 21).

Pure.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.messages.base import Header

OTHER_CLIENTS: Final = "*"
"""As the client of an entry: all that ``except`` does not name. No client has this name."""
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
    if entry.get("client") != OTHER_CLIENTS or len(globs) > MAX_EXCEPT:
        problem = f"key {EXCEPT!r} has {len(globs)} globs, expected at most {MAX_EXCEPT}, and client '*'"
        raise MalformedFrame(f"CAPS entry {excerpt(entry)}: {problem}")
    return {EXCEPT: list(globs)}


def caps_client(entry: Header, client: str) -> bool:
    """Whether an entry holds for this client."""
    if entry["client"] == OTHER_CLIENTS:
        return not any(fnmatchcase(client, glob) for glob in entry.get(EXCEPT) or ())
    return bool(entry["client"] == client)
