"""What is known of each pool of storage: readings in, rows for SQL and events out.

    reading ──► level (``watermarks``) ──► event when it changes
            ├─► the pool's row, and its day's, at most every ``record_s`` unless something has happened
            └─► rows of volumes that are new, have changed or are gone; orphans

State of a pool is what its rows in SQL say (``restore``), so that a restart neither repeats an event nor
swallows one. Two readings of one pool are in order of their times; an older one is dropped. What people
know of a pool that is read no more (its source was taken out of a file, or its gateway is away for long)
ends (``end_unread``).

What an owner can make us keep is bounded: pools (``MOST_KNOWN_POOLS``; readings of more are dropped, which is
said once), and volumes of a pool (``MOST_KNOWN_VOLUMES``), which are looked at every ``record_s`` at most.

Pure: no clock, no I/O. Owner: the main loop of ``services``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pmdaemon.space.words import shown_bytes
from pmdaemon.wire.messages.space import MAX_POOLS, MAX_SPACE_VOLUMES, Space
from sla_server.rows import Row, Rows
from sla_server.services.rows import event_row, identity
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.forecast import Forecast
from sla_server.storage_resources.watermarks import CRITICAL, OK, WARN, Marks, next_level

SERVER: Final = "server"
"""Owner of the pools that the server reads itself."""
SPACE_JOB: Final = "space"
"""Of the job that forecasts all pools: its kind, and that of what it stores."""
DAY_US: Final = 86_400_000_000
STALE_US: Final = 3 * 3_600_000_000  # longer than any interval of reading
UNREAD_US: Final = 7 * DAY_US  # a gateway that is away for so long is lost, which is an event of its own
CHANGED_RATIO: Final = 0.01  # of the pool's size: stored at once
OVERSUBSCRIBED: Final = "oversubscribed"
FORECAST: Final = "forecast"
SPIKE: Final = "spike"
MOST_KNOWN_POOLS: Final = 4 * MAX_POOLS
"""Of one owner, with those that have other names by now; they are kept as long as ``space_days``."""
MOST_KNOWN_VOLUMES: Final = 2 * MAX_SPACE_VOLUMES
NEAR_UNTIL: Final = 1.25  # times ``forecast_days``: a day that moves a little ends nothing
_DAY_COLUMNS: Final = ("day_us", "size_bytes", "used_bytes", "least_bytes", "most_bytes", "readings")


class PoolKey(NamedTuple):
    """Of a pool: who reads it (gateway_id, or ``SERVER``), and its name there."""

    owner: str
    pool: str


@dataclass(slots=True)
class PoolState:
    """A pool, as it was stored last and read last.

    Attributes:
        row: its row in ``pools``, by the newest reading.
        day: its row in ``pool_days`` of the day of that reading; empty before the first.
        stored_us, stored_bytes: when the rows were stored, and ``used_bytes`` of then.
        volumes_us: when the volumes were looked at.
        volumes: rows in ``pool_volumes`` of those that are there.
        reported: volumes whose being orphaned was reported.
        claim_day: of the newest event that its backend is not believed.
    """

    row: Row
    day: Row = field(default_factory=dict)
    stored_us: int = 0
    stored_bytes: int = 0
    volumes_us: int = -(1 << 62)
    volumes: dict[str, Row] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    claim_day: int = -1

    @property
    def name(self) -> str:
        """As people call it: GATEWAY/POOL."""
        return f"{self.row['owner_name'] or self.row['owner']}/{self.row['pool']}"


@dataclass(frozen=True, slots=True)
class PoolForecast:
    """What the history of a pool says.

    Attributes:
        key: which pool.
        forecast: when it will be full.
        spike_bytes: growth of the newest day, if that was far more than usual.
        newest_us: begin of that day.
    """

    key: PoolKey
    forecast: Forecast
    spike_bytes: float | None
    newest_us: int


@dataclass(frozen=True, slots=True)
class StoredPools:
    """What SQL has: ``pools``, ``pool_volumes`` not gone, the newest ``pool_days`` and ``pool_actions``."""

    pools: list[Row] = field(default_factory=list)
    days: list[Row] = field(default_factory=list)
    volumes: list[Row] = field(default_factory=list)
    actions: list[Row] = field(default_factory=list)


class StoragePools:
    """See the module."""

    def __init__(self, config: StorageConfig, stored: StoredPools | None = None) -> None:
        self._config = config
        self._pools: dict[PoolKey, PoolState] = {}
        self._known: Counter[str] = Counter()  # pools by owner
        self._refused: set[str] = set()  # owners of whom that was reported
        self._restore(stored or StoredPools())

    def _restore(self, stored: StoredPools) -> None:
        for row in stored.pools:
            row = {**row, "conditions": row.get("conditions") or {}, "forecast": row.get("forecast")}
            state = PoolState(row, stored_us=row["read_us"], stored_bytes=row["used_bytes"])
            self._pools[_key_of(row)] = state
            self._known[row["owner"]] += 1
        for row in stored.days:
            known = self._pools.get(_key_of(row))
            if known is not None and row["day_us"] >= known.day.get("day_us", 0):
                known.day = {name: row[name] for name in _DAY_COLUMNS}
        for row in stored.volumes:
            known = self._pools.get(_key_of(row))
            if known is not None and row["gone_us"] is None:
                known.volumes[row["name"]] = row
                if self._is_orphan(row, known.row["read_us"]):
                    known.reported.add(row["name"])

    def end_unread(self, now_us: int, own: Collection[str] | None, *, has_watched: bool = True) -> Rows:
        """Ends of what is said of pools that nothing reads any more; what is to be recorded because of it.

        Args:
            now_us: wall clock.
            own: pools that the server reads itself; None: not known.
            has_watched: readings could come for long; else only own ones that are no more end.
        """
        rows: Rows = []
        for key, state in self._pools.items():
            is_out = own is not None and key.owner == SERVER and key.pool not in own
            is_unread = has_watched and now_us - int(state.row["read_us"]) > UNREAD_US
            if not is_out and not is_unread:
                continue
            rows += self._end_all(state, "it is not read any more", now_us)
        return rows

    def _end_all(self, state: PoolState, why: str, now_us: int) -> Rows:
        ended = {OVERSUBSCRIBED: "space-subscribed", FORECAST: "space-forecast-ended"}
        kinds = [kind for name, kind in ended.items() if name in state.row["conditions"]]
        if state.row["level"] not in ("", OK):
            kinds.insert(0, "space-enough")
            state.row |= {"level": OK, "level_us": now_us}
        if not kinds:
            return []
        conditions = state.row["conditions"]
        state.row["conditions"] = {name: value for name, value in conditions.items() if name not in ended}
        text, details = f"nothing is known of pool {state.name} any more: {why}", _figures(state)
        events = [event_row(kind, "info", "pool", state.name, text, now_us, details) for kind in kinds]
        return [("pools", dict(state.row)), *events]

    def states(self) -> Iterable[PoolState]:
        """All pools."""
        return self._pools.values()

    def add_forecast(self, found: PoolForecast, now_us: int) -> Rows:
        """What was found in the history of a pool; what is to be recorded because of it."""
        state = self._pools.get(found.key)
        if state is None:
            return []
        events: Rows = []
        if not is_stale(state, now_us):  # what was not read for long causes nothing
            events = self._check_forecast(state, found, now_us) + self._check_spike(state, found, now_us)
        state.row["forecast"] = found.forecast.as_row(now_us)
        return [("pools", dict(state.row)), *events]

    def _check_forecast(self, state: PoolState, found: PoolForecast, now_us: int) -> Rows:
        full_us, was_near = found.forecast.full_us, FORECAST in state.row["conditions"]
        left_days = (full_us - now_us) / DAY_US if full_us is not None else math.inf
        limit_days = self._config.forecast_days * (NEAR_UNTIL if was_near else 1.0)
        is_near = left_days <= limit_days
        if is_near == was_near:
            return []
        details = _figures(state) | {"full_us": full_us, "latest_us": found.forecast.latest_us}
        if is_near:
            state.row["conditions"] = {**state.row["conditions"], FORECAST: now_us}
            grows = shown_bytes(found.forecast.slope_bytes_per_day or 0.0)
            text = (
                f"pool {state.name} will be full in {left_days:.0f} days if it grows on by {grows} a day: "
                f"{_used_words(state)}"
            )
            return [event_row("space-forecast", "warning", "pool", state.name, text, now_us, details)]
        state.row["conditions"] = _without(state.row["conditions"], FORECAST)
        why = found.forecast.reason or f"it will be full in {left_days:.0f} days"
        text = f"pool {state.name} is not expected to be full soon any more: {why}"
        return [event_row("space-forecast-ended", "info", "pool", state.name, text, now_us, details)]

    def _check_spike(self, state: PoolState, found: PoolForecast, now_us: int) -> Rows:
        """One event a day, by the day that has grown."""
        if found.spike_bytes is None or state.row["conditions"].get(SPIKE) == found.newest_us:
            return []
        state.row["conditions"] = {**state.row["conditions"], SPIKE: found.newest_us}
        text = (
            f"pool {state.name} has grown by {shown_bytes(found.spike_bytes)} in a day, far more than in the "
            "days before"
        )
        details = _figures(state) | {"grown_bytes": round(found.spike_bytes), "day_us": found.newest_us}
        return [event_row("space-growth", "warning", "pool", state.name, text, now_us, details)]

    def add(self, owner: str, owner_name: str, space: Space, now_us: int) -> Rows:
        """One reading; what is to be recorded because of it."""
        key = PoolKey(owner, space.pool)
        if owner_name == SERVER:  # a gateway may be called so, and has no pools of the server's
            owner_name = owner
        state = self._pools.get(key)
        if state is None:
            if self._known[owner] >= MOST_KNOWN_POOLS:
                return self._too_many(owner, owner_name, now_us)
            state = self._pools[key] = PoolState(_first_row(key, now_us))
            self._known[owner] += 1
        if space.at_us < state.row["read_us"] and state.row["read_us"] <= now_us:
            return []
        before = state.row["level"]
        state.row |= {
            "owner_name": owner_name,
            "kind": space.kind,
            "backend": space.backend,
            "size_bytes": space.size_bytes,
            "used_bytes": space.used_bytes,
            "other_ratio": space.other_ratio,
            "provisioned_bytes": space.provisioned_bytes,
            "volume_count": space.volume_count,
            "read_us": space.at_us,
        }
        events = self._check_level(state, space, now_us) + self._check_provisioned(state, now_us)
        days = _count_day(state, space)
        grown = abs(space.used_bytes - state.stored_bytes)
        is_due = (
            bool(events)
            or bool(days)
            or state.row["level"] != before
            or now_us - state.stored_us >= self._config.record_s * 1e6
            or state.stored_us > now_us  # by a clock that was ahead
            or grown >= CHANGED_RATIO * max(space.size_bytes, 1)
        )
        if not is_due:
            return []
        state.stored_us, state.stored_bytes = now_us, space.used_bytes
        rows: Rows = [("pools", dict(state.row)), *days, ("pool_days", {**key._asdict(), **state.day})]
        if 0 <= now_us - state.volumes_us < self._config.record_s * 1e6:
            return rows + events
        state.volumes_us = now_us
        return rows + self._check_volumes(key, state, space, now_us) + events

    def _too_many(self, owner: str, owner_name: str, now_us: int) -> Rows:
        if owner in self._refused:
            return []
        self._refused.add(owner)
        text = (
            f"gateway {owner_name} has sent the space of more than {MOST_KNOWN_POOLS} pools; those that are "
            f"new are left out"
        )
        details = {"gateway_id": owner, "what": "pools"}
        return [event_row("gateway-over-limit", "warning", "gateway", owner_name, text, now_us, details)]

    def refuse_claim(self, key: PoolKey, now_us: int) -> Rows:
        """The backend of a pool is another gateway's; said once a day."""
        state, day = self._pools.get(key), now_us // DAY_US
        if state is None or state.claim_day == day:
            return []
        state.claim_day = day
        backend = state.row["backend"]
        text = (
            f"the gateway of pool {state.name} says that it is of backend {backend}, and serves no volume "
            "there, as others do: that is not believed, and agreements there are taken"
        )
        details = {**_figures(state), "gateway_id": key.owner}
        event_id = identity("space-claim", *key, backend, day)
        return [
            event_row("space-claim-refused", "warning", "pool", state.name, text, now_us, details, event_id)
        ]

    def marks(self, state: PoolState) -> Marks:
        """The marks of a pool."""
        warn, critical = self._config.marks_of(self._config.rule_of(state.name))
        return Marks(warn, critical, self._config.hysteresis_ratio)

    def _check_level(self, state: PoolState, space: Space, now_us: int) -> Rows:
        before, marks = state.row["level"], self.marks(state)
        level = next_level(before, space.full_ratio, marks)
        if level == before:
            return []
        state.row |= {"level": level, "level_us": now_us}
        details = _figures(state) | {"level": level, "before": before or OK}
        if level == OK:
            if not before:
                return []  # a pool seen for the first time
            text = f"pool {state.name} has room again: {_used_words(state)}"
            return [event_row("space-enough", "info", "pool", state.name, text, now_us, details)]
        mark = marks.critical if level == CRITICAL else marks.warn
        words = {WARN: "is filling up", CRITICAL: "is nearly full"}[level]
        text = f"pool {state.name} {words}: {_used_words(state)}; the {level} mark is {mark:.0%}"
        severity = "critical" if level == CRITICAL else "warning"
        return [event_row("space-low", severity, "pool", state.name, text, now_us, details)]

    def _check_provisioned(self, state: PoolState, now_us: int) -> Rows:
        size, limit = state.row["size_bytes"], self._config.oversubscription_ratio
        ratio = state.row["provisioned_bytes"] / size if size else 0.0
        was_over = OVERSUBSCRIBED in state.row["conditions"]
        is_over = ratio > (limit * (1 - self._config.hysteresis_ratio) if was_over else limit)
        if is_over == was_over:
            return []
        details = _figures(state) | {"ratio": round(ratio, 2), "limit": limit}
        if is_over:
            state.row["conditions"] = {**state.row["conditions"], OVERSUBSCRIBED: now_us}
            text = (
                f"the {state.row['volume_count']} volumes of pool {state.name} may grow to {ratio:.1f} times "
                f"its size ({shown_bytes(state.row['provisioned_bytes'])} in {shown_bytes(size)}); at most "
                f"{limit:g} times is wanted"
            )
            return [event_row("space-oversubscribed", "warning", "pool", state.name, text, now_us, details)]
        state.row["conditions"] = _without(state.row["conditions"], OVERSUBSCRIBED)
        text = f"the volumes of pool {state.name} may grow to {ratio:.1f} times its size, which is in order"
        return [event_row("space-subscribed", "info", "pool", state.name, text, now_us, details)]

    def _check_volumes(self, key: PoolKey, state: PoolState, space: Space, now_us: int) -> Rows:
        rows: Rows = []
        for seen in space.volumes:
            old = state.volumes.get(seen["name"])
            row = {
                **key._asdict(),
                **seen,
                "first_seen_us": old["first_seen_us"] if old else now_us,
                "unused_since_us": _unused_since(seen, old, now_us),
                "gone_us": None,
            }
            state.volumes[seen["name"]] = row
            if row != old:
                rows.append(("pool_volumes", row))
            rows += self._check_orphan(state, row, now_us)
        # Those that are not named may still be there, if there are more; too many of them are not kept.
        if space.volume_count == len(space.volumes) or len(state.volumes) > MOST_KNOWN_VOLUMES:
            for name in state.volumes.keys() - {seen["name"] for seen in space.volumes}:
                rows.append(("pool_volumes", {**key._asdict(), "name": name, "gone_us": now_us}))
                del state.volumes[name]
                state.reported.discard(name)
        return rows

    def _is_orphan(self, row: Row, now_us: int) -> bool:
        since_us = row["unused_since_us"]
        return since_us is not None and now_us - since_us >= self._config.orphan_days * DAY_US

    def _check_orphan(self, state: PoolState, row: Row, now_us: int) -> Rows:
        if not self._is_orphan(row, now_us):
            state.reported.discard(row["name"])
            return []
        if row["name"] in state.reported:
            return []
        state.reported.add(row["name"])
        name, days = row["name"], (now_us - row["unused_since_us"]) / DAY_US
        text = (
            f"volume {name} of pool {state.name} ({shown_bytes(row['size_bytes'])}) was neither served "
            f"by an export nor open for {days:.0f} days"
        )
        event_id = identity("orphan", row["owner"], row["pool"], row["name"], row["unused_since_us"])
        details = {"volume": row["name"], "size_bytes": row["size_bytes"]}
        return [event_row("space-orphan", "info", "pool", state.name, text, now_us, details, event_id)]


