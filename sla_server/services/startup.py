"""What the services process takes up again when it starts, read from SQL.

A RECORD is durable in dbmanager's queue before it is in SQL. So that nothing recorded by the process before
us is overlooked, we first record an event of our own, and read only when that event has come through: the
queue has one consumer and keeps the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pmdaemon.runtime.clock import Clock
from sla_server.agreements.thresholds import CGROUP_PREFIX, GROUP_PREFIX, HOST_PREFIX, QEMU_PREFIX
from sla_server.agreements.volume_labels import stored_labels
from sla_server.ownership import VolumeClaim
from sla_server.rows import Row, Rows
from sla_server.services import catalog as catalogs
from sla_server.services.catalog import Catalog
from sla_server.services.control.windows import RETIRED_S
from sla_server.services.requests import BACKEND_MODES, POLICY_MODE
from sla_server.services.rows import event_row, identity
from sla_server.services.sql_worker import AHEAD_US, SHOWN_EVENTS
from sla_server.services.store import SqlReads
from sla_server.storage_resources.pools import DAY_US, StoredPools

FAULTS_BACK_US: Final = 30 * DAY_US
"""A fault that was reported longer ago is reported again if it goes on."""
MODES: Final = ("observe", "enforce")
PINNED: Final = ("pinned", "rejected-pinned")
CONNECTED: Final = frozenset(("up", "recovered"))


@dataclass(frozen=True, slots=True)
class KnownGateway:
    """A gateway that was connected when SQL last heard of it.

    Pairs announce gateways once, to the process before us; the cuts that come next name streams by number
    only.

    Attributes:
        exports: of the volumes that some client has used; the next registration completes them
        streams: as in STREAMS_SEEN
        is_away: it was lost before us, less than ``RETIRED_S`` ago: promises still need what it measures
    """

    gateway_id: str
    name: str
    exports: list[Row]
    streams: list[Row]
    is_away: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """The state before the first message.

    Attributes:
        awaited: gateway_id to name of all that were not known to be lost: they should come back
        rows: to record: what was noticed while reading
        policy_version: 0 if none was ever in force
        policy_pinned: that version, if it is pinned
        policy_mode, policy_modes: where caps of policies hold; "" if it was never set
        claims: of gateways to volumes
        pools: of storage, as they were stored last
        storage_faults: backends at fault as events say: to the kind of fault
    """

    catalog: Catalog = field(default_factory=Catalog)
    gateways: list[KnownGateway] = field(default_factory=list)
    awaited: dict[str, str] = field(default_factory=dict)
    throttles: list[Row] = field(default_factory=list)
    episodes: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    rows: Rows = field(default_factory=list)
    mode: str = "observe"
    backend_modes: dict[str, str] = field(default_factory=dict)
    policy_mode: str = ""
    policy_modes: dict[str, str] = field(default_factory=dict)
    claims: list[VolumeClaim] = field(default_factory=list)
    policy_version: int = 0
    policy_pinned: int | None = None
    policy_applied_us: int = 0
    rollup_s: int = 60
    pools: StoredPools = field(default_factory=StoredPools)
    storage_faults: dict[str, str] = field(default_factory=dict)


def marker_event(tag: str, clock: Clock) -> tuple[str, Row]:
    """The event that must come through; ``tag`` is unique to this process."""
    text = "the services process has started; control resumes when gateways confirm the caps in force"
    return event_row(
        "services-started",
        "info",
        "server",
        "services",
        text,
        clock.unix_us(),
        event_id=identity("started", tag),
    )


def read_start(store: SqlReads, default_mode: str, now_us: int) -> Start:
    """Read everything.

    Raises:
        SlaError: the database is away (retryable).
    """
    volumes = store.volumes()
    names = [row["volume"] for row in volumes]
    labels = {row["volume"]: stored_labels(row.get("labels")) for row in volumes}
    announced = {volume: found for volume, found in labels.items() if found}
    catalog, problems = catalogs.from_rows(store.agreements(), names, now_us, store.documents(), announced)
    mode_row = store.last_audit("mode")
    mode = (mode_row["after"] or {}).get("mode") if mode_row is not None else default_mode
    policy = store.policy_in_force() or {"version": 0, "state": ""}
    version = policy["version"]
    applied = store.last_audit("policy-applied") if version else None
    gateways = store.gateways()
    stage = store.last_audit(POLICY_MODE)
    return Start(
        catalog=catalog,
        gateways=_gateways(gateways, store.streams(), volumes, now_us),
        awaited={row["gateway_id"]: row["name"] for row in gateways if row["state"] != "lost"},
        throttles=store.throttles_in_force(),
        episodes=store.open_episodes(),
        events=store.newest_events(SHOWN_EVENTS, now_us + AHEAD_US),
        rows=problems,
        mode=mode if mode in MODES else default_mode,
        backend_modes=_backend_modes(store.last_audit(BACKEND_MODES)),
        policy_mode=(stage["after"] or {}).get("mode", "") if stage is not None else "",
        policy_modes=_backend_modes(stage),
        policy_version=version,
        policy_pinned=version if policy["state"] in PINNED else None,
        policy_applied_us=applied["at_us"] if applied is not None else 0,
        rollup_s=store.rollup_s(),
        claims=[VolumeClaim.of_row(row) for row in store.volume_owners()],
        pools=store.stored_pools(now_us - DAY_US),
        storage_faults=store.storage_faults(now_us - FAULTS_BACK_US),
    )


def _backend_modes(row: Row | None) -> dict[str, str]:
    """Backends with a mode of their own, from the newest audit row about one."""
    found = (row["after"] or {}).get("backends", {}) if row is not None else {}
    return {name: mode for name, mode in found.items() if mode in MODES}


def _source_of(volume: str) -> str:
    """Whose statistics a volume's are (messages.md, "Sources"): the kind is not in SQL, but in the name."""
    if volume.startswith(HOST_PREFIX):
        return "host"
    if volume.startswith((QEMU_PREFIX, GROUP_PREFIX)):
        return "qemu"
    return "cgroup" if volume.startswith(CGROUP_PREFIX) else "nbd"


def _gateways(gateways: list[Row], streams: list[Row], volumes: list[Row], now_us: int) -> list[KnownGateway]:
    by_volume = {row["volume"]: row for row in volumes}
    known = []
    streams_of: dict[str, list[Row]] = {}
    for row in streams:
        streams_of.setdefault(row["gateway_id"], []).append(row)
    for gateway in gateways:
        is_away = gateway["state"] not in CONNECTED
        if is_away and gateway.get("last_cut_us", 0) < now_us - RETIRED_S * 1_000_000:
            continue
        own = streams_of.get(gateway["gateway_id"], [])
        backend_of = {row["volume"]: row["backend"] for row in own}
        exports = [
            {
                "volume": volume,
                "backend": backend,
                "size_bytes": by_volume.get(volume, {}).get("size_bytes", 0),
                "read_only": bool(by_volume.get(volume, {}).get("read_only", False)),
                "labels": stored_labels(by_volume.get(volume, {}).get("labels")),
                "source": _source_of(volume),
            }
            for volume, backend in sorted(backend_of.items())
        ]
        named = [
            {
                "id": row["stream_id"],
                "volume": row["volume"],
                "client": row["client"],
                "backend": row["backend"],
            }
            for row in own
        ]
        known.append(KnownGateway(gateway["gateway_id"], gateway["name"], exports, named, is_away))
    return known
