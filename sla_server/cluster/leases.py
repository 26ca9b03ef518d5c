"""Leases: which of several servers does what only one may do, and the number that tells its terms apart.

A lease is a record in the cluster that its holder writes again (*renews*) before it lapses:

    {"holder": "n1", "fence": 1795861200, "lease_s": 6.0, "is_given_up": false, "page": "https://sla-1:8411",
     "links": "192.0.2.1:7412", "successor": "", "gave_up": "n2", "why": "has not reached the database ..."}

``fence`` rises with each holder. Whatever the holder writes elsewhere carries it, and the place that is
written to (``sla_server.db.fence``) refuses a lower one than it has seen. That is what keeps a former holder
out; the times below only keep two servers from trying at once.

Theory of operation. The engine numbers each write of a key (its *revision*), and stores one only if the
revision before it is the one its writer has read. So of two that want the same lease one gets it.

    holder    holds until ``lease_s`` after it *began* to write the newest record that was stored
    others    take it when they have seen the same revision for ``lease_s`` and a margin, or a record that is
              given up, if it is to no other one; counted from when they *had read* it first

Both are of each one's own clock since its boot, which goes on while a machine sleeps; no two are compared. A
holder's time began before the others could see the record, so it ends first, as long as clocks run equally
fast within ``MARGIN_RATIO``.
An answer that is lost leaves a record that its writer does not know to be stored: it reads, and finds itself.

A reading may be old, of a copy that lags. Then what is written with it is refused, and read again.

What a crash can leave: a record that lapses. A bucket that was lost with all nodes: fences begin at the
seconds of the clock, so the next one is still higher than all before it, unless the clock has gone back by
years; then SQL refuses the new holder, and says so.

``ClusterLease`` is pure. ``LeaseKeeper`` is a task of the node's agent; thread ``node-agent``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol

import nats.errors
import nats.js.api
import nats.js.errors
import structlog
from nats.aio.client import Client

from pmdaemon.runtime.clock import Clock, Deadline, boot_ns
from sla_server.cluster.errors import UNREADABLE, ClusterError, ClusterRefused
from sla_server.cluster.giving_up import GivingUp

log = structlog.get_logger("cluster")
BUCKET: Final = "SLA_LEASES"
ACTING: Final = "gateways"
"""Name of the lease whose holder polls all gateways, judges, controls and writes (``db.fence``)."""
MARGIN_RATIO: Final = 0.25
"""Of ``lease_s``: what others wait beyond it. Clocks of machines differ by some 0.01 %."""
FORSAKEN_LEASES: Final = 10
"""What nobody has taken for so many of ``lease_s``, a server that rests takes: better than none that acts."""
RENEWALS: Final = 3  # in ``lease_s``: two may fail
LOOKS: Final = 6  # in ``lease_s``, of those that wait
STEP_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What is stored of a lease.

    Attributes:
        holder: the node of the server that has it.
        fence: of its term.
        lease_s: how long it holds without being renewed.
        is_given_up: it was handed back; the next one need not wait.
        page: where the holder's page is; "": not known, as of a former release.
        links: where the holder takes agents that others forward; "": it takes none.
        successor: to whom it is given up; "": to any.
        gave_up: the node that gave it up to the holder because it could not act (``giving_up``); "": none.
        why: it did.
    """

    holder: str
    fence: int
    lease_s: float
    is_given_up: bool = False
    page: str = ""
    links: str = ""
    successor: str = ""
    gave_up: str = ""
    why: str = ""

    def encode(self) -> bytes:
        """As the value of the key."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def parse(cls, data: bytes) -> LeaseRecord:
        """From the value.

        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(data)
            return cls(
                str(found["holder"]),
                int(found["fence"]),
                float(found["lease_s"]),
                bool(found["is_given_up"]),
                str(found.get("page", "")),
                *(str(found.get(name, "")) for name in ("links", "successor", "gave_up", "why")),
            )
        except UNREADABLE as exc:
            raise ValueError(f"no record of a lease: {exc!r}") from exc


