"""Checks of issued reports: the chain, the sums within one, the same figures computed again.

What is found has one of these meanings:

    broken       the document is not what was issued: a digest, the chain or the audit log differs
    differs      a figure is not what the stored rows give; says which, and both values
    raw          a stored slice is not what the raw counters give; says which slice (``raw``)
    superseded   slices were judged again after the report was issued: a revision would say something else
    gone         what the figure rests on is no longer stored, so it cannot be checked

The first three are faults, the other two are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ValidationError

from sla_server.agreements.credits import penalty_for
from sla_server.agreements.difference import differences
from sla_server.reports.compute import compute_report
from sla_server.reports.document import IssuedReport, ReportContent, digest_of, plain
from sla_server.reports.errors import ReportError
from sla_server.reports.inputs import MOST_SLICES, ReportInputs, read_inputs
from sla_server.reports.issue import summary_of
from sla_server.reports.raw import RawCheck, raw_differences
from sla_server.reports.words import moment
from sla_server.rows import Row

if TYPE_CHECKING:
    from sla_server.db.queries.reader import SqlReader

Meaning = Literal["broken", "differs", "raw", "superseded", "gone"]
FAULTS: Final = ("broken", "differs", "raw")
MOST_FOUND: Final = 500
BATCH: Final = 50
FIGURES: Final = (
    "agreement",
    "period",
    "objectives",
    "credits",
    "bad",
    "missing",
    "inexact",
    "maintenance",
    "versions",
)
"""Parts that rest on slices and documents alone, which are stored for 13 months; the others rest on what
leaves sooner (throttles, decisions), or goes on to change while a violation lasts.
"""
NO_REPORT: Final = "0" * 64


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One thing that was found: what it means, where, and in words."""

    meaning: Meaning
    where: str
    text: str

    def as_dict(self) -> dict[str, Any]:
        """As the API answers."""
        return asdict(self)


@dataclass
class Verification:
    """What the check of one report found.

    Attributes:
        checked: what was compared, in words, whether or not something was found.
        number: of the report in the chain, where that is walked along.
    """

    report_id: str
    findings: list[Discrepancy] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    left_out: int = 0
    number: int = 0

    @property
    def is_good(self) -> bool:
        """Whether no fault was found."""
        return not any(each.meaning in FAULTS for each in self.findings)

    def add(self, meaning: Meaning, where: str, text: str) -> None:
        """Note a finding; those beyond ``MOST_FOUND`` are counted."""
        if len(self.findings) < MOST_FOUND:
            self.findings.append(Discrepancy(meaning, where, text))
        else:
            self.left_out += 1

    def as_dict(self) -> dict[str, Any]:
        """As the API answers."""
        return {
            "report_id": self.report_id,
            "is_good": self.is_good,
            "findings": [each.as_dict() for each in self.findings],
            "checked": self.checked,
            "left_out": self.left_out,
        }


