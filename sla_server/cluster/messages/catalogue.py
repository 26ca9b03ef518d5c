"""The catalogue: which destinations there are, and with what settings (C2, C11).

One document a destination, in a key-value bucket of the engine with as many copies as the destinations have.
A session has a copy of it in memory, brought up to date when another one announces a new destination and,
should an announcement be lost (it is one message that no one keeps), every ``REFRESH_S``. Those who wait for
destinations to come (wildcards) are called with what is new.

A destination is created in this order: its JetStream stream, its document, the announcement. A crash between
them leaves a stream without a document; to create the destination again finds it and goes on. A queue that is
not the first of its domain has its consumer before its document (``keep_queue``): the domain may have a
mirror, which would empty a queue without one (``mirrors``).

Thread: the link's, all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import nats.errors
import nats.js.api
import nats.js.errors
import structlog

from pmdaemon.runtime.excerpt import excerpt
from sla_server.cluster.messages import names
from sla_server.cluster.messages.errors import (
    BadSettings,
    DestinationDiffers,
    DestinationMissing,
    MessagesError,
)
from sla_server.cluster.messages.link import ANSWER_S, EngineLink
from sla_server.cluster.messages.mirror_streams import parts_of, stream_names

log = structlog.get_logger("messages")
BUCKET: Final = "SLA_DESTINATIONS"
_KEYS: Final = f"$KV.{BUCKET}."
ANNOUNCEMENTS: Final = "sla.announce"
REFRESH_S: Final = 5.0
DUPLICATES_S: Final = 600.0
"""For so long the engine knows identities of messages; a producer gives up earlier."""
LEAST_ACK_WAIT_S: Final = 1.0
SHARED_PENDING: Final = 100_000
"""Of a queue, handed out and not acknowledged: each of its consumers has credit of its own."""
_CREATE_S: Final = 60.0
_ATOMIC_SINCE: Final = (2, 12)


class DestinationKind(Enum):
    """What becomes of a message."""

    QUEUE = "queue"
    """One consumer is given it; stored until it acknowledges."""
    TOPIC = "topic"
    """Every subscriber is given it; stored until all of them acknowledged. Without any it is not kept."""


@dataclasses.dataclass(frozen=True)
class Destination:
    """A queue or topic.

    Attributes:
        name: see ``names``.
        domain: destinations of one domain share a JetStream stream, and so a primary, limits and their kind;
            a transaction within one is a single step. "" is a domain of its own.
        replicas: primary and synchronous backups.
        max_bytes, max_messages: of the domain; -1 has no limit. A message beyond it is refused. Each
            node that has a copy reserves ``max_bytes`` of its disk.
    """

    name: str
    kind: DestinationKind = DestinationKind.QUEUE
    domain: str = ""
    replicas: int = 3
    max_bytes: int = 64 << 20
    max_messages: int = -1

    def check(self, *, reserved: bool = False) -> None:
        """Refuse settings that cannot be.

        Raises:
            BadName, BadSettings: with the field.
        """
        names.check_name(self.name, reserved=reserved)
        if self.domain:
            names.check_name(self.domain, "domain")
        names.check_domain(self.domain or self.name, "domain" if self.domain else "destination")
        if not 1 <= self.replicas <= 5:
            raise BadSettings("replicas", self.replicas, "the engine has 1 to 5 synchronous copies")
        for field, value in (("max_bytes", self.max_bytes), ("max_messages", self.max_messages)):
            if value != -1 and value < 1:
                raise BadSettings(field, value, "it must be at least 1, or -1 for no limit")

    @property
    def subject(self) -> str:
        """Where its messages are published."""
        return names.subject(self.domain or self.name, self.name)

    @property
    def stream(self) -> str:
        """The JetStream stream that has them."""
        return names.stream_name(self.domain or self.name)

    def engine_identity(self, identity: str) -> str:
        """A message's identity as the engine knows it: once for all destinations of a domain.

        A message may go from one of them to another under the identity that it has.
        """
        return f"{self.name}:{identity}" if self.domain else identity

    def own_identity(self, engine_identity: str) -> str:
        """The identity that its sender knows it by."""
        return engine_identity.removeprefix(f"{self.name}:") if self.domain else engine_identity

    def encode(self) -> bytes:
        """Its document."""
        return json.dumps(dataclasses.asdict(self) | {"kind": self.kind.value}, sort_keys=True).encode()

    @classmethod
    def parse(cls, document: bytes) -> Destination:
        """From its document; fields of a later release are left out.

        Raises:
            ValueError: it is of a later release, or no session of ours has stored it.
        """
        try:
            fields: dict[str, Any] = dict(json.loads(document))
            known = {field.name for field in dataclasses.fields(cls)}
            given = {key: value for key, value in fields.items() if key in known}
            found = cls(**given | {"kind": DestinationKind(fields["kind"])})
            texts, numbers = (
                (found.name, found.domain),
                (found.replicas, found.max_bytes, found.max_messages),
            )
            if any(type(text) is not str for text in texts) or any(type(n) is not int for n in numbers):
                raise TypeError("a field has a value of another type")
            found.check(reserved=True)
        except (KeyError, TypeError, AttributeError, RecursionError, MessagesError) as exc:
            raise ValueError(f"no document of a destination: {excerpt(str(exc))}") from exc
        return found

    @classmethod
    def of_key(cls, key: str, document: bytes) -> Destination:
        """From what the catalogue has under a name.

        Raises:
            ValueError: as ``parse``, or it is the document of another destination.
        """
        found = cls.parse(document)
        if found.name != key:
            raise ValueError(f"it is the document of {excerpt(found.name)}")
        return found

    def differences(self, other: Destination) -> dict[str, tuple[object, object]]:
        """Field -> (here, there), of those that differ."""
        pairs = {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class Catalogue:
    """A session's copy of the catalogue, and how to change it."""

    def __init__(self, link: EngineLink, replicas: int) -> None:
        self._link = link
        self._replicas = replicas
        self._found: dict[str, Destination] = {}
        self._unreadable: set[str] = set()
        self._listeners: list[Callable[[Destination], None]] = []
        self._refreshed = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.has_batches = False

    @property
    def replicas(self) -> int:
        """Of what is made for the cluster itself."""
        return self._replicas

    def of_stream(self, stream: str) -> list[Destination]:
        """Destinations of a domain that are known, those of the cluster itself left out."""
        found = [destination for destination in self._found.values() if destination.stream == stream]
        return [destination for destination in found if not destination.name.startswith("_")]

    async def open(self) -> None:
        """Make the bucket if there is none, read it, and keep up with it."""
        self.find_abilities()

        async def find_bucket() -> None:
            try:
                await self._link.stream.key_value(BUCKET)
            except nats.js.errors.NotFoundError:
                await self._link.stream.create_key_value(
                    nats.js.api.KeyValueConfig(bucket=BUCKET, history=1, replicas=self._replicas)
                )

        await self._link.retry(find_bucket, "the catalogue", _CREATE_S)

        async def announced(_message: object) -> None:
            self._wake.set()

        await self._link.client.subscribe(ANNOUNCEMENTS, cb=announced)
        await self._link.retry(self.refresh, "the catalogue", _CREATE_S)
        self._task = asyncio.create_task(self._keep_up())

    def find_abilities(self) -> None:
        """Learn what the engine of the node is able to do."""
        version = self._link.client.connected_server_version
        self.has_batches = (version.major, version.minor) >= _ATOMIC_SINCE

    async def get(self, name: str) -> Destination:
        """One destination.

        Raises:
            DestinationMissing: there is none.
        """
        if name not in self._found:
            await self._link.retry(self.refresh, "the catalogue", _CREATE_S)
        try:
            return self._found[name]
        except KeyError:
            raise DestinationMissing(name) from None

    def listen(self, listener: Callable[[Destination], None]) -> Callable[[], None]:
        """Call ``listener`` with each destination, also those that come; returns what ends it."""
        self._listeners.append(listener)
        for destination in list(self._found.values()):
            listener(destination)
        return lambda: self._listeners.remove(listener)

    async def create(self, wanted: Destination) -> Destination:
        """Make a destination, or find the one that is there.

        Raises:
            DestinationDiffers: it, or another one of its domain, has other settings.
            NotConfirmed: the cluster has no majority; repeat it.
        """
        await self._link.retry(lambda: self._make_stream(wanted), f"stream of {wanted.name!r}", _CREATE_S)
        if any(other.name != wanted.name for other in self.of_stream(wanted.stream)):
            await self._link.retry(
                lambda: keep_queue(self._link, wanted), f"consumer of {wanted.name!r}", _CREATE_S
            )
        there = await self._link.retry(
            lambda: self._make_document(wanted), f"destination {wanted.name!r}", _CREATE_S
        )
        if different := wanted.differences(there):
            raise DestinationDiffers(wanted.name, different)
        self._add(there)
        with contextlib.suppress(OSError, nats.errors.Error):  # others read it within REFRESH_S
            await self._link.client.publish(ANNOUNCEMENTS, wanted.name.encode())
        return there

    async def refresh(self) -> None:
        """Read what is new.

        Which keys there are is asked of the bucket's leader, as the documents are. A consumer, with which the
        library lists them, may run at a copy that is behind, and so not find what was just created.
        """
        async with self._refreshed:
            bucket = await self._link.stream.key_value(BUCKET)
            info = await self._link.stream.stream_info(f"KV_{BUCKET}", subjects_filter=f"{_KEYS}>")
            for key in (subject.removeprefix(_KEYS) for subject in info.state.subjects or {}):
                if key in self._found or key in self._unreadable:
                    continue
                try:
                    entry = await bucket.get(key)
                except nats.js.errors.KeyNotFoundError as exc:
                    if exc.op is None:  # of a primary that is behind: it passes
                        raise
                    continue  # removed by hand, with a mark in its place; it may be made again
                try:
                    found = Destination.of_key(key, entry.value or b"")
                except ValueError as exc:  # of a later release
                    self._unreadable.add(key)
                    log.warning("destination-not-readable", destination=key, problem=str(exc))
                else:
                    self._add(found)

    def _add(self, destination: Destination) -> None:
        if destination.name in self._found:
            return
        self._found[destination.name] = destination
        for listener in list(self._listeners):
            try:
                listener(destination)
            except Exception:  # it keeps no other from the destination
                log.exception("destination-not-taken-in", destination=destination.name)

    async def _make_stream(self, wanted: Destination) -> None:
        config = stream_config(wanted, has_batches=self.has_batches)
        there = await self._stream_of(config)
        fields = ("retention", "max_bytes", "max_msgs", "num_replicas")
        pairs: dict[str, tuple[Any, Any]] = {
            field: (getattr(config, field), getattr(there, field)) for field in fields
        }
        if different := {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}:
            raise DestinationDiffers(wanted.name, different)

    async def _stream_of(self, config: nats.js.api.StreamConfig) -> nats.js.api.StreamConfig:
        """The stream as it is, made if there is none.

        One that has mirrors was there, and is being promoted: with an empty one in its place, what the mirror
        has would be lost.
        """
        name = str(config.name)
        try:
            return (await self._link.stream.stream_info(name)).config
        except nats.js.errors.NotFoundError:
            there = await stream_names(self._link)
            if any(parts is not None and parts[0] == name for parts in map(parts_of, there)):
                raise TimeoutError("it has a mirror: it is being promoted, or is to be") from None
            return (await self._link.make_stream(config)).config

    async def _make_document(self, wanted: Destination) -> Destination:
        bucket = await self._link.stream.key_value(BUCKET)
        try:
            await bucket.create(wanted.name, wanted.encode())
        except nats.js.errors.KeyWrongLastSequenceError:  # another session was first, or a try of ours
            entry = await bucket.get(wanted.name)
            return Destination.parse(entry.value or b"")
        return wanted

    async def _keep_up(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), REFRESH_S)
            self._wake.clear()
            try:
                await asyncio.wait_for(self.refresh(), 2 * ANSWER_S)
            except (TimeoutError, OSError, nats.errors.Error) as exc:
                log.debug("catalogue-not-read", problem=str(exc))  # the next round reads it
            except Exception:  # without this task no destination of later would be found
                log.exception("catalogue-not-read")


