"""The thread that reads SQL, so that a slow database delays neither control nor leases.

One *look*: take the newest catalog handed in, judge what is due, read what the snapshot shows (processes,
events), and now and then the policies. What it finds goes into a queue that the main loop empties at each
tick. While the database is away a look fails as a whole, is logged once, and the next one tries again.

Shared with the main loop: ``found`` (a SimpleQueue), ``_catalog`` and ``_policy_wanted`` under ``_lock``,
``_wake``, ``_way_is_free``. All else belongs to this thread.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Final

import structlog

from pmdaemon.errors import SlaError
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.stop import Stop
from sla_server.ownership import Ownership, VolumeClaim
from sla_server.rows import Row, Rows
from sla_server.services.catalog import Catalog
from sla_server.services.config import ServicesConfig
from sla_server.services.control.controller import Controller
from sla_server.services.costs import Fit, NewestFits
from sla_server.services.judging.judge import Judge, Judgement
from sla_server.services.reports import MOST, SINCE_US
from sla_server.services.rows import audit_row, event_row
from sla_server.services.store import SqlReads

log = structlog.get_logger("sql-worker")
SHOWN_EVENTS: Final = 20
LOOK_LIMIT_S: Final = 600.0  # between two breaths: a few statements of SQL, for which SQLite has no limit
AHEAD_US: Final = 86_400 * 1_000_000  # an event further ahead than a day was not raised under a true clock
MORE_S: Final = 0.1
"""In which others get the processor, and dbmanager what was judged."""
WAY_S: Final = 0.1
"""The longest wait for the mail at a time: at 128 slices between two, 64,000 are judged within a minute."""
HOUR_S: Final = 3600
IN_FORCE: Final = ("in-force", "pinned", "rejected-pinned")
"""States of the one policy in force (docs/formats/sql.md)."""
FIRST_MONDAY_S: Final = 4 * 86_400  # 1970-01-05, 00 UTC


@dataclass(frozen=True, slots=True)
class PolicyOrders:
    """What operators want of policies.

    Attributes:
        number: counts changes of the orders since the process started
        pinned: the version to keep, whatever is published
        withdrawn: rolled back since the process started; SQL says it, too, a moment later
    """

    number: int = 0
    pinned: int | None = None
    withdrawn: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """The policy that should be in force in this hour; None if none was ever published.

    Attributes:
        version: of the policy; 0: none, those that were published are rolled back
        published: it is not in force in SQL yet
        hour_of_week: 0 = Monday 00 UTC
        caps: volume to cost rate, None for no cap
        bursts: volume to the seconds of its cap that may pass at once, where that is not the default
        coming, coming_us: caps of the hour after it, and when that hour begins
        costs: what an I/O costs, by backend
        orders: number of the orders it follows
    """

    version: int
    published: bool
    hour_of_week: int
    caps: dict[str, float | None]
    coming: dict[str, float | None] = field(default_factory=dict)
    coming_us: int = 0
    costs: dict[str, Fit] = field(default_factory=dict)
    orders: int = 0
    bursts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SqlState:
    """The result of one look; ``claims``: changed since the look before; ``reports``: not announced yet."""

    judgement: Judgement = field(default_factory=Judgement)
    processes: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    policy_looked: bool = False
    policy: PublishedPolicy | None = None
    claims: list[VolumeClaim] = field(default_factory=list)
    reports: list[Row] = field(default_factory=list)


def hour_of_week(now_us: int) -> int:
    """0..167, Monday 00 UTC is 0."""
    return int((now_us // 1_000_000 - FIRST_MONDAY_S) // HOUR_S % 168)


class SqlWorker:
    """See the module."""

    def __init__(
        self, store: SqlReads, config: ServicesConfig, clock: Clock, ownership: Ownership = "first"
    ) -> None:
        self.found: queue.SimpleQueue[SqlState] = queue.SimpleQueue()
        self._store = store
        self._config = config
        self._clock = clock
        self._judge = Judge(store, config.judge_late_s, self._yield_to_main_loop)
        self._is_open = ownership == "open"
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._way_is_free = threading.Event()
        self._way_is_free.set()
        self._catalog: Catalog | None = None
        self._policy_wanted = True
        self._policy_orders = PolicyOrders()
        self._policy_at_ns = 0
        self._policy_hour = -1
        self._trouble = ""
        self._fits = NewestFits()
        self._claims_version = 0
        self._announced = 0  # number of the newest report that was handed to the main loop
        self._interrupted = False  # the last look read what is shown, but not all that is judged
        self.live_us = 0  # when a cut came last, server time; set by the main loop
        self._start_ends_ns: int | None = None  # while it starts, what others have kept is on its way

    @property
    def trouble(self) -> str:
        """Why the database cannot be read; "" while it can. Thread: any (one reference, read whole)."""
        return self._trouble

    def set_catalog(self, catalog: Catalog) -> None:
        """Judge by these agreements from the next look on. Thread: any."""
        with self._lock:
            self._catalog = catalog

    def request_policy(self) -> None:
        """Look for a new policy version at once. Thread: any."""
        with self._lock:
            self._policy_wanted = True
        self._wake.set()

    def order_policy(self, orders: PolicyOrders) -> None:
        """Follow other orders from the next look on, which is at once. Thread: any."""
        with self._lock:
            self._policy_orders = orders
        self.request_policy()

    def yield_to_main_loop(self, *, to_mail: bool) -> None:
        """Let the main loop go first while more mail waits than it takes at once. Thread: any."""
        if to_mail:
            self._way_is_free.clear()
        else:
            self._way_is_free.set()

    def _yield_to_main_loop(self) -> None:
        watchdog.beat(LOOK_LIMIT_S)
        self._way_is_free.wait(WAY_S)

    def run(self, stop: Stop) -> None:
        """The thread ``sv-sql``; ``wake`` ends its sleep early."""
        while not stop.is_set():
            watchdog.beat(LOOK_LIMIT_S)
            self.poll()
            self._wake.wait(self.pause_s)
            self._wake.clear()

    @property
    def pause_s(self) -> float:
        """Until the next look: short while more is due than one pass judges."""
        return MORE_S if self._judge.has_more else self._config.judge_every_s

    def wake(self) -> None:
        """End the sleep: the process stops. Thread: any."""
        self._wake.set()

    def poll(self) -> None:
        """One look; failures of the database are logged, not raised."""
        try:
            self.found.put(self._read(self._clock.unix_us()))
        except SlaError as exc:
            if not exc.retryable:
                raise
            self._record_away(exc)
        else:
            if self._trouble and not self._interrupted:
                self._trouble = ""
                log.info("database-back")

    def _record_away(self, error: SlaError) -> None:
        if not self._trouble:
            log.warning("database-away", error=str(error), effect="slices and policies wait; control goes on")
        self._trouble = str(error)

    def _read(self, now_us: int) -> SqlState:
        with self._lock:
            catalog, self._catalog = self._catalog, None
            policy_wanted, orders = self._policy_wanted, self._policy_orders
        if catalog is not None:
            try:
                self._judge.set_agreements(catalog.judged(), now_us)
            except SlaError:
                with self._lock:
                    self._catalog = self._catalog or catalog
                raise
        processes, events = (
            self._store.processes(),
            self._store.newest_events(SHOWN_EVENTS, now_us + AHEAD_US),
        )
        claims = [VolumeClaim.of_row(row) for row in self._store.volume_owners(self._claims_version)]
        policy_due = policy_wanted or self._is_policy_due(now_us)
        policy = self._read_policies(orders, now_us) if policy_due else None
        reports = (
            self._store.unannounced_reports(self._announced, now_us - SINCE_US, MOST) if policy_due else []
        )
        if not self._is_open:
            self._judge.set_claims(claims)
        # Last, because what it judges must not be thrown away by a later read that fails.
        judgement = self._judge.run(now_us, self.live_us, now_us + self._start_left_us())
        self._interrupted = judgement.interrupted is not None
        if judgement.interrupted is not None:
            self._record_away(judgement.interrupted)
        self._claims_version = max((claim.version for claim in claims), default=self._claims_version)
        self._announced = max((row["number"] for row in reports), default=self._announced)
        return SqlState(judgement, processes, events, policy_due, policy, claims, reports)

    def _start_left_us(self) -> int:
        """How long gateways may take to dial in, and dbmanager to store what its queue has, from now on.

        As long as a slice waits for a late gateway: what it lacks before is no fault of anybody.
        """
        now_ns = self._clock.monotonic_ns()
        if self._start_ends_ns is None:
            self._start_ends_ns = now_ns + round(self._config.judge_late_s * 1e9)
        return max(0, self._start_ends_ns - now_ns) // 1000

    def _is_policy_due(self, now_us: int) -> bool:
        waited_ns = self._clock.monotonic_ns() - self._policy_at_ns
        return waited_ns >= self._config.policy_look_s * 1e9 or hour_of_week(now_us) != self._policy_hour

    def _read_policies(self, orders: PolicyOrders, now_us: int) -> PublishedPolicy | None:
        hour = hour_of_week(now_us)
        chosen = None if orders.pinned is None else self._store.policy(orders.pinned)
        if chosen is None:  # or the pinned one is of a database that was restored since
            chosen = self._store.usable_policy(orders.withdrawn)
        look = None if not orders.number else PublishedPolicy(0, False, hour, {}, orders=orders.number)
        if chosen is not None:
            version = int(chosen["version"])
            caps, bursts = self._store.policy_caps(version, hour)
            coming_us = (now_us // 1_000_000 // HOUR_S + 1) * HOUR_S * 1_000_000
            coming, _ = self._store.policy_caps(version, hour_of_week(coming_us))
            costs = self._fits.up_to(version, self._store.policies)
            is_new = chosen["state"] not in IN_FORCE
            look = PublishedPolicy(
                version, is_new, hour, caps, coming, coming_us, costs, orders.number, bursts
            )
        with self._lock:
            self._policy_wanted = self._policy_orders is not orders
        self._policy_at_ns = self._clock.monotonic_ns()
        self._policy_hour = hour
        return look


# -- The offline policy in force: its version, since when, and its caps of the hour, passed to the controller


class PolicyInForce:
    """See the module. ``version`` is 0 before the first policy. Belongs to the main loop.

    Attributes:
        orders: what operators want now; a look that followed others is of the past
    """

    def __init__(self, version: int, applied_us: int, pinned: int | None = None) -> None:
        self.version = version
        self.orders = PolicyOrders(pinned=pinned)
        self._applied_us = applied_us
        self._followed = 0  # number of the orders under which the version was chosen
        self._handed: tuple[int, int] | None = None

    def pin(self, version: int | None) -> PolicyOrders:
        """Keep this version, which is rolled back no more; None: the newest one again."""
        withdrawn = self.orders.withdrawn - {version}
        self.orders = PolicyOrders(self.orders.number + 1, version, withdrawn)
        return self.orders

    def roll_back(self) -> PolicyOrders:
        """Never again the version in force, unless it is pinned."""
        withdrawn = self.orders.withdrawn | {self.version}
        self.orders = PolicyOrders(self.orders.number + 1, None, withdrawn)
        return self.orders

    def apply(self, found: PublishedPolicy, controller: Controller, now_us: int) -> Rows:
        """Put a newer version, or the caps of a new hour, in force; returns what to record.

        A look that read SQL before our own record arrived there still says ``published``; the version tells.
        """
        orders = self.orders
        if found.orders != orders.number or (
            found.version < self.version and self._followed == orders.number  # a database that was restored
        ):
            return []
        self._followed = orders.number
        if self._handed != (found.version, found.hour_of_week):
            self._handed = (found.version, found.hour_of_week)
            controller.set_policy_caps(found.version or None, found.caps, found.bursts)
            controller.set_coming_caps(found.coming, found.coming_us)
        if found.version == self.version:
            return []
        before, self.version, self._applied_us = self.version, found.version, now_us
        if not found.published and found.version:
            return []
        capped = sum(cap is not None for cap in found.caps.values())
        text = f"policy version {found.version} is in force; volumes that it caps this hour: {capped}"
        if not found.version:
            text = f"no policy is in force: version {before} was rolled back, and there is none before it"
        is_pinned = orders.pinned == found.version
        states = [{"version": found.version, "state": "pinned" if is_pinned else "in-force"}]
        details = {"version": found.version, "before": before or None, "capped_now": capped}
        return [
            *(("policies", state) for state in states if found.version),
            event_row("policy-applied", "info", "policy", str(found.version), text, now_us, details),
            audit_row(
                "services",
                "policy-applied",
                str(found.version),
                now_us,
                before={"version": before or None},
                after={"version": found.version or None},
            ),
        ]

    def shown(self) -> Row | None:
        """For the live snapshot."""
        if not self.version:
            return None
        pinned = self.orders.pinned
        return {"version": self.version, "applied_us": self._applied_us, "pinned": pinned == self.version}
