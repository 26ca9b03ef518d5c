"""Asynchronous mirrors: copies of a domain beyond those that the engine keeps together (C2, C3).

A mirror is a JetStream stream of its own, ``SLA_DOMAIN_mNODE``, on one node that has neither the primary nor
a backup. The engine copies into it what the primary has stored, in order, under the same sequence, and later:
nothing that is confirmed or committed waits for it, and it is counted nowhere as a copy. It takes no messages
and nobody consumes from it; who wants to reads it (``read``). ``mirror_promotion`` makes a primary of it.

*What it does to the primary.* To the engine, the one who copies is a consumer like others. A queue removes
what all of its consumers have, so a queue without any would be emptied by its mirror. Therefore each queue
of the domain has its consumer before there is a mirror (``keep_queues``), and so has one that is created
later before it is announced (``Catalogue.create``).

*Keeping up.* The engine keeps an acknowledged message until each mirror has it. ``sweep`` removes what would
be kept for one that cannot follow, so that it never fills its primary.

*Trimming.* The engine does not tell a mirror what was acknowledged at the primary. ``trim`` removes that, so
a mirror has what the primary had some seconds ago, and not everything that ever passed. A primary that was
set back is followed no more in this: then only the mirror has what that has lost (``mirror_records``).

*Records* (``mirror_records``). What both had is written down every few seconds, for when the primary is lost.

Order of making: consumers, stream, record; a crash between them is mended by the next ``add``. Of removing:
stream, record. Thread: the link's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import nats.errors
import nats.js.errors

from pmdaemon.runtime.clock import Clock, Deadline
from sla_server.cluster import essentials
from sla_server.cluster.messages.catalogue import Catalogue, Destination, keep_queue
from sla_server.cluster.messages.errors import BadName, DestinationMissing, MirrorRefused
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_records import (
    BUCKET,
    compare,
    consumers_of,
    forget,
    make_bucket,
    observe,
    record,
)
from sla_server.cluster.messages.mirror_streams import (
    LIMIT_S,
    Info,
    behind,
    both,
    delete_stream,
    holders_of,
    is_served,
    is_set_back,
    mirror_name,
    parts_of,
    refuse_mirror,
    stream_info,
    stream_names,
)

NO_NODE_S: Final = 10.0
"""So long "no node can take it" may pass: nodes that are starting are not known yet."""
MOST_DELETED: Final = 20_000
"""Gaps of the primary beyond which only its beginning is trimmed: the engine lists them all in one answer."""
MOST_TRIMMED: Final = 1000  # single messages, in one call
AT_ONCE: Final = 64
COPIES: Final = "flow_control"
"""How the engine's consumers acknowledge by which it copies a stream."""
_NO_PEERS: Final = 10005


@dataclasses.dataclass(frozen=True, slots=True)
class MirrorRow:
    """A mirror, and how far it is behind.

    Attributes:
        name, primary: JetStream streams.
        is_running: whether its node answers; if not, nothing else is known.
        is_promoted: whether its promotion was begun and not ended.
        is_ahead: whether the primary has stored less than this, or once had: its disk was lost or set back.
        hears_primary: whether the primary answers; if not, ``behind_messages`` is what was known last.
        behind_messages: what the primary has and this has not.
        behind_s: age of the oldest of them; with a primary that does not answer, since it was last heard of
            by the mirror. None: not known.
    """

    name: str
    primary: str
    node: str
    is_running: bool = False
    is_promoted: bool = False
    is_ahead: bool = False
    hears_primary: bool = False
    messages: int = 0
    stored_bytes: int = 0
    behind_messages: int = 0
    behind_s: float | None = None

    @property
    def text(self) -> str:
        """What it is, for people."""
        if not self.is_running:
            return "asynchronous copy, does not run"
        if self.is_promoted:
            return "its promotion was begun: repeat 'sla cluster mirror promote'"
        if self.is_ahead:
            return (
                "asynchronous copy, its primary was lost or set back, and has stored less than this has: "
                "what that lacks is only here, so nothing is removed here any more. Send it again from here "
                "('read_mirror'), then remove this mirror and add it again"
            )
        since = "an unknown time" if self.behind_s is None else f"{self.behind_s:,.0f} s"
        if not self.hears_primary:
            return (
                f"asynchronous copy, its primary does not answer: {self.behind_messages:,} messages behind "
                f"when it was heard of last, {since} ago"
            )
        return f"asynchronous copy, {self.behind_messages:,} messages / {since} behind"


