"""Who may come in: accounts, API tokens and sessions as SQL has them, kept in memory.

SQL is the truth; a change goes to it as any other, through ``services`` and the database manager. It is
durable before it is in SQL, so what this process changed is kept beside what it reads until SQL has it
(``changed_us`` grows with each change of a row). Read again every ``REFRESH_S`` when somebody asks, by one
thread at a time.

While the database is away, what was read last goes on to hold; if nothing was read since the start, nobody
but the local administrator is known, whose token is a file. Lock ``_lock`` guards all members. Thread: any.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from pmdaemon.errors import SlaError
from pmdaemon.runtime.clock import Clock
from sla_server.api.errors import Unavailable
from sla_server.api.roles import ROLE_NAMES, Principal, Role
from sla_server.rows import Row

log = structlog.get_logger("api-accounts")
REFRESH_S: Final = 10.0
DAY_US: Final = 86_400_000_000
ACTIVE: Final = "active"
DISABLED: Final = "disabled"
DELETED: Final = "deleted"
WITHDRAWN: Final = "withdrawn"
"""Of an account that its provider lets in no more; the next sign-in that is allowed makes it active."""
SESSIONS_MAX: Final = 32
"""Open sessions of one account; the oldest ends when one more begins."""
KEYS: Final = {
    "accounts": "name",
    "api_tokens": "token_id",
    "sessions": "session_id",
    "approvals": "approval_id",
}
"""Tables, and the column of their key."""
TOKEN_PREFIX: Final = "sla_"  # noqa: S105 - what secret scanners look for


class AccessSource(Protocol):
    """What is asked of SQL (``db.queries.access``); tests of the API answer from memory instead."""

    def accounts(self) -> list[Row]:
        """All accounts."""

    def tokens(self, now_us: int) -> list[Row]:
        """API tokens that have not expired."""

    def sessions(self, now_us: int) -> list[Row]:
        """Sessions whose time is not up."""

    def sign_ins(self) -> list[Row]:
        """Accounts of a provider, and when the newest session of each began (``account``, ``begun_us``)."""

    def approvals(self, now_us: int) -> list[Row]:
        """Changes that wait for a second person, and whose time is not up."""


def digest_of(secret: str) -> str:
    """What is stored of a secret of 256 random bits; guessing it is out of reach of any hash rate."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def new_token() -> str:
    """The secret of an API token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def role_of(row: Row) -> Role:
    """The role in a row; one of another release counts as the least."""
    name = row.get("role")
    return Role[name] if name in ROLE_NAMES else Role.viewer


class Directory:
    """See the module.

    Args:
        source: SQL.
        clock: of the server.
        token_days: an API token is worth nothing so long after its maker, whom a provider knows, has signed
            in last.
    """

    def __init__(self, source: AccessSource, clock: Clock, token_days: float) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._read_ns: int | None = None
        self._is_known = False
        self._token_us = round(token_days * DAY_US)
        self._signed_in_us: dict[str, int] = {}
        self._lapsed_us: dict[str, int] = {}  # API tokens to when they lapsed: no sign-in changes that
        self._rows: dict[str, dict[str, Row]] = {table: {} for table in KEYS}
        self._stored: dict[str, dict[str, Row]] = {table: {} for table in KEYS}
        self._own: dict[str, dict[str, list[Row]]] = {table: {} for table in KEYS}
        self._tokens: dict[str, Row] = {}

    def refresh(self) -> None:
        """Read SQL again if it is time for it; never fails."""
        now_ns = self._clock.monotonic_ns()
        if self._read_ns is not None and now_ns - self._read_ns < REFRESH_S * 1e9:
            return
        if not self._reading.acquire(blocking=self._read_ns is None):
            return  # another thread reads
        try:
            if self._read_ns is not None and now_ns - self._read_ns < REFRESH_S * 1e9:
                return
            now_us = self._clock.unix_us()
            found = {
                "accounts": self._source.accounts(),
                "api_tokens": self._source.tokens(now_us),
                "sessions": self._source.sessions(now_us),
                "approvals": self._source.approvals(now_us),
            }
            signed_in_us = {str(row["account"]): int(row["begun_us"]) for row in self._source.sign_ins()}
            with self._lock:
                for name, begun_us in signed_in_us.items():  # SQL may not have the newest session yet
                    self._signed_in_us[name] = max(begun_us, self._signed_in_us.get(name, 0))
                self._merge(found, now_us)
                self._is_known = True
        except SlaError as exc:
            log.warning("accounts-not-read", error=str(exc))
        finally:
            self._read_ns = now_ns
            self._reading.release()

    def _merge(self, found: dict[str, list[Row]], now_us: int) -> None:
        for table, key in KEYS.items():
            self._stored[table] = {str(row[key]): row for row in found[table]}
            rows = dict(self._stored[table])
            own = self._own[table]
            for name, changes in list(own.items()):
                stored_us = rows[name]["changed_us"] if name in rows else -1
                left = [row for row in changes if row["changed_us"] > stored_us]
                if table != "accounts":
                    left = [row for row in left if row.get("expires_us", now_us + 1) > now_us]
                if left:
                    own[name] = left
                    rows[name] = left[-1]
                else:
                    del own[name]
            self._rows[table] = rows
        self._index()

    def _index(self) -> None:
        self._tokens = {str(row["digest"]): row for row in self._rows["api_tokens"].values()}

    def put(self, table: str, row: Row) -> None:
        """What this process has changed just now; SQL will have it soon."""
        name = str(row[KEYS[table]])
        with self._lock:
            self._own[table].setdefault(name, []).append(row)
            self._rows[table][name] = row
            if table == "api_tokens":
                self._index()
            if table == "sessions" and (account := str(row["account"])):
                begun_us = max(int(row["created_us"]), self._signed_in_us.get(account, 0))
                self._signed_in_us[account] = begun_us

    def now_us(self) -> int:
        """The server's time."""
        return self._clock.unix_us()

    def take_back(self, table: str, row: Row) -> None:
        """A change that was ``put`` is none: what was so before holds again, unless it changed once more."""
        name = str(row[KEYS[table]])
        with self._lock:
            left = [one for one in self._own[table].pop(name, []) if one is not row]
            if left:
                self._own[table][name] = left
            rows, before = self._rows[table], left[-1] if left else self._stored[table].get(name)
            if before is None:
                rows.pop(name, None)
            else:
                rows[name] = before
            if table == "api_tokens":
                self._index()

    def changed_us(self, row: Row | None) -> int:
        """Time for the next change of a row: now, and later than the last one."""
        return max(self._clock.unix_us(), int((row or {}).get("changed_us", 0)) + 1)

    def rows(self, table: str) -> list[Row]:
        """All rows of a table, by key.

        Raises:
            Unavailable: SQL could not be read since the start.
        """
        self.refresh()
        with self._lock:
            self._check_known()
            return [dict(row) for _key, row in sorted(self._rows[table].items())]

    def _check_known(self) -> None:
        if not self._is_known:
            raise Unavailable(
                "the database cannot be read, so accounts, API tokens and sessions are not known",
                "Use the server's own token (DATA_DIR/api.token), or try again when the database is back",
            )

    def without_sessions(self, account: Row) -> Row:
        """The account, with all sessions so far ended."""
        at_us = self.changed_us(account)
        return {
            **account,
            "changed_us": at_us,
            "sessions_from_us": at_us + 1,
        }  # those of this microsecond, too

    def account(self, name: str) -> Row | None:
        """An account that was not deleted.

        Raises:
            Unavailable: as ``rows``.
        """
        self.refresh()
        with self._lock:
            self._check_known()
            row = self._rows["accounts"].get(name)
        return None if row is None or row["state"] == DELETED else dict(row)

    def by_token(self, secret: str) -> Principal | None:
        """Who has this API token; None: unknown, expired or revoked, or the account that made it has ended.

        Raises:
            Unavailable: as ``rows``.
        """
        self.refresh()
        digest = digest_of(secret)
        with self._lock:
            self._check_known()
            row = self._tokens.get(digest)
            maker = self._rows["accounts"].get(row["created_by"]) if row is not None else None
        if row is None or not hmac.compare_digest(str(row["digest"]), digest):
            return None
        if row["revoked_us"] is not None or 0 < self.token_ends_us(row) <= self._clock.unix_us():
            return None
        who, role, labels = f"token {row['name']}", role_of(row), str(row["labels"])
        if maker is not None:
            # It can do no more than who made it may do now; an account of that name made later is another.
            if maker["state"] != ACTIVE or maker["created_us"] > row["created_us"]:
                return None
            role = min(role, role_of(maker))
            labels = ",".join(dict.fromkeys(one for one in (labels, str(maker["labels"])) if one))
        return Principal(who, role, labels, token_id=row["token_id"])

    def token_ends_us(self, row: Row) -> int:
        """When an API token ends, if nobody signs in meanwhile; 0 for never.

        A provider is not asked between sign-ins: whom it has dropped is whoever does not sign in any more.
        """
        with self._lock:
            if (lapsed_us := self._lapsed_us.get(str(row["token_id"]))) is not None:
                return lapsed_us
            maker = self._rows["accounts"].get(row["created_by"])
            signed_in_us = self._signed_in_us.get(row["created_by"], 0)
        if maker is None or not maker.get("identity"):
            return int(row["expires_us"])
        # The account was made by a sign-in, too; rows of sessions leave SQL in the end.
        lapses_us = max(int(maker["created_us"]), signed_in_us) + self._token_us
        return min(lapses_us, int(row["expires_us"]) or lapses_us)

    def lapsed_tokens(self) -> list[Row]:
        """API tokens that have ended early, because their maker signs in no more; reads no SQL.

        They stay so in this process, also if that cannot be recorded and their maker signs in again.
        """
        now_us = self._clock.unix_us()
        with self._lock:
            known = {name: dict(row) for name, row in self._rows["api_tokens"].items()}
        rows = [row for row in known.values() if row["revoked_us"] is None]
        ends_us = {row["token_id"]: self.token_ends_us(row) for row in rows}
        found = [
            row for row in rows if 0 < ends_us[row["token_id"]] <= now_us < (row["expires_us"] or now_us + 1)
        ]
        with self._lock:
            kept = {name: us for name, us in self._lapsed_us.items() if name in known}
            self._lapsed_us = kept | {row["token_id"]: ends_us[row["token_id"]] for row in found}
        return found

    def by_session(self, secret: str) -> Principal | None:
        """Who is signed in with this session; None: ended, or never was.

        Raises:
            Unavailable: as ``rows``.
        """
        return self.by_session_id(digest_of(secret))

    def by_session_id(self, session_id: str) -> Principal | None:
        """The same, of a session whose id is known.

        Raises:
            Unavailable: as ``rows``.
        """
        self.refresh()
        with self._lock:
            self._check_known()
            row = self._rows["sessions"].get(session_id)
            account = self._rows["accounts"].get(row["account"]) if row and row["account"] else None
        if row is None or not self._is_open(row, account):
            return None
        if account is None:
            return Principal(row["made_by"], role_of(row), row["labels"], session=session_id)
        return Principal(
            account["name"], role_of(account), account["labels"], account["name"], session=session_id
        )

    def _is_open(self, row: Row, account: Row | None) -> bool:
        if row["ended_us"] is not None or row["expires_us"] <= self._clock.unix_us():
            return False
        if not row["account"]:
            return True
        if account is None or account["state"] != ACTIVE:
            return False
        return bool(row["created_us"] >= account["sessions_from_us"])

    def open_sessions(self, is_wanted: Callable[[Row], bool] = lambda _row: True) -> list[Row]:
        """Sessions that somebody can still use, oldest first.

        Raises:
            Unavailable: as ``rows``.
        """
        rows = self.rows("sessions")
        accounts = {row["name"]: row for row in self.rows("accounts")}
        found = [row for row in rows if is_wanted(row) and self._is_open(row, accounts.get(row["account"]))]
        return sorted(found, key=lambda row: (row["created_us"], row["session_id"]))