def canonical_text(value: Any) -> bytes:
    """JSON values as ``document.canonical`` writes them, whatever release made them."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def verify_chain(reader: SqlReader, after: int = 0, most: int | None = None) -> Iterator[Verification]:
    """Check digests, numbers and audit entries of reports, oldest first.

    Args:
        reader: of what is stored.
        after: reports behind the one of this number; 0: from the first one on.
        most: so many of them; None: all.
    """
    number, previous = after, _digest_at(reader, after)
    left = most
    while rows := reader.reports.issued_after(number, BATCH if left is None else min(BATCH, left)):
        left = None if left is None else left - len(rows)
        for row in rows:
            found = Verification(row["report_id"], number=row["number"])
            if row["number"] != number + 1:
                text = f"number {number + 1} is missing: the report after {number} is {row['number']}"
                found.add("broken", "number", text)
            elif row["previous"] != previous:
                found.add("broken", "previous", "it does not name the digest of the report before it")
            check_document(found, row, reader.reports.audit_of(row["report_id"]))
            number, previous = row["number"], row["digest"]
            yield found


def _digest_at(reader: SqlReader, number: int) -> str:
    """What the report after this one has to name; "", which none names, if this one is not there."""
    if number == 0:
        return NO_REPORT
    rows = reader.reports.issued_after(number - 1, 1)
    return str(rows[0]["digest"]) if rows and rows[0]["number"] == number else ""


def taken_away(reader: SqlReader) -> Iterator[Verification]:
    """Reports that the audit log says were issued and are no longer there, as the last ones of the chain."""
    for row in reader.reports.taken_away(MOST_FOUND):
        found = Verification(row["subject"])
        number = (row["after"] or {}).get("number")
        found.add("broken", "number", f"it was issued as number {number}, and is no longer there")
        yield found


def check_document(found: Verification, row: Row, audited: Row | None) -> None:
    """Whether a stored report is what its digest says, its columns and the audit log as well.

    Args:
        found: gets what is not so.
        row: of ``reports``, with its body.
        audited: what the audit log says of its issue; None: nothing (it is announced a moment later, and
            the log keeps three years).
    """
    body = row["body"].encode()
    digest = digest_of(body)
    if digest != row["digest"]:
        found.add("broken", "digest", f"its body has the digest {digest}, and was issued as {row['digest']}")
    try:
        plain_body = json.loads(body)
    except ValueError:
        found.add("broken", "body", "its body is no JSON")
        return
    for name in ("number", "report_id", "revision", "issued_us", "issued_by", "previous"):
        if plain_body.get(name) != row[name]:
            found.add("broken", name, f"its body says {plain_body.get(name)}, its row {row[name]}")
    _check_listed(found, row, plain_body)
    after = (audited or {}).get("after")
    if after is not None and after.get("digest") != row["digest"]:
        found.add("broken", "audit", f"the audit log has the digest {after.get('digest')}")
    found.checked.append("digest, number, the digest of the report before it, audit log")


def _check_listed(found: Verification, row: Row, plain_body: Mapping[str, Any]) -> None:
    """Whether what lists show of a report is what its body says."""
    try:
        report = IssuedReport.model_validate(plain_body)
    except ValidationError:
        return  # of another release
    content = report.content
    period = content.period
    said = {
        "name": content.agreement.name,
        "period": period.text,
        "from_us": period.from_us,
        "to_us": period.to_us,
        "revises": report.revises or "",
        "is_preliminary": content.is_preliminary,
        "summary": summary_of(content),
    }
    for name, value in said.items():
        if not _agrees(row[name], value):
            found.add("broken", name, f"its body says {_shown(value)}, its row {_shown(row[name])}")


def _agrees(stored: Any, said: Any) -> bool:
    """Whether they are equal, but for keys that only one release writes."""
    if isinstance(stored, dict) and isinstance(said, dict):
        return all(_agrees(stored[key], said[key]) for key in stored.keys() & said.keys())
    if isinstance(stored, list) and isinstance(said, list):
        return len(stored) == len(said) and all(map(_agrees, stored, said))
    return bool(stored == said)


def verify_report(
    reader: SqlReader, row: Row, before: Row | None, most_slices: int = MOST_SLICES
) -> Verification:
    """Check one report in full.

    Args:
        reader: of what is stored.
        row: of ``reports``, with its body.
        before: the row with the number before; None for the first.
        most_slices: of a report with more only the document itself is checked.
    """
    found = Verification(row["report_id"])
    previous = before["digest"] if before is not None else NO_REPORT
    if row["previous"] != previous:
        found.add("broken", "previous", "it does not name the digest of the report before it")
    check_document(found, row, reader.reports.audit_of(row["report_id"]))
    try:
        report = IssuedReport.model_validate_json(row["body"])
    except ValidationError:
        found.add("gone", "content", "it was issued by another release: its figures are not compared")
        return found
    check_sums(found, report.content)
    content = report.content
    try:
        agreement, period = content.agreement.name, content.period.text
        inputs = read_inputs(reader, agreement, period, content.as_of_us, most_slices, to_verify=True)
    except ReportError as exc:
        found.add("gone", "content", str(exc))
        return found
    compare(found, content, inputs)
    _compare_raw(found, reader, inputs)
    if inputs.revised:
        text = f"{inputs.revised} slices were judged again since: 'sla report issue' makes a revision"
        found.add("superseded", "slices", text)
    return found


def compare(found: Verification, content: ReportContent, inputs: ReportInputs) -> None:
    """Compare a report with the same computed again, as of the time at which it was computed."""
    if not any(inputs.slices.values()) and any(each.due_s for each in content.objectives):
        found.add("gone", "objectives", "the slices of its period are no longer stored")
        return
    again = plain(compute_report(inputs))
    issued = plain(content)
    for change in differences(issued, again):
        part = change.field.partition(".")[0].partition("[")[0]
        if part == "as_of_us":
            continue
        text = f"the report says {_shown(change.before)}, what is stored gives {_shown(change.after)}"
        found.add("differs" if part in FIGURES else "gone", change.field, text)
    slices = sum(row["slices"] for rows in inputs.slices.values() for row in rows)
    found.checked.append(f"all figures, computed again from {slices} stored slices as of its issue")


def _compare_raw(found: Verification, reader: SqlReader, inputs: ReportInputs) -> None:
    """Judge stored slices again, as far as the raw counters are there."""
    check = RawCheck()
    for each in raw_differences(reader, inputs, check):
        at = moment(each.start_us, inputs.period.tz)
        text = f"stored {_shown(dict(each.stored))}, the raw counters give {_shown(dict(each.raw))}"
        found.add("raw", f"{each.objective} {at}", text)
    if check.compared:
        found.checked.append(f"{check.compared} slices judged again from the raw counters")
    if check.gone:
        found.checked.append(f"not compared: {check.gone} slices whose raw counters have left SQL")


def check_sums(found: Verification, content: ReportContent) -> None:
    """Whether a report's own figures add up: days to the period, states to time, credits by the table."""
    for one in content.objectives:
        where = f"objectives[{one.name}]"
        counts: Mapping[str, int] = one.slices.model_dump()
        for name, total in counts.items():
            by_day = sum(getattr(day.slices, name) for day in one.days)
            if by_day != total:
                found.add(
                    "differs", f"{where}.slices.{name}", f"the days add up to {by_day}, it says {total}"
                )
        time = one.time.model_dump()
        parts = sum(value for name, value in time.items() if name not in ("all_s", "unplanned_s"))
        if parts != one.time.all_s:
            found.add(
                "differs", f"{where}.time.all_s", f"its parts add up to {parts}, it says {one.time.all_s}"
            )
        due_s = sum(day.due_s for day in one.days)
        if due_s != one.due_s:
            found.add("differs", f"{where}.due_s", f"the days add up to {due_s}, it says {one.due_s}")
    for period in content.credits.periods:
        added = 0.0
        is_of_last = period.version == content.agreement.version  # whose penalties and cap the report has
        for line in period.objectives:
            owed = penalty_for(content.credits.penalties, line.compliance)
            added += line.credit
            if is_of_last and owed != line.credit:
                where = f"credits.{line.objective}"
                found.add("differs", where, f"by the penalties it is {owed}, it says {line.credit}")
        added = round(added, 9)
        capped = min(added, content.credits.credit_cap) if is_of_last else min(added, period.credit)
        if added != period.uncapped or capped != period.credit:
            found.add("differs", "credits", f"the objectives add up to {capped}, it says {period.credit}")
    found.checked.append("sums of days, of time, and credits by the penalties")


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