def engine_name(destination: Destination, consumer: str) -> str:
    """Consumers of a queue share one of the engine; each subscriber of a topic has its own."""
    who = "queue" if destination.kind is DestinationKind.QUEUE else names.encode(consumer)
    return f"{who}-{names.encode(destination.name)}"


async def keep_queue(link: EngineLink, destination: Destination) -> None:
    """Make the engine's consumer of a queue if there is none; nothing for topics; for ``retry``.

    The first session that receives gives it its own settings (``feed``).
    """
    if destination.kind is not DestinationKind.QUEUE:
        return
    name = engine_name(destination, "")
    try:
        await link.ask(f"CONSUMER.INFO.{destination.stream}.{name}", {})
    except nats.js.errors.NotFoundError:
        config = nats.js.api.ConsumerConfig(
            durable_name=name,
            filter_subject=destination.subject,
            ack_policy=nats.js.api.AckPolicy.EXPLICIT,
            ack_wait=LEAST_ACK_WAIT_S,
            max_ack_pending=SHARED_PENDING,
            max_deliver=-1,
        )
        await link.ask(
            f"CONSUMER.DURABLE.CREATE.{destination.stream}.{name}",
            {"stream_name": destination.stream, "config": config.as_dict(), "action": "create"},
        )


def stream_config(destination: Destination, *, has_batches: bool) -> nats.js.api.StreamConfig:
    """What the engine is asked to make for a destination's domain."""
    is_queue = destination.kind is DestinationKind.QUEUE
    retention = nats.js.api.RetentionPolicy.WORK_QUEUE if is_queue else nats.js.api.RetentionPolicy.INTEREST
    return nats.js.api.StreamConfig(
        name=destination.stream,
        subjects=[names.domain_subjects(destination.domain or destination.name)],
        retention=retention,
        discard=nats.js.api.DiscardPolicy.NEW,
        max_bytes=destination.max_bytes,
        max_msgs=destination.max_messages,
        num_replicas=destination.replicas,
        storage=nats.js.api.StorageType.FILE,
        duplicate_window=DUPLICATES_S,
        allow_atomic=True if has_batches else None,
    )
