"""``_DMQ`` for people: dead messages with origin and reason; sent again, or dropped (C12).

A message is named by its sequence in the stream of ``_DMQ``. To send it again stores it at its origin first,
under an identity made of that sequence, and removes it from ``_DMQ`` then: a crash between the two leaves it
in both, and the repeated command (within the engine's ten minutes) leaves one. Its time of expiry is taken
off, or it would die again; fragments of a large message belong to it as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

import nats.errors
import nats.js.api
import nats.js.errors
from nats.aio.client import Client

from sla_server.cluster.errors import ClusterRefused
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import BUCKET, Destination
from sla_server.cluster.messages.consumer import ORIGIN, REASON
from sla_server.cluster.messages.link import Trouble, classify
from sla_server.cluster.messages.producer import EXPIRES, IDENTITY

STREAM: Final = names.stream_name(names.DEAD_MESSAGES)
SUBJECT: Final = names.subject(names.DEAD_MESSAGES, names.DEAD_MESSAGES)
ANSWER_S: Final = 5.0
_OWN: Final = frozenset({ORIGIN, REASON, EXPIRES, IDENTITY})


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """One message of ``_DMQ``.

    Attributes:
        at: when it came there, ISO 8601 UTC.
        headers: all but the engine's own.
    """

    sequence: int
    at: str
    origin: str
    reason: str
    identity: str
    headers: dict[str, str]
    data: bytes

    @property
    def headers_again(self) -> dict[str, str]:
        """With which it goes to its origin."""
        kept = {key: value for key, value in self.headers.items() if key not in _OWN}
        return kept | {IDENTITY: f"again:{STREAM}:{self.sequence}"}


def dead_message(raw: nats.js.api.RawStreamMsg) -> DeadMessage:
    """From what the stream has."""
    headers = dict(raw.headers or {})
    at = raw.time if raw.time is not None else ""
    return DeadMessage(
        sequence=int(raw.seq or 0),
        at=at if isinstance(at, str) else at.isoformat(timespec="seconds"),
        origin=headers.get(ORIGIN, ""),
        reason=headers.get(REASON, ""),
        identity=headers.get(IDENTITY, ""),
        headers=headers,
        data=raw.data or b"",
    )


async def find(client: Client, *, origin: str = "", after: int = 0) -> AsyncIterator[DeadMessage]:
    """Dead messages, the oldest first.

    Args:
        client: of the product's account.
        origin: only of this destination; "": all.
        after: only those behind this sequence.

    Raises:
        ClusterRefused: there is no majority.
    """
    stream = client.jetstream(timeout=ANSWER_S)
    while True:
        with _translated("reading _DMQ"):
            try:
                raw = await stream.get_msg(STREAM, seq=after + 1, subject=SUBJECT, next=True)
            except nats.js.errors.NotFoundError:  # no more, or not one ever
                return
        found = dead_message(raw)
        after = found.sequence
        if origin in ("", found.origin):
            yield found


async def get(client: Client, sequence: int) -> DeadMessage:
    """One of them.

    Raises:
        ClusterRefused: it is not there.
    """
    with _translated(f"reading message {sequence} of _DMQ"):
        try:
            return dead_message(await client.jetstream(timeout=ANSWER_S).get_msg(STREAM, seq=sequence))
        except nats.js.errors.NotFoundError:
            raise _missing(sequence) from None


async def requeue(client: Client, sequence: int) -> DeadMessage:
    """Send one to its origin again, and remove it here.

    Raises:
        ClusterRefused: it is not there, its origin is not, or has no room; it stays.
    """
    message = await get(client, sequence)
    destination = await _origin(client, message)
    with _translated(f"sending message {sequence} to {message.origin} again"):
        await client.jetstream(timeout=ANSWER_S).publish(
            destination.subject, message.data, headers=message.headers_again, stream=destination.stream
        )
    await drop(client, sequence)
    return message


async def drop(client: Client, sequence: int) -> None:
    """Remove one.

    Raises:
        ClusterRefused: it is not there.
    """
    with _translated(f"removing message {sequence} of _DMQ"):
        try:
            await client.jetstream(timeout=ANSWER_S).delete_msg(STREAM, sequence)
        except nats.js.errors.NotFoundError:
            raise _missing(sequence) from None
        except nats.js.errors.APIError as exc:
            if "no message found" in (exc.description or ""):
                raise _missing(sequence) from exc
            raise


async def _origin(client: Client, message: DeadMessage) -> Destination:
    with _translated(f"reading the settings of {message.origin}"):
        try:
            bucket = await client.jetstream(timeout=ANSWER_S).key_value(BUCKET)
            return Destination.of_key(message.origin, (await bucket.get(message.origin)).value or b"")
        except ValueError as exc:
            raise ClusterRefused(f"the settings of {message.origin} cannot be read: {exc}") from exc
        except (nats.js.errors.KeyNotFoundError, nats.js.errors.BucketNotFoundError) as exc:
            raise ClusterRefused(
                f"message {message.sequence} comes from {message.origin or 'no known destination'}, which is "
                "not there any more. Create it again, or drop the message"
            ) from exc


def _missing(sequence: int) -> ClusterRefused:
    return ClusterRefused(f"_DMQ has no message {sequence}; 'sla cluster dmq list' names those that it has")


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, TimeoutError, nats.errors.Error) as exc:
        if classify(exc) is Trouble.FULL:
            raise ClusterRefused(f"{what}: the destination is full. Have it consumed, then repeat") from exc
        raise ClusterRefused(f"{what}: {str(exc) or type(exc).__name__}") from exc
