"""Promises at risk while a throttle set by hand holds I/Os of their own volumes back: said at once.

The wait counts against the promise, so an operator's throttle may be all of the trouble. The loops look for
neighbours, and need some seconds of decreases without effect before they say that the cause is elsewhere. So
such a throttle is named as soon as the promise is at risk and its gateways hold I/Os back, again after a time
that doubles while that lasts, as the loops do; and what loops say of a cause elsewhere is left out meanwhile.

State: what was reported, by promise and throttle. No clock, no I/O. Changed only by the controller's one
thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from sla_server.agreements.promise import Promise
from sla_server.explanation import words
from sla_server.services.control.decisions import Decision, RaiseEvent
from sla_server.services.control.inventory import BackendInventory
from sla_server.services.control.loop_step import Report
from sla_server.services.control.manual import effect
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.scopes import Key, PromiseScope, PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.targets import target_of
from sla_server.services.control.throttle import Throttle
from sla_server.services.control.victims import figures_of

MOST_ROWS: Final = 4096
"""Promises at risk that a tick looks at; only a whole fleet in trouble has more."""


class _Cause(NamedTuple):
    """A promise and a throttle."""

    key: Key
    throttle_id: str


class ManualCauses:
    """See the module."""

    def __init__(
        self,
        settings: ControlSettings,
        inventory: BackendInventory,
        scopes: PromiseScopes,
        policy: PolicyManager,
    ) -> None:
        self._settings, self._inventory = settings, inventory
        self._scopes, self._policy = scopes, policy
        self._reported: dict[_Cause, Report] = {}

    def check(self, now_ns: int) -> list[Decision]:
        """Events about what was not reported yet, or long ago."""
        manual = self._policy.layers["manual"]
        self._reported = {
            cause: last for cause, last in self._reported.items() if cause.throttle_id in manual
        }
        holding = [throttle for throttle in manual.values() if self._holds(throttle)]
        if not holding:
            return []
        events: list[Decision] = []
        for scope in self._at_risk(now_ns):
            for throttle in holding:
                cause = _Cause(scope.promise.key, throttle.throttle_id)
                if _slows_down(throttle, scope) and self._is_due(cause, now_ns):
                    events.append(self._event(scope, throttle, now_ns))
        return events

    def without_known(self, decisions: Sequence[Decision]) -> list[Decision]:
        """What loops decided, less that a promise is nobody's fault where a throttle explains it."""
        known = {"/".join(cause.key) for cause in self._reported}
        return [
            each
            for each in decisions
            if not known
            or not isinstance(each, RaiseEvent)
            or each.kind != "unattributed"
            or each.details.get("promise") not in known
        ]

    def _holds(self, throttle: Throttle) -> bool:
        """Whether a gateway holds I/Os back that are of what it caps."""
        answers = self._policy.answers
        uses = (
            answers.use(table, throttle.target)
            for table in answers.carriers_of(throttle.target).values()
            if table.state == "up"
        )
        return any(use is not None and use.held > 0 for use in uses)

    def _at_risk(self, now_ns: int) -> Iterator[PromiseScope]:
        table = self._scopes.table
        for row in islice(table.risky_rows(now_ns, self._settings.lease_s), MOST_ROWS):
            promise = table.promises[row]
            if promise is not None:
                yield self._scopes.on(table.backends[row], promise.key)

    def _is_due(self, cause: _Cause, now_ns: int) -> bool:
        report = Report.due(self._reported.get(cause), now_ns, self._settings)
        if report is not None:
            self._reported[cause] = report
        return report is not None

    def below(self, promises: Collection[Promise]) -> Iterator[str]:
        """Throttles set by hand below what these promise, in words: those are not in force yet.

        The other way round, a throttle below a promise that is in force, is refused (``manual``).
        """
        known = self._inventory.volumes()
        for throttle in self._policy.layers["manual"].values():
            held, total = self._policy.held(throttle), sum(throttle.weights.values())
            broken = list[str]()
            for volume in throttle.volumes:
                share = held.scaled(throttle.weights[volume] / total) if throttle.group_key else held
                target = target_of(volume, throttle.client)
                covering = [promise for promise in promises if _is_held(promise, volume, throttle.client)]
                sizes = [sum(promise.has_volume(name) for name in known) for promise in covering]
                pairs = zip(covering, sizes, strict=True)
                broken += effect(share, share, self._inventory.mean_cost_of(target), pairs).broken
            if broken:
                what, held_text = words.capped(throttle.row()), throttle.announced(self._policy.held)
                yield (
                    f"{what} is {held_text}, which is below what is promised for it: {'; '.join(broken)}. "
                    "Its I/Os wait, and the wait counts. It ends with: "
                    f"{_release_command(throttle)}"
                )

    def _event(self, scope: PromiseScope, throttle: Throttle, now_ns: int) -> RaiseEvent:
        victim = self._inventory.victim(scope, now_ns)
        what, held = words.capped(throttle.row()), throttle.announced(self._policy.held)
        text = (
            f"{figures_of(victim)}; {what} is {held}: I/Os of this promise wait for that. It ends with: "
            f"{_release_command(throttle)}"
        )
        severity = "critical" if victim.signal.u > 1 else "warning"
        details = {"backend": scope.backend, "throttle_id": throttle.throttle_id, "promise": victim.name}
        return RaiseEvent("unattributed", severity, "backend", scope.backend, text, details)


def _release_command(throttle: Throttle) -> str:
    return words.release_command(throttle.volume, throttle.client, throttle.group)


def _is_held(promise: Promise, volume: str, client: str) -> bool:
    return promise.covers(volume, client) if client else promise.has_volume(volume)


def _slows_down(throttle: Throttle, scope: PromiseScope) -> bool:
    """Whether what it caps is in the promise's scope."""
    if throttle.client:
        volumes = scope.volumes.intersection(throttle.volumes)
        return any(scope.promise.covers(volume, throttle.client) for volume in volumes)
    return not scope.volumes.isdisjoint(throttle.volumes)
