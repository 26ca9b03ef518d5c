"""A slow program that knows nothing of the product's sums works a report out slice by slice.

Histories are generated: two versions of an agreement with other slices and targets, edited at any half hour,
over a change of summer time, with gaps, revisions, maintenance and service hours.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from sla_server.reports.compute import compute_report
from sla_server.reports.inputs import read_inputs
from sla_server.rows import Row
from tests.support.agreements import simple
from tests.support.reports import DAY_US, HOUR_US, MINUTE_US, StoredRows, at_us, slice_row, version_row

TZ = "Europe/Berlin"
STATES = ("good", "bad", "no_data", "not_applicable", "excluded")
POLICIES = ("good", "bad", "exclude", "bad_if_ours")
STEP_US = 30 * MINUTE_US  # slices of half an hour and of an hour: days are short to write down


@dataclass(frozen=True)
class Terms:
    minutes: int
    target: float
    no_data: str


@st.composite
def terms(draw: st.DrawFn) -> Terms:
    return Terms(
        draw(st.sampled_from((30, 60))),
        draw(st.sampled_from((0.5, 0.9, 0.99))),
        draw(st.sampled_from(POLICIES)),
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[StoredRows, list[Terms], str, int]:
    """What is stored, the terms of the versions, the day that is asked for, and the time now."""
    day = draw(st.sampled_from(("2026-10-24", "2026-10-25", "2026-10-26", "2026-03-29")))
    start = at_us(f"{day} 00:00", TZ)
    both = [draw(terms()), draw(terms())]
    edit = start + draw(st.integers(-3, 53)) * STEP_US
    texts = [
        simple(
            slice_text=f"{each.minutes}m",
            target=each.target,
            extra=f"    no_data: {each.no_data}\n  window: {{type: calendar, period: day, tz: {TZ}}}\n",
        )
        for each in both
    ]
    rows = StoredRows([version_row(texts[0], 1, start - 5 * DAY_US, edit), version_row(texts[1], 2, edit)])
    now = start + draw(st.integers(1, 60)) * HOUR_US
    at = start - 4 * HOUR_US
    while at < start + 30 * HOUR_US:
        version = 1 if at < edit else 2
        length = both[version - 1].minutes * MINUTE_US
        if at % length:  # the first slice of a version begins on its own grid
            at += STEP_US
            continue
        state = draw(st.sampled_from((*STATES, *("good",) * 4, "none")))
        if state != "none":
            for revision in range(draw(st.integers(1, 2))):
                rows.slices.append(
                    slice_row(
                        at,
                        draw(st.sampled_from(STATES)) if revision else state,
                        revision=revision,
                        version=version,
                        length_us=length,
                        ours=draw(st.booleans()),
                        inexact=draw(st.booleans()),
                        judged_us=at + length + revision * draw(st.sampled_from((HOUR_US, 40 * HOUR_US))),
                        reason=draw(st.sampled_from(("maintenance: disks", "outside service hours"))),
                    )
                )
        at += length
    return rows, both, day, now


def day_of(at: int) -> str:
    return datetime.fromtimestamp(at // 1_000_000, ZoneInfo(TZ)).date().isoformat()


def counted(row: Row, both: list[Terms]) -> str:
    """good, bad or neither."""
    policy = both[row["version"] - 1].no_data
    if row["state"] in ("good", "bad"):
        return str(row["state"])
    if row["state"] != "no_data":
        return ""
    return {"good": "good", "bad": "bad", "exclude": ""}.get(policy, "bad" if row["ours"] else "")


@settings(max_examples=60, deadline=None)
@given(histories())
def test_a_slow_program_finds_the_same(history: tuple[StoredRows, list[Terms], str, int]) -> None:
    rows, both, day, now = history
    newest: dict[int, Row] = {}
    for row in rows.slices:
        is_known = row["judged_us"] <= now and row["start_us"] < now and day_of(row["start_us"]) == day
        if is_known and (
            row["start_us"] not in newest or newest[row["start_us"]]["revision"] < row["revision"]
        ):
            newest[row["start_us"]] = row
    good_s = bad_s = measured_s = judged_s = 0
    allowed_s = 0.0
    of_state = dict.fromkeys(STATES, 0)
    planned_s = 0
    for row in newest.values():
        length_s = row["length_us"] // 1_000_000
        of_state[row["state"]] += 1
        verdict = counted(row, both)
        good_s += length_s * (verdict == "good")
        bad_s += length_s * (verdict == "bad")
        allowed_s += length_s * (1 - both[row["version"] - 1].target) * bool(verdict)
        measured_s += length_s * (row["state"] in ("good", "bad", "not_applicable"))
        judged_s += length_s * (row["state"] != "excluded")
        planned_s += length_s * (row["state"] == "excluded" and row["reason"].startswith("maintenance"))

    found = compute_report(read_inputs(rows, "gold", day, now))  # type: ignore[arg-type]
    (latency,) = found.objectives
    assert {state: getattr(latency.slices, state) for state in STATES} == of_state
    assert latency.due_s == good_s + bad_s
    assert latency.time.unplanned_s == latency.budget.spent_s == bad_s
    assert latency.time.planned_s == planned_s
    assert latency.compliance == (good_s / (good_s + bad_s) if good_s + bad_s else None)
    assert latency.coverage == (measured_s / judged_s if judged_s else None)
    assert latency.is_kept == (bad_s <= allowed_s + 1e-6 if good_s + bad_s else None)
    if found.period.to_us <= now:
        assert abs(latency.budget.allowed_s - allowed_s) < 0.01
    (one_day,) = latency.days
    assert (one_day.slices, one_day.due_s) == (latency.slices, latency.due_s)
    parts = latency.time.model_dump()
    del parts["unplanned_s"]
    assert parts.pop("all_s") == sum(parts.values())
    assert parts["unjudged_s"] >= 0
    spans = [(span.from_us, span.to_us) for span in found.bad]
    in_spans = {at for at, row in newest.items() if any(begin <= at < end for begin, end in spans)}
    assert in_spans == {at for at, row in newest.items() if row["state"] == "bad"}
