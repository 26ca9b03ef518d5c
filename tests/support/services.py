"""Stand-ins for what surrounds the services' core: SQL, mailboxes, the controller."""

from __future__ import annotations

import queue
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from pmdaemon.errors import SlaError
from pmdaemon.mailbox.sender import MailboxSender
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.cut import OUTSTANDING_COLUMNS
from pmdaemon.wire.histogram import BUCKETS, bucket_of_ns
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.rates import Rates
from sla_server.agreements.promise import Promise
from sla_server.db.queries.slice_inputs import SliceInputs
from sla_server.db.schema import FAILED, LATE_SUMS
from sla_server.events.routing import RoutingFile
from sla_server.ownership import Ownership
from sla_server.rows import Row
from sla_server.services.catalog import Catalog
from sla_server.services.config import ServicesConfig
from sla_server.services.control.decisions import Decision
from sla_server.services.control.manual import ManualEffect
from sla_server.services.core import Services
from sla_server.services.documents import DocumentReader
from sla_server.services.record_sender import RecordSender
from sla_server.services.sql_worker import PolicyOrders, SqlState
from sla_server.services.startup import Start
from sla_server.storage_resources.manager import StorageManager
from sla_server.storage_resources.pools import StoredPools
from tests.support.fake_mailbox import FakeMailbox
from tests.support.judged import inputs_of

MINUTE_US = 60_000_000
START_US = 1_798_761_600_000_000  # 2027-01-01 00:00 UTC, a Friday
GATEWAY = "11111111-2222-3333-4444-555555555555"


class Away(SlaError):
    """The database is away."""

    retryable = True


