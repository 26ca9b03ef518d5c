"""How notices read for people."""

from __future__ import annotations

from sla_server.events.recipients.wording import line, text, title
from tests.support.notices import closed, notice


def test_a_line_says_what_is_special_about_a_notice() -> None:
    assert line(notice(1)) == "CRITICAL: erp-gold/latency: broken, number 1"
    assert line(closed(2)) == "RESOLVED: erp-gold/latency: broken, number 2"
    special = notice(1, repeats=3, reminder=2, escalated=True, is_caught_up=True)
    assert line(special).endswith("(3 times, reminder 2, not acknowledged in time, held back until now)")


def test_several_notices_have_the_newest_as_title() -> None:
    assert (
        title([notice(1), notice(2), notice(3)])
        == "CRITICAL: erp-gold/latency: broken, number 3 (and 2 more)"
    )


def test_the_text_has_the_figures_and_the_identity() -> None:
    found = text([notice(1)])
    assert "  worst_u: 1.5" in found
    assert "  identity: event-1" in found
    many = notice(1, event_fields={"details": {f"key{number}": number for number in range(30)}})
    assert "and 10 more: sla describe event event-1" in text([many])
