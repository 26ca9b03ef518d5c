"""Messages of RFC 5424: header, structured data and its escapes, framing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sla_server.events.documents import SyslogSpec
from sla_server.events.recipients.syslog import counted, message
from tests.support.notices import notice

HEAD = re.compile(
    rb"<(\d{1,3})>1 (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z) "
    rb"([!-~]{1,255}) ([!-~]{1,48}) ([!-~]{1,128}) ([!-~]{1,32}) \["
)


def _spec(**fields: Any) -> SyslogSpec:
    return SyslogSpec.model_validate({"server": "log.example", **fields})


def test_a_message_has_the_form_of_the_rfc() -> None:
    assert message(notice(1), _spec(), "host-a", 7) == (
        b"<130>1 2026-01-01T00:00:01.000000Z host-a storage-sla 7 violation-opened "
        b'[sla@32473 id="event-1" severity="critical" status="firing" element="sla" '
        b'subject="erp-gold/latency" agreement="erp-gold" volume="vol-1"] '
        b"\xef\xbb\xbferp-gold/latency: broken, number 1"
    )


@pytest.mark.parametrize(
    ("severity", "facility", "priority"),
    [("info", "local7", 190), ("warning", "daemon", 28), ("critical", "user", 10)],
)
def test_facility_and_severity_make_the_priority(severity: str, facility: str, priority: int) -> None:
    found = message(notice(1, event_fields={"severity": severity}), _spec(facility=facility), "h", 1)
    assert found.startswith(b"<%d>1 " % priority)


def test_what_would_end_a_value_is_escaped() -> None:
    odd = notice(1, event_fields={"subject": 'a"b]c\\d\n', "details": {}})
    assert b'subject="a\\"b\\]c\\\\d " agreement' in message(odd, _spec(), "h", 1)


def test_header_fields_hold_visible_ascii_only_and_are_cut() -> None:
    odd = notice(1, event_fields={"kind": "sehr lang\u00e4 " + "x" * 50, "text": "\u00e4"})
    found = message(odd, _spec(), "host b", 1)
    match = HEAD.match(found)
    assert match is not None
    assert (match[3], match[6]) == (b"host_b", b"sehr_lang__" + b"x" * 21)
    assert found.endswith(b"] \xef\xbb\xbf\xc3\xa4")


def test_the_frame_counts_bytes() -> None:
    assert counted("\u00e4".encode()) == b"2 \xc3\xa4"
