"""Values and reasons in words. A value that is missing is never a 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any, Final

from pmdaemon.wire.messages.client_caps import is_glob

Row = Mapping[str, Any]

COST_UNIT: Final = "weighted IOPS"
COST_NOTE: Final = (
    "Of weighted IOPS, an I/O counts once, and once more per 64 KiB: "
    "one of 4 KiB 1.06 times, one of 1 MiB 17 times."
)

OTHERS: Final = "*"
"""As the client of a throttle: all clients of the volume that no agreement names."""


def together(client: str) -> str:
    """Whom a throttle is for that has a glob as its client; "" for one client, or a whole volume."""
    if not is_glob(client):
        return ""
    return "that no agreement names" if client == OTHERS else f"whose names match {client}"


REASONS: Final = {
    "promise-violated": "the promise was violated",
    "promise-at-risk": "the promise was at risk",
    "recovery-step": "the promise was kept with room to spare",
    "fair-share": "the allowance was shared again by demand",
    "manual": "set by hand",
    "policy": "asked for by the policy",
    "agreed-cap": "the cap of its own agreement",
    "recurring-burst": "a burst that recurs was expected",
    "policy-ahead": "the policy has lower caps from the next hour on",
    "demand-fits": "it was allowed more than it wanted",
    "victim-idle": "the protected volume had no I/O",
    "victim-out-of-curve": "the protected volume asked for more than its promise covers",
    "victim-not-applicable": "the I/Os of the protected volume were none that its promise is about",
    "victim-excluded": "the protected promise was in maintenance or outside its service hours",
    "victim-gone": "the promise had no statistics, or was no longer in force",
    "storage-fault": "the storage itself hung or failed, which slowing down others does not help",
    "unattributed": "throttling did not help: the cause is elsewhere",
    "mode-observe": "the mode was switched to observe",
    "manual-release": "released by hand",
    "expired": "its time had passed",
    "withdrawn": "nothing asked for it any more",
    "ahead-no-help": "caps ahead of bursts did not leave fewer bad windows",
    "ahead-no-burst": "the bursts that were expected did not come",
}
"""Every ``Reason`` of the controller."""

WITHDRAWN: Final = "withdrawn"
AGREED: Final = "agreed-cap"
CAP_OF: Final = "cap of agreement "
"""How the text of a cap begins that an agreement has; its name follows."""
ENDED: Final = frozenset(("release", "cap-released"))
"""Decisions that end a cap: their text says what ended it."""
AHEAD: Final = frozenset(("recurring-burst", "policy-ahead"))
"""Reasons of caps that are set before a promise is at risk."""

SLA_STATES: Final = {
    "ok": ("kept", "is kept", "was kept"),
    "at-risk": ("at-risk", "is at risk", "was at risk"),
    "violating": ("violated", "is violated", "was violated"),
    "no-data": ("no-data", "has no data", "had no data"),
    "idle": ("idle", "has no I/O to judge", "had no I/O to judge"),
    "out-of-curve": ("above-demand", "is asked for more than it covers", "was asked for more than it covers"),
    "good": ("kept", "is kept", "was kept"),
    "bad": ("violated", "is violated", "was violated"),
    "no_data": ("no-data", "has no data", "had no data"),
    "not_applicable": ("idle", "is not applicable", "was not applicable"),
    "not-applicable": ("idle", "does not apply to its I/Os of now", "did not apply to its I/Os"),
    "excluded": ("excluded", "is excluded (maintenance, or outside service hours)",
                 "was excluded (maintenance, or outside service hours)"),
}  # fmt: skip
"""State of a promise, live or of a slice: (status, now, then)."""


@dataclass(frozen=True, slots=True)
class Times:
    """Times as text, in one zone; ``zone`` None is this machine's own."""

    now_us: int
    zone: tzinfo | None = UTC

    def _at(self, at_us: int) -> datetime:
        at = datetime.fromtimestamp(at_us / 1e6, UTC)
        return at.astimezone(self.zone)

    def when(self, at_us: int) -> str:
        """Time of day, with the date before it when that is not today's."""
        at, now = self._at(at_us), self._at(self.now_us)
        return at.strftime("%H:%M:%S" if at.date() == now.date() else "%Y-%m-%d %H:%M:%S")

    def full(self, at_us: int) -> str:
        """Date, time and zone."""
        return self._at(at_us).strftime("%Y-%m-%d %H:%M:%S %Z")

    def zone_name(self) -> str:
        """Of the zone now."""
        return self._at(self.now_us).strftime("%Z")


def number(value: float) -> str:
    """With separators; one digit behind the point below 10."""
    return f"{value:,.1f}".removesuffix(".0") if abs(value) < 10 else f"{value:,.0f}"