def is_stale(state: PoolState, now_us: int) -> bool:
    """Whether a pool was not read for long: its source, or its gateway, is away."""
    return now_us - int(state.row["read_us"]) > STALE_US


def _key_of(row: Row) -> PoolKey:
    return PoolKey(row["owner"], row["pool"])


def _first_row(key: PoolKey, now_us: int) -> Row:
    empty = {"level": "", "level_us": now_us, "conditions": {}, "forecast": None, "read_us": 0}
    return {**key._asdict(), "owner_name": "", **empty, "first_seen_us": now_us}


def _without(conditions: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in conditions.items() if key != name}


def _unused_since(seen: Row, old: Row | None, now_us: int) -> int | None:
    """Since when a volume is neither served nor open; None if it is, or if that is not known."""
    if seen["volume"] or seen["in_use"] is not False:
        return None
    before_us: int | None = old["unused_since_us"] if old else None
    return now_us if before_us is None else before_us


def _count_day(state: PoolState, space: Space) -> Rows:
    """Add a reading to its day; the row of the day before, if it has ended now."""
    day_us, ended = space.at_us // DAY_US * DAY_US, []
    used, day = space.used_bytes, state.day
    if day and day["day_us"] != day_us:
        ended = [("pool_days", {"owner": state.row["owner"], "pool": state.row["pool"], **day})]
    if not day or day["day_us"] != day_us:
        day = {"least_bytes": used, "most_bytes": used, "readings": 0}
    state.day = {
        "day_us": day_us,
        "size_bytes": space.size_bytes,
        "used_bytes": used,
        "least_bytes": min(day["least_bytes"], used),
        "most_bytes": max(day["most_bytes"], used),
        "readings": day["readings"] + 1,
    }
    return ended


def _figures(state: PoolState) -> Row:
    return {
        **{key: state.row[key] for key in ("owner", "pool", "backend", "size_bytes", "used_bytes")},
        **({"other_ratio": state.row["other_ratio"]} if state.row["other_ratio"] is not None else {}),
    }


def _used_words(state: PoolState) -> str:
    row = state.row
    ratio = row["used_bytes"] / row["size_bytes"] if row["size_bytes"] else 1.0
    words = f"{ratio:.1%} ({shown_bytes(row['used_bytes'])} of {shown_bytes(row['size_bytes'])})"
    if (row["other_ratio"] or 0.0) > ratio:
        what = "inodes" if row["kind"] in ("path", "loop") else "metadata"
        words = f"{row['other_ratio']:.1%} of its {what}, {words} of its bytes"
    return words
