"""Rig of the API tests: a mailbox in memory, a source of fixed rows, a snapshot like the real ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import argon2

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox.inspect import METRICS
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server import audit_chain
from sla_server.agreements.fields import Document
from sla_server.agreements.load import load_documents
from sla_server.api.access import Access
from sla_server.api.accounts import KEYS, Directory
from sla_server.api.config import ApiConfig
from sla_server.api.context import AppContext
from sla_server.api.live_view import LiveView
from sla_server.api.mailbox_thread import MailboxThread
from sla_server.api.metrics import MailboxCollector, Metrics
from sla_server.api.operations import Operations
from sla_server.api.passwords import Passwords
from sla_server.api.scope import Scopes
from sla_server.api.security import Guard, Logins
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.queries.backend_load import BackendLoad
from sla_server.db.queries.policy_reports import KeptReport, back_test_of
from sla_server.db.queries.records import RecordList, Wanted, cursor_of
from sla_server.db.queries.volume_clients import VolumeClients
from sla_server.events.event import SEVERITIES
from sla_server.reports.issue import issue
from sla_server.services.approvals import digest_of
from tests.support import made_up_events
from tests.support.agreements import FULL, agreement, calendar_text, maintenance_text
from tests.support.reports import MINUTE_US, StoredRows, episode_row, slice_row, throttle_row

TOKEN = "t" * 43
QUICK_PASSWORDS = Passwords(argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
"""A hash of them costs next to nothing."""
NOW_US = 1_800_000_000_000_000


@dataclass
class FakeMessage:
    payload: bytes
    sender: str = "services"


@dataclass
class AnsweringMailbox:
    """A mailbox whose other side is a function: request header -> (ok, code, body), or None: silence."""

    answer: Callable[[dict[str, Any]], tuple[bool, int, dict[str, Any]] | None] | None = None
    posted: list[dict[str, Any]] = field(default_factory=list)
    recorded: list[dict[str, Any]] = field(default_factory=list)
    """Requests about accounts and sessions, which are not in ``posted``."""
    stored: Callable[[dict[str, Any]], None] = lambda header: None
    waiting: list[FakeMessage] = field(default_factory=list)
    full: bool = False
    thread: MailboxThread | None = None
    name: str = "appserver"

    def __post_init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK)

    def post(self, recipients: str, payload: bytes) -> None:
        assert recipients == "services"
        if self.full:
            raise MailboxError("full: services")
        message = frame.decode(payload)
        assert message.kind == Kind.REQUEST
        if is_access := message.header["op"] == "access":
            self.recorded.append(message.header)
        else:
            self.posted.append(message.header)
        said = self.answer(message.header) if self.answer else None
        if said is not None:
            ok, code, body = said
            if is_access and ok:
                self.stored(message.header)
            header = {"req": message.header["req"], "ok": ok, "code": code, "body": body}
            self.arrive(Kind.RESPONSE, header)

    def arrive(self, kind: Kind, header: dict[str, Any]) -> None:
        """A message comes in; with a thread set it is taken at once, in the caller's thread."""
        self.waiting.append(FakeMessage(frame.encode(kind, header)))
        os.write(self._write_fd, b"\0")
        if self.thread is not None:
            self.thread.step()

    def stats(self) -> dict[str, Any]:
        return dict.fromkeys(METRICS, 0)

    def take(self) -> list[FakeMessage]:
        taken, self.waiting = self.waiting, []
        return taken

    def fileno(self) -> int:
        return self._read_fd

    def prepare_sleep(self) -> bool:
        return not self.waiting

    def awake(self) -> None:
        try:
            while os.read(self._read_fd, 4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


@cache
def _document(text: str) -> Document:
    """The one document of a text; it is immutable, and reading it takes 10 ms."""
    (loaded,) = load_documents(text, 60)
    return loaded.document


def document_text(kind: str, name: str, spec: str) -> str:
    return f"apiVersion: storage-sla/v1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n"


def events(count: int) -> list[dict[str, Any]]:
    """Newest first, a second apart."""
    return made_up_events.events(count, NOW_US)


EPISODE = {
    "episode_id": "0b0e7a3e-77d1-5b0e-9a51-6f2f6c1f0d11",
    "name": "erp-gold",
    "objective": "latency",
    "opened_us": NOW_US - 200_000_000,
    "closed_us": NOW_US - 100_000_000,
    "worst_u": 2.25,
    "slices_bad": 3,
    "cursor": f"{NOW_US - 200_000_000}:0b0e7a3e-77d1-5b0e-9a51-6f2f6c1f0d11",
}


def throttle(**changed: Any) -> dict[str, Any]:
    """A row of ``throttles``: batch is slowed down for erp-gold."""
    row = {
        "throttle_id": "t-1",
        "volume": "batch",
        "backend": "disk-0",
        "source": "control",
        "cost_per_s": 290.0,
        "ops_per_s": None,
        "bytes_per_s": None,
        "reason": "promise-at-risk",
        "text": "erp-gold/latency at 15.1 ms of 12 ms allowed (2.40 times the misses allowed): "
        "batch from 581 to 290 weighted IOPS",
        "victim": "erp-gold/latency",
        "who": "",
        "state": "seen",
        "gen": 7,
        "requested_us": NOW_US - 42_000_000,
        "confirmed_us": NOW_US - 41_000_000,
        "seen_us": NOW_US - 40_000_000,
        "released_us": None,
        "expires_us": None,
    }
    return {**row, **changed}


def pool(**changed: Any) -> dict[str, Any]:
    """A row of ``pools``: 81 of 100 GiB, and full in 19 days."""
    forecast = {
        "at_us": NOW_US, "days": 10, "slope_bytes_per_day": float(1 << 30), "r2": 0.98, "reason": "",
        "full_us": NOW_US + 19 * 86_400_000_000, "earliest_us": NOW_US + 17 * 86_400_000_000,
        "latest_us": NOW_US + 22 * 86_400_000_000,
    }  # fmt: skip
    row = {
        "owner": "g-1", "pool": "data", "owner_name": "gateway-a", "kind": "lvm", "backend": "disk-0",
        "size_bytes": 100 << 30, "used_bytes": 81 << 30, "provisioned_bytes": 65 << 30, "volume_count": 2,
        "read_us": NOW_US - 20_000_000, "other_ratio": None, "level": "warn", "level_us": NOW_US,
        "conditions": {}, "forecast": forecast, "first_seen_us": NOW_US - 864_000_000_000,
    }  # fmt: skip
    return row | changed


def decisions() -> list[dict[str, Any]]:
    """Rows of ``decisions``, newest first: the cap of ``throttle`` and the step it came from."""
    promised = {"u": 2.4, "r": 1.26, "latency_us": 15_100, "threshold_us": 12_000, "percentile": 95.0}
    windows = {"windows": 3, "risky": 3, "over": 3, "offered_iops": 80.6, "excused_ratio": 0.0}
    common = {"at_us": NOW_US - 42_000_000, "reason": "promise-violated", "mode": "enforce"}
    greedy = {"volume": "batch", "cost_per_s": 581.0, "share_ratio": 0.872, "priority": "best-effort"}
    gold_use = {"volume": "erp-db", "cost_per_s": 85.6, "share_ratio": 0.128, "priority": "gold"}
    start = {
        "decision_id": "d-1",
        "kind": "start",
        "backend": "disk-0",
        "volume": "",
        "victim": "erp-gold/latency",
        "text": throttle()["text"],
        "figures": {
            "c_before": 581.0,
            "c_after": 290.0,
            "backend_cost_per_s": 666.6,
            "volumes": 2,
            "throttled": ["batch"],
            "use": [
                {**greedy, "queueing": False, "throttled": True, "cap_cost_per_s": 290.0},
                {**gold_use, "queueing": False, "throttled": False, "cap_cost_per_s": None},
            ],
            "promise": {**promised, **windows},
        },
    }
    cap = {
        "decision_id": "d-2",
        "kind": "cap-set",
        "backend": "disk-0",
        "volume": "batch",
        "victim": "erp-gold/latency",
        "text": throttle()["text"],
        "confirmed_us": NOW_US - 41_000_000,
        "seen_us": NOW_US - 40_000_000,
        "figures": {
            "throttle_id": "t-1",
            "source": "control",
            "before": None,
            "after": {"cost_per_s": 290.0},
            "in_force": {"cost_per_s": 290.0},
            "floor_iops": 50.0,
            "floor_cost_per_s": 53.1,
            "gateways": ["gateway-b"],
        },
    }
    return [{**common, **cap}, {**common, **start}]


def december() -> StoredRows:
    """An hour of 2026-12-21 of erp-gold, five minutes of it bad, for which batch was slowed down."""
    from_us = NOW_US // 86_400_000_000 * 86_400_000_000 - 25 * 86_400_000_000 + 36_000_000_000
    named = {"name": "erp-gold", "threshold_us": 5000}
    slices = [
        slice_row(from_us + minute * MINUTE_US, "bad" if 20 <= minute < 25 else "good", **named)
        for minute in range(60)
    ]
    slices.append(slice_row(NOW_US - MINUTE_US, judged_us=NOW_US, **named))  # judging goes on
    opened_us, closed_us = from_us + 20 * MINUTE_US, from_us + 25 * MINUTE_US
    throttles = [throttle_row("batch", opened_us, closed_us, victim="erp-gold/latency")]
    episodes = [episode_row(opened_us, closed_us, name="erp-gold")]
    return StoredRows(slices=slices, stored_episodes=episodes, stored_throttles=throttles)


def _moved(row: dict[str, Any], shift_us: int) -> dict[str, Any]:
    return {key: value + shift_us if value and key.endswith("_us") else value for key, value in row.items()}


def _asked_for(row: dict[str, Any], asked: dict[str, Any]) -> bool:
    victims, kinds = asked.get("victims") or (), asked.get("kinds") or ()
    return (
        asked.get("volume") in (None, row["volume"])
        and asked.get("backend") in (None, row["backend"])
        and (not victims or row["victim"] in victims)
        and (not kinds or row["kind"] in kinds)
        and (asked.get("from_us") is None or row["at_us"] > asked["from_us"])
        and (asked.get("until_us") is None or row["at_us"] <= asked["until_us"])
    )


def gold() -> dict[str, Any]:
    """A row of ``agreements`` with its spec, as ``agreements_at`` gives it."""
    curve = [{"up_to_iops": 150.0, "value_ms": 12.0}]
    objective = {
        "name": "latency",
        "indicator": {"metric": "latency", "percentile": 95.0},
        "demand_curve": curve,
        "budgeting": {"target": 0.995},
    }
    agreed = {"scope": {"volumes": ["erp-*"]}, "priority": "gold", "objectives": [objective]}
    spec = {"apiVersion": "storage-sla/v1", "kind": "SLA", "metadata": {"name": "erp-gold"}, "spec": agreed}
    return {"name": "erp-gold", "version": 2, "priority": "gold", "spec": spec, "ended_us": None}


def slice_sum(
    state: str, n: int, *, minutes: int = 1, version: int = 2, ours: bool = False, inexact: bool = False
) -> dict[str, Any]:
    """A row of ``SqlReader.slice_sums``."""
    row = {"version": version, "state": state, "ours": ours, "inexact": inexact}
    return {**row, "length_us": minutes * 60_000_000, "n": n}


PASSWORD = "seven small pelicans"
_PASSWORD_HASH = QUICK_PASSWORDS.hash(PASSWORD)


def account(**changed: Any) -> dict[str, Any]:
    """A row of ``accounts``: ann, an operator whose password is PASSWORD."""
    row = {"name": "ann", "role": "operator", "password": _PASSWORD_HASH, "labels": "", "state": "active"}
    return {**row, "identity": "", "created_us": 1, "changed_us": 1, "sessions_from_us": 1, **changed}


def session(**changed: Any) -> dict[str, Any]:
    """A row of ``sessions``: a browser of ann's, whose cookie nobody has."""
    row = {"session_id": "5e55", "account": "ann", "role": "operator", "labels": "", "made_by": "ann"}
    row |= {"address": "127.0.0.1", "browser": "Firefox"}
    return {
        **row,
        "created_us": 2,
        "changed_us": 2,
        "expires_us": 4_000_000_000_000_000,
        "ended_us": None,
        **changed,
    }


def api_token(**changed: Any) -> dict[str, Any]:
    """A row of ``api_tokens``: Prometheus may read."""
    row = {"token_id": "70c3", "name": "prometheus", "digest": "0" * 64, "role": "viewer", "labels": ""}
    row |= {"created_by": "ann", "created_us": 3, "changed_us": 3, "expires_us": 4_000_000_000_000_000}
    return {**row, "revoked_us": None, **changed}


def approval(**changed: Any) -> dict[str, Any]:
    """A row of ``approvals``: zoe asks for enforce on the whole server."""
    row = {"approval_id": "5c0f", "op": "mode", "body": '{"mode":"enforce"}', "state": "pending"}
    row |= {"basis": '{"mode":"observe","own":null}', "text": "mode enforce on the server (now observe)"}
    row |= {"requested_by": "zoe", "requested_as": "account zoe", "decided_by": "", "answer": ""}
    row |= {"requested_us": 5, "expires_us": 4_000_000_000_000_000, "changed_us": 5, "decided_us": None}
    row |= changed
    return {**row, "digest": digest_of(row)}


def audit_rows(count: int) -> list[dict[str, Any]]:
    """Rows of the audit log in their chain."""
    rows: list[dict[str, Any]] = []
    for seq in range(1, count + 1):
        row = {"seq": seq, "audit_id": f"a{seq}", "at_us": NOW_US + seq, "who": "ann", "action": "mode"}
        row |= {"subject": "server", "before": "null", "after": '{"mode": "enforce"}'}
        rows.append({**row, "digest": audit_chain.digest_of(rows[-1]["digest"] if rows else "", row)})
    return rows


@dataclass
class FakeAccess:
    """Rows of accounts, API tokens and sessions, as ``services`` was asked to store them."""

    rows: dict[str, dict[str, dict[str, Any]]] = field(
        default_factory=lambda: {
            "accounts": {"ann": account()},
            "api_tokens": {"70c3": api_token()},
            "sessions": {"5e55": session()},
            "approvals": {"5c0f": approval()},
        }
    )
    away: bool = False
    chain: list[dict[str, Any]] = field(default_factory=lambda: audit_rows(5))

    def stored(self, header: dict[str, Any]) -> None:
        """A request to ``services`` that it carries out."""
        if table := header["body"].get("table"):
            key = KEYS[table]
            self.rows[table][header["body"]["row"][key]] = header["body"]["row"]

    def _all(self, table: str) -> list[dict[str, Any]]:
        if self.away:
            raise DatabaseUnavailable("postgresql://db/sla", "connection refused")
        return [dict(row) for _key, row in sorted(self.rows[table].items())]

    def accounts(self) -> list[dict[str, Any]]:
        return self._all("accounts")

    def approvals(self, now_us: int) -> list[dict[str, Any]]:
        rows = self._all("approvals")
        return [row for row in rows if row["state"] == "pending" and row["expires_us"] > now_us]

    def approvals_newest(self, limit: int) -> list[dict[str, Any]]:
        return sorted(self._all("approvals"), key=lambda row: -row["requested_us"])[:limit]

    def tokens(self, now_us: int) -> list[dict[str, Any]]:
        return [row for row in self._all("api_tokens") if row["expires_us"] > now_us]

    def audit_chain(self, after_seq: int, limit: int) -> list[dict[str, Any]]:
        if self.away:
            raise DatabaseUnavailable("postgresql://db/sla", "connection refused")
        return [row for row in self.chain if row["seq"] > after_seq][:limit]

    def sign_ins(self) -> list[dict[str, Any]]:
        newest: dict[str, int] = {}
        for row in self._all("sessions"):
            if self.rows["accounts"].get(row["account"], {}).get("identity"):
                newest[row["account"]] = max(row["created_us"], newest.get(row["account"], 0))
        return [{"account": name, "begun_us": begun_us} for name, begun_us in newest.items()]

    def sessions(self, now_us: int) -> list[dict[str, Any]]:
        return [row for row in self._all("sessions") if row["expires_us"] > now_us]


def _harm(volume: str, share: float, reason: str = "") -> dict[str, Any]:
    """A row of a policy's attribution."""
    return {
        "backend": "disk-0",
        "sla": "erp-gold",
        "objective": "latency",
        "step": 0,
        "volume": volume,
        "share": share,
        "avoided_bad": 9,
        "avoided_missed": 1200.5,
        "bad": 12,
        "first_us": NOW_US - 7_200_000_000,
        "last_us": NOW_US,
        "worst_us": NOW_US - 3_600_000_000,
        "likely_cause": not reason,
        "reason": reason,
    }


@dataclass
class FakePolicyReports:
    """What is kept of the reports of the policies of a source."""

    source: FakeSource

    def newest(self) -> KeptReport | None:
        rows = self.source.policies(1)
        return self.report_of(rows[0]) if rows else None

    def report_of(self, head: dict[str, Any]) -> KeptReport:
        row = self.source.policy(head["version"]) or {}
        return KeptReport.of((head["version"], head["created_us"]), row.get("report"))

    def head(self, version: int) -> dict[str, Any] | None:
        row = self.source.policy(version)
        return row and {key: row[key] for key in ("version", "state", "created_us")}

    def back_tests(self, wanted: Iterable[tuple[int, int]]) -> dict[int, dict[str, Any]]:
        found = {row["version"]: back_test_of(row["report"]) for row in self.source.policies()}
        return {version: found[version] for version, _created_us in wanted}


class FakeSource:
    """Fixed rows; ``away`` makes every question fail as a database that is not there.

    ``shift_us`` moves throttles and decisions, for servers whose clock is the real one. ``ended``: events
    that end conditions, newest first.
    """

    def __init__(self) -> None:
        self.access = FakeAccess()
        self.away = False
        self.shift_us = 0
        self.ended: list[dict[str, Any]] = []
        self.labels: list[dict[str, Any]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.policy_reports = FakePolicyReports(self)

    def happened(self, count: int) -> list[dict[str, Any]]:
        """The newest events."""
        return events(count)

    def _row(self, *asked: Any) -> None:
        self.asked.append(asked)
        if self.away:
            raise DatabaseUnavailable("postgresql://db/sla", "connection refused")

    def gateways(self) -> list[dict[str, Any]]:
        self._row("gateways")
        return [
            {
                "gateway_id": "g-1",
                "name": "gateway-a",
                "state": "up",
                "last_cut_us": NOW_US,
                "address": "10.0.0.5:7412",
            }
        ]

    @property
    def space(self) -> FakeSource:
        return self

    @property
    def pages(self) -> FakeSource:
        return self

    @property
    def loads(self) -> FakeSource:
        return self

    def of_backend(self, backend: str, from_us: int, to_us: int, now_us: int) -> BackendLoad:
        """Sixty points in which ``batch`` asks for more and more of it."""
        self._row("backend_load", backend, from_us, to_us)
        length_us = max((to_us - from_us) // 60, 1)
        items = []
        for number in range(60):
            by_volume = {"batch": 200.0 + 8 * number, "erp-db": 85.6}
            row = {"slot_us": from_us + number * length_us, "length_us": length_us, "by_volume": by_volume}
            items.append(
                {**row, "cost_per_s": sum(by_volume.values()), "iops": 260.0, "bytes_per_s": 1_064_960}
            )
        return BackendLoad(items, ["batch", "erp-db"])

    def of_clients(self, volume: str, from_us: int, to_us: int, now_us: int, limit: int) -> VolumeClients:
        """Two clients, of which one has nearly all of the I/O."""
        self._row("of_clients", volume, from_us, to_us, limit)
        rows = [
            {
                "client": client,
                "iops": iops,
                "read_iops": iops * 0.75,
                "write_iops": iops * 0.25,
                "bytes_per_s": round(iops * 4096),
                "cost_per_s": iops * 1.0625,
                "errors": 0,
                "p50_us": 2_300,
                "p95_us": 9_200,
                "p99_us": 14_700,
                "last_us": to_us,
            }
            for client, iops in (("127.0.0.1", 272.0), ("10.0.0.31", 8.0))
        ]
        return VolumeClients(rows[:limit], len(rows))

    def agreement_names(self) -> dict[str, str]:
        self._row("agreement_names")
        return {row["name"]: row["priority"] for row in self.agreements()}

    def agreements_named(self, names: Collection[str]) -> list[dict[str, Any]]:
        self._row("agreements_named", sorted(names))
        return [row for row in self.agreements() if row["name"] in names]

    def open_episodes(self, names: Collection[str]) -> list[dict[str, Any]]:
        self._row("open_episodes", sorted(names))
        return [{**EPISODE, "closed_us": None}] if EPISODE["name"] in names else []

    def volume_names(self) -> dict[str, str]:
        self._row("volume_names")
        rows = sorted(self.volumes(), key=lambda row: str(row["volume"]))
        return {row["volume"]: row["backend"] for row in rows}

    def volumes_named(self, names: Collection[str]) -> list[dict[str, Any]]:
        self._row("volumes_named", sorted(names))
        return [row for row in self.volumes() if row["volume"] in names]

    def label_rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        self._row("label_rows")
        return self.volumes(), self.labels

    def label_documents(self) -> list[dict[str, Any]]:
        return self.labels

    def slice_hours(self, name: str, objective: str, from_us: int, to_us: int) -> list[dict[str, Any]]:
        """Two days with a bad quarter of an hour, and one without data; then what ``slice_sums`` says."""
        self._row("slice_hours", name, objective, from_us, to_us)
        hour_us = 3_600_000_000
        first_us = max(from_us, (NOW_US + self.shift_us) // hour_us * hour_us - 48 * hour_us)
        rows = []
        for number in range(48):
            good = 45 if number == 20 else 60
            counts = {"no_data": 60} if number == 30 else {"good": good, "bad": 60 - good}
            for state, n in counts.items():
                at = {"hour_us": first_us + number * hour_us, "newest_us": first_us + number * hour_us}
                rows += [{**slice_sum(state, n), **at}] if n else []
        return [row for row in rows if row["hour_us"] < to_us]

    def policy_volumes(self, version: int, part: str, after: str, limit: int) -> list[dict[str, Any]]:
        self._row("policy_volumes", version, part, after, limit)
        row = {"volume": "batch", "hours": 40, "lowest_cost_per_s": 300.0, "highest_demand_p95": 450.0}
        return [row] if part in "batch" and after < "batch" else []

    def pools(self) -> list[dict[str, Any]]:
        self._row("pools")
        return [pool()]

    def pool_volumes(self, owner: str = "", pool: str = "") -> list[dict[str, Any]]:
        self._row("pool_volumes", owner, pool)
        served = {"name": "lv-erp", "size_bytes": 60 << 30, "used_bytes": 41 << 30, "volume": "erp-db"}
        unused = {"name": "lv-old", "size_bytes": 5 << 30, "used_bytes": None, "volume": "", "in_use": False}
        return [
            {**served, "in_use": True, "unused_since_us": None},
            {**unused, "unused_since_us": NOW_US - 9 * 86_400_000_000},
        ]

    def pool_days(self, from_us: int, owner: str = "", pool: str = "") -> list[dict[str, Any]]:
        self._row("pool_days", from_us, owner, pool)
        day_us = 86_400_000_000
        return [
            {"owner": owner, "pool": pool, "day_us": NOW_US // day_us * day_us - (9 - number) * day_us,
             "size_bytes": 100 << 30, "used_bytes": (72 + number) << 30, "readings": 288}
            for number in range(10)
        ]  # fmt: skip

    def pool_actions(self, owner: str, pool: str, limit: int = 200) -> list[dict[str, Any]]:
        self._row("pool_actions", owner, pool)
        text = "archive --old: would be run, because pool gateway-a/data is filling up"
        return [{"action_id": "a-1", "at_us": NOW_US, "action": "archive", "state": "dry-run", "text": text}]

    def gateway_list(self) -> list[dict[str, Any]]:
        self._row("gateway_list")
        return [
            {"address": "10.0.0.5:7412", "name": "host-5"},
            {"address": "10.0.0.6:7412", "name": "host-6"},
        ]

    def volumes(self) -> list[dict[str, Any]]:
        self._row("volumes")
        sums = {"read_bytes": 4096, "write_bytes": 0, "errors": 0, "cuts": 3, "streams": 1, "last_us": NOW_US}
        return [
            {
                "volume": "erp-db",
                "backend": "disk-0",
                "size_bytes": 1 << 26,
                "reads": 48_211,
                "writes": 12_004,
                **sums,
            },
            {
                "volume": "batch",
                "backend": "disk-0",
                "size_bytes": 1 << 26,
                "reads": 981_223,
                "writes": 7,
                **sums,
            },
        ]

    def volume_owner_names(self, volumes: Any = None) -> dict[str, list[str]]:
        self._row("volume_owner_names", volumes)
        return {"erp-db": ["gateway-a"], "batch": ["gateway-a", "gateway-b"]}

    def volume_owners(
        self, *, state: str | None = None, after: Any = (), limit: int | None = None
    ) -> list[dict[str, Any]]:
        self._row("volume_owners", state, after, limit)
        claim = {"decided_by": "first sight", "first_seen_us": NOW_US, "changed_us": NOW_US, "left_out": 0}
        rows = [
            {**claim, "volume": volume, "gateway_id": gateway_id, "name": name, "state": held,
             "backend": backend, "shown_backend": shown, "version": 1}
            for volume, gateway_id, name, held, backend, shown in (
                ("batch", "g-1", "gateway-a", "approved", "disk-0", "disk-1"),
                ("batch", "g-2", "gateway-b", "approved", "disk-0", "disk-0"),
                ("erp-db", "g-1", "gateway-a", "approved", "disk-0", "disk-0"),
                ("erp-db", "g-9", "evil-gw", "pending", "", "disk-0"),
            )
        ]  # fmt: skip
        if state == "pending":
            rows = [rows[0], {**rows[3], "left_out": 1_204, "decided_by": ""}]
        return [row for row in rows if (row["volume"], row["gateway_id"]) > tuple(after)][:limit]

    def streams(self, volume: str | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        self._row("streams", volume, limit)
        return [{"stream_id": (1 << 62) + 1, "volume": volume, "client": "127.0.0.1", "reads": 48_211}]

    def backends(self) -> list[dict[str, Any]]:
        self._row("backends")
        return [{"backend": "disk-0", "capacity_cost_per_s": None, "first_seen_us": NOW_US}]

    def agreements(self, in_force: bool = True) -> list[dict[str, Any]]:
        self._row("agreements", in_force)
        return [dict(self._agreement("erp-gold"))]

    def agreement(self, name: str, version: int | None = None) -> dict[str, Any] | None:
        self._row("agreement", name, version)
        rows = {row["version"]: row for row in self._agreement_rows(name)}
        return rows.get(version or 2) if name == "erp-gold" else None

    def agreement_versions(self, name: str) -> list[dict[str, Any]]:
        self._row("agreement_versions", name)
        rows = self._agreement_rows(name) if name == "erp-gold" else []
        return [{key: value for key, value in row.items() if key != "document"} for row in rows]

    @staticmethod
    def _agreement(name: str) -> dict[str, Any]:
        return FakeSource._agreement_rows(name)[-1]

    @staticmethod
    def _agreement_rows(name: str) -> list[dict[str, Any]]:
        """Two versions: the first with a lower target, until an hour ago."""
        since_us = NOW_US - 3_600_000_000
        texts = [FULL.replace("target: 0.995", "target: 0.99"), FULL]
        times: list[tuple[int, int | None]] = [(NOW_US - 40 * 86_400_000_000, since_us), (since_us, None)]
        rows = []
        for number, (text, (applied_us, ended_us)) in enumerate(zip(texts, times, strict=True), start=1):
            row = {"name": name, "version": number, "priority": "gold", "applied_us": applied_us}
            row |= {"applied_by": "token", "ended_us": ended_us, "document": text}
            rows.append({**row, "spec": agreement(text).spec_json()})
        return rows

    def documents(self, kind: str | None = None, in_force: bool = False) -> list[dict[str, Any]]:
        self._row("documents", kind, in_force)
        texts = {
            "Maintenance": [
                maintenance_text("disks", when='start: "2027-01-15T07:00", duration: 4h'),
                maintenance_text("past", when='start: "2026-12-01T07:00", duration: 4h'),
            ],
            "Calendar": [calendar_text("bank")],
            "VolumeLabels": [
                document_text(
                    "VolumeLabels", "vol-17", "{volumes: [vol-17], labels: {tier: gold, env: null}}"
                )
            ],
            "Recipient": [document_text("Recipient", "mail", "{inbox: {}}")],
            "Route": [
                document_text(
                    "Route", "all", "{recipients: [mail], match: {severities: [warning, critical]}}"
                )
            ],
            "Silence": [
                document_text("Silence", name, f"{{start: {start}, duration: 1h, reason: night}}")
                for name, start in (("now", "2027-01-15T07:30"), ("over", "2026-01-01T00:00"))
            ],
        }
        rows = []
        for each in [kind] if kind else texts:
            for text in texts[each]:
                document = _document(text)
                row = {"kind": each, "name": document.name, "version": 1, "document": text}
                row |= {"applied_us": NOW_US - 60 * 86_400_000_000, "applied_by": "ann", "ended_us": None}
                rows.append({**row, "spec": document.spec_json()})
        return rows

    def slice_sums(self, name: str, objective: str, from_us: int, to_us: int) -> list[dict[str, Any]]:
        """Of the second version; those that are bad rest on an upper bound."""
        self._row("slice_sums", name, objective, from_us, to_us)
        counts = {("good", False): 985, ("bad", False): 14, ("no_data", True): 1, ("excluded", False): 60}
        return [slice_sum(state, n, ours=ours, inexact=state == "bad") for (state, ours), n in counts.items()]

    def slices(
        self, name: str, objective: str, from_us: int, to_us: int, limit: int | None = None
    ) -> list[dict[str, Any]]:
        self._row("slices", name, objective, from_us, to_us, limit)
        starts = range(from_us, min(to_us, from_us + 3 * 60_000_000), 60_000_000)
        more = {"state": "bad", "n": 600, "missed": 40, "offered_iops": 10.0, "threshold_us": 12_000}
        more |= {"coverage_ratio": 1.0, "reason": "slow", "inexact": True, "revision": 1}
        more |= {"length_us": 60_000_000}
        rows = [{"name": name, "objective": objective, "start_us": at, **more} for at in starts]
        return rows[:limit]

    def slice_counts(self, name: str, objective: str, from_us: int, to_us: int) -> dict[str, int]:
        self._row("slice_counts", name)
        return {"good": 1}

    def episodes(
        self,
        open_only: bool = False,
        limit: int = 1000,
        *,
        name: str | None = None,
        objective: str | None = None,
        before: str | None = None,
        since_us: int | None = None,
    ) -> list[dict[str, Any]]:
        self._row("episodes", open_only, limit, name, objective, before, since_us)
        return [dict(EPISODE)]

    def episode(self, episode_id: str) -> dict[str, Any] | None:
        self._row("episode", episode_id)
        return dict(EPISODE) if str(EPISODE["episode_id"]).startswith(episode_id) else None

    def throttles(
        self,
        in_force: bool = False,
        limit: int = 100,
        before: str | None = None,
        since_us: int | None = None,
    ) -> list[dict[str, Any]]:
        self._row("throttles", in_force, limit, before, since_us)
        row = {"throttle_id": "t-1", "volume": "batch", "state": "seen", "cost_per_s": 290.0}
        row |= {"requested_us": NOW_US + self.shift_us - 42_000_000, "released_us": None}
        return [] if before else [{**row, "cursor": f"{NOW_US}:t-1"}][:limit]

    def events(
        self, limit: int = 100, before: str | None = None, since_us: int | None = None
    ) -> list[dict[str, Any]]:
        self._row("events", limit, before)
        rows = self.happened(25)
        if before:
            at_text, _, event_id = before.partition(":")
            rows = [row for row in rows if (row["at_us"], row["event_id"]) < (int(at_text), event_id)]
        return rows[:limit]

    def fences(self) -> list[dict[str, Any]]:
        self._row("fences")
        return [{"name": "gateways", "fence": 7, "server": "n2", "queue": "q", "since_us": NOW_US}]

    def processes(self) -> list[dict[str, Any]]:
        self._row("processes")
        return [
            {
                "name": "services",
                "state": "running",
                "pid": 1,
                "restarts": 0,
                "since_us": NOW_US,
                "reason": "",
            }
        ]

    def policies(self, limit: int = 20) -> list[dict[str, Any]]:
        self._row("policies", limit)
        return [
            {
                "version": 3,
                "created_us": NOW_US,
                "state": "in-force",
                "job": {"rollups": 84_000},
                "report": {
                    "capacity": [
                        {
                            "backend": "disk-0",
                            "sla": "erp-gold",
                            "objective": "latency",
                            "cost_per_s": 700.0,
                            "points": 1_204,
                            "reason": "largest load at which the promise was kept",
                        }
                    ],
                    "curves": [
                        {
                            "backend": "disk-0",
                            "sla": "erp-gold",
                            "objective": "latency",
                            "points": [
                                [100.0 * at, 0.3 / (1 - at / 11), 0.3 / (1 - at / 11)] for at in range(1, 10)
                            ],
                            "queueing": [0.0, 0.3, 1100.0],
                        }
                    ],
                    "harms": [_harm("crm", 0.2, reason="only 12 intervals, 30 needed"), _harm("batch", 0.7)],
                },
            }
        ]

    def policy_caps(
        self,
        version: int,
        hour_of_week: int | None = None,
        limit: int | None = None,
        after: str | None = None,
        volume: str | None = None,
    ) -> list[dict[str, Any]]:
        self._row("policy_caps", version, hour_of_week, limit, after)
        row = {"version": 3, "volume": "batch", "hour_of_week": 0, "cost_per_s": 300.0}
        row |= {"demand_p50": 200.0, "demand_p95": 450.0, "burst_s": 2.5}
        is_meant = version == 3 and after is None and volume in (None, "batch")
        return [row] if is_meant else []

    def policy(self, version: int) -> dict[str, Any] | None:
        return next((row for row in self.policies() if row["version"] == version), None)

    def policy_changes(
        self, before: int, after: int, limit: int, after_volume: str = ""
    ) -> list[dict[str, Any]]:
        self._row("policy_changes", before, after, limit, after_volume)
        row = {"volume": "batch", "hours": 2, "added": 1, "removed": 0, "lowered": 1, "raised": 0}
        row |= {"lowest_before": 400.0, "lowest_after": 300.0}
        return [] if before == after else [row]

    def jobs(self) -> list[dict[str, Any]]:
        return [
            {
                "job_id": "j-1",
                "kind": "policy",
                "state": "done",
                "who": "ann",
                "text": "it helps",
                "started_us": NOW_US,
                "ended_us": NOW_US + 12_000_000,
                "exit_status": 0,
                "rows": 84_000,
                "version": 3,
            }
        ]

    def inbox(self, limit: int = 100, before: str | None = None, **wanted: Any) -> list[dict[str, Any]]:
        self._row("inbox", limit, before, wanted)
        if (kinds := wanted.get("kinds")) is not None:
            subjects = wanted.get("subjects")
            found = [row for row in self.ended if row["kind"] in kinds]
            return [row for row in found if subjects is None or row["subject"] in subjects]
        rows = self.happened(25) if (ids := wanted.get("event_ids")) is not None else self.events(25, before)
        severities = wanted.get("severities") or SEVERITIES
        found = [row for row in rows if row["severity"] in severities]
        return [row for row in found if ids is None or row["event_id"] in ids][:limit]

    def event(self, event_id: str) -> dict[str, Any] | None:
        self._row("event", event_id)
        return next((row for row in self.happened(25) if row["event_id"] == event_id), None)

    def events_of(self, beginning: str, limit: int) -> list[dict[str, Any]]:
        self._row("events_of", beginning, limit)
        return [row for row in self.happened(25) if row["event_id"].startswith(beginning)][:limit]

    def deliveries(self, event_id: str) -> list[dict[str, Any]]:
        self._row("deliveries", event_id)
        row = {"recipient": "oncall", "delivery_id": "e0001", "event_id": "e0001", "number": 7, "answer": ""}
        row |= {"state": "confirmed", "attempts": 3, "at_us": NOW_US}
        dead = row | {
            "delivery_id": "e0002",
            "event_id": "e0002",
            "state": "dead-letter",
            "answer": "HTTP 400",
        }
        return [each for each in (row, dead) if each["event_id"] == event_id]

    def dead_letters(self, recipient: str, delivery_ids: Collection[str]) -> list[dict[str, Any]]:
        self._row("dead_letters", recipient, delivery_ids)
        found = [row for event in self.happened(25) for row in self.deliveries(event["event_id"])]
        dead = [row for row in found if row["state"] == "dead-letter" and row["recipient"] == recipient]
        return [row for row in dead if row["delivery_id"] in delivery_ids]

    def acknowledgements(self, event_ids: Collection[str]) -> list[dict[str, Any]]:
        self._row("acknowledgements", event_ids)
        said = {
            "event_id": "e0001",
            "at_us": NOW_US + self.shift_us,
            "who": "ann",
            "after": {"note": "disk ordered"},
        }
        return [said] if "e0001" in event_ids else []

    def audit(self) -> list[dict[str, Any]]:
        return [{"audit_id": "a-1", "at_us": NOW_US, "who": "token", "action": "mode", "subject": "server"}]

    def records(self, listed: RecordList, wanted: Wanted) -> list[dict[str, Any]]:
        """Of the few rows of this source those that are asked for, in the order of their table."""
        name = listed.table.name
        self._row(name, wanted)
        if wanted.before is not None and not wanted.before.rpartition(":")[2]:
            raise ValueError(f"{wanted.before!r} is no cursor")
        rows: list[dict[str, Any]] = {"audit": self.audit, "jobs": self.jobs, "policies": self.policies}[
            name
        ]()
        found = [
            {**row, "cursor": cursor_of(listed, row)}
            for row in rows
            if all(not values or row[column] in values for column, values in wanted.values.items())
            and (not wanted.match or any(wanted.match in str(row.get(one)) for one in listed.searched))
        ]
        return [] if wanted.before else found[: wanted.limit]

    def rollup_history(
        self, volume: str, from_us: int, to_us: int, client: str | None = None
    ) -> list[dict[str, Any]]:
        self._row("rollup_history", volume, from_us, to_us, *([client] if client else []))
        length_us = max((to_us - from_us) // 60, 1)
        row = {"length_us": length_us, "iops": 80.0, "cost_milli": 80 * length_us // 1000}
        return [
            {
                **row,
                "slot_us": from_us + number * length_us,
                "p50_us": 2_300,
                "p95_us": 9_200 + 40 * number,
                "p99_us": 14_700,
            }
            for number in range(60)
        ]

    @property
    def reports(self) -> StoredRows:
        self._row("reports")
        return self.stored_reports

    @cached_property
    def stored_reports(self) -> StoredRows:
        """With one issued report; made when a test asks for it."""
        made = december()
        made.versions = [
            {key: value for key, value in row.items() if key != "document"}
            for row in self._agreement_rows("erp-gold")
        ]
        issue(made, "erp-gold", "2026-12", "ann", NOW_US)  # type: ignore[arg-type]
        return made

    def progress(self) -> dict[str, int]:
        self._row("progress")
        return {}

    def outages(self, from_us: int, to_us: int) -> list[dict[str, Any]]:
        self._row("outages", from_us, to_us)
        return []

    def decisions_from_us(self) -> int | None:
        self._row("decisions_from_us")
        return NOW_US + self.shift_us - 20 * 86_400_000_000

    def kinds_of(self, name: str) -> set[str]:
        self._row("kinds_of", name)
        return {kind for known, kind in self.known_names() if known == name}

    def known_names(self) -> list[tuple[str, str]]:
        self._row("known_names")
        return [("batch", "volume"), ("erp-db", "volume"), ("erp-gold", "sla")]

    def mode_at(self, at_us: int) -> str | None:
        self._row("mode_at", at_us)
        return "enforce"

    def backend_of(self, volume: str) -> str | None:
        self._row("backend_of", volume)
        return "disk-0"

    def decisions(self, **asked: Any) -> list[dict[str, Any]]:
        """What was decided 42 s ago: the backend's first step, and the cap that followed."""
        self._row("decisions", asked)
        moved = (_moved(row, self.shift_us) for row in decisions())
        rows = [row for row in moved if _asked_for(row, asked)]
        return rows[: asked.get("limit", 100)]

    def decision_count(self, **asked: Any) -> int:
        return len(self.decisions(**asked))

    def backends_of(self, volumes: Collection[str]) -> set[str]:
        self._row("backends_of", tuple(volumes))
        return {"disk-0"} if volumes else set()

    def backend_modes_at(self, at_us: int) -> dict[str, str]:
        self._row("backend_modes_at", at_us)
        return {}

    def throttles_at(
        self,
        at_us: int,
        volumes: Collection[str] = (),
        victims: Collection[str] = (),
        backends: Collection[str] = (),
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        self._row("throttles_at", at_us, tuple(volumes), tuple(victims), tuple(backends))
        row = _moved(throttle(), self.shift_us)
        about = row["volume"] in volumes or row["victim"] in victims or row["backend"] in backends
        return [row] if about and row["requested_us"] <= at_us else []

    def agreements_at(self, at_us: int, name: str | None = None) -> Iterator[dict[str, Any]]:
        self._row("agreements_at", at_us, name)
        if name in (None, "erp-gold"):
            yield gold()

    def slice_at(self, name: str, objective: str, at_us: int) -> dict[str, Any] | None:
        self._row("slice_at", name, objective, at_us)
        row = {"start_us": at_us // 60_000_000 * 60_000_000, "length_us": 60_000_000, "state": "good"}
        return {**row, "n": 4_820, "missed": 41, "offered_iops": 80.3, "threshold_us": 12_000}

    def episodes_until(self, name: str, objective: str, at_us: int, limit: int = 2) -> list[dict[str, Any]]:
        self._row("episodes_until", name, objective, at_us)
        return []

    def sizes(self) -> dict[str, Any]:
        self._row("sizes")
        tables = [{"table": "events", "rows": 25, "has_more": False, "bytes": None}]
        return {"kind": "sqlite", "bytes": 4096, "tables": tables}

    def totals(self) -> dict[str, Any]:
        self._row("totals")
        return {"reads": 1, "writes": 2, "streams": 1, "gateways": 1, "volumes": 1}


def snapshot(at_us: int = NOW_US, **changed: Any) -> dict[str, Any]:
    """A live view with one agreement kept by throttling a neighbour."""
    whole = {
        "at_us": at_us,
        "mode": "enforce",
        "gateways": [
            {**_gateway("g-1", "gateway-a", at_us - 400_000), "io_waited_ratio": 0.137},
            _gateway("g-2", "gateway-b", at_us - 900_000),
        ],
        "volumes": [
            _volume("erp-db", 80.4, p95_us=9_200, gateways=["gateway-a"]),
            _volume("batch", 291.0, p95_us=131_000, held=24, cap_cost_per_s=290.0, delay_us=81_000),
        ],
        "slas": [
            _sla("erp-gold", "gold", "ok", latency_us=9_200),
            _sla("reports", "silver", "at-risk", latency_us=19_400, threshold_us=20_000),
            _sla("scratch", "best-effort", "idle", latency_us=None, compliance=None, coverage=None),
        ],
        "throttles": [
            {
                "throttle_id": "t-1",
                "volume": "batch",
                "backend": "disk-0",
                "source": "control",
                "cost_per_s": 290.0,
                "reason": "victim-at-risk",
                "text": "p95 of erp-gold was 15.1 ms of 12 ms promised; batch used 71 % of disk-0",
                "victim": "erp-gold/latency",
                "state": "seen",
                "since_us": at_us - 42_000_000,
                "expires_us": at_us + 28_000_000,
            }
        ],
        "backends": [{"backend": "disk-0", "cost_per_s": 371.0, "cap_cost_per_s": 290.0, "phase": "hold"}],
        "processes": [
            {"name": "appserver", "state": "running", "restarts": 0, "since_us": at_us - 9_000_000_000},
            {"name": "dbmanager", "state": "running", "restarts": 1, "since_us": at_us - 60_000_000},
            {"name": "pmdaemon", "state": "running", "restarts": 0, "since_us": at_us - 9_000_000_000},
            {"name": "services", "state": "running", "restarts": 0, "since_us": at_us - 9_000_000_000},
        ],
        "events": events(12),
        "policy": {"version": 3, "applied_us": at_us - 600_000_000},
    }
    return {**whole, **changed}


def _gateway(gateway_id: str, name: str, last_cut_us: int) -> dict[str, Any]:
    where = {"address": "127.0.0.1:50112", "clock_offset_us": 12, "exports": 1, "streams": 1}
    return {"gateway_id": gateway_id, "name": name, "state": "up", "last_cut_us": last_cut_us, **where}


def _volume(name: str, iops: float, **changed: Any) -> dict[str, Any]:
    row = {
        "volume": name,
        "backend": "disk-0",
        "iops": iops,
        "read_iops": iops * 0.75,
        "write_iops": iops * 0.25,
        "bytes_per_s": iops * 4096,
        "p50_us": 2_300,
        "p95_us": 9_200,
        "p99_us": 14_700,
        "service_p95_us": 8_000,
        "held": 0,
        "inflight": 1,
        "cap_cost_per_s": None,
        "delay_us": 0,
        "gateways": ["gateway-b"],
    }
    return {**row, **changed}


def _sla(name: str, priority: str, state: str, **changed: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "objective": "latency",
        "priority": priority,
        "state": state,
        "latency_us": 9_200,
        "threshold_us": 12_000,
        "percentile": 95.0,
        "u": 0.4,
        "compliance": 0.9921,
        "coverage": 0.998,
        "budget_remaining": 0.63,
        "budget_minutes_left": 136.0,
        "slices": {"good": 1_254, "bad": 10, "no_data": 2, "not_applicable": 3, "excluded": 0},
    }
    return {**row, **changed}


def make_context(
    mailbox: AnsweringMailbox, clock: FakeClock | None = None, source: Any = None, **config: Any
) -> AppContext:
    """A context over the fakes; the wait for answers is short because none comes later."""
    settings = ApiConfig(**{"request_wait_s": 0.01, **config})
    used = clock or FakeClock()
    live = LiveView(used, streams_max=settings.live_streams_max, stale_after_s=settings.stale_after_s)

    def post(message: bytes) -> None:
        mailbox.post("services", message)

    operations = Operations(post, used, wait_s=settings.request_wait_s)
    rows = source or FakeSource()
    directory = Directory(rows.access, used, settings.oidc.token_days)
    mailbox.stored = rows.access.stored
    box = MailboxCollector(mailbox.name, mailbox.stats)
    return AppContext(
        config=settings,
        token=TOKEN,
        source=rows,
        live=live,
        operations=operations,
        guard=Guard(TOKEN, settings.hosts(), directory, needs_login=settings.reading == "login"),
        logins=Logins(used),
        scopes=Scopes(rows, used),
        access=Access(directory, operations, used, config=settings, passwords=QUICK_PASSWORDS),
        metrics=Metrics(live, operations, box, rows, settings.metrics_rows_max),
        clock=used,
        address="http://127.0.0.1:8411/",
    )


def data_dir(folder: Path) -> Path:
    """A data directory with the token the tests know."""
    token = folder / "api.token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    return folder
