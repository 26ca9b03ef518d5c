"""Records of mirrors: what primary and mirror had a few seconds ago, in the bucket ``SLA_MIRRORS`` (C3).

A primary that is lost can be asked nothing. What a promotion says is missing, and where the subscribers of a
topic go on, comes from the last record; the mirror's node writes it. The engine's answers are believed only
while the mirror follows its primary, and the primary is served. Thread: the link's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Final

import nats.js.api
import nats.js.errors

from pmdaemon.runtime.clock import Clock
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_streams import LIMIT_S, both, is_served

BUCKET: Final = "SLA_MIRRORS"


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerRecord:
    """A consumer of the primary: everything up to ``floor`` it has acknowledged."""

    name: str
    filter_subject: str
    floor: int


@dataclasses.dataclass(frozen=True, slots=True)
class MirrorRecord:
    """What the primary and its mirror had at one moment."""

    at_unix_us: int
    primary_last: int
    primary_messages: int
    mirror_last: int
    consumers: tuple[ConsumerRecord, ...] = ()

    def encode(self) -> bytes:
        """For the bucket."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes) -> MirrorRecord:
        """What ``encode`` has made.

        Raises:
            ValueError: it is of a later release.
        """
        try:
            fields = dict(json.loads(data))
            consumers = tuple(
                ConsumerRecord(str(part["name"]), str(part["filter_subject"]), int(part["floor"]))
                for part in fields["consumers"]
            )
            return cls(
                int(fields["at_unix_us"]),
                int(fields["primary_last"]),
                int(fields["primary_messages"]),
                int(fields["mirror_last"]),
                consumers,
            )
        except (KeyError, TypeError) as exc:
            raise ValueError(f"no record of a mirror: {type(exc).__name__}") from exc


async def make_bucket(link: EngineLink, replicas: int) -> None:
    """Make the bucket if there is none; for ``retry``."""
    try:
        await link.stream.key_value(BUCKET)
    except nats.js.errors.NotFoundError:
        await link.stream.create_key_value(
            nats.js.api.KeyValueConfig(bucket=BUCKET, history=1, replicas=replicas)
        )


async def recorded(link: EngineLink) -> list[str]:
    """Mirrors that have a record; for ``retry``."""
    prefix = f"$KV.{BUCKET}."
    try:
        info = await link.ask(f"STREAM.INFO.KV_{BUCKET}", {"subjects_filter": f"{prefix}>"})
    except nats.js.errors.NotFoundError:
        return []
    return sorted(subject.removeprefix(prefix) for subject in info["state"].get("subjects") or {})


async def record(link: EngineLink, mirror: str) -> MirrorRecord | None:
    """The last one of a mirror; None: there is none; for ``retry``."""
    try:
        bucket = await link.stream.key_value(BUCKET)
        return MirrorRecord.parse((await bucket.get(mirror)).value or b"{}")
    except (nats.js.errors.BucketNotFoundError, nats.js.errors.KeyNotFoundError, ValueError):
        return None


async def forget(link: EngineLink, mirror: str) -> None:
    """Remove its record; nothing if there is none.

    Raises:
        NotConfirmed: the cluster has no majority.
    """

    async def attempt() -> None:
        with contextlib.suppress(nats.js.errors.NotFoundError):
            # Not deleted by the library, which leaves a mark under the key.
            await link.ask(f"STREAM.PURGE.KV_{BUCKET}", {"filter": f"$KV.{BUCKET}.{mirror}"})

    await link.retry(attempt, f"record of {mirror}", LIMIT_S)


async def observe(link: EngineLink, mirror: str, clock: Clock) -> MirrorRecord | None:
    """Write down what primary and mirror have; None: one does not answer, and the last record stays."""
    own, primary = await both(link, mirror)
    if own is None or primary is None or not own["config"].get("mirror") or not is_served(primary):
        return None
    found = MirrorRecord(
        clock.unix_us(),
        int(primary["state"]["last_seq"]),
        int(primary["state"]["messages"]),
        int(own["state"]["last_seq"]),
        await _consumers(link, primary["config"]["name"]),
    )
    bucket = await link.stream.key_value(BUCKET)
    await bucket.put(mirror, found.encode())
    return found


async def _consumers(link: EngineLink, stream: str) -> tuple[ConsumerRecord, ...]:
    found: list[ConsumerRecord] = []
    offset = 0
    while True:
        answer = await link.ask(f"CONSUMER.LIST.{stream}", {"offset": offset})
        more = answer.get("consumers") or ()
        found += [
            ConsumerRecord(
                str(part["name"]),
                str(part["config"].get("filter_subject", "")),
                int((part.get("ack_floor") or {}).get("stream_seq", 0)),
            )
            for part in more
            if part["config"].get("ack_policy") == "explicit"  # not those by which the engine copies
        ]
        offset += len(more)
        if not more or offset >= int(answer.get("total", 0)):
            return tuple(found)
