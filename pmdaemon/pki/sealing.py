"""Short secrets sealed with a key that several machines have: AES-GCM with a random nonce."""

from __future__ import annotations

import base64
import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES: Final = 12


def seal(secret: str, key: bytes) -> str:
    """``secret`` as only those can read it who have ``key``, of 32 bytes; in base64."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return base64.b64encode(nonce + AESGCM(key).encrypt(nonce, secret.encode(), None)).decode()


def unseal(sealed: str, key: bytes) -> str:
    """What ``seal`` was given.

    Raises:
        ValueError: it was sealed with another key, or is damaged.
    """
    data = base64.b64decode(sealed, validate=True)
    try:
        return AESGCM(key).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], None).decode()
    except InvalidTag as exc:
        raise ValueError("sealed with another key, or damaged") from exc
