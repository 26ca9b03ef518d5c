"""Changes that wait for a second person: what was asked, what it was based on, and what became of it.

The application server decides which changes wait, and who may approve them; its rows of ``approvals`` are the
only state. Here a change becomes such a row, with what it is ``basis``ed on: the modes or the policy that are
in force. A digest binds it all together. Approving it carries out the stored body, nothing else, and only
while the basis is still the same; the change, the row's new state and the entries of the audit log are one
record. Belongs to the main loop.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from sla_server.agreements.document import Agreement
from sla_server.agreements.errors import DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.requests import AgreementsApply, ApprovalRequest, ModeSet, PolicyPin, PolicyRollback
from sla_server.rows import Row, Rows
from sla_server.services.catalog import Catalog
from sla_server.services.rows import audit_row, event_row

if TYPE_CHECKING:
    from sla_server.services.core import Services

MODELS: Final[dict[str, type[BaseModel]]] = {
    "mode": ModeSet,
    "policy_pin": PolicyPin,
    "policy_rollback": PolicyRollback,
}
"""Operations that can wait, and their bodies."""
PENDING: Final = "pending"
BOUND: Final = (
    "approval_id",
    "op",
    "body",
    "basis",
    "requested_by",
    "requested_as",
    "requested_us",
    "expires_us",
)
"""Columns that the digest binds together."""
TEXT_MAX: Final = 200


def basis_of(desk: Services, op: str, wanted: BaseModel) -> Row:
    """What is in force now, as far as the change depends on it."""
    if isinstance(wanted, ModeSet):
        is_policy = wanted.of == "policy"
        mode, modes = (desk.policy_mode, desk.policy_modes) if is_policy else (desk.mode, desk.backend_modes)
        return {"mode": mode, "own": modes.get(wanted.backend) if wanted.backend is not None else None}
    assert op != "mode"
    return {"version": desk.policy.version, "pinned": desk.policy.orders.pinned}


def is_so_already(wanted: BaseModel, basis: Row) -> bool:
    """Whether the change would change nothing, so that nobody need approve it."""
    if not isinstance(wanted, ModeSet):
        return False
    if wanted.backend is None:
        return bool(basis["mode"] == wanted.mode)
    return bool(basis["own"] == (None if wanted.mode == "inherit" else wanted.mode))


def enforced_alone(
    asked: AgreementsApply, catalog: Catalog, documents: Collection[Loaded]
) -> list[DocumentProblem]:
    """Agreements that would get ``control: enforce``, where that is a mode for two people."""
    if asked.may_enforce:
        return []
    fix = "Leave control out, and ask for the mode: sla mode enforce, or with --backend NAME"
    found = []
    for each in documents:
        if isinstance(each.document, Agreement) and each.document.spec.control == "enforce":
            before = catalog.get(each.document.name)
            if before is None or before.agreement.spec.control != "enforce":
                problem = "is a mode, which a second person has to approve ([api] approval)"
                name = each.document.name
                found.append(DocumentProblem(each.line, "spec.control", problem, fix, name))
    return found


def text_of(wanted: BaseModel, basis: Row) -> str:
    """The change in words."""
    if isinstance(wanted, ModeSet):
        what = "mode of policies" if wanted.of == "policy" else "mode"
        where = f"backend {wanted.backend}" if wanted.backend is not None else "the server"
        now = basis["mode"] if wanted.backend is None else basis["own"] or f"inherited: {basis['mode']}"
        return f"{what} {wanted.mode} on {where} (now {now})"
    now = f"now version {basis['version'] or 'none'}" + (", pinned" if basis["pinned"] else "")
    if isinstance(wanted, PolicyPin):
        return (
            f"pin policy version {wanted.version} ({now})" if wanted.version else f"unpin the policy ({now})"
        )
    return f"roll back the policy ({now})"


def requested(
    asked: ApprovalRequest, who: str, wanted: BaseModel, basis: Row, now_us: int
) -> tuple[Row, Rows]:
    """The row of a change that waits from now on, and all rows to record."""
    row: Row = {
        "approval_id": str(uuid.uuid4()),
        "op": asked.op,
        "body": _canonical(wanted.model_dump(exclude_unset=True)),
        "basis": _canonical(basis),
        "text": text_of(wanted, basis),
        "state": PENDING,
        "requested_by": who,
        "requested_as": asked.requested_as,
        "decided_by": "",
        "answer": "",
        "requested_us": now_us,
        "expires_us": now_us + round(asked.lasts_s * 1e6),
        "changed_us": now_us,
        "decided_us": None,
    }
    row["digest"] = digest_of(row)
    subject, words = row["approval_id"], f"{who} asks for: {row['text']}"
    details = {"who": who, "approval_id": subject}
    return row, [
        ("approvals", row),
        audit_row(who, "approval-request", subject, now_us, after=_audited(row)),
        event_row("approval-requested", "info", "approval", subject, words, now_us, details),
    ]


def decided(row: Row, who: str, state: str, note: str, now_us: int) -> tuple[Row, Rows]:
    """The row of a change that waits no more, and the rows to record."""
    at_us = max(now_us, int(row["changed_us"]) + 1)
    after = {**row, "state": state, "decided_by": who, "answer": note[:TEXT_MAX]}
    after |= {"changed_us": at_us, "decided_us": at_us}
    said = {"state": state, "requested_by": row["requested_by"], "decided_by": who, "note": note[:TEXT_MAX]}
    action, subject = f"approval-{state}", str(row["approval_id"])
    audited = audit_row(who, action, subject, now_us, before=_audited(row), after=said)
    return after, [("approvals", after), audited]


def digest_of(row: Row) -> str:
    """SHA-256 of what was asked, by whom, on which basis, until when."""
    return hashlib.sha256(_canonical({name: row[name] for name in BOUND}).encode()).hexdigest()


def _audited(row: Row) -> Row:
    return {name: row[name] for name in ("op", "text", "body", "requested_by", "digest", "expires_us")}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