class ClusterLease:
    """One lease as one server sees it; see the module. Pure.

    Args:
        holder: this server's node.
        lease_s: how long it is to hold without a renewal.
        page: of this server.
        links: of this server.

    Attributes:
        record: as seen last; None if there was none.
        revision: of it, 0 for none.
        heard_ns: when the cluster said so last; 0: never.
    """

    def __init__(self, holder: str, lease_s: float, page: str = "", links: str = "") -> None:
        self._holder = holder
        self._lease_s = lease_s
        self._page = page
        self._links = links
        self._seen_ns = 0
        self._until_ns = 0
        self.heard_ns = 0
        self.record: LeaseRecord | None = None
        self.revision = 0

    @property
    def until_ns(self) -> int:
        """Until when it is held; of the past if it is not."""
        return self._until_ns

    def is_held(self, now_ns: int) -> bool:
        """Whether this server may act by it."""
        return now_ns < self._until_ns

    def saw(self, record: LeaseRecord | None, revision: int, now_ns: int) -> None:
        """What is stored, as it was read; ``now_ns``: when the answer was there."""
        if revision != self.revision or record is None:
            self._seen_ns = now_ns
        self.record, self.revision, self.heard_ns = record, revision, now_ns
        if record is None or record.holder != self._holder or record.is_given_up:
            self._until_ns = 0

    def next_record(self, now_ns: int, unix_s: int, *, may_take: bool = True) -> LeaseRecord | None:
        """What to store in place of ``record``; None: nothing now.

        Args:
            now_ns: of the machine's clock since boot.
            unix_s: the first fence of a cluster.
            may_take: whether the server does not rest; else it takes what nobody else has taken for long.
        """
        record = self.record
        if record is not None and record.holder == self._holder and not record.is_given_up:
            return replace(record, lease_s=self._lease_s, page=self._page, links=self._links)
        if record is None:
            return self._own(unix_s) if may_take else None
        waited_ns = now_ns - self._seen_ns
        if not may_take and waited_ns < FORSAKEN_LEASES * record.lease_s * 1e9:
            return None
        is_offered = record.is_given_up and record.successor in ("", self._holder)
        if is_offered or waited_ns >= record.lease_s * (1 + MARGIN_RATIO) * 1e9:
            own = self._own(max(record.fence + 1, unix_s))
            return replace(own, gave_up=record.gave_up, why=record.why) if record.is_given_up else own
        return None

    def given_up(self, successor: str = "", why: str = "") -> LeaseRecord | None:
        """What to store to hand it back; None if it is another's. It is not held from now on.

        Args:
            successor: who could act; "": any.
            why: this server cannot; "": it could, and is stopped.
        """
        self._until_ns = 0
        record = self.record
        if record is None or record.holder != self._holder or record.is_given_up:
            return None
        gave_up = self._holder if why else ""
        return replace(record, is_given_up=True, successor=successor, gave_up=gave_up, why=why)

    def stored(self, record: LeaseRecord, revision: int, sent_ns: int) -> None:
        """``record`` was stored; ``sent_ns``: before it was sent."""
        self.record, self.revision, self._seen_ns, self.heard_ns = record, revision, sent_ns, sent_ns
        self._until_ns = 0 if record.is_given_up else sent_ns + round(record.lease_s * 1e9)

    def wait_s(self) -> float:
        """Until the next round."""
        record = self.record
        own = record is not None and record.holder == self._holder and not record.is_given_up
        return self._lease_s / (RENEWALS if own else LOOKS)

    def _own(self, fence: int) -> LeaseRecord:
        return LeaseRecord(self._holder, fence, self._lease_s, page=self._page, links=self._links)


class LeaseStore(Protocol):
    """Where the record is."""

    async def read(self, name: str) -> tuple[LeaseRecord | None, int]:
        """The record and its revision; None and the revision to write with if there is none."""

    async def write(self, name: str, record: LeaseRecord, revision: int) -> int | None:
        """Store it in place of that revision; the new one, None if another was stored meanwhile."""


class BucketStore:
    """A bucket of the cluster.

    Args:
        client: of the product's account.
        replicas: of the bucket, if it is made here.
        limit_s: for each answer.
    """

    def __init__(self, client: Client, replicas: int, limit_s: float) -> None:
        self._stream = client.jetstream(timeout=limit_s)
        self._replicas = replicas
        self._bucket: Any = None

    async def read(self, name: str) -> tuple[LeaseRecord | None, int]:
        """See ``LeaseStore``.

        Raises:
            nats.errors.Error, OSError, TimeoutError: the cluster does not say.
            ClusterRefused: what is there is no lease.
        """
        bucket = await self._open()
        try:
            entry = await bucket.get(name)
        except nats.js.errors.KeyNotFoundError as exc:  # a key that was deleted has a revision, too
            return None, int(exc.entry.revision or 0) if exc.entry else 0
        try:
            return LeaseRecord.parse(entry.value or b""), int(entry.revision or 0)
        except ValueError as exc:
            raise ClusterRefused(
                f"key {name} of the bucket {BUCKET}: {exc}. Delete the key; the lease is taken again then"
            ) from exc

    async def write(self, name: str, record: LeaseRecord, revision: int) -> int | None:
        """See ``LeaseStore``.

        Raises:
            nats.errors.Error, OSError, TimeoutError: perhaps stored.
        """
        bucket = await self._open()
        try:
            return int(await bucket.update(name, record.encode(), revision))
        except nats.js.errors.KeyWrongLastSequenceError:
            return None

    async def _open(self) -> Any:
        if self._bucket is None:
            try:
                self._bucket = await self._stream.key_value(BUCKET)
            except nats.js.errors.BucketNotFoundError:
                config = nats.js.api.KeyValueConfig(bucket=BUCKET, history=1, replicas=self._replicas)
                self._bucket = await self._stream.create_key_value(config)
        return self._bucket


