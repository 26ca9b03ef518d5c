"""Several messages for one JetStream stream in one step: all are stored, or none (engine 2.12 or newer).

The messages of a batch carry its identifier and their place; the last one asks to commit. The engine answers
the first (the batch is open) and the last. A batch of which the last never comes is forgotten after 10 s.

Repeating: the identifier is new each time, the identities of the messages are not. If the first try was
stored and its answer lost, the engine refuses the second because it knows an identity (``is_repeated``).
Where no identity can have been stored outside this batch, that is the answer: it is stored. Elsewhere each
message is sent alone.

Thread: the link's.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

import nats.errors
import nats.js.errors

from sla_server.cluster.messages.errors import BadSettings
from sla_server.cluster.messages.link import ANSWER_S, EngineLink

MAX_BATCH: Final = 1000
_DUPLICATE_IDENTITY: Final = 10201
Row = tuple[str, bytes, Mapping[str, str]]
"""Subject, payload, headers with an identity."""


async def store_batch(link: EngineLink, rows: Sequence[Row]) -> int:
    """Store ``rows``, which are for one stream; for ``EngineLink.retry``. The last one's sequence.

    Raises:
        AccessDenied: none was stored.
        nats.js.errors.APIError: none was stored, or the primary knows no batches and has stored the first.
    """
    if not 1 <= len(rows) <= MAX_BATCH:
        raise BadSettings("batch", len(rows), f"the engine takes 1 to {MAX_BATCH} messages at once")
    for _subject, data, headers in rows:
        link.check_size(data, headers)
    batch, last = secrets.token_hex(16), 0
    for place, (subject, data, headers) in enumerate(rows, start=1):
        marked = dict(headers) | {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(place)}
        if place == len(rows):
            marked["Nats-Batch-Commit"] = "1"
        elif place > 1:
            await link.client.publish(subject, data, headers=marked)
            continue
        link.forget_denial(subject)
        try:
            answer = await link.client.request(subject, data, timeout=ANSWER_S, headers=marked)
        except (TimeoutError, nats.errors.TimeoutError):
            link.check_not_denied(subject)
            raise
        found = json.loads(answer.data) if answer.data else {}
        if "error" in found:
            raise nats.js.errors.APIError.from_error(found["error"])
        if found and found.get("batch") != batch:
            # An engine before 2.12, in a cluster that is being upgraded: it takes each message for one alone
            # and answers so. Nothing more may follow, as those between are stored or lost without a word.
            raise nats.js.errors.APIError(code=400, description="the primary of the stream has no batches")
        last = int(found.get("seq", 0))
    return last


def is_repeated(exc: Exception) -> bool:
    """Whether a batch was refused because some of it is stored already."""
    return isinstance(exc, nats.js.errors.APIError) and exc.err_code == _DUPLICATE_IDENTITY