@dataclasses.dataclass(frozen=True, slots=True)
class MirroredMessage:
    """A message as a mirror has it; its sequence is that of the primary."""

    sequence: int
    subject: str
    headers: Mapping[str, str]
    data: bytes


async def rows(link: EngineLink, clock: Clock) -> tuple[MirrorRow, ...]:
    """All mirrors, by name; for ``retry``."""
    found = []
    for name in sorted(await stream_names(link)):
        if (parts := parts_of(name)) is not None:
            own, primary = await both(link, name)
            found.append(await _row(link, clock, MirrorRow(name, *parts), own, primary))
    return tuple(found)


async def _row(
    link: EngineLink, clock: Clock, row: MirrorRow, own: Info | None, primary: Info | None
) -> MirrorRow:
    if own is None:
        return row
    state = own["state"]
    row = dataclasses.replace(
        row, is_running=True, messages=int(state["messages"]), stored_bytes=int(state["bytes"])
    )
    if not own["config"].get("mirror"):
        return dataclasses.replace(row, is_promoted=True)
    with contextlib.suppress(TimeoutError, nats.errors.Error):  # without a majority the rest is said
        seen = await record(link, row.name)
        row = dataclasses.replace(row, is_ahead=seen is not None and seen.is_set_back and seen.is_of(own))
    if primary is None:
        heard = own.get("mirror") or {}
        active_ns = int(heard.get("active", -1))
        return dataclasses.replace(
            row,
            behind_messages=int(heard.get("lag", 0)),
            behind_s=None if active_ns < 0 else active_ns / 1e9,
        )
    if is_served(primary) and is_set_back(primary["state"], state):
        there = int(primary["state"]["messages"])
        return dataclasses.replace(row, hears_primary=True, is_ahead=True, behind_messages=there)
    count = behind(primary["state"], state)
    age_s: float | None = 0.0
    if count:
        age_s = await _age_s(link, clock, row.primary, int(state["last_seq"]) + 1)
    return dataclasses.replace(row, hears_primary=True, behind_messages=count, behind_s=age_s)


async def _age_s(link: EngineLink, clock: Clock, stream: str, sequence: int) -> float | None:
    """How long ago the first message from this sequence on was stored; None: there is none, or no answer."""
    try:
        found = await link.ask(f"STREAM.MSG.GET.{stream}", {"seq": sequence, "next_by_subj": ">"})
        stored = datetime.fromisoformat(found["message"]["time"][:19] + "+00:00").timestamp()
    except (TimeoutError, ValueError, KeyError, nats.errors.Error):
        return None
    return max(0.0, clock.unix_us() / 1e6 - stored)


async def add(link: EngineLink, catalogue: Catalogue, name: str, node: str, clock: Clock) -> str:
    """Make a mirror of a destination's domain on a node, or find it there; its stream.

    Raises:
        MirrorRefused: the node has the primary or a backup, or there is no such node; the destination is a
            mirror, or is being promoted; the mirror is there, and its primary was set back.
        DestinationMissing: there is none.
        NotConfirmed: the cluster has no majority; repeat it.
    """
    destination = await _destination(catalogue, name)
    mirror = mirror_name(destination.stream, node)

    async def primary() -> Info:
        if (found := await stream_info(link, destination.stream)) is None:
            raise TimeoutError("its primary does not answer")
        return found

    info = await link.retry(primary, f"stream {destination.stream}", LIMIT_S)
    if not is_served(info):
        raise MirrorRefused(f"{name} is being promoted: its stream {destination.stream} is a mirror itself")
    if node.lower() in (holder.lower() for holder in holders_of(info)):
        raise MirrorRefused(
            f"{node} has the primary or a backup of {name}: a mirror there would be lost together with it. "
            f"These have: {', '.join(holders_of(info))}; name another node"
        )
    await keep_queues(link, catalogue, destination.stream)
    await link.retry(_maker(link, destination, mirror, node), f"mirror {mirror}", LIMIT_S)
    await keep_queues(link, catalogue, destination.stream)  # what was created meanwhile
    await link.retry(lambda: make_bucket(link, catalogue.replicas), f"bucket {BUCKET}", LIMIT_S)

    async def recorded() -> None:
        if (found := await observe(link, mirror, clock)) is None:  # without a record no node looks after it
            raise TimeoutError("the mirror or its primary does not answer")
        if found.is_set_back:
            raise MirrorRefused(
                f"{mirror} is there, and the primary of {name} was lost or set back since: what that lacks "
                "is only in the mirror. Send it again from there ('read_mirror'), then: sla cluster mirror "
                f"remove {name} --node {node}"
            )

    await link.retry(recorded, f"record of {mirror}", LIMIT_S)
    return mirror


