"""Changes that need a second person: which do, who asked, and who may approve them.

``[api] approval`` names the kinds of change that wait. A change that only loosens the grip on I/O (mode
``observe``) never waits. ``services`` stores what was asked (``services.approvals``); here is decided who the
people are: an account, or whoever is behind a token. An account of a provider is the person that the provider
knows, whatever the account is called now; all tokens are the person who made them. The server's own token is
whoever can read its file, so it may ask and withdraw, but not approve.

Rows are those of ``Directory``. Lock ``_lock`` guards ``_deciding``. Thread: any.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from pydantic import BaseModel

from sla_server.api.accounts import Directory
from sla_server.api.config import ApiConfig
from sla_server.api.errors import Forbidden, NotFound, conflict
from sla_server.api.operations import Operation, Operations
from sla_server.api.roles import Principal
from sla_server.requests import ApprovalAnswer, ApprovalDecision, ApprovalRequest, ModeSet
from sla_server.rows import Row

LOCAL_PERSON: Final = "local"
"""Whoever can read the server's own token; no account has this as its person."""
PENDING: Final = "pending"
PENDING_MAX: Final = 100
OF_ONE_MAX: Final = 10
"""Of one person, so that nobody takes the places of all."""
CHAIN_MAX: Final = 8
SEE: Final = "'sla approvals list' shows what waits"


class Approvals:
    """See the module."""

    def __init__(self, directory: Directory, operations: Operations, config: ApiConfig) -> None:
        self._directory = directory
        self._operations = operations
        self._kinds = frozenset(config.approval)
        self._lasts_s = config.approval_hours * 3600
        self._lock = threading.Lock()
        self._deciding: set[str] = set()

    def is_needed(self, op: str, body: BaseModel | None) -> bool:
        """Whether this change waits for a second person."""
        if isinstance(body, ModeSet):
            return "mode" in self._kinds and body.mode != "observe"
        return op.startswith("policy_") and "policies" in self._kinds

    def is_for_two(self, kind: str) -> bool:
        """Whether changes of this kind wait, as ``[api] approval`` names them."""
        return kind in self._kinds

    def request(self, principal: Principal, op: str, body: dict[str, Any]) -> Operation:
        """Have a change wait; the operation's answer has the row as ``approval``.

        Raises:
            ServiceRefused: too much waits, or it is not possible.
            Unavailable: accounts cannot be read, or ``services`` take nothing.
        """
        waiting, person = self.pending(), self._person_of(principal)
        if len(waiting) >= PENDING_MAX:
            raise conflict(f"{PENDING_MAX} changes wait for approval already", SEE)
        if sum(row["requested_as"] == person for row in waiting) >= OF_ONE_MAX:
            raise conflict(f"{OF_ONE_MAX} changes that you asked for wait for approval already", SEE)
        asked = ApprovalRequest.model_validate(
            {"op": op, "body": body, "requested_as": person, "lasts_s": self._lasts_s}
        )
        operation = self._operations.ask("approval_request", principal.who, asked.model_dump())
        if operation.done.is_set() and "approval" in operation.result():
            self._directory.put("approvals", operation.result()["approval"])
        return operation

    def pending(self) -> list[Row]:
        """What waits, oldest first.

        Raises:
            Unavailable: SQL could not be read since the start.
        """
        now_us = self._directory.now_us()
        rows = self._directory.rows("approvals")
        found = [row for row in rows if row["state"] == PENDING and row["expires_us"] > now_us]
        return sorted(found, key=lambda row: (row["requested_us"], row["approval_id"]))

    def decide(self, principal: Principal, name: str, answer: ApprovalAnswer, *, approves: bool) -> Operation:
        """Approve or refuse what waits; who asked may withdraw it, which is to refuse it.

        Raises:
            NotFound: nothing of that id waits.
            Forbidden: the same person asked for it, or nobody knows who it is that approves.
            ServiceRefused: it is not what was seen, or what it was based on has changed.
            Unavailable: as ``request``.
        """
        row = self._found(name)
        if answer.digest != row["digest"]:
            raise conflict(f"approval {row['approval_id']} is not the change that you saw", SEE)
        person = self._person_of(principal)
        if approves and person == LOCAL_PERSON:
            problem = "the server's own token does not say which person approves"
            raise Forbidden(problem, "Approve with an account, or an API token that an account has made")
        if approves and person == row["requested_as"]:
            problem = f"{principal.who} is the person who asked for it"
            raise Forbidden(problem, "Another account with the role operator approves it")
        self._claim(row["approval_id"])
        try:
            body = ApprovalDecision(row=row, approves=approves, note=answer.note)
            operation = self._operations.ask("approval_decide", principal.who, body.model_dump())
            if operation.done.is_set():
                operation.result()
                state = "approved" if approves else "refused"
                self._directory.put("approvals", {**row, "state": state, "changed_us": row["changed_us"] + 1})
        finally:
            with self._lock:
                self._deciding.discard(row["approval_id"])
        return operation

    def _claim(self, name: str) -> None:
        with self._lock:
            if name in self._deciding:
                raise conflict(f"approval {name} is being decided at this moment", SEE)
            self._deciding.add(name)

    def _found(self, name: str) -> Row:
        found = [row for row in self.pending() if row["approval_id"].startswith(name)]
        if len(found) != 1:
            problem = f"no change waits as {name[:64]!r}" if not found else "several begin so"
            raise NotFound(problem, f"{SEE}; what is too old waits no more")
        return found[0]

    def _person_of(self, principal: Principal) -> str:
        if principal.account:
            return self._person_named(principal.account)
        if not principal.token_id:
            return LOCAL_PERSON
        tokens = {row["token_id"]: row for row in self._directory.rows("api_tokens")}
        makers = {f"token {row['name']}": row["created_by"] for row in tokens.values()}
        maker = tokens[principal.token_id]["created_by"] if principal.token_id in tokens else ""
        for _ in range(CHAIN_MAX):  # a token may have made a token
            maker = makers.get(maker, maker)
        return self._person_named(maker)

    def _person_named(self, who: str) -> str:
        """The person behind the name of an account; also of one that was deleted meanwhile."""
        accounts = {row["name"]: row for row in self._directory.rows("accounts")}
        if who not in accounts:
            return LOCAL_PERSON
        return accounts[who].get("identity") or f"account {who}"
