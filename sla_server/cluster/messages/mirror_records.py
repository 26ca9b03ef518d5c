"""Records of mirrors: what primary and mirror had a few seconds ago, in the bucket ``SLA_MIRRORS`` (C3).

A primary that is lost can be asked nothing. What a promotion says is missing, and where the subscribers of a
topic go on, comes from the last record; the mirror's node writes it. The engine's answers are believed only
while the mirror follows its primary, and the primary is served.

*A primary that was set back.* One whose disk was lost, or is that of an earlier day, has stored less than its
mirror; soon it has stored more, and other messages under the same sequences. So it is written into the record
when it is seen (``compare``), and stays until the mirror is removed or promoted: what the record tells of is
not touched any more, nor is what only the mirror has.

Thread: the link's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
from collections.abc import Iterable
from typing import Final

import nats.js.api
import nats.js.errors

from pmdaemon.runtime.clock import Clock
from sla_server.cluster.errors import UNREADABLE
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_streams import (
    LIMIT_S,
    Info,
    both,
    is_served,
    is_set_back,
    shares_history,
)

BUCKET: Final = "SLA_MIRRORS"
AGAIN_S: Final = 1.0
"""After it a primary that seems to be set back is asked again: a new one may be behind for a moment."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerRecord:
    """A consumer of the primary: everything up to ``floor`` it has acknowledged."""

    name: str
    filter_subject: str
    floor: int


@dataclasses.dataclass(frozen=True, slots=True)
class MirrorRecord:
    """What the primary and its mirror had at one moment.

    Attributes:
        is_set_back: the primary was set back since; all else is from before.
        mirror_created: when the engine made the mirror, in its words; "": of an earlier release.
    """

    at_unix_us: int
    primary_last: int
    primary_messages: int
    mirror_last: int
    consumers: tuple[ConsumerRecord, ...] = ()
    is_set_back: bool = False
    mirror_created: str = ""

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
                bool(fields.get("is_set_back", False)),
                str(fields.get("mirror_created", "")),
            )
        except UNREADABLE as exc:
            raise ValueError(f"no record of a mirror: {type(exc).__name__}") from exc

    def is_of(self, own: Info) -> bool:
        """Whether it is of this mirror, and not of a former one of its name."""
        return self.mirror_created in ("", str(own.get("created", "")))


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A mirror and its primary, as both answer now.

    Attributes:
        seen: the record before; None: there is none.
        is_set_back: the primary was set back, now or earlier.
        is_comparable: both have a message by which that could be seen, or need none.
    """

    own: Info
    primary: Info
    seen: MirrorRecord | None
    revision: int
    is_set_back: bool
    is_comparable: bool = True


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
    return (await _entry(link, mirror))[0]


async def _entry(link: EngineLink, mirror: str) -> tuple[MirrorRecord | None, int]:
    """A record and its revision; 0: there is none."""
    try:
        found = await link.ask(f"STREAM.MSG.GET.KV_{BUCKET}", {"last_by_subj": f"$KV.{BUCKET}.{mirror}"})
    except nats.js.errors.NotFoundError:
        return None, 0
    message = found["message"]
    try:
        return MirrorRecord.parse(base64.b64decode(message.get("data", ""))), int(message["seq"])
    except ValueError:
        return None, int(message["seq"])


async def _put(link: EngineLink, mirror: str, found: MirrorRecord, revision: int) -> MirrorRecord:
    """Write a record over the one of this revision: another one may have it that the primary is set back."""
    bucket = await link.stream.key_value(BUCKET)
    try:
        await bucket.update(mirror, found.encode(), last=revision)
    except nats.js.errors.KeyWrongLastSequenceError as exc:
        raise TimeoutError(f"the record of {mirror} was written by another one") from exc
    return found


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

    It stays as well, but for the mark, with a primary that was set back: it tells of what that has lost.
    """
    if (now := await compare(link, mirror)) is None:
        return None
    if now.is_set_back and now.seen is not None:
        return now.seen
    if (consumers := await consumers_of(link, now.primary["config"]["name"])) is None:
        return None
    found = MirrorRecord(
        clock.unix_us(),
        int(now.primary["state"]["last_seq"]),
        int(now.primary["state"]["messages"]),
        int(now.own["state"]["last_seq"]),
        _record_of(consumers),
        now.is_set_back,
        str(now.own.get("created", "")),
    )
    if found.is_set_back:  # nothing is known of what it was before
        return found
    return await _put(link, mirror, found, now.revision)


async def compare(link: EngineLink, mirror: str) -> Comparison | None:
    """Mirror and primary, compared; None: one does not answer, or is none now; for ``retry``.

    Durability: that the primary is set back is in the record on return, if there is one.
    """
    if (pair := await _pair(link, mirror)) is None:
        return None
    own, primary = pair
    seen, revision = await _entry(link, mirror)
    if seen is not None and not seen.is_of(own):
        seen = None
    if seen is not None and seen.is_set_back:
        return Comparison(own, primary, seen, revision, is_set_back=True)
    if is_set_back(primary["state"], own["state"]):
        await asyncio.sleep(AGAIN_S)
        if (pair := await _pair(link, mirror)) is None:
            return None
        own, primary = pair
    shares: bool | None = False
    if not is_set_back(primary["state"], own["state"]):
        shares = await shares_history(link, own, primary)
    if shares is not False:
        return Comparison(own, primary, seen, revision, is_set_back=False, is_comparable=bool(shares))
    if seen is not None:
        seen = await _put(link, mirror, _marked(seen, own), revision)
    return Comparison(own, primary, seen, revision, is_set_back=True)


def _marked(seen: MirrorRecord, own: Info) -> MirrorRecord:
    """Of a primary that was set back; of this mirror alone, should another one get its name. Pure."""
    return dataclasses.replace(seen, is_set_back=True, mirror_created=str(own.get("created", "")))


async def _pair(link: EngineLink, mirror: str) -> tuple[Info, Info] | None:
    own, primary = await both(link, mirror)
    if own is None or primary is None or not own["config"].get("mirror") or not is_served(primary):
        return None
    return own, primary


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
