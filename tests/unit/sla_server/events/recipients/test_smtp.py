"""Mails: one for each group, the same identity when they are sent again, threads of one condition."""

from __future__ import annotations

from typing import Any

from sla_server.events.documents import SmtpSpec
from sla_server.events.recipients.smtp import mails
from tests.support.notices import closed, notice

SPEC = SmtpSpec.model_validate(
    {"server": "mail.example", "sender": "sla@a.example", "to": ["ops@b.example", "x@b.example"]}
)


def test_one_mail_for_each_group_in_order() -> None:
    notices = [
        notice(1, group_key="a"),
        notice(2, group_key="a"),
        notice(3, group_key="b"),
        notice(4),
        notice(5),
    ]
    found = list(mails(SPEC, notices))
    assert [str(each["Subject"]) for each in found] == [
        "[storage-sla] CRITICAL: erp-gold/latency: broken, number 2 (and 1 more)",
        "[storage-sla] CRITICAL: erp-gold/latency: broken, number 3",
        "[storage-sla] CRITICAL: erp-gold/latency: broken, number 4",
        "[storage-sla] CRITICAL: erp-gold/latency: broken, number 5",
    ]
    assert {str(each["To"]) for each in found} == {"ops@b.example, x@b.example"}
    assert "number 1" in found[0].get_content()


def _ids(*notices: Any) -> list[str]:
    return [str(each["Message-ID"]) for each in mails(SPEC, notices)]


def test_a_mail_sent_again_has_the_same_identity() -> None:
    assert _ids(notice(1)) == _ids(notice(1, attempt=5)) != _ids(notice(1, reminder=1))
    assert _ids(notice(1))[0].endswith("@a.example>")


def test_beginning_and_end_of_a_condition_make_a_thread() -> None:
    (begun,), (ended,) = mails(SPEC, [notice(1)]), mails(SPEC, [closed(2)])
    assert begun["References"] == ended["References"]
    assert "RESOLVED: " in str(ended["Subject"])


def test_no_line_end_of_a_text_begins_a_header() -> None:
    odd = notice(1, event_fields={"text": "a\r\nBcc: evil@x.example"})
    (mail,) = mails(SPEC, [odd])
    assert mail["Bcc"] is None
    assert str(mail["Subject"]) == "[storage-sla] CRITICAL: a  Bcc: evil@x.example"