class FakeStore:
    """Tables as lists; ``away`` makes the named methods (or all, ``{"*"}``) fail."""

    def __init__(self) -> None:
        self.tables: dict[str, list[Row]] = {}
        self.rollups: list[Row] = []
        self.missed: list[Row] = []
        self.coverage: list[Row] = []
        self.plane_gaps: list[Row] = []
        self.planes: dict[int, str] = {}
        self.progress_us: dict[str, int] = {}
        self.caps: dict[tuple[int, int], dict[str, float | None]] = {}
        self.away: set[str] = set()
        self.reads: list[str] = []
        self.of_space_job: tuple[int, list[Row]] | None = None
        self.closed = False

    def _read(self, name: str) -> None:
        self.reads.append(name)
        if self.away & {name, "*"}:
            raise Away("no database")

    def _table(self, name: str, method: str) -> list[Row]:
        self._read(method)
        return [dict(row) for row in self.tables.get(name, [])]

    def keep(self, rows: Iterable[tuple[str, Row]]) -> None:
        """What dbmanager does with RECORD rows, by natural key for the tables tests read back."""
        keys = {"slices": ("name", "objective", "start_us", "revision"), "agreements": ("name", "version"),
                "documents": ("kind", "name", "version")}  # fmt: skip
        for table, row in rows:
            stored = self.tables.setdefault(table, [])
            names = keys.get(table, ())
            old = [other for other in stored if names and all(other[n] == row[n] for n in names)]
            if old:
                old[0].update(row)
            else:
                stored.append(dict(row))

    def rollup_s(self) -> int:
        self._read("rollup_s")
        return 60

    def agreements(self) -> list[Row]:
        return self._table("agreements", "agreements")

    def agreement_versions(self, name: str) -> list[Row]:
        rows = [row for row in self._table("agreements", "agreement_versions") if row["name"] == name]
        return sorted(rows, key=lambda row: int(row["version"]))

    def documents(self) -> list[Row]:
        return self._table("documents", "documents")

    def volumes(self) -> list[Row]:
        return self._table("volumes", "volumes")

    def volume_owners(self, after_version: int = 0) -> list[Row]:
        rows = self._table("volume_owners", "volume_owners")
        return [row for row in rows if row["version"] > after_version]

    def gateways(self) -> list[Row]:
        return self._table("gateways", "gateways")

    def streams(self) -> list[Row]:
        return self._table("streams", "streams")

    def stream_count(self) -> int:
        return len(self._table("streams", "stream_count"))

    def progress(self) -> dict[str, int]:
        self._read("progress")
        return dict(self.progress_us)

    def throttles_in_force(self) -> list[Row]:
        return self._table("throttles", "throttles_in_force")

    def open_episodes(self) -> list[Row]:
        return [row for row in self._table("episodes", "open_episodes") if row["closed_us"] is None]

    def slices(self, name: str, objective: str, from_us: int, to_us: int) -> list[Row]:
        newest: dict[int, Row] = {}
        for row in self._table("slices", "slices"):
            if (row["name"], row["objective"]) == (name, objective) and from_us <= row["start_us"] < to_us:
                old = newest.get(row["start_us"])
                if old is None or row["revision"] > old["revision"]:
                    newest[row["start_us"]] = row
        return [newest[start] for start in sorted(newest)]

    def slice_inputs(
        self, stream_ids: Collection[int], gateway_ids: Collection[str], from_us: int, to_us: int
    ) -> SliceInputs:
        self._read("slice_inputs")

        def within(rows: list[Row], key: str, values: Collection[Any]) -> list[Row]:
            return [row for row in rows if from_us <= row["slot_us"] < to_us and row[key] in values]

        gaps = within(self.plane_gaps, "gateway_id", gateway_ids)
        return inputs_of(
            within(self.rollups, "stream_id", stream_ids),
            within(self.missed, "stream_id", stream_ids),
            within(self.coverage, "gateway_id", gateway_ids),
            gaps,
            self.planes if gaps else {},
        )

    def outages(self, from_us: int, to_us: int) -> list[Row]:
        rows = self._table("outages", "outages")
        return [row for row in rows if row["from_us"] < to_us and row["to_us"] > from_us]

    def late_cuts(self, after_us: int, from_us: int) -> list[Row]:
        rows = self._table("late_cuts", "late_cuts")
        return [row for row in rows if row["noted_us"] > after_us and row["slot_us"] >= from_us]

    def has_event(self, event_id: str, at_us: int) -> bool:
        return any(row["event_id"] == event_id for row in self._table("events", "has_event"))

    def newest_events(self, limit: int, until_us: int) -> list[Row]:
        rows = [row for row in self._table("events", "newest_events") if row["at_us"] <= until_us]
        return sorted(rows, key=lambda row: -row["at_us"])[:limit]

    def storage_faults(self, since_us: int) -> dict[str, str]:
        newest: dict[str, Row] = {}
        for row in sorted(self._table("events", "storage_faults"), key=lambda row: row["at_us"]):
            if row["kind"] in ("storage-fault", "storage-recovered") and row["at_us"] >= since_us:
                newest[row["subject"]] = row
        begun = (row for row in newest.values() if row["kind"] == "storage-fault")
        return {row["subject"]: row["details"].get("fault", "") for row in begun}

    def processes(self) -> list[Row]:
        return self._table("processes", "processes")

    def last_audit(self, action: str) -> Row | None:
        rows = [row for row in self._table("audit", "last_audit") if row["action"] == action]
        return max(rows, key=lambda row: row["at_us"]) if rows else None

    def policies(self, before: int | None = None) -> list[Row]:
        rows = sorted(self._table("policies", "policies"), key=lambda row: -row["version"])
        return [row for row in rows if before is None or row["version"] < before][:20]

    def policy(self, version: int) -> Row | None:
        return next((row for row in self._table("policies", "policies") if row["version"] == version), None)

    def unannounced_reports(self, after: int, since_us: int, limit: int) -> list[Row]:
        rows = self._table("reports", "unannounced_reports")
        return [row for row in rows if row["number"] > after and row["issued_us"] >= since_us][:limit]

    def usable_policy(self, but: Collection[int] = ()) -> Row | None:
        usable = ("published", "superseded", "in-force", "pinned")
        rows = [row for row in self._table("policies", "policies") if row["state"] in usable]
        return max((r for r in rows if r["version"] not in but), key=lambda r: r["version"], default=None)

    def policy_in_force(self) -> Row | None:
        rows = self._table("policies", "policies")
        in_force = ("in-force", "pinned", "rejected-pinned")
        return next((row for row in rows if row["state"] in in_force), None)

    def policy_caps(
        self, version: int, hour_of_week: int
    ) -> tuple[dict[str, float | None], dict[str, float]]:
        self._read("policy_caps")
        return self.caps.get((version, hour_of_week), {}), {}

    def stored_pools(self, days_from_us: int) -> StoredPools:
        days = [row for row in self._table("pool_days", "stored_pools") if row["day_us"] >= days_from_us]
        return StoredPools(
            list(self.tables.get("pools", [])), days, list(self.tables.get("pool_volumes", []))
        )

    def space_results(self) -> tuple[int, list[Row]] | None:
        self._read("space_results")
        return self.of_space_job

    def pool_keys(self) -> list[tuple[str, str]]:
        rows = self._table("pool_days", "pool_keys")
        return list(dict.fromkeys((row["owner"], row["pool"]) for row in rows))

    def pool_days(self, from_us: int, owner: str, pool: str) -> list[Row]:
        rows = self._table("pool_days", "pool_days")
        of_pool = [row for row in rows if (row["owner"], row["pool"]) == (owner, pool)]
        return [row for row in of_pool if row["day_us"] >= from_us]

    def close(self) -> None:
        self.closed = True

    # Filling it.

    def add_stream(
        self,
        stream_id: int = 1,
        volume: str = "vol-1",
        client: str = "c",
        gateway: str = GATEWAY,
        first_us: int = 0,
    ) -> None:
        self.tables.setdefault("streams", []).append(
            {"stream_id": stream_id, "gateway_id": gateway, "volume": volume, "client": client,
             "backend": "b", "first_seen_us": first_us}
        )  # fmt: skip

    def add_slot(
        self, slot_us: int, reads: int = 600, missed: int = 0, stream_id: int = 1, gateway: str = GATEWAY,
        covered_us: int = MINUTE_US, gap_cuts: int = 0, threshold_us: int = 12_000, gap_ios: int = 0,
        **more: int,
    ) -> None:  # fmt: skip
        """One minute of one stream, ingested: rollup, missed, coverage and progress.

        ``more``: further columns of the rollup, or of what is compared with the limit.
        """
        hist = np.zeros(BUCKETS, dtype=np.int64)
        hist[bucket_of_ns(5_000_000)] = reads
        late = {name: more.pop(name, 0) for name in LATE_SUMS[2:]}
        if reads or more or any(late.values()):
            self.rollups.append(
                {"slot_us": slot_us, "stream_id": stream_id, "arrived": reads, "reads": reads, "writes": 0,
                 "read_bytes": reads * 4096, "write_bytes": 0, "hist_read": hist,
                 "hist_write": np.zeros(BUCKETS, dtype=np.int64), "lat_sum_us": reads * 5_000,
                 **dict.fromkeys(("errors", *FAILED, *OUTSTANDING_COLUMNS, "held_max", "inflight_max"), 0),
                 "covered_us": covered_us, **more}
            )  # fmt: skip
            self.missed.append(
                {"slot_us": slot_us, "stream_id": stream_id, "io": 0, "threshold_us": threshold_us,
                 "counted": reads, "missed": missed, **late}
            )  # fmt: skip
        self.coverage.append(
            {
                "slot_us": slot_us,
                "gateway_id": gateway,
                "covered_us": covered_us,
                "cuts": 60,
                "gap_cuts": gap_cuts,
                "gap_ios": gap_ios,
            }
        )
        if slot_us + MINUTE_US <= self.progress_us.get(gateway, 0):
            self.add_late(slot_us, gateway)
        self.progress_us[gateway] = max(self.progress_us.get(gateway, 0), slot_us + MINUTE_US)

    def add_late(self, slot_us: int, gateway: str = GATEWAY) -> None:
        """What ingest notes of cuts that may come after their slice was judged."""
        rows = self.tables.setdefault("late_cuts", [])
        noted_us = max([*self.progress_us.values(), *(row["noted_us"] + 1 for row in rows)])
        rows.append({"slot_us": slot_us, "gateway_id": gateway, "noted_us": noted_us})


