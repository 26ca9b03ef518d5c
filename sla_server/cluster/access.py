"""What an account may do, as its own side sees it: roles, where its answers come, refusals (C15). Pure.

``accounts`` has the other side: what the nodes' engines are given as permissions.
"""

from __future__ import annotations

import re
from typing import Final

PRODUCT_USER: Final = "sla"
"""Of the product itself, which may do everything."""
ADMIN: Final = "admin"
MONITOR: Final = "monitor"
PRODUCER: Final = "producer"
CONSUMER: Final = "consumer"
_REFUSED: Final = re.compile(
    r'permissions violation for (?:publish|subscription) to "([^"]+)"', re.IGNORECASE
)
_DESTINATIONS: Final = "sla.d."
_STREAM: Final = "SLA_"


def inbox_of(account: str) -> str:
    """Prefix of the subjects at which an account is answered; no other may listen there."""
    return f"_INBOX_{account}"


def refused_subject(text: str) -> str:
    """What the engine refused, from its words, in small letters; "" if they are about something else.

    The client library hands on the engine's words in small letters.
    """
    found = _REFUSED.search(text)
    return found[1].lower() if found else ""


def needed(subject: str) -> tuple[str, str]:
    """The role that a refused subject needs, and the destination; "" where it is about the cluster itself.

    In small letters if ``subject`` is.
    """
    tokens = subject.split(".")
    if subject.startswith(_DESTINATIONS) and len(tokens) > 3:
        name = ".".join(tokens[3:])
        return (ADMIN if name.startswith("_") else f"{PRODUCER}:{name}"), name
    stream = next((token for token in tokens if token.upper().startswith(_STREAM)), "")
    if stream and {"CONSUMER", "ACK", "L"} & {token.upper() for token in tokens}:
        name = decoded(stream[len(_STREAM) :])
        return (MONITOR if name.upper() == "_LOG" else f"{CONSUMER}:{name}"), name
    return ADMIN, ""


def decoded(token: str) -> str:
    """The name of which ``messages.names.encode`` made a token."""
    return re.sub("__|_d", lambda pair: "_" if pair[0] == "__" else ".", token)
