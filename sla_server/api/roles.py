"""Roles, and who a request comes from."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Role(enum.IntEnum):
    """What somebody may do; each role includes those before it."""

    viewer = 1
    """Reads, and asks what would be."""
    operator = 2
    """Changes what control does: agreements, throttles, modes, policies, events."""
    admin = 3
    """Decides who else may: accounts, tokens, gateways and their volumes."""


ROLE_NAMES: Final = tuple(role.name for role in Role)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks, as far as the server has proof of it."""

    who: str
    """For the audit log."""
    role: Role
    labels: str = ""
    """Selector of the agreements that it may see; empty: all of them."""
    account: str = ""
    """Name of the account; empty for the local administrator and for API tokens."""
    session: str = ""
    """Of a browser: the id of its session."""
    token_id: str = ""
    """Of a program: the id of its API token."""
