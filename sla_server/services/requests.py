"""What the application server may ask for (messages.md, "Requests to services").

Every request gets one answer: at once if it is refused, when its record is durable if it is accepted, and
202 after ``request_limit_s`` if that takes longer; then a second, final answer with the same id follows.
Codes are HTTP's.

Belongs to the main loop.
"""

from __future__ import annotations

import difflib
import json
import math
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from pmdaemon.runtime.config import describe
from pmdaemon.wire.messages.api import ServiceRequest
from pmdaemon.wire.rates import Rates
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.requests import (
    AccessChange,
    Acknowledgement,
    AgreementDelete,
    AgreementsApply,
    ApprovalDecision,
    ApprovalRequest,
    DocumentEnd,
    EventAgain,
    GatewayListing,
    ModeSet,
    PolicyPin,
    PolicyRollback,
    RecipientTest,
    ThrottleRelease,
    ThrottleSet,
    VolumesDecision,
)
from sla_server.rows import Row, Rows
from sla_server.services import approvals, notifications
from sla_server.services import catalog as catalogs
from sla_server.services.acts import Act
from sla_server.services.catalog import AgreementChange, Catalog, Change
from sla_server.services.rows import audit_row, event_row
from sla_server.services.volume_gate import DecisionRefused

if TYPE_CHECKING:
    from sla_server.services.core import Services

Body = dict[str, Any]
BACKEND_MODES: Final = "backend-mode"
"""Action of the audit rows that say which backends have a mode of their own."""
OBSERVE: Final = "observe"
POLICY_MODE: Final = "policy-mode"
"""Action of the audit rows that say where the caps of policies hold."""
MAX_PENDING: Final = 1024


