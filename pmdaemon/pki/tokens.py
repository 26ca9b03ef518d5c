"""One-time tokens: 256 random bits that let one gateway enrol once, until they expire.

Only the SHA-256 of a token is stored; a token has full entropy, so a slow hash would protect nothing more.
The look-up is by that hash: comparing is opening a file, and its time says nothing about other tokens.

Story of a race: two agents present the same token at the same moment to two processes. Both find the file;
one rename succeeds, the other finds nothing to rename and is refused as a replay.

If we die after the rename and before the certificate is sent, the token is spent and the operator makes
another: a token that worked twice would be worse.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from pmdaemon.pki.errors import CredentialRefused
from pmdaemon.pki.store import TOKENS, USED, CaStore
from pmdaemon.runtime.files import sync_directory
from pmdaemon.wire.messages.certificates import MAX_TOKEN_CHARACTERS

TOKEN_BYTES: Final = 32
KEEP_USED_US: Final = 30 * 86_400 * 1_000_000  # a replay is distinguished from a wrong token for that long


class Token(NamedTuple):
    """A stored token; what was handed out cannot be computed from it."""

    digest: str
    name: str
    expires_us: int
    volumes: tuple[str, ...] = ()


def make(
    store: CaStore, name: str, now_us: int, lifetime_s: float, volumes: Sequence[str] = ()
) -> tuple[str, int]:
    """A new token for the gateway ``name`` and the time of its expiry. Shown once, never kept.

    ``volumes``: patterns of those that the gateway may show, for its certificate; none: no list.
    """
    token = secrets.token_urlsafe(TOKEN_BYTES)
    expires_us = now_us + round(lifetime_s * 1e6)
    entry = {"name": name, "made_us": now_us, "expires_us": expires_us, "volumes": list(volumes)}
    store.write_json(f"{TOKENS}/{digest(token)}.json", entry)
    return token, expires_us


def digest(token: str) -> str:
    """What is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def find(store: CaStore, token: str, now_us: int) -> Token:
    """The stored token, not used yet.

    Raises:
        CredentialRefused: ``token-unknown``, ``token-expired`` or ``token-used``.
    """
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise CredentialRefused("token-unknown", "this is no token of ours")
    found = digest(token)
    try:
        entry = store.read_json(f"{TOKENS}/{found}.json")
    except FileNotFoundError:
        if store.path(f"{USED}/{found}.json").exists():
            raise _used() from None
        raise CredentialRefused(
            "token-unknown", "this token is not known here. Make one on the server: sla ca token NAME"
        ) from None
    name, expires_us = str(entry.get("name", "")), int(entry.get("expires_us", 0))
    if now_us >= expires_us:
        raise CredentialRefused(
            "token-expired", f"the token for {name} has expired. Make another: sla ca token {name}"
        )
    return Token(found, name, expires_us, tuple(map(str, entry.get("volumes", ()))))


def burn(store: CaStore, token: Token) -> None:
    """Spend it; on disk when this returns.

    Raises:
        CredentialRefused: ``token-used``: another was faster.
    """
    try:
        store.move(f"{TOKENS}/{token.digest}.json", f"{USED}/{token.digest}.json")
    except FileNotFoundError:
        raise _used() from None


def cancel(store: CaStore, names: Collection[str], now_us: int) -> list[Token]:
    """Withdraw the tokens that wait for these gateways; returns those that could still be used."""
    found = [token for token in waiting(store, now_us) if token.name in names]
    for token in found:
        store.path(f"{TOKENS}/{token.digest}.json").unlink(missing_ok=True)
    if found:
        sync_directory(store.path(TOKENS))
    return found


def waiting(store: CaStore, now_us: int) -> list[Token]:
    """Tokens that can still be used, by name."""
    found = []
    for name in store.names(TOKENS):
        try:
            entry = store.read_json(f"{TOKENS}/{name}.json")
        except FileNotFoundError:
            continue  # used between the listing and the reading
        volumes = tuple(map(str, entry.get("volumes", ())))
        token = Token(name, str(entry.get("name", "")), int(entry.get("expires_us", 0)), volumes)
        if now_us < token.expires_us:
            found.append(token)
    return sorted(found, key=lambda token: token.name)


def sweep(store: CaStore, now_us: int) -> None:
    """Delete tokens that expired, or were used, long ago."""
    for directory in (TOKENS, USED):
        for name in store.names(directory):
            path = f"{directory}/{name}.json"
            try:
                expires_us = int(store.read_json(path).get("expires_us", 0))
            except FileNotFoundError:
                continue
            if now_us >= expires_us + KEEP_USED_US:
                store.path(path).unlink(missing_ok=True)


def _used() -> CredentialRefused:
    return CredentialRefused(
        "token-used",
        "this token was used already; a token enrols one gateway once. If that was not you, revoke what it "
        "enrolled (sla ca list, sla ca revoke NAME)",
    )
