"""Signing in and out, and every change of accounts, tokens and sessions: one request to ``services`` each.

A change holds in this process as soon as it was asked for (``Directory.put``), unless ``services`` refuse it,
also later (``take_back``), and everywhere when it is durable. A session begins at once, whatever became of
its row: a person who was given the right to come in need not wait for the database. Thread: any.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import structlog

from pmdaemon.errors import SlaError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.excerpt import printable
from sla_server.api.accounts import (
    ACTIVE,
    DELETED,
    DISABLED,
    SESSIONS_MAX,
    WITHDRAWN,
    Directory,
    digest_of,
    role_of,
)
from sla_server.api.approvals import Approvals
from sla_server.api.config import ApiConfig
from sla_server.api.errors import ApiError, LoginRefused, NothingGuessed, TooManyLogins
from sla_server.api.failed_logins import Entry, FailedLogins
from sla_server.api.identity import ASK, ProviderIdentity
from sla_server.api.operations import Operation, Operations
from sla_server.api.passwords import PASSWORD_MAX, LoginLimits, Passwords, network_of
from sla_server.api.roles import Principal
from sla_server.requests import AccessChange
from sla_server.rows import Row

log = structlog.get_logger("api-access")
NOBODY: Final = "not signed in"
PROVIDER: Final = "OpenID Connect"
"""What the audit log calls a sign-in through the provider."""
HOUR_US: Final = 3_600_000_000
LAPSES_S: Final = 60.0
"""How often API tokens are looked for whose maker has not signed in for too long."""
UNWAITED: Final = {"waits": False, "goes_back": True}


class Access:
    """See the module."""

    def __init__(
        self,
        directory: Directory,
        operations: Operations,
        clock: Clock,
        *,
        config: ApiConfig,
        passwords: Passwords | None = None,
    ) -> None:
        self.directory = directory
        self.passwords = passwords or Passwords()
        self._limits = LoginLimits(clock)
        self._failed = FailedLogins(clock)
        self._operations = operations
        self._clock = clock
        self._session_us = round(config.session_hours * HOUR_US)
        self._lapses_ns = clock.monotonic_ns()
        self.approvals = Approvals(directory, operations, config)
        # Accounts of the provider are decided on one at a time; no change is waited for meanwhile.
        self._provided = threading.Lock()

    def change(
        self,
        who: str,
        action: str,
        subject: str,
        table: str = "",
        row: Row | None = None,
        *,
        before: Any = None,
        after: Any = None,
        waits: bool = True,
        goes_back: bool = False,
    ) -> Operation:
        """Ask ``services`` to record a change; ``goes_back``: one that is not waited for, but may be refused.

        Raises:
            ServiceRefused, Unavailable: it did not take it; nothing has changed.
        """
        body = AccessChange.model_validate(
            {"table": table, "row": row or {}, "action": action, "subject": subject}
            | {"before": before, "after": after}
        )
        operation = self._operations.ask("access", who, body.model_dump(), waits=waits)
        if operation.done.is_set():
            operation.result()
        if row is not None:
            self.directory.put(table, row)
            if waits or goes_back:  # a session that has begun goes on, see the module
                operation.on_refusal(lambda: self.directory.take_back(table, row))
        return operation

    def record(self, who: str, action: str, subject: str, after: Any = None) -> None:
        """An entry of the audit log that must not hold up what it is about."""
        try:
            self.change(who, action, subject, after=after, waits=False)
        except SlaError as exc:
            log.warning("audit-entry-lost", who=who, action=action, subject=subject, error=str(exc))

    def by_password(self, name: str, password: str, address: str) -> Principal:
        """Who signs in with name and password.

        Raises:
            TooManyLogins: for this account or from this address.
            LoginRefused: wrong, or no such account, or a disabled one; it does not say which.
            Unavailable: accounts cannot be read.
        """
        name = printable(name, 64)
        self._limits.take(name, address)
        account = self.directory.account(name)
        is_usable = account is not None and account["state"] == ACTIVE
        stored = account["password"] if account is not None and is_usable else ""
        if not self.passwords.verify(stored, password[:PASSWORD_MAX]) or account is None:
            self._record_failed(self._failed.add(name, address, is_account=account is not None))
            raise LoginRefused
        if self.directory.account(name) != account:  # changed while the password was looked at
            raise LoginRefused
        self._limits.succeeded(name, address)
        self._record_failed(self._failed.succeeded(name, address))
        return Principal(name, role_of(account), account["labels"], account=name)

    def by_provider(self, fetch: Callable[[], ProviderIdentity], address: str) -> Principal:
        """Who signs in through the provider of OpenID Connect; ``fetch`` asks it who it is.

        Raises:
            TooManyLogins: from this address.
            LoginRefused: the provider, the mapping or the account refuse it; it says why.
            Unavailable: the provider does not answer, or accounts cannot be read.
        """
        key = f"{PROVIDER} {network_of(address)}"
        self._limits.take(key, address)
        name = PROVIDER
        try:
            identity = fetch()
            name = identity.name
            principal = self._of_identity(identity)
        except LoginRefused as exc:
            if isinstance(exc, NothingGuessed):
                self._limits.succeeded(key, address)
            why = {"by": PROVIDER, "why": exc.detail}
            entries = self._failed.add(name, address)
            self._record_failed((of, {**why, **after} if of == name else after) for of, after in entries)
            raise
        except ApiError:
            self._limits.succeeded(key, address)  # no fault of theirs
            raise
        self._limits.succeeded(key, address)
        self._record_failed(self._failed.succeeded(name, address))
        return principal

    def _of_identity(self, identity: ProviderIdentity) -> Principal:
        """The account of somebody whom the provider vouches for; made, or changed, as the mapping says."""
        changes: list[Operation] = []
        try:
            with self._provided:
                row = self._decided(identity, changes)
        finally:
            for operation in changes:
                self._operations.wait(operation)
        for operation in changes:
            if operation.done.is_set():
                operation.result()
        return Principal(row["name"], role_of(row), row["labels"], account=row["name"])

    def _decided(self, identity: ProviderIdentity, changes: list[Operation]) -> Row:
        """The account as it is now; ``changes`` were asked for, and are to be waited for without the lock."""
        if not identity.role:
            self._withdraw(identity, changes)
            problem = f"{identity.name!r} is known to the provider, but may not come in here"
            raise LoginRefused(problem, ASK)
        self._check_one_account(identity)
        account = self.directory.account(identity.name)
        if account is not None and account.get("identity", "") != identity.subject:
            whose = "was another person's at the provider" if account.get("identity") else "is a local one"
            problem = f"the account {identity.name!r} {whose}, so it is not yours"
            raise LoginRefused(problem, f"An administrator ends it first: sla user delete {identity.name}")
        if account is not None and account["state"] == DISABLED:
            problem = f"the account {identity.name!r} is disabled"
            raise LoginRefused(problem, f"An administrator enables it: sla user enable {identity.name}")
        self._end_lapsed_of(identity)
        return self._provided_row(identity, account, changes)

    def _check_one_account(self, identity: ProviderIdentity) -> None:
        """One person has one account: somebody with two could approve what they asked for themselves."""
        for row in self.directory.rows("accounts"):
            is_theirs = row.get("identity", "") == identity.subject and row["state"] != DELETED
            if is_theirs and row["name"] != identity.name:
                former = row["name"]
                problem = f"the provider calls you {identity.name!r} now; your account is {former!r}"
                raise LoginRefused(problem, f"An administrator ends that: sla user delete {former}")

    def _provided_row(self, identity: ProviderIdentity, account: Row | None, changes: list[Operation]) -> Row:
        given = {"role": identity.role, "labels": identity.labels, "state": ACTIVE}
        if account is not None:
            before = {key: account[key] for key in given}
            if before == given:
                return account
            row = {**account, **given, "changed_us": self.directory.changed_us(account)}
            who, subject = f"{identity.name} ({PROVIDER})", identity.name
            changes.append(
                self.change(
                    who, "user-change", subject, "accounts", row, before=before, after=given, **UNWAITED
                )
            )
            return row
        former = {row["name"]: row for row in self.directory.rows("accounts")}.get(identity.name)
        assert former is None or former["state"] == DELETED
        at_us = self.directory.changed_us(former)
        row = {"name": identity.name, **given, "password": "", "identity": identity.subject}
        row |= dict.fromkeys(("created_us", "changed_us", "sessions_from_us"), at_us)
        after = {**given, "identity": identity.subject}
        who, subject = f"{identity.name} ({PROVIDER})", identity.name
        changes.append(self.change(who, "user-add", subject, "accounts", row, after=after, **UNWAITED))
        return row

    def _withdraw(self, identity: ProviderIdentity, changes: list[Operation]) -> None:
        """Somebody may come in no more: sessions end, and API tokens are worth nothing, whatever the name."""
        for account in self.directory.rows("accounts"):
            if account.get("identity", "") == identity.subject and account["state"] == ACTIVE:
                row = {**self.directory.without_sessions(account), "state": WITHDRAWN}
                before, after = {"state": ACTIVE}, {"state": WITHDRAWN}
                name = account["name"]
                changes.append(
                    self.change(
                        PROVIDER,
                        "user-change",
                        name,
                        "accounts",
                        row,
                        before=before,
                        after=after,
                        **UNWAITED,
                    )
                )

    def end_lapsed_tokens(self) -> None:
        """End the API tokens whose makers have not signed in at the provider for too long; with a record.

        They are worth nothing from that moment (``Directory.by_token``); what is not recorded is tried again.
        """
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._lapses_ns:
            return
        self._lapses_ns = now_ns + round(LAPSES_S * 1e9)
        try:
            self._end_lapsed(self.directory.lapsed_tokens())
        except SlaError as exc:
            log.warning("tokens-not-ended", error=str(exc))

    def _end_lapsed_of(self, identity: ProviderIdentity) -> None:
        """Before a sign-in counts: what has lapsed stays so."""
        rows = self.directory.lapsed_tokens()
        self._end_lapsed(row for row in rows if row["created_by"] == identity.name)

    def _end_lapsed(self, rows: Iterable[Row]) -> None:
        for row in rows:
            at_us = self.directory.changed_us(row)
            ended = {**row, "revoked_us": at_us, "changed_us": at_us}
            before = {key: row[key] for key in ("token_id", "role", "labels", "expires_us", "created_by")}
            after = {"why": f"{row['created_by']} has not signed in through the provider for too long"}
            name = row["name"]
            self.change(
                PROVIDER, "token-lapse", name, "api_tokens", ended, before=before, after=after, **UNWAITED
            )

    def code_refused(self, address: str) -> None:
        """Somebody tried a one-time code that is not good; counted as often as passwords may be tried."""
        try:
            self._limits.take("", address)
        except TooManyLogins:
            return
        self._record_failed(self._failed.add("one-time code", address))

    def record_failed_logins(self, *, all_of_them: bool = False) -> None:
        """Record what was counted of failed logins: of spans that have passed, or all at the end."""
        self._record_failed(self._failed.rest() if all_of_them else self._failed.due())

    def _record_failed(self, entries: Iterable[Entry]) -> None:
        for subject, after in entries:
            self.record(NOBODY, "login-failed", subject, after)

    def by_code(self, principal: Principal | None) -> Principal | None:
        """Who spends a one-time code, as they are now: that of a session is good while the session is.

        Raises:
            Unavailable: sessions cannot be read.
        """
        if principal is None or not principal.session:
            return principal
        return self.directory.by_session_id(principal.session)

    def begin_session(
        self, principal: Principal, address: str, browser: str, how: str, *, within: str = ""
    ) -> str:
        """A new session; returns the secret that its cookie holds.

        ``within``: id of the session that it is made from; it ends with that one's time at the latest.
        """
        secret = secrets.token_urlsafe(32)
        account = self._account_of(principal)
        now_us = max(self._clock.unix_us(), account["sessions_from_us"] if account else 0)
        row: Row = {
            "session_id": digest_of(secret),
            "account": principal.account,
            "role": principal.role.name,
            "labels": principal.labels,
            "made_by": principal.who,
            "address": printable(address, 64),
            "browser": printable(browser, 200),
            "created_us": now_us,
            "changed_us": now_us,
            "expires_us": self._end_us(now_us, within),
            "ended_us": None,
        }
        same = [
            item
            for item in self._sessions_of(principal)
            if (item["account"], item["made_by"]) == (principal.account, principal.who)
        ]
        for item in same[: max(0, len(same) - SESSIONS_MAX + 1)]:
            self._try_end(principal.who, item)
        after = {"session": row["session_id"][:12], "by": how, "address": row["address"]}
        try:
            self.change(principal.who, "login", principal.who, "sessions", row, after=after, waits=False)
        except SlaError as exc:  # it ends with this process
            log.warning("session-not-stored", who=principal.who, error=str(exc))
            self.directory.put("sessions", row)
        return secret

    def _end_us(self, now_us: int, within: str) -> int:
        made_from = self.directory.open_sessions(lambda row: row["session_id"] == within) if within else []
        return min([now_us + self._session_us, *(int(row["expires_us"]) for row in made_from)])

    def _account_of(self, principal: Principal) -> Row | None:
        return self.directory.account(principal.account) if principal.account else None

    def _sessions_of(self, principal: Principal) -> list[Row]:
        try:
            return self.directory.open_sessions(lambda row: row["account"] == principal.account)
        except SlaError:
            return []

    def end_session(self, who: str, row: Row) -> Operation:
        """End one session."""
        at_us = self.directory.changed_us(row)
        ended = {**row, "ended_us": at_us, "changed_us": at_us}
        after = {"session": row["session_id"][:12], "account": row["account"] or row["made_by"]}
        return self.change(who, "logout", row["account"] or row["made_by"], "sessions", ended, after=after)

    def _try_end(self, who: str, row: Row) -> None:
        try:
            self.end_session(who, row)
        except SlaError as exc:
            log.warning("session-not-ended", session=row["session_id"][:12], error=str(exc))
