"""A receiver of webhooks: checks the signature, drops what it has had, confirms afterwards."""

import hashlib
import hmac
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any

MOST_AGE_S = 300  # a request that was written down cannot be sent again later


def receive(
    seen: sqlite3.Connection,
    secret: bytes,
    headers: Mapping[str, str],
    body: bytes,
    handle: Callable[[dict[str, Any]], None],
) -> int:
    """Answer one request with its HTTP status; ``handle`` gets each alert once, in order."""
    parts = dict(part.partition("=")[::2] for part in headers.get("Sla-Signature", "").split(","))
    at = parts.get("t", "0")
    wanted = hmac.new(secret, at.encode() + b"." + body, hashlib.sha256).hexdigest()
    is_signed = hmac.compare_digest(wanted.encode(), parts.get("v1", "").encode())
    if not is_signed or abs(time.time() - int(at)) > MOST_AGE_S:
        return 401
    seen.execute("CREATE TABLE IF NOT EXISTS seen (id TEXT PRIMARY KEY)")
    for alert in json.loads(body)["alerts"]:
        with seen:  # one transaction each: what was handled is remembered, whatever happens to the rest
            if seen.execute(
                "INSERT OR IGNORE INTO seen VALUES (?)", (alert["delivery"]["delivery_id"],)
            ).rowcount:
                handle(alert)  # if it raises, the row goes, and the server sends it again
    return 200
