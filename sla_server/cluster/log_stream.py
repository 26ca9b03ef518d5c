"""``_LOG``: records of all nodes, kept in the cluster and read in the order of their times (C12).

    files of a node ──► LogForwarder ──► stream, sla.d.__LOG._LOG.NODE ──► read ──► LogMerger ──► people

*Forwarding* loses and doubles nothing. A message has many records of one node, in the order of its file, and
the position after them. The node's last message in the stream says where to go on, whatever was not answered
before; each message names the one that it follows, so the engine refuses one that comes twice or late.

*Merging.* Each node's records are in the order in which they were written, and reach the stream when they
can. ``LogMerger`` puts them in order by time, then node, then counter, and holds each back for ``WINDOW_S``:
one that comes within the window has its place; one that comes later still is given out at once, marked as
late. A past part of the log is read whole first, so nothing in it is late.

State: none but the files' ``sent``. What a crash leaves is what the stream has.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import nats.errors
import nats.js.api
import nats.js.errors
import structlog
from nats.aio.client import Client

from sla_server.cluster.errors import UNREADABLE, ClusterRefused
from sla_server.cluster.log_spool import LEVELS, LogRecord, LogSpool
from sla_server.cluster.messages import names

log = structlog.get_logger("cluster")
STREAM: Final = names.stream_name("_LOG")
SUBJECT: Final = names.subject("_LOG", "_LOG")
WINDOW_S: Final = 2.0
SKEW_S: Final = 60.0
"""So much earlier than its time a record may be stored, by clocks that differ."""
BATCH_BYTES: Final = 32 << 10
POLL_S: Final = 0.25
ANSWER_S: Final = 5.0
FETCH: Final = 100
IDENTITY: Final = "Sla-Log-Identity"
NEXT: Final = "Sla-Log-Next"
Values = Callable[[], Mapping[str, Any]]


class LogMerger:
    """Records in order; see the module. Pure."""

    def __init__(self) -> None:
        self._held: list[LogRecord] = []
        self._last: LogRecord | None = None

    def add(self, records: Iterable[LogRecord]) -> None:
        """Records that came."""
        for record in records:
            heapq.heappush(self._held, record)

    def ready(self, until_us: int) -> list[tuple[LogRecord, bool]]:
        """Those up to a time, in order; with each whether it is late: later ones were given out before."""
        found = []
        while self._held and self._held[0].at_unix_us <= until_us:
            record = heapq.heappop(self._held)
            is_late = self._last is not None and record < self._last
            if not is_late:
                self._last = record
            found.append((record, is_late))
        return found


def encode(records: Iterable[LogRecord]) -> bytes:
    """The message of a node's records."""
    rows = [[row.at_unix_us, row.counter, row.level, row.line] for row in records]
    return json.dumps(rows, ensure_ascii=False).encode(errors="backslashreplace")


def decode(node: str, data: bytes) -> list[LogRecord]:
    """From the message.

    Raises:
        ValueError: it is none.
    """
    try:
        rows = [
            (int(at), int(counter), str(level), str(line)) for at, counter, level, line in json.loads(data)
        ]
    except UNREADABLE as exc:
        raise ValueError(f"no log records: {exc}") from exc
    return [LogRecord(at, node, counter, level, line) for at, counter, level, line in rows]


