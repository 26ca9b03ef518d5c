"""Targets of caps: a volume, one client of a volume, a whole client, or a group of volumes.

A target is a name, so that what shares, sends and confirms rates by name does so for all. A volume's target
is its own name, a client's is ``VOLUME/CLIENT``, a group's is ``/GROUP``: no name of them holds a slash
(``wire.names``). A group's target has no volume and no client; which volumes it has is in the policy manager.
``VOLUME/GLOB`` is clients of a volume together (``newcomers``): those that this glob of an agreement names,
or with ``*`` all that none names. A *whole client*, ``//CLIENT``, is one client over all volumes that it uses
(ADR 74). It counts as a group of them, by the name ``/CLIENT``, whose volumes are those it was seen to use.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sla_server.agreements.selectors import is_pattern
from sla_server.explanation.words import listed

SEPARATOR: Final = "/"
MOST_NAMED: Final = 10
"""Targets that a text names: each throttle's row has the text, and a volume may have hundreds of clients."""


def target_of(volume: str, client: str = "", group: str = "") -> str:
    """The target of a group, of a client of a volume or of all, or without one that of the volume."""
    if group:
        return f"{SEPARATOR}{group}"
    if not volume and client:
        return f"{SEPARATOR}{SEPARATOR}{client}"
    return f"{volume}{SEPARATOR}{client}" if client else volume


def volume_of(target: str) -> str:
    """Its volume; "" for a group, and for a whole client."""
    return target.partition(SEPARATOR)[0]


def client_of(target: str) -> str:
    """The client of a volume; "" for a whole volume, a group, and a whole client."""
    volume, _, client = target.partition(SEPARATOR)
    return client if volume else ""


def is_glob(target: str) -> bool:
    """Whether it is clients of a volume together, by a glob."""
    return is_pattern(client_of(target))


def group_of(target: str) -> str:
    """Its group, that of a whole client too; "" for a volume or a client of one."""
    return target[1:] if target.startswith(SEPARATOR) else ""


def whole_client_of(target: str) -> str:
    """The client of which it is all use; "" for any other target."""
    return target[2:] if target.startswith(2 * SEPARATOR) else ""


def named(targets: Iterable[str]) -> str:
    """Targets in words: the first of them in order of name, and how many more there are."""
    return listed(sorted(targets), MOST_NAMED)