class FakeFaults:
    """``restored``: faults that a process before has reported."""

    def __init__(self) -> None:
        self.restored: dict[str, str] = {}

    def restore(self, reported: Mapping[str, str], now_ns: int) -> None:
        self.restored |= reported


class FakeWholeClients:
    """See ``whole_clients.WholeClients``; answers as the controller does of groups."""

    def __init__(self, controller: FakeController) -> None:
        self._controller = controller

    def why_no_cap(self, client: str) -> tuple[int, str, str] | None:
        return self._controller.group_refusal

    def effect(self, client: str, rates: Rates) -> ManualEffect:
        return self._controller.group_effect({}, rates)


class FakeManualCauses:
    """What is said of throttles set by hand when something is applied: names of the promises, if any."""

    def __init__(self) -> None:
        self.is_below = False

    def below(self, promises: Collection[Promise]) -> list[str]:
        names = ", ".join("/".join(promise.key) for promise in promises)
        return [f"by hand below {names}"] if self.is_below and names else []


class FakeController:
    """Notes every call; ``decisions`` are returned by the next tick, ``view`` by snapshot."""

    def __init__(self) -> None:
        self.faults = FakeFaults()
        self.calls: list[tuple[str, Any]] = []
        self.decisions: list[Decision] = []
        self.released: list[str] = []
        self.slas: list[Row] = []
        self.only_seen: set[str] = set()
        self.broken: tuple[str, ...] = ()
        self.held: Rates | None = None
        self.refusal: tuple[str, str] | None = None
        self.group_refusal: tuple[int, str, str] | None = None
        self.manual_causes = FakeManualCauses()
        self.whole_clients = FakeWholeClients(self)

    def manual_effect(self, volume: str, *, client: str, **rates: float | None) -> ManualEffect:
        asked = Rates(rates.get("ops_per_s"), rates.get("bytes_per_s"), rates.get("cost_per_s"))
        return ManualEffect(self.held or asked, self.held is not None, self.broken)

    def group_effect(self, weights: Mapping[str, float], rates: Rates) -> ManualEffect:
        return ManualEffect(self.held or rates, self.held is not None, self.broken)

    def why_no_group_cap(self, group: str, volumes: Iterable[str]) -> tuple[int, str, str] | None:
        return self.group_refusal

    def can_throttle(self, volume: str) -> bool:
        return volume not in self.only_seen

    def why_no_client_cap(self, volume: str, client: str) -> tuple[str, str] | None:
        return self.refusal

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, (*args, *kwargs.values())))

        return note

    def backends(self) -> list[str]:
        return ["array-1", "array-2"]

    def volumes_by_backend(self) -> dict[str, list[str]]:
        return {"array-1": ["vol-1", "vol-2"]}

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def last(self, name: str) -> Any:
        return next(args for called, args in reversed(self.calls) if called == name)

    def manual_release(
        self,
        volume: str | None = None,
        throttle_id: str | None = None,
        who: str = "",
        client: str | None = None,
        group: str | None = None,
    ) -> list[str]:
        self.calls.append(("manual_release", (volume, throttle_id, who, client, *([group] if group else []))))
        return self.released

    def tick(self, now_ns: int, unix_us: int) -> list[Decision]:
        decisions, self.decisions = self.decisions, []
        return decisions

    def snapshot(self, unix_us: int, most: int) -> dict[str, Any]:
        return {"gateways": [], "volumes": [], "slas": self.slas, "throttles": [], "backends": []}

    def promise_states(self, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Row]:
        found = {(row["name"], row["objective"]): row for row in self.slas}
        return {key: found[key] for key in keys if key in found}