class LogForwarder:
    """A task of the agent: from the files to the stream.

    Args:
        spool: the files.
        node: its name.
        replicas: copies of the stream, if there is none.
        values: acquirable parameters that hold.
    """

    def __init__(self, spool: LogSpool, node: str, replicas: int, values: Values) -> None:
        self._spool = spool
        self._subject = f"{SUBJECT}.{node}"
        self._replicas = replicas
        self._values = values

    async def run(self, client: Client) -> None:
        """Forward until something fails; then it may be called again.

        Raises:
            nats.errors.Error, OSError, TimeoutError: of the engine or the disk.
        """
        stream = client.jetstream(timeout=ANSWER_S)
        kept = await self._make_stream(stream)
        position, sequence = await self._begin(stream)
        while True:
            values = self._values()
            if (values["log_bytes"], values["log_age_s"]) != kept:
                kept = await self._make_stream(stream)
            records, after = await asyncio.to_thread(self._spool.read, position, BATCH_BYTES)
            least = LEVELS[str(values["log_level"])]
            wanted = [record for record in records if LEVELS.get(record.level, 1) >= least]
            if wanted:
                stored = await stream.publish(
                    self._subject,
                    encode(wanted),
                    headers={
                        IDENTITY: self._spool.identity,
                        NEXT: str(after),
                        nats.js.api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(sequence),
                    },
                    stream=STREAM,
                )
                sequence = stored.seq
            position = after
            if not records:
                await asyncio.to_thread(self._spool.keep_up, position)
                await asyncio.sleep(POLL_S)

    async def _begin(self, stream: nats.js.JetStreamContext) -> tuple[int, int]:
        """Position to go on at, and the sequence of this node's last message."""
        noted = await asyncio.to_thread(self._spool.sent)
        try:
            last = await stream.get_last_msg(STREAM, self._subject)
        except nats.js.errors.NotFoundError:
            return noted, 0
        headers = last.headers or {}
        if headers.get(IDENTITY) != self._spool.identity:
            return noted, int(last.seq or 0)
        return max(noted, int(headers.get(NEXT, 0))), int(last.seq or 0)

    async def _make_stream(self, stream: nats.js.JetStreamContext) -> tuple[Any, Any]:
        values = self._values()
        kept = (values["log_bytes"], values["log_age_s"])
        config = nats.js.api.StreamConfig(
            name=STREAM,
            subjects=[f"{SUBJECT}.*"],
            retention=nats.js.api.RetentionPolicy.LIMITS,
            discard=nats.js.api.DiscardPolicy.OLD,
            max_bytes=kept[0],
            max_age=kept[1],
            num_replicas=self._replicas,
            storage=nats.js.api.StorageType.FILE,
        )
        try:
            there = (await stream.stream_info(STREAM)).config
        except nats.js.errors.NotFoundError:
            await stream.add_stream(config)
        else:
            if (there.max_bytes, there.max_age) != kept:
                there.max_bytes, there.max_age = kept
                await stream.update_stream(there)
        return kept


async def read(
    client: Client, since_us: int, *, node: str = "", follow: bool = False, now_us: Callable[[], int]
) -> AsyncIterator[tuple[LogRecord, bool]]:
    """Records from a time on, in order; with each whether it is late.

    Args:
        client: of the product's account, or of one with the role ``monitor``.
        since_us: the earliest time.
        node: only this one's; "": all.
        follow: go on with what comes.
        now_us: the time now, for the window.

    Raises:
        ClusterRefused: there is no log yet, or no majority.
    """
    merger = LogMerger()
    try:
        async for records, is_end in _batches(client, since_us, node, follow=follow):
            merger.add(record for record in records if record.at_unix_us >= since_us)
            if is_end and not follow:
                break
            if is_end:
                for found in merger.ready(now_us() - round(WINDOW_S * 1e6)):
                    yield found
    except nats.js.errors.NotFoundError as exc:
        raise ClusterRefused("there is no _LOG yet: no node has forwarded a record") from exc
    except (OSError, TimeoutError, nats.errors.Error) as exc:
        raise ClusterRefused(f"reading _LOG: {str(exc) or type(exc).__name__}") from exc
    for found in merger.ready(1 << 63):
        yield found


async def _batches(
    client: Client, since_us: int, node: str, *, follow: bool
) -> AsyncIterator[tuple[list[LogRecord], bool]]:
    """Records as they are stored, and whether these are all that are there now."""
    stream = client.jetstream(timeout=ANSWER_S)
    last = int((await stream.stream_info(STREAM)).state.last_seq or 0)
    start = datetime.fromtimestamp(max(0.0, since_us / 1e6 - SKEW_S), UTC)
    config = nats.js.api.ConsumerConfig(
        ack_policy=nats.js.api.AckPolicy.NONE,
        deliver_policy=nats.js.api.DeliverPolicy.BY_START_TIME,
        opt_start_time=start,
        filter_subject=f"{SUBJECT}.{node or '*'}",
        inactive_threshold=60.0,
    )
    reached = 0
    while True:
        feed = await stream.pull_subscribe(config.filter_subject or "", stream=STREAM, config=config)
        try:
            pending = (await feed.consumer_info()).num_pending or 0
            while pending or follow:
                messages = []
                with contextlib.suppress(TimeoutError, nats.errors.TimeoutError):
                    messages = await feed.fetch(FETCH, timeout=ANSWER_S if pending else 0.5)
                if not messages and (pending or not client.is_connected):
                    break  # the node that had the consumer is gone: another one, from where this one came to
                records = []
                for message in messages:
                    found = message.metadata
                    reached, pending = found.sequence.stream, found.num_pending
                    with contextlib.suppress(ValueError):  # of a later release
                        records += decode(message.subject.rpartition(".")[2], message.data)
                yield records, not pending
            if not pending:
                yield [], True
                return
        finally:
            with contextlib.suppress(OSError, TimeoutError, nats.errors.Error):
                await feed.unsubscribe()
        if not follow and reached >= last:
            yield [], True
            return
        if reached:
            config.deliver_policy = nats.js.api.DeliverPolicy.BY_START_SEQUENCE
            config.opt_start_time, config.opt_start_seq = None, reached + 1