def _maker(
    link: EngineLink, destination: Destination, mirror: str, node: str
) -> Callable[[], Awaitable[None]]:
    no_node = Deadline(NO_NODE_S)
    config: dict[str, Any] = {
        "name": mirror,
        "mirror": {"name": destination.stream},
        "retention": "limits",
        "discard": "old",
        # Between two trims it has what the primary has, and what was acknowledged there since.
        "max_bytes": 2 * destination.max_bytes if destination.max_bytes > 0 else -1,
        "max_msgs": -1,
        "max_age": 0,
        "max_consumers": -1,
        "storage": "file",
        "num_replicas": 1,
        "placement": {"tags": [essentials.node_tag(node)]},
    }

    async def attempt() -> None:
        try:
            there = (await link.ask(f"STREAM.INFO.{mirror}", {}))["config"]
        except nats.js.errors.NotFoundError:
            try:
                there = (await link.ask(f"STREAM.CREATE.{mirror}", config))["config"]
            except nats.js.errors.APIError as exc:
                if exc.err_code == _NO_PEERS and no_node.passed:
                    raise MirrorRefused(
                        f"no node {node} that runs has room for it, or it is of a release without mirrors: "
                        f"{exc.description}"
                    ) from exc
                raise
        if (there.get("mirror") or {}).get("name") != destination.stream:
            raise MirrorRefused(
                f"stream {mirror} is no mirror: its promotion was begun. Finish that first: "
                f"sla cluster mirror promote {destination.name} --node {node}"
            )

    return attempt


async def keep_queues(
    link: EngineLink, catalogue: Catalogue, stream: str, safe: set[str] | None = None
) -> None:
    """See that each queue of a domain has its consumer: without one, its mirror would empty it.

    ``safe`` has names of those that are known to have it; what is seen to is added.

    Raises:
        NotConfirmed: the cluster has no majority.
    """
    known = set() if safe is None else safe
    await link.retry(catalogue.refresh, "the catalogue", LIMIT_S)
    for destination in catalogue.of_stream(stream):
        if destination.name not in known:
            keep = functools.partial(keep_queue, link, destination)
            await link.retry(keep, f"consumer of {destination.name!r}", LIMIT_S)
            known.add(destination.name)


async def remove(link: EngineLink, catalogue: Catalogue, name: str, node: str) -> str:
    """Remove a mirror with all that it has; its stream.

    Raises:
        MirrorRefused: there is none.
        NotConfirmed: the cluster has no majority; repeat it.
    """
    mirror = mirror_name((await _destination(catalogue, name)).stream, node)
    if mirror not in await link.retry(lambda: stream_names(link), "names of streams", LIMIT_S):
        await forget(link, mirror)
        raise MirrorRefused(f"there is no mirror of {name} on {node}; 'sla cluster mirror list' names all")
    await delete_stream(link, mirror)
    await forget(link, mirror)
    return mirror


async def _destination(catalogue: Catalogue, name: str) -> Destination:
    refuse_mirror(name)
    if name.startswith("_"):
        raise BadName("destination", name, "reserved destinations have no mirrors")
    return await catalogue.get(name)


async def trim(link: EngineLink, mirror: str) -> int:
    """Remove what the primary does not have any more; how many messages.

    Nothing is removed for a primary that does not answer, is none, or was set back: it may have lost what the
    mirror is kept for.
    """
    pair = await compare(link, mirror)
    if pair is None or pair.is_set_back or not pair.is_comparable:
        return 0
    there, here, primary = pair.primary["state"], pair.own["state"], pair.primary
    if not here["messages"]:
        return 0
    removed = 0
    if there["first_seq"] > here["first_seq"]:
        # Sequences below the first one of the primary were acknowledged there, however old its answer is.
        answer = await link.ask(f"STREAM.PURGE.{mirror}", {"seq": int(there["first_seq"])})
        removed = int(answer.get("purged", 0))
    if 0 < int(there.get("num_deleted", 0)) <= MOST_DELETED and here["last_seq"] >= there["first_seq"]:
        removed += await _trim_gaps(link, mirror, primary["config"]["name"])
    return removed