class LeaseKeeper:
    """Takes a lease when it is free, and renews it.

    Args:
        name: of the lease.
        lease: its state.
        clock: for the first fence.
        publish: called after each round and each failure.
        now_ns: the clock that decides.
        giving_up: whether this server gives it up by itself, and may take it.
    """

    def __init__(
        self,
        name: str,
        lease: ClusterLease,
        clock: Clock,
        publish: Callable[[ClusterLease], None],
        now_ns: Callable[[], int] = boot_ns,
        giving_up: GivingUp | None = None,
    ) -> None:
        self._giving_up = giving_up or GivingUp(0)
        self._name = name
        self._lease = lease
        self._clock = clock
        self._publish = publish
        self._now_ns = now_ns
        self._is_known = False

    @property
    def is_due(self) -> bool:
        """Whether the lease is to be handed back now."""
        return self._giving_up.is_due

    async def round(self, store: LeaseStore) -> None:
        """Read if need be; store what is to be stored.

        Raises:
            ClusterError, nats.errors.Error, OSError, TimeoutError: the cluster does not say; come again.
        """
        lease = self._lease
        was_held = lease.is_held(self._now_ns())
        try:
            if not was_held or not self._is_known:
                record, revision = await store.read(self._name)
                lease.saw(record, revision, self._now_ns())
            await self._store(store, self._next_record())
        except BaseException:
            self._is_known = False
            raise
        finally:
            self._log_change(was_held)
            self._publish(lease)

    async def give_up(self, store: LeaseStore) -> None:
        """Hand it back, if it is held.

        Raises:
            ClusterError, nats.errors.Error, OSError, TimeoutError: the others wait until it lapses.
        """
        try:
            await self._store(store, self._lease.given_up())
        finally:
            self._publish(self._lease)

    def _next_record(self) -> LeaseRecord | None:
        lease, giving_up = self._lease, self._giving_up
        if giving_up.is_due:
            if (record := lease.given_up(giving_up.successor, giving_up.reason)) is not None:
                return record
            giving_up.handed_back(self._clock.monotonic_ns())
        return lease.next_record(self._now_ns(), self._unix_s(), may_take=giving_up.may_take)

    async def _store(self, store: LeaseStore, record: LeaseRecord | None) -> None:
        if record is None:
            return
        sent_ns = self._now_ns()
        revision = await store.write(self._name, record, self._lease.revision)
        self._is_known = revision is not None
        if revision is not None:
            self._lease.stored(record, revision, sent_ns)

    def _log_change(self, was_held: bool) -> None:
        is_held = self._lease.is_held(self._now_ns())
        if is_held != was_held:
            record = self._lease.record
            log.warning(
                "lease-held" if is_held else "lease-lost",
                lease=self._name,
                fence=record.fence if record else None,
                holder=record.holder if record else None,
            )

    def _unix_s(self) -> int:
        return self._clock.unix_us() // 1_000_000


class LeaseTask:
    """Rounds of a keeper, as a task of the node's agent (``NodeAgent.add_task``)."""

    def __init__(self, keeper: LeaseKeeper, lease: ClusterLease, replicas: int, lease_s: float) -> None:
        self._keeper = keeper
        self._lease = lease
        self._replicas = replicas
        self._lease_s = lease_s
        self._limit_s = lease_s / RENEWALS
        self._store: BucketStore | None = None
        self._failing_ns = 0  # since when; 0: the last round was in order
        self._said = set[str]()  # problems of the rounds that fail; those of an outage come by turns

    async def run(self, client: Client) -> None:
        """Until a round fails: the agent comes again, perhaps with another connection."""
        self._store = BucketStore(client, self._replicas, self._limit_s)
        while True:
            try:
                await asyncio.wait_for(self._keeper.round(self._store), 2 * self._limit_s)
            except (ClusterError, OSError, TimeoutError, nats.errors.Error) as exc:
                self.failed(exc)
                raise
            self._failing_ns = 0
            self._said.clear()
            await self._wait()

    async def _wait(self) -> None:
        """Until the next round, which comes at once when the lease is to be handed back."""
        deadline = Deadline(self._lease.wait_s())
        while not deadline.passed:
            await asyncio.sleep(min(STEP_S, deadline.left_s()))
            if self._keeper.is_due:
                return

    def failed(self, exc: Exception) -> None:
        """Say so once it matters: rounds fail for longer than a lease, or as they will fail again."""
        now_ns, problem = boot_ns(), str(exc) or type(exc).__name__
        self._failing_ns = self._failing_ns or now_ns
        lasts = isinstance(exc, ClusterRefused) or now_ns - self._failing_ns > self._lease_s * 1e9
        if lasts and problem not in self._said:
            self._said.add(problem)
            log.warning(
                "lease-not-known", problem=problem, effect="this server can neither act nor take over"
            )

    async def end(self) -> None:
        """Hand the lease back, before the connection ends."""
        if self._store is not None:
            with contextlib.suppress(ClusterRefused, OSError, TimeoutError, nats.errors.Error):
                await asyncio.wait_for(self._keeper.give_up(self._store), self._limit_s)
