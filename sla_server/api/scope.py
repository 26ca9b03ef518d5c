"""What an account with labels sees: its agreements, and what is about them; enforced here for all routes.

``ApiRoute.scope`` says how a route is to be dealt with; a route that says nothing is closed to such accounts,
so a new one leaks nothing. Before the handler ``check`` refuses what the path or the query names and does not
belong to them, in the words for what does not exist. After it ``filtered`` leaves their rows, and of a row
only columns that cannot be about others: texts name neighbours, so they are left out.

A volume belongs to an agreement if its scope names it for all clients; what several clients share is nobody's
alone. Agreements are read again after ``FRESH_S``. Thread: any; lock ``_lock`` guards ``_scopes``.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol

from flask import Response

from pmdaemon.runtime.clock import Clock
from sla_server.agreements.selectors import matches, parse_labels, selects
from sla_server.agreements.volume_labels import LabelBook
from sla_server.api import responses
from sla_server.api.errors import Forbidden, NotFound
from sla_server.api.roles import Principal
from sla_server.api.route import LIMIT_MAX, ApiRoute
from sla_server.api.scope_volumes import LabelSource, ScopeVolumes, read_book
from sla_server.rows import Row

FRESH_S: Final = 10.0
SCOPES_MAX: Final = 64
PAGES_MAX: Final = 20
ABOUT_OTHERS: Final = frozenset(
    (
        *("text", "details", "victim", "members", "who", "reason", "why", "note", "causes"),
        *("group_name", "cap_group", "loop_start", "loop_ceiling", "gen", "applied_by", "author"),
    )
)
"""Columns that may be about neighbours, whatever the row is of: a group has the volumes of several, figures
of a loop are of all throttled volumes of a backend, and staff of the provider is none of a customer's affair.
"""
SHOWN: Final = {
    "throttles": frozenset(
        (
            *("throttle_id", "volume", "client", "backend", "source", "state", "cursor", "live"),
            *("cost_per_s", "ops_per_s", "bytes_per_s", "burst_s", "peak_ops_per_s"),
            *("lifted_to", "floor"),
            *("requested_us", "confirmed_us", "seen_us", "released_us", "expires_us", "since_us"),
            *("mean_hold_us", "worst_hold_us", "longest_hold_us", "late_ios"),
        )
    ),
    "episodes": frozenset(
        (
            *("episode_id", "name", "objective", "opened_us", "closed_us", "worst_u", "slices_bad"),
            *("slices", "cursor"),
        )
    ),
    "events": frozenset(("event_id", "at_us", "kind", "severity", "element", "subject", "cursor")),
    "reports": frozenset(
        (
            *("number", "report_id", "name", "period", "revises", "revision", "from_us", "to_us"),
            *("issued_us", "is_preliminary", "digest", "summary"),
        )
    ),
}
"""Of rows that grow columns: these and no other."""
OWN_REASON: Final = ABOUT_OTHERS - {"reason"}
"""Of a judged slice the reason is its own: slow, few I/Os, no samples."""
COUNTED: Final = {
    "promises": ("count", "before", "states"),
    "volumes": ("count", "before"),
    "slas": ("count", "before"),
}
"""By operation: what their handlers count of their rows alone."""
AWAY: Final = "it cannot be read"
"""All that customers learn of a database in trouble: not where it is, nor as whom it is asked."""
LIVE_KEYS: Final = ("at_us", "mode", "server")
"""Of a snapshot: what is no list and the same for everybody."""


class AgreementSource(LabelSource, Protocol):
    """What is asked of SQL."""

    def agreements(self, in_force: bool = True) -> list[Row]:
        """Agreements in force."""


class LabelScope:
    """Agreements and volumes of one selector. Immutable."""

    def __init__(
        self, labels: str, rows: Collection[Mapping[str, Any]], read: Callable[[], LabelBook] = LabelBook
    ) -> None:
        """``read``: the labels of volumes, by which agreements may choose them."""
        volumes = ScopeVolumes(read)
        wanted = self._wanted = parse_labels(labels)
        patterns: set[str] = set()
        names: set[str] = set()
        for row in rows:
            spec = row.get("spec") or {}
            if not selects(wanted, (spec.get("metadata") or {}).get("labels") or {}):
                continue
            names.add(row["name"])
            scope = (spec.get("spec") or {}).get("scope") or {}
            if (scope.get("clients") or ["*"]) == ["*"]:
                patterns.update(volumes.of(row))
        self.agreements = frozenset(names)
        self._volumes = frozenset(patterns)

    def has_volume(self, volume: object) -> bool:
        """Whether a volume is theirs."""
        return isinstance(volume, str) and bool(self._volumes) and matches(volume, self._volumes)

    def has_agreement(self, name: object) -> bool:
        """Whether an agreement is theirs."""
        return name in self.agreements

    def has_labels(self, labels: Mapping[str, str] | None) -> bool:
        """Whether something with these labels is theirs; None: it is not known, so it is not."""
        return labels is not None and selects(self._wanted, labels)

    def _has_event(self, row: Row) -> bool:
        element, subject = row.get("element"), str(row.get("subject"))
        if element == "volume":
            return self.has_volume(subject)
        return element == "sla" and subject.partition("/")[0] in self.agreements

    def check(self, route: ApiRoute, path: Mapping[str, str], query: Mapping[str, str]) -> None:
        """Refuse what is not theirs, before the handler.

        Raises:
            Forbidden: the route is not for accounts with labels.
            NotFound: what is named belongs to others, or does not exist.
        """
        if not route.scope:
            problem = "this account sees its own agreements alone, and this is about more than them"
            raise Forbidden(problem, "Ask an administrator for an account without labels")
        name, volume = path.get("name", query.get("name")), path.get("volume")
        if route.scope in ("sla", "episodes") and name is not None and not self.has_agreement(name):
            raise NotFound(f"no agreement {name[:128]!r}", "'sla get slas' lists yours")
        if route.scope == "volume" and not self.has_volume(volume):
            raise NotFound(f"no volume {str(volume)[:128]!r}", "'sla get volumes' lists yours")

    def filtered(self, route: ApiRoute, response: Response) -> Response:
        """The answer with what is theirs."""
        if route.scope in ("free", "stream", "report") or response.status_code != 200:
            return response  # a stream asks ``live`` for each of its events, a report is made for them
        body = json.loads(response.get_data())
        is_theirs = self._tests()
        if route.scope == "live":
            body = self.live(body)
        elif route.scope in is_theirs:
            shown = SHOWN.get(route.scope)
            rows = [_plain(row, shown=shown) for row in body["items"] if is_theirs[route.scope](row)]
            kept = ("next", "server", *COUNTED.get(route.operation, ()))
            body = {key: body[key] for key in kept if key in body} | {"items": rows}
        elif route.scope in ("sla", "volume"):
            body = _first_level(body)
            if "items" in body:
                body["items"] = [_first_level(row) for row in body["items"]]
            if "live" in body:
                body["live"] = _plain(body["live"])
        else:  # a mistake in the table: better nothing than too much
            raise Forbidden("this is not for accounts with labels", "Report it")
        if (body.get("server") or {}).get("database"):
            body["server"] = {**body["server"], "database": AWAY}
        return responses.as_json(body)

    def page(
        self, scope: str, read: Callable[[int, str | None], list[Row]], limit: int, before: str | None
    ) -> tuple[list[Row], str | None]:
        """The newest of their rows before that cursor, and the cursor of the next page.

        A cursor is one of their own rows: those of others tell when something happened to them. Only after
        ``PAGES_MAX`` pages with too few of theirs it is what it is, so that a page costs a second at most.
        """
        is_theirs = self._tests()[scope]
        found: list[Row] = []
        for _page in range(PAGES_MAX):
            rows = read(LIMIT_MAX, before)
            found += filter(is_theirs, rows)
            if len(found) > limit:
                return found[:limit], found[limit - 1]["cursor"]
            if len(rows) < LIMIT_MAX:
                return found, None
            before = rows[-1]["cursor"]
        return found, before

    def _tests(self) -> dict[str, Callable[[Row], bool]]:
        return {
            "slas": lambda row: self.has_agreement(row.get("name")),
            "episodes": lambda row: self.has_agreement(row.get("name")),
            "volumes": lambda row: self.has_volume(row.get("volume")),
            "throttles": lambda row: self.has_volume(row.get("volume")),
            "events": self._has_event,
            "reports": lambda row: self.has_labels(row["labels"]),
        }

    def live(self, snapshot: Row) -> Row:
        """Of a snapshot what is theirs."""
        kept: Row = {key: snapshot[key] for key in LIVE_KEYS if key in snapshot}
        for key, value in snapshot.items():
            if isinstance(value, list):
                kept[key] = []
        kept["slas"] = [
            _plain(row) for row in snapshot.get("slas", ()) if self.has_agreement(row.get("name"))
        ]
        kept["volumes"] = [
            _plain(row) for row in snapshot.get("volumes", ()) if self.has_volume(row.get("volume"))
        ]
        return {"totals": {}, "policy": None, **kept}


def _plain(value: Any, shown: Collection[str] | None = None) -> Any:
    """The same without columns that may be about others, also in rows within rows; ``shown``: only these."""
    if isinstance(value, dict):
        return {
            key: _plain(one, shown if key == "live" else None)
            for key, one in value.items()
            if key not in ABOUT_OTHERS and (shown is None or key in shown)
        }
    return [_plain(one, shown) for one in value] if isinstance(value, list) else value


def _first_level(row: Row) -> Row:
    """What is said of their own agreement or volume; its document stays whole."""
    return {key: value for key, value in row.items() if key not in OWN_REASON}


class Scopes:
    """Scopes by selector, kept for a while."""

    def __init__(self, source: AgreementSource, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._scopes: OrderedDict[str, tuple[int, LabelScope]] = OrderedDict()

    def of(self, principal: Principal | None) -> LabelScope | None:
        """What this one sees; None: everything."""
        if principal is None or not principal.labels:
            return None
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            made_ns, scope = self._scopes.get(principal.labels, (0, None))
        if scope is not None and now_ns - made_ns < FRESH_S * 1e9:
            return scope
        rows = self._source.agreements(True)
        fresh = LabelScope(principal.labels, rows, lambda: read_book(self._source))
        with self._lock:
            self._scopes[principal.labels] = now_ns, fresh
            self._scopes.move_to_end(principal.labels)
            while len(self._scopes) > SCOPES_MAX:
                self._scopes.popitem(last=False)
        return fresh
