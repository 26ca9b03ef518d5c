r"""Names of destinations, what they are to the engine, and selectors that match them (C11, C12). Pure.

A name is made of tokens separated by dots: ``orders.eu.paid``. Names that begin with an underscore are
reserved: ``_ADMIN``, ``_LOG`` and ``_DMQ`` are well known.

A selector is one of three kinds, marked as such:

    orders.*  orders.>     the engine's: ``*`` is one token, ``>`` one or more at the end
    glob:orders.?u*        a glob, over the whole name
    regex:orders\.(eu|us)  a regular expression, which must match the whole name

A selector that matches all takes in no reserved name: the first token must ask for it with an underscore.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Final

from sla_server.cluster.messages.errors import BadName, BadSelector

DEAD_MESSAGES: Final = "_DMQ"
WELL_KNOWN: Final = frozenset({"_ADMIN", "_LOG", DEAD_MESSAGES})
FRAGMENTS: Final = "FRAGMENTS"
TRANSACTIONS: Final = "TRANSACTIONS"
OWN_DOMAINS: Final = frozenset({FRAGMENTS, TRANSACTIONS})
"""What streams of the message system itself are called like; no destination may have their streams."""
NAME_LENGTH: Final = 120
"""The engine makes a directory of it, encoded to twice the length at most; file systems take 255 bytes."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+")
GLOB: Final = "glob:"
REGEX: Final = "regex:"


def check_name(name: str, what: str = "destination", *, reserved: bool = False) -> None:
    """Refuse what cannot be a name.

    Raises:
        BadName: with the reason.
    """
    if not name or len(name) > NAME_LENGTH:
        raise BadName(what, name, f"a name has 1 to {NAME_LENGTH} characters")
    for token in name.split("."):
        if not _TOKEN.fullmatch(token):
            raise BadName(what, name, "tokens separated by dots have letters, digits, - and _ only")
    if name.startswith("_") and not reserved:
        raise BadName(what, name, "names that begin with an underscore are reserved")


def check_domain(domain: str, what: str) -> None:
    """Refuse one whose JetStream stream the message system has for itself.

    Raises:
        BadName: with what to do.
    """
    if domain in OWN_DOMAINS:
        raise BadName(what, domain, "the message system has a stream of this name; take another one")


def encode(name: str) -> str:
    """One token of the engine for a whole name, a different one for each name: ``a.b_c`` is ``a_db__c``."""
    return name.replace("_", "__").replace(".", "_d")


def stream_name(domain: str) -> str:
    """JetStream stream that has the messages of a domain."""
    return f"SLA_{encode(domain)}"


def subject(domain: str, name: str) -> str:
    """Where messages of the destination ``name`` are published."""
    return f"sla.d.{encode(domain)}.{name}"


def domain_subjects(domain: str) -> str:
    """All subjects of a domain."""
    return f"sla.d.{encode(domain)}.>"


class Selector:
    """Which destinations are meant.

    Raises:
        BadSelector: ``text`` is none.
    """

    def __init__(self, text: str) -> None:
        self.text: Final = text
        self._takes_reserved = text.removeprefix(GLOB).removeprefix(REGEX).startswith("_")
        try:
            self._expression = re.compile(_expression(text))
        except re.error as exc:
            raise BadSelector(text, str(exc)) from exc

    def matches(self, name: str) -> bool:
        """Whether a destination of this name is meant."""
        if name.startswith("_") and not self._takes_reserved:
            return False
        return self._expression.fullmatch(name) is not None

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"


def _expression(text: str) -> str:
    if text.startswith(REGEX):
        return text.removeprefix(REGEX)
    if text.startswith(GLOB):
        return fnmatch.translate(text.removeprefix(GLOB))
    tokens = text.split(".")
    parts = []
    for place, piece in enumerate(tokens):
        if piece == ">" and place == len(tokens) - 1:
            parts.append(r".+")
        elif piece == "*":
            parts.append(r"[^.]+")
        elif _TOKEN.fullmatch(piece):
            parts.append(re.escape(piece))
        else:
            raise BadSelector(text, f"{piece!r} is no token")
    return r"\.".join(parts)