async def sweep(link: EngineLink, stream: str) -> int:
    """Remove what is acknowledged at a primary, and kept there for a mirror that cannot follow; how many.

    The engine keeps a message until its copier has it, too, however long that is away. Without this a mirror
    whose link is cut would fill its primary. What is removed the mirror never needs.
    """
    if (info := await stream_info(link, stream)) is None or not is_served(info):
        return 0
    if (consumers := await consumers_of(link, stream)) is None:
        return 0  # one that does not answer may need them
    removed = 0
    for subject, floor in floors(consumers).items():
        # Only where there is something: a purge is a step of the whole group.
        first = await _next(link, stream, subject, 1)
        if first is not None and first.sequence <= floor:
            answer = await link.ask(f"STREAM.PURGE.{stream}", {"filter": subject, "seq": floor + 1})
            removed += int(answer.get("purged", 0))
    return removed


def floors(consumers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Subject -> the sequence up to which all of its consumers have acknowledged. Pure.

    A program may have made consumers of several subjects, which count for each.
    """
    found: dict[str, int] = {}
    least: int | None = None
    for part in consumers:
        config, floor = part["config"], int(part["ack_floor"]["stream_seq"])
        if config.get("ack_policy") == COPIES:
            continue
        subject = str(config.get("filter_subject") or "")
        if not subject or not {"*", ">"}.isdisjoint(subject.split(".")):
            least = floor if least is None else min(floor, least)
        else:
            found[subject] = min(found.get(subject, floor), floor)
    if least is not None:
        found = {subject: min(floor, least) for subject, floor in found.items()}
    return {subject: floor for subject, floor in found.items() if floor}


async def _trim_gaps(link: EngineLink, mirror: str, stream: str) -> int:
    primary = await stream_info(link, stream, details=True)
    own = await stream_info(link, mirror, details=True)  # after it: what the primary lacks, it had stored
    if own is None or primary is None:
        return 0
    here = own["state"]
    gone = gaps(primary["state"].get("deleted") or (), here)[:MOST_TRIMMED]
    for begin in range(0, len(gone), AT_ONCE):
        await asyncio.gather(*(_delete(link, mirror, sequence) for sequence in gone[begin : begin + AT_ONCE]))
    return len(gone)


def gaps(deleted: Iterable[int], mirror: Mapping[str, Any]) -> list[int]:
    """Which of these a mirror still has. Pure."""
    missing = set(mirror.get("deleted") or ())
    return sorted(
        sequence
        for sequence in deleted
        if mirror["first_seq"] <= sequence <= mirror["last_seq"] and sequence not in missing
    )


async def _delete(link: EngineLink, mirror: str, sequence: int) -> None:
    with contextlib.suppress(nats.js.errors.APIError):  # it is gone
        await link.ask(f"STREAM.MSG.DELETE.{mirror}", {"seq": sequence, "no_erase": True})


async def read(link: EngineLink, mirror: str, subject: str, begin: int) -> AsyncIterator[MirroredMessage]:
    """What a mirror has of a destination, in order, up to what it has now.

    Raises:
        DestinationMissing: there is no such mirror.
        NotConfirmed: its node does not answer.
    """

    async def bounds() -> int:
        try:
            return int((await link.ask(f"STREAM.INFO.{mirror}", {}))["state"]["last_seq"])
        except nats.js.errors.NotFoundError:
            raise DestinationMissing(mirror) from None

    last, sequence = await link.retry(bounds, f"mirror {mirror}", LIMIT_S), begin
    while sequence <= last:
        found = await link.retry(
            functools.partial(_next, link, mirror, subject, sequence),
            f"message {sequence} of {mirror}",
            LIMIT_S,
        )
        if found is None or found.sequence > last:
            return
        yield found
        sequence = found.sequence + 1


async def _next(link: EngineLink, mirror: str, subject: str, sequence: int) -> MirroredMessage | None:
    try:
        raw = await link.stream.get_msg(mirror, seq=sequence, subject=subject, next=True)
    except nats.js.errors.NotFoundError:
        return None
    return MirroredMessage(int(raw.seq or 0), str(raw.subject), dict(raw.headers or {}), raw.data or b"")
