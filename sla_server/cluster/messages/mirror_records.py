"""Records of mirrors: what primary and mirror had a few seconds ago, in the bucket ``SLA_MIRRORS`` (C3).

A primary that is lost can be asked nothing. What a promotion says is missing, and where the subscribers of a
topic go on, comes from the last record; the mirror's node writes it. The engine's answers are believed only
while the mirror follows its primary, and the primary is served. Thread: the link's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from typing import Final

import nats.js.api
import nats.js.errors

from pmdaemon.runtime.clock import Clock
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_streams import LIMIT_S, Info, both, is_served, is_set_back

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
    """Write down what primary and mirror have; None: one does not answer, and the last record stays.

    Likewise with a primary that has stored less than the mirror: it has lost what the record tells of.
    """
    own, primary = await both(link, mirror)
    if own is None or primary is None or not own["config"].get("mirror") or not is_served(primary):
        return None
    if is_set_back(primary["state"], own["state"]):
        return None
    if (consumers := await consumers_of(link, primary["config"]["name"])) is None:
        return None
    found = MirrorRecord(
        clock.unix_us(),
        int(primary["state"]["last_seq"]),
        int(primary["state"]["messages"]),
        int(own["state"]["last_seq"]),
        _record_of(consumers),
    )
    bucket = await link.stream.key_value(BUCKET)
    await bucket.put(mirror, found.encode())
    return found


async def consumers_of(link: EngineLink, stream: str) -> list[Info] | None:
    """All consumers of a stream, with those by which the engine copies; None: not all of them answer."""
    found: dict[str, Info] = {}
    totals = set[int]()
    offset = 0
    while True:
        answer = await link.ask(f"CONSUMER.LIST.{stream}", {"offset": offset})
        if answer.get("missing") or answer.get("offline"):
            return None
        more = answer.get("consumers") or ()
        totals.add(total := int(answer.get("total", 0)))
        found |= {str(part["name"]): part for part in more}
        offset += len(more)
        if not more or offset >= total:
            # Where one went between two pages another one is on neither.
            return list(found.values()) if totals == {len(found)} else None


def _record_of(found: Iterable[Info]) -> tuple[ConsumerRecord, ...]:
    return tuple(
        ConsumerRecord(
            str(part["name"]),
            str(part["config"].get("filter_subject", "")),
            int((part.get("ack_floor") or {}).get("stream_seq", 0)),
        )
        for part in found
        if part["config"].get("ack_policy") == "explicit"  # not those by which the engine copies
    )