def cost(value: float | None) -> str:
    """A cost rate."""
    return "an unknown rate" if value is None else f"{number(value)} {COST_UNIT}"


def capped(row: Row) -> str:
    """What a throttle, or a decision about one, caps: a volume, one client, the rest, or a group."""
    if group := row.get("group_name") or (row.get("figures") or {}).get("group"):
        return f"group {group}"
    client = row.get("client") or (row.get("figures") or {}).get("client") or ""
    if client and row.get("volume") in ("", f"client {client}"):
        return f"client {client} over all its volumes"
    if whose := together(client):
        return f"every client of {row.get('volume')} {whose}"
    return f"client {client} of {row.get('volume')}" if client else str(row.get("volume"))


def release_command(volume: str, client: str = "", group: str = "") -> str:
    """What ends a throttle set by hand; without volume and group it is one of a whole client."""
    subject = f"--group {group}" if group else volume
    which = f"--client {client}" if client and not group else ""
    return " ".join(part for part in ("sla throttle release", subject, which) if part)


def rates(row: Row | None) -> str:
    """Rates that are set: of a throttle's row, or of a decision's figures."""
    parts = []
    if row and row.get("cost_per_s") is not None:
        parts.append(cost(row["cost_per_s"]))
    if row and row.get("ops_per_s") is not None:
        parts.append(f"{number(row['ops_per_s'])} IOPS")
    if row and row.get("bytes_per_s") is not None:
        parts.append(f"{number(row['bytes_per_s'] / 1e6)} MB/s")
    return " and ".join(parts)


def latency(us: float | None) -> str:
    """In the unit a person would use."""
    if us is None:
        return "an unknown latency"
    if us < 995:
        return f"{us:.0f} us"
    return (
        f"{us / 1000:.{2 if us < 9_995 else 1 if us < 99_950 else 0}f} ms"
        if us < 1e6
        else f"{us / 1e6:.1f} s"
    )


def percent(ratio: float) -> str:
    """A share; below one percent it says so."""
    return "under 1 %" if 0 < ratio < 0.01 else f"{ratio * 100:.0f} %"


def percent_down(ratio: float) -> str:
    """What is left of a budget, as tables show it: rounded down, so that 99.6 % is not all of it."""
    return "under 1 %" if 0 < ratio < 0.01 else f"{math.floor(ratio * 100 + 1e-9)} %"


def span(seconds: float) -> str:
    """A duration, in one unit."""
    whole = max(0, round(seconds))
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if whole < limit:
            return f"{round(whole / unit)} {name}"
    return f"{round(whole / 86_400)} days"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names with commas; of many the first, and how many more."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def plural(count: int, one: str, many: str = "") -> str:
    """A count with its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def reason_of(row: Row) -> str:
    """A reason in words; the enum itself if a newer release wrote it.

    Of what was withdrawn only the row knows why: its volume moved, or no gateway takes its caps any more.
    """
    reason = str(row.get("reason") or "")
    if reason == WITHDRAWN and row.get("kind") in ENDED and row.get("text"):
        return str(row["text"]).rstrip(".")
    if reason == AGREED and str(row.get("text") or "").startswith(CAP_OF):
        return f"the {str(row['text']).partition('; ')[0]}"
    return REASONS.get(reason, reason)


def mode_of(row: Row) -> str:
    """Whose mode it is: of the server, of a backend or of an agreement."""
    whose = {"backend": f" of backend {row.get('name')}", "agreement": f" of agreement {row.get('name')}"}
    return f"the mode{whose.get(str(row.get('of')), '')}"


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def joined(parts: Iterable[str], between: str = "; ") -> str:
    """Those that say something."""
    return between.join(part for part in parts if part)


def acting_line(server: Row | None) -> str:
    """Which of several servers acts; "" of one that is alone, or while it is not known."""
    acting = (server or {}).get("acting")
    return f"The server of node {acting} acts: it polls, judges and controls." if acting else ""


def silence(server: Row | None) -> str:
    """Why there is no live snapshot, and what follows from it."""
    stands_by = str((server or {}).get("stands_by") or "")
    said = f"{stands_by[0].upper()}{stands_by[1:]}" if stands_by else "The services part is silent"
    return f"{said}: what is so at this moment is not known, only what is stored."


def is_of_a_part(throttle: Row) -> bool:
    """Whether it is about a client, of the volume or over all that it uses, or about the volume's group."""
    return bool(throttle.get("client") or throttle.get("group_name"))


def is_alike(one: Row, other: Row) -> bool:
    """Whether two throttles are about the same: a volume, or one client of it."""
    return capped(one) == capped(other)