class Requests:
    """See the module."""

    def __init__(self, desk: Services, limit_s: float) -> None:
        self._desk = desk
        self._limit_ns = round(limit_s * 1e9)
        self._pending: dict[str, int] = {}  # request to the time when 202 is due
        self._policy_waiters: list[str] = []
        self._ops: dict[str, Callable[[str, str, Body, int], None]] = {
            "apply": self._apply,
            "delete": self._delete,
            "end_document": self._end_document,
            "notify_test": self._notify_test,
            "event_again": self._event_again,
            "acknowledge": self._acknowledge,
            "throttle_set": self._throttle_set,
            "throttle_release": self._throttle_release,
            "mode": self._mode,
            "policies_changed": self._policies_changed,
            "policy_pin": self._policy_pin,
            "policy_rollback": self._policy_rollback,
            "gateway_list": self._gateway_list,
            "volumes_approve": partial(self._volumes, approve=True),
            "volumes_revoke": partial(self._volumes, approve=False),
            "access": self._access,
            "approval_request": self._approval_request,
            "approval_decide": self._approval_decide,
        }
        self._acts: dict[str, Act] = {}  # of requests that are not recorded yet
        self._newest: dict[str, str] = {}  # what changes to the request that has changed it last
        self._decided: OrderedDict[str, None] = OrderedDict()  # approvals that SQL may still call pending

    def handle(self, asked: ServiceRequest, now_ns: int, now_us: int) -> None:
        """One REQUEST."""
        request, action = asked.request, self._ops.get(asked.op)
        if action is None or asked.body is None:
            known = ", ".join(sorted(self._ops))
            self._refuse(request, 400, f"{asked.op!r} is not an operation with a body", f"Use one of {known}")
            return
        if len(self._pending) >= MAX_PENDING:
            self._refuse(request, 503, "too many changes are waiting", "Try again in some seconds")
            return
        self._pending[request] = now_ns + self._limit_ns
        try:
            action(request, asked.who, asked.body, now_us)
        except ValidationError as exc:
            self._refuse(request, 422, describe(exc), "Correct the request")
        except AgreementsRefused as exc:
            self._refuse_all(request, exc.problems)

    def tick(self, now_ns: int) -> None:
        """Answer 202 to what takes too long."""
        for request, due_ns in list(self._pending.items()):
            if now_ns >= due_ns:
                # Its final answer follows: `_finish` answers again, whether or not it is still here.
                del self._pending[request]
                self._desk.respond(request, 202, {"state": "accepted; not durable yet"})

    def policy_looked(self) -> None:
        """The SQL worker has read: tell those who asked."""
        waiters, self._policy_waiters = self._policy_waiters, []
        for request in waiters:
            self._finish(request, 200, {"version": self._desk.policy.version or None})

    def _finish(self, request: str, code: int, body: Body) -> None:
        self._pending.pop(request, None)
        self._acts.pop(request, None)
        self._desk.respond(request, code, body)

    def _refuse(self, request: str, code: int, problem: str, fix: str) -> None:
        self._finish(request, code, {"errors": [DocumentProblem(0, "", problem, fix).as_dict()]})

    def _refuse_all(self, request: str, problems: list[DocumentProblem]) -> None:
        self._finish(request, 422, {"errors": [problem.as_dict() for problem in problems]})

    def _when_durable(self, request: str, rows: Rows, body: Body, decided: str = "") -> None:
        """``decided``: an approval that the rows end; one that is carried out is known without."""
        change = self._acts.pop(request, None) or Act(decided)

        def done(ok: bool, error: str) -> None:
            if not ok:
                self._decided.pop(change.approval, None)  # it goes on waiting
                said = "it is done, but not recorded" if change.is_done else "not recorded"
                self._refuse(request, 503, f"{said}: {error}", "Try again")
            elif change.what and not change.is_done and self._newest.get(change.what) != request:
                which = f"approval {change.approval}" if change.approval else "it"
                problem = f"{which} was recorded, but another change came before it was done"
                self._refuse(request, 409, problem, "See what is in force: sla mode; or ask for it again")
            else:
                if not change.is_done:
                    change.act()
                self._finish(request, 200, body)

        self._desk.record_sender.append([*rows, *change.rows], done)

    def _act(self, request: str, what: str, act: Callable[[], object], *, at_once: bool = False) -> None:
        """Bring a change about when its record is durable; ``at_once`` what takes pressure off the I/O.

        What was overtaken while it waited to be durable is not done.
        """
        if what:
            self._newest[what] = request
        change = self._acts.setdefault(request, Act())
        change.what, change.act, change.is_done = what, act, at_once
        if at_once:
            act()

    def _submit(
        self, request: str, make: Callable[[Catalog, int], Change | None], body: Callable[[Change], Body]
    ) -> None:
        def done(change: Change, error: str) -> None:
            if error:
                self._refuse(request, 503, f"not recorded: {error}", "Try again")
            else:
                self._finish(request, 200, body(change))

        def guarded(catalog: Catalog, now_us: int) -> Change | None:
            try:
                return make(catalog, now_us)
            except AgreementsRefused as exc:
                self._refuse_all(request, exc.problems)
                return None

        if not self._desk.changes.submit(AgreementChange(guarded, done)):
            self._refuse(request, 503, "too many changes are waiting", "Try again in some seconds")

    def _apply(self, request: str, who: str, raw: Body, now_us: int) -> None:
        body = AgreementsApply.model_validate(raw)

        def read(documents: list[Loaded], problems: list[DocumentProblem]) -> None:
            catalog = self._desk.changes.catalog
            if problems := problems or approvals.enforced_alone(body, catalog, documents):
                self._refuse_all(request, problems)
            elif body.dry_run:
                if not self._is_outdated(request, catalog, documents, body.based_on):
                    self._try(request, documents, who, now_us)
            else:
                # Applied when its turn comes, not when it was asked for: slices in between have one judge.
                self._submit(request, partial(make, documents), lambda change: _applied(change, documents))

        def make(documents: list[Loaded], catalog: Catalog, us: int) -> Change | None:
            if self._is_outdated(request, catalog, documents, body.based_on):
                return None
            return self._change(catalog, documents, who, us)

        if not self._desk.documents.submit(body.documents, self._desk.rollup_s, read):
            self._refuse(
                request, 503, "too many documents are waiting to be read", "Try again in some seconds"
            )

    def _is_outdated(
        self, request: str, catalog: Catalog, documents: list[Loaded], based_on: dict[str, int] | None
    ) -> bool:
        """Whether a document was changed since it was read to be edited; that is refused.

        ``based_on`` names an agreement by its name, and another document as KIND/NAME.
        """
        given = {(each.document.kind, each.document.name) for each in documents}
        for key, version in (based_on or {}).items():
            kind, _, name = key.rpartition("/")
            if (kind or "SLA", name) not in given:
                continue
            item = catalog.plans.get(kind, name) if kind else catalog.get(name)
            if (item.version if item is not None else 0) != version:
                now = f"version {item.version} is in force" if item is not None else "it has ended"
                problem = (
                    f"{name} has changed since: this text was made from version {version}, and now {now}"
                )
                seen = f"GET /api/v1/documents/{kind}/{name}/versions" if kind else f"/agreements/{name}"
                fix = f"See what changed ({seen}), put it into the text, and apply that"
                self._refuse(request, 409, problem, fix)
                return True
        return False

    def _try(self, request: str, documents: list[Loaded], who: str, now_us: int) -> None:
        try:
            change = self._change(self._desk.changes.catalog, documents, who, now_us, is_trial=True)
        except AgreementsRefused as exc:
            self._refuse_all(request, exc.problems)
        else:
            self._finish(request, 200, _applied(change, documents))

    def _change(
        self, catalog: Catalog, documents: list[Loaded], who: str, now_us: int, *, is_trial: bool = False
    ) -> Change:
        in_force = {item.name for item in catalog.items}
        if problems := self._desk.refusals(documents, in_force, now_us, is_trial=is_trial):
            raise AgreementsRefused(problems)
        return self._desk.apply(catalog, documents, who, now_us)

    def _delete(self, request: str, who: str, raw: Body, _now_us: int) -> None:
        name = AgreementDelete.model_validate(raw).name

        def make(catalog: Catalog, now_us: int) -> Change | None:
            change = catalogs.delete(catalog, name, who, now_us)
            if change is None:
                self._refuse(request, 404, f"no agreement {name!r} is in force", "See 'sla get slas'")
            return change

        self._submit(request, make, lambda _change: {})

    def _end_document(self, request: str, who: str, raw: Body, _now_us: int) -> None:
        body = DocumentEnd.model_validate(raw)

        def make(catalog: Catalog, now_us: int) -> Change | None:
            change = catalogs.end_document(catalog, body.kind, body.name, who, now_us)
            if change is None:
                listed = body.kind.lower() + ("" if body.kind in ("Maintenance", "VolumeLabels") else "s")
                problem = f"no {body.kind.lower()} {body.name!r} is in force"
                self._refuse(request, 404, problem, f"See 'sla get {listed}'")
            return change

        self._submit(request, make, lambda _change: {})

    def _notify_test(self, request: str, who: str, raw: Body, now_us: int) -> None:
        name = RecipientTest.model_validate(raw).name
        audited = audit_row(who, "recipient-test", name, now_us)
        self._send_to(request, name, notifications.test_event(name, who, now_us), audited)

    def _event_again(self, request: str, who: str, raw: Body, now_us: int) -> None:
        body = EventAgain.model_validate(raw)
        audited = audit_row(who, "event-again", body.name, now_us, after={"event_id": body.event_id})
        self._send_to(request, body.name, notifications.again_event(body, who, now_us), audited)

    def _send_to(self, request: str, name: str, row: tuple[str, Row], audited: tuple[str, Row]) -> None:
        """Raise an event for one recipient, unless that takes none."""
        if refusal := notifications.why_it_takes_none(self._desk.changes.catalog.plans, name):
            self._refuse(request, *refusal)
        else:
            self._when_durable(request, [row, audited], {"event_id": row[1]["event_id"]})

    def _acknowledge(self, request: str, who: str, raw: Body, now_us: int) -> None:
        body = Acknowledgement.model_validate(raw)
        text = f"{who} acknowledged {body.kind or 'event'} {body.subject or body.event_id}: {body.note}"
        details = {"event_id": body.event_id, "who": who, "note": body.note}
        rows: Rows = [
            audit_row(who, "acknowledge", body.event_id, now_us, after={"note": body.note}),
            event_row("event-acknowledged", "info", "event", body.subject, text, now_us, details),
        ]
        self._when_durable(request, rows, {"event_id": body.event_id})

    def _throttle_set(self, request: str, who: str, raw: Body, now_us: int) -> None:
        body = ThrottleSet.model_validate(raw)
        client, group, weights = body.client or "", body.group or "", body.volumes or {}
        volume, controller = body.volume or "", self._desk.controller
        refusal = self._why_not_throttled(body)
        if refusal is not None:
            self._refuse(request, *refusal)
            return
        rates = body.rates
        if group:
            effect = controller.group_effect(weights, Rates(**rates))
        elif not volume:
            effect = controller.whole_clients.effect(client, Rates(**rates))
        else:
            effect = controller.manual_effect(volume, **rates, client=client)
        if effect.broken and not body.force:
            shared = f"its volumes, while all of them use their shares of group {group!r}"
            subject = shared if group else repr(volume or client)
            problem = (
                f"that is below what is promised for {subject}: {'; '.join(effect.broken)}. Its I/Os "
                f"would wait, and the wait counts against the promise. What would hold is {effect.held_text}"
                + (", its floor" if effect.is_lifted else "")
            )
            self._refuse(request, 409, problem, "Give a higher rate, or set it all the same: --force")
            return
        throttle_id = str(uuid.uuid4())
        until_us = None if body.duration_s is None else now_us + math.ceil(body.duration_s * 1e6)
        act = partial(
            controller.manual_set,
            throttle_id,
            volume,
            **rates,
            until_unix_us=until_us,
            who=who,
            reason=body.reason,
            group=group,
            weights=weights,
            client=client,
        )
        self._act(request, "", act)
        after = {**body.model_dump(), "throttle_id": throttle_id, "until_us": until_us}
        after["breaks"] = list(effect.broken)
        rows = [audit_row(who, "throttle-set", body.subject, now_us, after=after)]
        answer = {"throttle_id": throttle_id, "breaks": after["breaks"]}
        if effect.is_lifted:
            answer["holds"] = effect.held_text
        self._when_durable(request, rows, answer)

    def _why_not_throttled(self, body: ThrottleSet) -> tuple[int, str, str] | None:
        """Status, problem and what to do; None if it can be set."""
        controller = self._desk.controller
        for volume in sorted(body.volumes or filter(None, [body.volume])):
            if volume not in self._desk.changes.catalog.volumes:
                return 404, f"no volume {volume!r} is known", "See 'sla get volumes'"
            if not controller.can_throttle(volume):
                problem = f"volume {volume!r} is only counted on its host, beside the I/O path"
                return 422, problem, "Throttle volumes that a gateway exports over NBD"
        if body.group:
            return controller.why_no_group_cap(body.group, body.volumes or {})
        if body.volume is None:
            return controller.whole_clients.why_no_cap(body.client or "")
        refusal = controller.why_no_client_cap(body.volume, body.client) if body.client else None
        return None if refusal is None else (422, *refusal)

    def _throttle_release(self, request: str, who: str, raw: Body, now_us: int) -> None:
        body = ThrottleRelease.model_validate(raw)
        released = self._desk.controller.manual_release(
            volume=body.volume, throttle_id=body.throttle_id, who=who, client=body.client, group=body.group
        )
        if not released:
            problem = f"no manual throttle of {body.subject!r} is in force"
            self._refuse(
                request, 404, problem, "See 'sla get throttles'; control's own are released by control"
            )
            return
        self._act(request, "", lambda: None, at_once=True)  # it is done
        rows = [audit_row(who, "throttle-release", body.subject, now_us, before={"throttle_ids": released})]
        self._when_durable(request, rows, {"released": released})

    def _mode(self, request: str, who: str, raw: Body, now_us: int) -> None:
        body, before = ModeSet.model_validate(raw), self._desk.mode
        if body.of == "policy":
            self._policy_mode(request, who, body, now_us)
            return
        if body.backend is not None:
            self._backend_mode(request, who, body.backend, body.mode, now_us)
            return
        mode = body.mode
        self._act(request, "mode", partial(self._desk.set_mode, mode), at_once=mode == OBSERVE)
        rows: Rows = [audit_row(who, "mode", "server", now_us, before={"mode": before}, after={"mode": mode})]
        if mode != before:
            text = f"mode is {mode}, was {before}"
            rows.append(event_row("mode-changed", "info", "server", "services", text, now_us, {"who": who}))
        self._when_durable(request, rows, {"mode": mode})

    def _backend_mode(self, request: str, who: str, backend: str, mode: str, now_us: int) -> None:
        """One backend's own mode; the audit row holds those of all, so that the newest one is enough."""
        known = self._desk.controller.backends()
        before = dict(self._desk.backend_modes)
        if backend not in known and backend not in before:
            self._refuse(request, 404, *_unknown_backend(backend, known))
            return
        after = {name: own for name, own in before.items() if name != backend}
        if mode != "inherit":
            after[backend] = mode
        act = partial(self._desk.set_backend_modes, after)
        self._act(request, BACKEND_MODES, act, at_once=mode == OBSERVE)
        rows: Rows = [
            audit_row(
                who, BACKEND_MODES, backend, now_us, before={"backends": before}, after={"backends": after}
            )
        ]
        if after != before:
            text = f"mode of backend {backend} is {mode}, was {before.get(backend, 'inherit')}"
            rows.append(event_row("mode-changed", "info", "backend", backend, text, now_us, {"who": who}))
        self._when_durable(request, rows, {"mode": mode, "backend": backend})

    def _policy_mode(self, request: str, who: str, body: ModeSet, now_us: int) -> None:
        """The stage of policies on all backends or one; the audit row holds all of them."""
        mode, before = self._desk.policy_mode, dict(self._desk.policy_modes)
        backend, after = body.backend, dict(before)
        if backend is None:
            mode = body.mode
        elif backend not in (known := self._desk.controller.backends()) and backend not in before:
            self._refuse(request, 404, *_unknown_backend(backend, known))
            return
        elif body.mode == "inherit":
            after.pop(backend, None)
        else:
            after[backend] = body.mode
        was = {"mode": self._desk.policy_mode, "backends": before}
        act = partial(self._desk.set_policy_stage, mode, after)
        self._act(request, POLICY_MODE, act, at_once=body.mode == OBSERVE)
        where = f"backend {backend}" if backend else "all backends without a stage of their own"
        text = f"caps of policies: {body.mode} on {where}"
        now = {"mode": mode, "backends": after}
        rows: Rows = [audit_row(who, POLICY_MODE, backend or "server", now_us, before=was, after=now)]
        if now != was:
            details = {"who": who, "of": "policy"}
            rows.append(event_row("mode-changed", "info", "backend", backend or "all", text, now_us, details))
        self._when_durable(request, rows, {"mode": body.mode, "backend": backend})

    def _gateway_list(self, request: str, who: str, raw: Body, now_us: int) -> None:
        body = GatewayListing.model_validate(raw)
        action = "gateway-listed" if body.is_listed else "gateway-unlisted"
        row = {"address": body.address, "name": body.name, "is_enabled": body.is_listed}
        rows: Rows = [
            ("gateway_list", row),
            audit_row(who, action, body.address, now_us, after={"name": body.name}),
        ]
        self._when_durable(request, rows, body.model_dump())

    def _volumes(self, request: str, who: str, raw: Body, now_us: int, *, approve: bool) -> None:
        body = VolumesDecision.model_validate(raw)
        try:
            rows, answer = self._desk.gate.decide(body.volumes, body.gateways, who, now_us, approve=approve)
        except DecisionRefused as exc:
            self._refuse(request, exc.code, exc.problem, exc.fix)
        else:
            self._act(request, "", lambda: None, at_once=True)  # it is done
            self._when_durable(request, rows, answer)

    def _access(self, request: str, who: str, raw: Body, now_us: int) -> None:
        """Accounts, tokens and sessions are the application server's; here they become rows."""
        body = AccessChange.model_validate(raw)
        change = {"before": body.before, "after": body.after}
        rows: Rows = [audit_row(who, body.action, body.subject, now_us, **change)]
        if body.table:
            rows.append((body.table, body.row))
        self._when_durable(request, rows, {})

    def _policies_changed(self, request: str, _who: str, _raw: Body, _now_us: int) -> None:
        self._policy_waiters.append(request)
        self._desk.sql_worker.request_policy()

    def _policy_pin(self, request: str, who: str, raw: Body, now_us: int) -> None:
        """Keep a version, which the caller has seen in SQL, or let the newest be in force again."""
        version, policy = PolicyPin.model_validate(raw).version, self._desk.policy
        before = policy.orders.pinned
        if version is None and before is None:
            self._refuse(request, 409, "no policy version is pinned", "See 'sla policy list'")
            return
        self._act(
            request, "policy", lambda: self._desk.sql_worker.order_policy(self._desk.policy.pin(version))
        )
        rows: Rows = [
            audit_row(
                who,
                "policy-pin" if version else "policy-unpin",
                str(version or before),
                now_us,
                before={"pinned": before},
                after={"pinned": version},
            )
        ]
        if version is None:
            rows.append(("policies", {"version": before, "state": "in-force"}))
        else:
            rows.append(("policies", {"version": version, "state": "pinned"}))
        self._when_durable(request, rows, {"pinned": version})

    def _policy_rollback(self, request: str, who: str, raw: Body, now_us: int) -> None:
        expected, policy = PolicyRollback.model_validate(raw).version, self._desk.policy
        version = policy.version
        if not version:
            self._refuse(request, 409, "no policy is in force", "See 'sla policy list'")
            return
        if expected not in (None, version):
            problem = f"policy version {expected} is not in force, but version {version}"
            self._refuse(request, 409, problem, "See 'sla policy list', and try again")
            return
        if policy.orders.pinned is not None:
            problem = f"policy version {version} is pinned"
            self._refuse(request, 409, problem, "Pin another one, or unpin it first: sla policy unpin")
            return

        def act() -> None:
            if self._desk.policy.version == version:  # else it is in force no more
                self._desk.sql_worker.order_policy(self._desk.policy.roll_back())

        self._act(request, "policy", act)
        rows: Rows = [
            audit_row(who, "policy-rollback", str(version), now_us, before={"version": version}),
            ("policies", {"version": version, "state": "rolled-back"}),
        ]
        self._when_durable(request, rows, {"rolled_back": version})

    def _approval_request(self, request: str, who: str, raw: Body, now_us: int) -> None:
        """A change that waits for a second person; one that would change nothing is carried out."""
        asked = ApprovalRequest.model_validate(raw)
        wanted = approvals.MODELS[asked.op].model_validate(asked.body)
        basis = approvals.basis_of(self._desk, asked.op, wanted)
        if approvals.is_so_already(wanted, basis):
            self._ops[asked.op](request, who, asked.body, now_us)
            return
        if isinstance(wanted, ModeSet) and wanted.backend is not None and basis["own"] is None:
            known = self._desk.controller.backends()
            if wanted.backend not in known:
                self._refuse(request, 404, *_unknown_backend(wanted.backend, known))
                return
        row, rows = approvals.requested(asked, who, wanted, basis, now_us)
        self._when_durable(request, rows, {"approval": row})

    def _approval_decide(self, request: str, who: str, raw: Body, now_us: int) -> None:
        """Carry out a change that waited, exactly as it was asked for, or end it."""
        body = ApprovalDecision.model_validate(raw)
        row, name = body.row, str(body.row["approval_id"])
        if approvals.digest_of(row) != row["digest"]:
            self._refuse(request, 409, f"approval {name} is not what was asked for", "Ask for it again")
            return
        if row["state"] != approvals.PENDING or name in self._decided or now_us >= row["expires_us"]:
            self._refuse(request, 409, f"approval {name} waits no more", "See 'sla approvals list --all'")
            return
        if not body.approves:
            after, rows = approvals.decided(row, who, "refused", body.note, now_us)
            self._remember_decided(name)
            self._when_durable(request, rows, {"approval": after}, name)
            return
        wanted = approvals.MODELS[row["op"]].model_validate(json.loads(row["body"]))
        basis = approvals.basis_of(self._desk, row["op"], wanted)
        if basis != json.loads(row["basis"]):
            _after, rows = approvals.decided(row, who, "outdated", body.note, now_us)
            self._remember_decided(name)
            self._desk.record_sender.append(rows, lambda _ok, _error: None)
            problem = f"what {row['requested_by']} asked for was based on something else: {row['text']}"
            self._refuse(request, 409, problem, "Ask for it again; nothing was changed")
            return
        _after, rows = approvals.decided(row, who, "approved", body.note, now_us)
        self._acts[request] = Act(name, rows)
        names = f"{row['requested_by']}, approved by {who}"
        self._ops[row["op"]](request, names, json.loads(row["body"]), now_us)
        if request in self._pending:  # it was not refused
            self._remember_decided(name)

    def _remember_decided(self, name: str) -> None:
        self._decided[name] = None
        while len(self._decided) > MAX_PENDING:
            self._decided.popitem(last=False)


def _unknown_backend(backend: str, known: Collection[str]) -> tuple[str, str]:
    near = ", ".join(difflib.get_close_matches(backend, known, 3)) or "'sla get volumes' names them"
    return f"no backend {backend!r} is known", f"Near: {near}"


def _applied(change: Change, documents: Collection[Loaded]) -> Body:
    """The answer; each entry has the line of its document, so that a long file's parts can be compared."""
    lines = {(item.document.kind, item.document.name): item.line for item in documents}
    applied = [{**row, "line": lines[row.get("kind", "SLA"), row["name"]]} for row in change.applied]
    return {"applied": applied, "warnings": change.warnings}
