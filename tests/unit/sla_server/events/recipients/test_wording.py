"""How notices read for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from sla_server.api.config import ApiConfig
from sla_server.config import ServerConfig
from sla_server.events.documents import SmtpSpec
from sla_server.events.recipients.alertmanager import begun
from sla_server.events.recipients.config import NotifyConfig
from sla_server.events.recipients.smtp import mail, mails
from sla_server.events.recipients.webhook import body
from sla_server.events.recipients.wording import line, text, title
from tests.support.deliveries import InlineSender, Rig, ToAll, event
from tests.support.notices import closed, notice

MAIL = SmtpSpec.model_validate({"server": "mail.example", "sender": "a@b.example", "to": ["c@d.example"]})


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


def test_a_notice_says_what_to_do_next_and_links_to_its_entry(tmp_path: Path) -> None:
    sender = InlineSender("oncall")
    rig = Rig(tmp_path, ToAll("oncall"), [sender])
    rig.add(
        event(1, "storage-fault", severity="critical"), event(2, "storage-recovered"), event(3, "agent-x")
    )
    rig.run()
    begins, ends, unknown = (each for batch in sender.batches for each in batch)
    page, anchor = begins.runbook.split("#")
    assert f'<a id="{anchor}">' in Path(page).read_text()  # without a page of a server
    assert f"  to do:    Look at the storage. ({begins.runbook})" in text([begins])
    assert "to do" not in text([ends])
    assert "  to do:    Read its text. (docs/formats/events.md)" in text([unknown])
    alert = body("oncall", [begins])["alerts"][0]
    found = {name: alert["annotations"][name] for name in ("action", "runbook")}
    assert found == {"action": "Look at the storage.", "runbook": begins.runbook}
    assert found.items() <= json.loads(json.dumps(begins.as_json())).items()


@pytest.mark.parametrize(
    ("at_us", "shown"),
    [
        (-(1 << 70), "1970-01-01T00:00:00.000000Z"),
        (10**18, "9999-12-31T23:59:59.000000Z"),
        (10**400, "9999-12-31T23:59:59.000000Z"),
    ],
)
def test_a_time_of_a_broken_clock_stops_no_recipient(at_us: int, shown: str) -> None:
    late = notice(1, event_fields={"at_us": at_us})
    assert f"time:     {shown}" in text([late])
    assert body("oncall", [late])["alerts"][0]["startsAt"] == shown
    assert begun(late, holds_s=60)["startsAt"] == shown
    spec = SmtpSpec.model_validate({"server": "mail.example", "sender": "a@b.example", "to": ["c@d.example"]})
    assert shown[:4] in mail(spec, [late])["Date"]


def test_links_lead_to_the_page_of_the_server_or_where_the_operator_says(tmp_path: Path) -> None:
    sender = InlineSender("oncall")
    rig = Rig(tmp_path, ToAll("oncall"), [sender], runbook_url="https://sla.example/runbook")
    rig.add(event(1, "storage-fault", severity="critical"), event(2, "agent-x"))
    rig.run()
    begins, unknown = (each for batch in sender.batches for each in batch)
    assert begins.runbook == "https://sla.example/runbook#storage-fault"
    assert unknown.runbook == "https://sla.example/runbook"
    assert f"  to do:    Look at the storage. ({begins.runbook})" in text([begins])
    assert begins.runbook in next(iter(mails(MAIL, [begins]))).get_content()
    assert body("oncall", [begins])["alerts"][0]["annotations"]["runbook"] == begins.runbook


@pytest.mark.parametrize(
    ("notify", "api", "wanted"),
    [
        ({}, {}, "http://127.0.0.1:8321/runbook"),
        ({}, {"external_url": "https://sla.example", "reading": "login"}, "https://sla.example/runbook"),
        ({"external_url": "https://page.example/sla/"}, {}, "https://page.example/sla/runbook"),
        ({"runbook_url": "https://wiki.example/events"}, {}, "https://wiki.example/events"),
    ],
)
def test_the_runbook_of_a_configuration(notify: dict[str, str], api: dict[str, str], wanted: str) -> None:
    config = ServerConfig(notify=NotifyConfig(**notify), api=ApiConfig(listen="127.0.0.1:8321", **api))
    assert config.runbook_url == wanted


@pytest.mark.parametrize("address", ["wiki/events", "ftp://wiki.example/", "https://wiki.example/#x"])
def test_a_runbook_is_at_an_address_that_can_be_followed(address: str) -> None:
    with pytest.raises(ValidationError, match="runbook_url"):
        NotifyConfig(runbook_url=address)