class FakeSqlWorker:
    def __init__(self) -> None:
        self.found: queue.SimpleQueue[SqlState] = queue.SimpleQueue()
        self.catalog: Catalog | None = None
        self.wanted = 0
        self.trouble = ""
        self.orders = PolicyOrders()

    def set_catalog(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def request_policy(self) -> None:
        self.wanted += 1

    def order_policy(self, orders: PolicyOrders) -> None:
        self.orders = orders


class Bench:
    """A core with everything around it faked, and the hands of the clock."""

    def __init__(
        self,
        start: Start | None = None,
        ownership: Ownership = "first",
        routing: RoutingFile | None = None,
        storage: StorageManager | None = None,
    ) -> None:
        self.clock = FakeClock(unix_us=START_US)
        self.main, self.app = FakeMailbox(), FakeMailbox()
        self.controller, self.sql_worker, self.documents = FakeController(), FakeSqlWorker(), DocumentReader()
        config = ServicesConfig()
        self.record_sender = RecordSender(self.main, "test", config.outbox_limit_bytes)
        outbox = MailboxSender({"*": self.main, "appserver": self.app}, 1 << 20)
        start = start or Start()
        self.core = Services(
            config,
            self.controller,
            self.sql_worker,
            self.documents,
            outbox,
            self.record_sender,
            start,
            self.clock,
            ownership,
            routing=routing,
            storage=storage,
        )

    def message(self, kind: Kind, header: dict[str, Any], blob: bytes = b"", sender: str = "pair-0") -> None:
        payload = frame.encode(kind, header, blob)
        self.core.on_message(sender, payload, self.clock.monotonic_ns(), self.clock.unix_us())

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.core.tick(self.clock.monotonic_ns(), self.clock.unix_us())

    def request(self, op: str, body: Any, req: str = "r1") -> None:
        header = {"req": req, "op": op, "who": "ann", "body": body}
        self.message(Kind.REQUEST, header, sender="appserver")
        self.documents.step()
        self.tick()

    def records(self) -> list[tuple[str, Row]]:
        """Rows posted to dbmanager since the last call."""
        return [
            (table, row) for _, header in self.main.take_posted(Kind.RECORD) for table, row in header["rows"]
        ]

    def confirm(self, ok: bool = True, error: str = "") -> list[tuple[str, Row]]:
        """dbmanager answers everything posted; returns the rows."""
        rows = []
        for _, header in self.main.take_posted(Kind.RECORD):
            rows += [(table, row) for table, row in header["rows"]]
            self.message(Kind.RECORDED, {"req": header["req"], "ok": ok, "error": error}, sender="dbmanager")
        self.tick()
        return rows

    def answers(self) -> list[dict[str, Any]]:
        return [header for _, header in self.app.take_posted(Kind.RESPONSE)]
