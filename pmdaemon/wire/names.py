"""Identities that every process computes in the same way, without asking another.

A *stream* is one client's use of one volume through one gateway. Source: DESIGN.md 4, "Names".
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

NAME_RE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
"""What a volume, client or backend may be called: it appears in URLs, files and selectors."""
NAME_RULE: Final = "must be 1-128 of letters, digits and . _ : @ -, beginning with a letter or digit"


def stream_id(gateway_id: str, volume: str, client: str) -> int:
    """First 63 bits of BLAKE2b over the three names (NUL between them), as a non-negative int."""
    digest = hashlib.blake2b(f"{gateway_id}\0{volume}\0{client}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def is_name(text: str) -> bool:
    """Whether ``text`` may name a volume, client or backend."""
    return NAME_RE.fullmatch(text) is not None


def checked_name(text: str) -> str:
    """The same text.

    Raises:
        ValueError: it may not be a name.
    """
    if not is_name(text):
        raise ValueError(NAME_RULE)
    return text
