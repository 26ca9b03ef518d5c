"""A mirror becomes the primary of its domain, when the primary is lost for good (C3).

Never by itself: a mirror lacks what was stored last, and only people can say that the primary does not come
back. The primary's JetStream stream is made again under its own name, so that live sessions, accounts and
transactions go on with it, and takes the messages of the mirror under the sequences that they had:

    LOST       the lost stream is removed, the mirror follows it no more
    COPYING    the stream is made again, for now as a copy of what the mirror has
    NUMBERS    it is a stream of its own; sequences that the lost one may have given are passed over
    SERVED     it has its subjects again; the mirror is removed

Each step is found from what the streams are, so a promotion that was interrupted goes on with the next call.
The new stream is marked with the mirror that it is made of: one without the mark was made by a program while
there was none (a session of this release waits instead, ``Catalogue``), and the mirror is not removed for it.
Producers and consumers wait meanwhile, as for an election.

*Sequences.* An acknowledgement and the lock of a transaction name a message by its sequence. A session that
still holds a lost message would acknowledge another one with it, if its sequence was given again. So as many
are passed over as the primary is known to have had, and ``MARGIN`` for what it stored after it was last seen.
The new stream says up to where its messages are the lost one's (``PROMOTED_LAST``): of these feeds ask, as
the locks are kept, whether a committed transaction has acknowledged them.

*Subscribers* of a topic begin where they were when the primary was last seen; the engine's consumers were
lost with it. A queue has nothing of the kind: all that it has is to be handed out.

Engine: 2.12 or newer makes a stream of its own of a mirror. Thread: the link's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import nats.js.errors

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.messages import names
from sla_server.cluster.messages.batch import MAX_BATCH, store_batch
from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind, stream_config
from sla_server.cluster.messages.errors import MirrorRefused
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_records import MirrorRecord, forget, record
from sla_server.cluster.messages.mirror_streams import (
    LIMIT_S,
    PASSED_OVER,
    PROMOTED_LAST,
    Info,
    delete_stream,
    is_served,
    mirror_name,
    parts_of,
    refuse_mirror,
    stream_info,
    stream_names,
)
from sla_server.cluster.messages.mirrors import keep_queues

SILENT_S: Final = 15.0
"""A primary that answers nothing for so long elects no more: an election takes 4 to 9 s."""
STALLED_S: Final = 120.0
MARGIN: Final = 50 * MAX_BATCH
"""More than a primary stores between two records of its mirror (``mirror_keeper``)."""
OLD_S: Final = 60.0
"""Age of a record beyond which the primary may have stored more than ``MARGIN`` since."""
MARK: Final = "sla-promoted-from"
_NO_MESSAGE: Final = 10037


class Stage(Enum):
    """How far a promotion has come; see the module."""

    LOST = "the primary is lost"
    COPYING = "messages are copied"
    NUMBERS = "sequences are passed over"
    SERVED = "the primary is there again"


@dataclasses.dataclass(frozen=True, slots=True)
class Promotion:
    """What would be promoted, and what is known to be missing.

    Attributes:
        messages: that the mirror has.
        seen: what primary and mirror had when the primary was last seen; None: that is not known.
        discarded: messages of a stream of the primary's name that a program has made since that was lost.
        silent: other mirrors of the primary that do not answer.
    """

    destination: Destination
    mirror: str
    node: str
    stage: Stage
    messages: int
    last: int
    seen: MirrorRecord | None
    discarded: int = 0
    silent: tuple[str, ...] = ()

    @property
    def missing(self) -> int | None:
        """Messages that the primary had when it was last seen, and the mirror never got, at most.

        None: not known. What it stored afterwards is missing as well.
        """
        if self.seen is None:
            return None
        return max(0, self.seen.primary_last - max(self.last, self.seen.mirror_last))

    def lines(self, now_unix_us: int) -> list[str]:
        """For people, before they decide."""
        found = [f"mirror {self.mirror} on {self.node} has {self.messages:,} messages, up to {self.last:,}"]
        if self.discarded:
            found.append(
                f"discarded: {self.discarded:,} messages of a stream {self.destination.stream} that a "
                "program has made since the primary was removed"
            )
        found += [
            f"another mirror, {name}, does not answer: if it has come further, promote it instead when its "
            "node runs again"
            for name in self.silent
        ]
        restart = (
            "restart first: programs that still hold messages of the lost primary. It may have given more "
            f"than the {MARGIN:,} sequences that are passed over, and they would acknowledge other messages"
        )
        if self.seen is None:
            unknown = "it is not known what the primary had; whatever the mirror lacks is missing"
            return [*found, unknown, restart]
        set_back = (
            "set back: the primary was lost or set back after that moment, and ran on; what it then stored "
            "under sequences that the mirror had is missing"
        )
        ago_s = max(0, now_unix_us - self.seen.at_unix_us) / 1e6
        return [
            *found,
            f"the primary was last seen {ago_s:,.0f} s ago, with {self.seen.primary_messages:,} messages, up "
            f"to {self.seen.primary_last:,}",
            f"missing: of those {self.missing:,} at most, and all that it stored after that moment",
            "again: what was acknowledged after that moment, or since the mirror was last trimmed, is handed "
            "out once more",
            *([set_back] if self.seen.is_set_back else []),
            *([restart] if ago_s > OLD_S else []),
        ]


async def plan(link: EngineLink, catalogue: Catalogue, name: str, node: str) -> Promotion:
    """See whether a mirror can be promoted, and what would be missing.

    Raises:
        MirrorRefused: there is none, its node does not answer, the primary is not lost, another mirror has
            come further, it is not known who subscribes to the topic, or the engine is too old.
        DestinationMissing: there is no such destination.
        NotConfirmed: the cluster has no majority.
    """
    refuse_mirror(name)
    destination = await catalogue.get(name)
    mirror = mirror_name(destination.stream, node)
    if not catalogue.has_batches:
        raise MirrorRefused("the engine cannot make a stream of its own of a mirror before 2.12")
    there = await link.retry(lambda: stream_names(link), "names of streams", LIMIT_S)
    if mirror not in there:
        raise MirrorRefused(f"there is no mirror of {name} on {node}; 'sla cluster mirror list' names all")
    if (own := await _patient_info(link, mirror)) is None:
        raise MirrorRefused(f"{mirror} does not answer: start {node} first")
    stage, discarded = await _stage(link, destination, mirror, own, is_there=destination.stream in there)
    seen = await link.retry(lambda: record(link, mirror), f"record of {mirror}", LIMIT_S)
    messages, last = int(own["state"]["messages"]), int(own["state"]["last_seq"])
    if stage is Stage.LOST or stage is Stage.COPYING:
        _refuse_unknown_subscribers(destination, mirror, messages, seen)
    silent: tuple[str, ...] = ()
    if stage is Stage.LOST:  # later the others follow the new primary
        others = sorted(
            other
            for other in there
            if other != mirror and (parts := parts_of(other)) is not None and parts[0] == destination.stream
        )
        silent = await _compare(link, destination, others, last)
    return Promotion(destination, mirror, node, stage, messages, last, seen, discarded, silent)


async def _patient_info(link: EngineLink, stream: str) -> Info | None:
    """None: it does not answer, for longer than an election takes."""
    deadline = Deadline(SILENT_S)
    while (found := await stream_info(link, stream)) is None and not deadline.passed:
        await asyncio.sleep(0.2)
    return found


def _refuse_unknown_subscribers(
    destination: Destination, mirror: str, messages: int, seen: MirrorRecord | None
) -> None:
    """A topic keeps what its subscribers want, so one without them would be emptied. Pure."""
    if destination.kind is DestinationKind.TOPIC and seen is None and messages:
        raise MirrorRefused(
            f"it is not known who subscribes to {destination.name}, and where each is: {mirror} has no "
            f"record that this release can read. Promoted, the topic would lose all {messages:,} messages, "
            "as none has a subscriber. Read them with 'read_mirror', and send them to another destination"
        )


async def _compare(
    link: EngineLink, destination: Destination, others: Sequence[str], last: int
) -> tuple[str, ...]:
    """Other mirrors of the primary that do not answer.

    Raises:
        MirrorRefused: one that answers has come further.
    """
    silent = []
    found = await asyncio.gather(*(_patient_info(link, name) for name in others))
    for name, info in zip(others, found, strict=True):
        if info is None:
            silent.append(name)
        elif (further := int(info["state"]["last_seq"])) > last:
            node = name.rpartition("_m")[2]
            raise MirrorRefused(
                f"the mirror on {node} has come further, to {further:,}; this one to {last:,}. Promote that "
                f"one: sla cluster mirror promote {destination.name} --node {node}. If it is of no use, "
                f"remove it first: sla cluster mirror remove {destination.name} --node {node}"
            )
    return tuple(silent)


async def _stage(
    link: EngineLink, destination: Destination, mirror: str, own: Info, *, is_there: bool
) -> tuple[Stage, int]:
    deadline = Deadline(SILENT_S)
    while is_there and not deadline.passed:
        if (primary := await stream_info(link, destination.stream)) is not None:
            stage = _stage_of(primary, mirror, own, destination)
            return stage, int(primary["state"]["messages"]) if stage is Stage.LOST else 0
        await asyncio.sleep(0.2)
    return Stage.LOST, 0


def _stage_of(primary: Info, mirror: str, own: Info, destination: Destination) -> Stage:
    """Of a primary that answers. Pure.

    Raises:
        MirrorRefused: it lives.
    """
    if own["config"].get("mirror"):
        leader = (primary.get("cluster") or {}).get("leader") or "a node"
        raise MirrorRefused(
            f"the primary of {destination.name} is not lost: {leader} leads stream {destination.stream}. A "
            "mirror lacks what was stored last; to move the lead use 'sla cluster stepdown'"
        )
    if not _is_made_of(primary["config"], mirror):
        return Stage.LOST
    if (primary["config"].get("mirror") or {}).get("name") == mirror:
        return Stage.COPYING
    return Stage.SERVED if is_served(primary) else Stage.NUMBERS


async def promote(
    link: EngineLink,
    catalogue: Catalogue,
    promotion: Promotion,
    say: Callable[[str], None] = lambda _text: None,
) -> Info:
    """Make a primary of a mirror; what the engine says of it then.

    ``promotion`` is of ``plan``; ``say`` is called with what is done, before each step.

    Raises:
        MirrorRefused: no progress; what was done stays, and the next call goes on.
        NotConfirmed: the cluster has no majority; likewise.
    """
    destination, mirror, stage = promotion.destination, promotion.mirror, promotion.stage
    stream = destination.stream
    own = await _answer(link, mirror)
    begin = _next_sequence(promotion, own)
    if stage is Stage.LOST:
        if stream in await link.retry(lambda: stream_names(link), "names of streams", LIMIT_S):
            say(f"the lost stream {stream} is removed")
            await delete_stream(link, stream)
        await _release(link, mirror)
        say(f"{promotion.messages:,} messages are copied from {mirror}")
        await _make(link, destination, mirror, begin, is_empty=not own["state"]["messages"])
        stage = Stage.COPYING
    if stage is Stage.COPYING:
        await _wait_copied(link, destination, mirror)
        await _make_consumers(link, catalogue, promotion)
        await _update(link, destination, mirror, begin, [_passed_over(destination)])
        stage = Stage.NUMBERS
    if stage is Stage.NUMBERS:
        await _make_consumers(link, catalogue, promotion)  # a stream without messages begins here
        await _pass_over(link, destination, begin)
        await _update(link, destination, mirror, begin, None)
    say(f"stream {stream} is served again")
    await delete_stream(link, mirror)
    await forget(link, mirror)
    return await _answer(link, stream)


async def _make_consumers(link: EngineLink, catalogue: Catalogue, promotion: Promotion) -> None:
    await _make_subscribers(link, promotion.destination, promotion.seen)
    # Sessions acknowledge there what they still hold.
    await keep_queues(link, catalogue, promotion.destination.stream)


def _next_sequence(promotion: Promotion, own: Info) -> int:
    """The first one that the lost primary has given to no message. Pure."""
    seen = promotion.seen.primary_last if promotion.seen is not None else 0
    return max(seen, int(own["state"]["last_seq"])) + MARGIN + 1


def _passed_over(destination: Destination) -> str:
    """Where sequences are used up. Pure."""
    return names.subject(destination.domain or destination.name, PASSED_OVER)


async def _answer(link: EngineLink, stream: str) -> Info:
    async def attempt() -> Info:
        if (found := await stream_info(link, stream)) is None:
            raise TimeoutError("it does not answer")
        return found

    return await link.retry(attempt, f"stream {stream}", LIMIT_S)


async def _release(link: EngineLink, mirror: str) -> None:
    """It follows the lost stream no more, and no other one that gets that name."""

    async def attempt() -> None:
        config = dict((await link.ask(f"STREAM.INFO.{mirror}", {}))["config"])
        if config.pop("mirror", None) is not None:
            await link.ask(f"STREAM.UPDATE.{mirror}", config)

    await link.retry(attempt, f"mirror {mirror}", LIMIT_S)


async def _make(
    link: EngineLink, destination: Destination, mirror: str, begin: int, *, is_empty: bool
) -> None:
    config = _config(destination, mirror, begin)
    if is_empty:  # nothing to copy, so the sequences can begin anywhere
        config |= {"subjects": [_passed_over(destination)], "first_seq": begin}
    else:
        # A topic keeps nothing without subscribers, and these can only be made when it is there.
        config |= {"subjects": [], "mirror": {"name": mirror}}
        config |= {} if destination.kind is DestinationKind.QUEUE else {"retention": "limits"}
        config["allow_atomic"] = False

    async def attempt() -> None:
        try:
            there = (await link.ask(f"STREAM.INFO.{destination.stream}", {}))["config"]
        except nats.js.errors.NotFoundError:
            there = (await link.ask(f"STREAM.CREATE.{destination.stream}", config))["config"]
        if not _is_made_of(there, mirror):
            raise MirrorRefused(
                f"a program has made a stream {destination.stream} in this moment. Stop those that create "
                f"{destination.name}, then repeat"
            )

    await link.retry(attempt, f"stream {destination.stream}", LIMIT_S)


def _config(destination: Destination, mirror: str, begin: int) -> dict[str, Any]:
    """Of its stream while it is filled: without limits, as a mirror may have somewhat more. Pure."""
    return _final(destination, mirror, begin) | {"max_bytes": -1, "max_msgs": -1}


def _final(destination: Destination, mirror: str, begin: int) -> dict[str, Any]:
    found = stream_config(destination, has_batches=True).as_dict()
    marks = {MARK: mirror, PROMOTED_LAST: str(begin - 1)}
    return {key: value for key, value in found.items() if value is not None} | {"metadata": marks}


def _is_made_of(config: Mapping[str, Any], mirror: str) -> bool:
    """Whether a promotion of this mirror has made the stream, and no program. Pure."""
    return bool((config.get("metadata") or {}).get(MARK) == mirror)


async def _wait_copied(link: EngineLink, destination: Destination, mirror: str) -> None:
    if not (await _answer(link, destination.stream))["config"].get("mirror"):
        return  # made without: there was nothing to copy
    wanted = await link.retry(
        lambda: _last_message(link, mirror, destination), f"the last message of {mirror}", LIMIT_S
    )
    reached, stalled = -1, Deadline(STALLED_S)
    while (now := int((await _answer(link, destination.stream))["state"]["last_seq"])) < wanted:
        if now > reached:
            reached, stalled = now, Deadline(STALLED_S)
        if stalled.passed:
            raise MirrorRefused(
                f"{destination.stream} has come to {reached:,} of {wanted:,} messages of {mirror}, and no "
                f"further for {STALLED_S:g} s. See 'sla cluster status', then repeat"
            )
        await asyncio.sleep(0.2)


async def _last_message(link: EngineLink, mirror: str, destination: Destination) -> int:
    """Its sequence; 0: there is none."""
    subjects = names.domain_subjects(destination.domain or destination.name)
    try:
        found = await link.ask(f"STREAM.MSG.GET.{mirror}", {"last_by_subj": subjects})
    except nats.js.errors.NotFoundError as exc:
        if exc.err_code == _NO_MESSAGE:
            return 0
        raise
    return int(found["message"]["seq"])


async def _make_subscribers(link: EngineLink, destination: Destination, seen: MirrorRecord | None) -> None:
    if destination.kind is DestinationKind.QUEUE or seen is None:
        return
    for consumer in seen.consumers:
        config = {
            "durable_name": consumer.name,
            "filter_subject": consumer.filter_subject,
            "ack_policy": "explicit",
            "ack_wait": 1_000_000_000,  # its session sets its own
            "max_deliver": -1,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": consumer.floor + 1,
        }

        async def attempt(name: str = consumer.name, config: dict[str, Any] = config) -> None:
            try:
                await link.ask(f"CONSUMER.INFO.{destination.stream}.{name}", {})
            except nats.js.errors.NotFoundError:
                await link.ask(
                    f"CONSUMER.DURABLE.CREATE.{destination.stream}.{name}",
                    {"stream_name": destination.stream, "config": config, "action": "create"},
                )

        await link.retry(attempt, f"subscriber {consumer.name}", LIMIT_S)


async def _update(
    link: EngineLink, destination: Destination, mirror: str, begin: int, subjects: list[str] | None
) -> None:
    """To a stream of its own; with its subjects and limits if none are given."""
    config = _final(destination, mirror, begin)
    if subjects is not None:
        config = _config(destination, mirror, begin) | {"subjects": subjects}

    async def attempt() -> None:
        there = (await link.ask(f"STREAM.INFO.{destination.stream}", {}))["config"]
        first = {"first_seq": there["first_seq"]} if there.get("first_seq") else {}
        await link.ask(f"STREAM.UPDATE.{destination.stream}", config | first)

    await link.retry(attempt, f"stream {destination.stream}", LIMIT_S)


async def _pass_over(link: EngineLink, destination: Destination, begin: int) -> None:
    """Use up sequences below ``begin``, with messages that are removed at once."""
    subject = _passed_over(destination)
    while True:
        state = (await _answer(link, destination.stream))["state"]
        if int(state["last_seq"]) >= begin - 1:
            return
        await link.retry(
            lambda: _use_up(link, destination.stream, subject, begin), f"stream {destination.stream}", LIMIT_S
        )


async def _use_up(link: EngineLink, stream: str, subject: str, begin: int) -> None:
    """One batch of them; for ``retry``."""
    state = (await link.ask(f"STREAM.INFO.{stream}", {}))["state"]
    if (left := begin - 1 - int(state["last_seq"])) > 0:
        await store_batch(link, [(subject, b"", {})] * min(left, MAX_BATCH))
        await link.ask(f"STREAM.PURGE.{stream}", {"filter": subject})
