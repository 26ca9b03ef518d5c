"""Whether events are held back, by whom, until when."""

from __future__ import annotations

from datetime import UTC, datetime

from sla_server.agreements.load import load_documents
from sla_server.events.documents import SilenceDocument
from sla_server.events.stages.silence import SilenceInForce, held
from tests.support.notices import event


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6)


def _silence(spec: str, name: str = "quiet", applied: str = "2026-01-01") -> SilenceInForce:
    head = f"apiVersion: storage-sla/v1\nkind: Silence\nmetadata: {{name: {name}}}\n"
    text = f"{head}spec: {{{spec}, reason: test}}\n"
    document = load_documents(text, 60)[0].document
    assert isinstance(document, SilenceDocument)
    return SilenceInForce(document, us(applied))


def test_a_silence_holds_back_while_it_lasts() -> None:
    silence = _silence("start: 2026-02-01T22:00, duration: 2h")
    for at, until in (("21:59", None), ("22:00", "2026-02-02T00:00"), ("23:59", "2026-02-02T00:00")):
        found = held(event(), "mail", [silence], us(f"2026-02-01T{at}"))
        assert (found and found.until_us) == (until and us(until))
    assert held(event(), "mail", [silence], us("2026-02-02T00:00")) is None
    found = held(event(), "mail", [silence], us("2026-02-01T23:00"))
    assert found is not None
    assert found.reason == "silence quiet until 2026-02-02 00:00:00Z: test"


def test_quiet_hours_repeat_in_their_zone() -> None:
    quiet = _silence('start: 2026-01-01T22:00, duration: 8h, rrule: "FREQ=DAILY", tz: Europe/Berlin')
    found = held(event(), "mail", [quiet], us("2026-07-01T23:00"))  # 01:00 there
    assert found is not None
    assert found.until_us == us("2026-07-02T04:00")
    assert held(event(), "mail", [quiet], us("2026-07-01T19:59")) is None


def test_it_concerns_what_it_matches_and_whom_it_names() -> None:
    at_us = us("2026-02-01T22:30")
    when = "start: 2026-02-01T22:00, duration: 2h"
    assert held(event(), "mail", [_silence(f"{when}, match: {{severities: [info, warning]}}")], at_us) is None
    assert (
        held(event(severity="warning"), "mail", [_silence(f"{when}, match: {{kinds: [gateway-*]}}")], at_us)
        is None
    )
    named = [_silence(f"{when}, recipients: [mail]")]
    assert held(event(), "mail", named, at_us) is not None
    assert held(event(), "oncall", named, at_us) is None
    assert held(event(kind="notify-test"), "mail", named, at_us) is None
    assert held(event(kind="event-sent-again"), "mail", named, at_us) is None


def test_it_holds_nothing_back_before_it_was_applied() -> None:
    silence = _silence("start: 2026-02-01T00:00, duration: 24h", applied="2026-02-01T12:00")
    assert held(event(), "mail", [silence], us("2026-02-01T11:59")) is None
    assert held(event(), "mail", [silence], us("2026-02-01T12:00")) is not None


def test_of_several_the_longest_counts_and_one_without_catch_up_before_all() -> None:
    at_us = us("2026-02-01T22:30")
    short = _silence("start: 2026-02-01T22:00, duration: 1h", "short")
    long = _silence("start: 2026-02-01T22:00, duration: 5h", "long")
    never = _silence("start: 2026-02-01T22:00, duration: 1h, catch_up: false", "never")
    found = held(event(), "mail", [short, long], at_us)
    assert found is not None
    assert found.until_us == us("2026-02-02T03:00")
    found = held(event(), "mail", [short, never, long], at_us)
    assert found is not None
    assert (found.until_us, "without catch-up" in found.reason) == (0, True)
