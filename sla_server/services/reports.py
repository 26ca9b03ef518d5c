"""Issued reports are announced: an entry in the audit log with the digest, and an event to the recipients.

The report job writes them into SQL beside the server (``sla_server.reports.job``). The SQL worker finds those
that are not in the audit log yet; identities of both rows depend on the report alone, so one that is found
twice is announced once.
"""

from __future__ import annotations

import math
from typing import Any, Final

from sla_server.rows import Row, Rows
from sla_server.services.rows import audit_row, event_row, identity

ISSUED: Final = "report-issued"
SINCE_US: Final = 30 * 86_400 * 1_000_000
"""Older ones are no news, as after a database was restored without its audit log."""
MOST: Final = 50
"""Of one look; the next one finds the others."""


def announcement(row: Row, external_url: str = "") -> Rows:
    """What to record of a report, a row of ``reports`` without its body."""
    report_id, at_us = row["report_id"], row["issued_us"]
    chained = {key: row[key] for key in ("number", "digest", "previous", "name", "period", "revises")}
    details: dict[str, Any] = {
        "agreement": row["name"],
        "period": row["period"],
        "report": report_id,
        "digest": row["digest"],
        "credit": (row["summary"] or {}).get("credit"),
        "revises": row["revises"],
        "path": f"/reports/{report_id}",
    }
    if external_url:
        details["link"] = f"{external_url.rstrip('/')}/reports/{report_id}"
    text = announcement_text(row) + (f". {details['link']}" if external_url else "")
    event_id = identity(ISSUED, report_id, row["digest"])
    return [
        audit_row(row["issued_by"], ISSUED, report_id, at_us, after=chained),
        event_row(ISSUED, "info", "sla", row["name"], text, at_us, details, event_id),
    ]


def _percent(ratio: float) -> str:
    """Rounded down, as in the report: 99.9996 % must not read as 100 %."""
    return f"{math.floor(ratio * 100_000 + 1e-9) / 1000:.3f}%"


def announcement_text(row: Row) -> str:
    """One sentence for people."""
    summary = row["summary"] or {}
    said = []
    for each in summary.get("objectives") or []:
        verdict = {True: "kept", False: "NOT kept"}.get(each.get("is_kept"), "not judged")
        figure, promised = each.get("compliance"), each.get("promised") or each.get("target")
        shown = "" if figure is None else f" ({_percent(figure)} of {promised:.3%} promised)"
        said.append(f"{each.get('name')} {verdict}{shown}")
    credit = summary.get("credit")
    said += [f"credit {credit:.0%}"] if credit else []
    of = f"the report of {row['name']} for {row['period']}"
    state = "preliminary: " if row["is_preliminary"] else ""
    revises = f", a revision of {row['revises']}" if row["revises"] else ""
    return f"{of} was issued as {row['report_id']}{revises}: {state}{', '.join(said) or 'nothing to judge'}"
