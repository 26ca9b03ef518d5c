"""The offline policy in force: which version, since when, and its caps of the hour handed to the brain."""

from __future__ import annotations

from sla_server.services.protocols import ControllerProtocol
from sla_server.services.rows import Row, Rows, audit_row, event_row
from sla_server.services.sql_worker import PublishedPolicy


class PolicyInForce:
    """See the module. ``version`` is 0 before the first policy. Belongs to the main loop."""

    def __init__(self, version: int, applied_us: int) -> None:
        self.version = version
        self._applied_us = applied_us
        self._handed: tuple[int, int] | None = None

    def look(self, found: PublishedPolicy, brain: ControllerProtocol, now_us: int) -> Rows:
        """Put a newer version, or the caps of a new hour, in force; returns what to record.

        A look that read SQL before our own record arrived there still says ``published``; the version tells.
        """
        if found.version < self.version:
            return []
        if self._handed != (found.version, found.hour_of_week):
            self._handed = (found.version, found.hour_of_week)
            brain.set_policy_caps(found.version, found.caps)
        if found.version == self.version:
            return []
        before, self.version, self._applied_us = self.version, found.version, now_us
        if not found.published:
            return []
        capped = sum(cap is not None for cap in found.caps.values())
        text = f"policy version {found.version} is in force; volumes that it caps this hour: {capped}"
        details = {"version": found.version, "before": before or None, "capped_now": capped}
        return [
            ("policies", {"version": found.version, "state": "in-force"}),
            event_row("policy-applied", "info", "policy", str(found.version), text, now_us, details),
            audit_row(
                "services",
                "policy-applied",
                str(found.version),
                now_us,
                before={"version": before or None},
                after={"version": found.version},
            ),
        ]

    def shown(self) -> Row | None:
        """For the live snapshot."""
        return {"version": self.version, "applied_us": self._applied_us} if self.version else None
