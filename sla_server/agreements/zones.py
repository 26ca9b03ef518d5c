"""Names of time zones. Light: the command line asks it without the models of documents."""

from __future__ import annotations

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError


def is_zone(name: str) -> bool:
    """Whether a name is that of an IANA time zone.

    The folders of a system hold others: ``right/`` counts leap seconds, which no clock here does; what
    ``localtime`` and ``posixrules`` are differs between machines; ``Factory`` is one that was never set.
    """
    if name.startswith(("right/", "posix/")) or name in ("localtime", "posixrules", "Factory"):
        return False
    return is_readable(name)


def is_readable(name: str) -> bool:
    """Whether this machine has a zone of this name, whatever it is."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True
