"""Dead letters as events: to whom they go, that they end, and what a kill leaves of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pmdaemon.reserve.raising import packed
from pmdaemon.runtime import strict_json
from sla_server.events.catalogue import runbook
from sla_server.events.event import Event, from_row
from sla_server.events.recipients.base import CONFIRMED, Notice, refused, retry
from sla_server.events.stages.confirm import RetryRules
from sla_server.events.trouble import PAUSE_NS
from tests.support.deliveries import InlineSender, Rig, event, router

MINUTE_S = PAUSE_NS / 1e9
REFUSED = refused("HTTP 400")


class Echo(Rig):
    """A rig in which what is raised about recipients is an event like others, as intake makes it.

    Attributes:
        told: the events raised.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.told: list[Event] = []
        super().__init__(*args, **settings)

    def _raised(self, kind: str, severity: str, name: str, text: str, details: dict[str, Any]) -> None:
        super()._raised(kind, severity, name, text, details)
        row = {
            "event_id": f"t{len(self.told) + 1}", "at_us": self.clock.unix_us(), "kind": kind,
            "severity": severity, "element": "recipient", "subject": name, "text": text, "details": details,
        }  # fmt: skip
        self.told.append(from_row(strict_json.loads(packed(row).decode())))
        self.add(self.told[-1])


def critical(number: int, text: str = "p95 is 12 ms") -> Event:
    return event(number, "storage-fault", "erp", severity="critical", element="backend", text=text)


def _kinds(sender: InlineSender) -> list[tuple[str, str]]:
    return [(notice.event.kind, notice.event.subject) for batch in sender.batches for notice in batch]


def _received(sender: InlineSender) -> list[Notice]:
    return [notice for batch in sender.batches for notice in batch]


def test_what_the_only_routed_recipient_refuses_reaches_the_other_one(tmp_path: Path) -> None:
    oncall, mail = InlineSender("oncall", REFUSED), InlineSender("mail")
    routes = router("{recipients: [oncall], match: {severities: [critical]}}", names="oncall mail")
    rig = Echo(tmp_path, routes, [oncall, mail])
    rig.add(critical(1), event(2))
    rig.run(2)
    assert _kinds(oncall) == [("storage-fault", "erp")]
    (notice,) = _received(mail)
    assert notice.event.text == (
        "recipient oncall did not take 1 event: HTTP 400. critical storage-fault erp: p95 is 12 ms"
    )
    assert notice.event.details == {
        "events": ["e1"], "count": 1, "answer": "HTTP 400", "level": 1, "not_taken_by": "oncall",
    }  # fmt: skip
    assert notice.runbook == runbook("delivery-failed")
    assert rig.main.read(0)[0] == []


def test_the_most_severe_ones_are_shown(tmp_path: Path) -> None:
    oncall, mail = InlineSender("oncall", REFUSED), InlineSender("mail")
    rig = Echo(tmp_path, router("{recipients: [oncall]}", names="oncall mail"), [oncall, mail])
    rig.add(event(1))
    rig.run(1)
    rig.add(*(event(number) for number in range(2, 50)), critical(50))
    rig.run(MINUTE_S + 1)
    first, second = _received(mail)
    assert first.event.details["count"] == 1
    assert (second.event.details["count"], second.event.details["events"][0]) == (49, "e2")
    assert second.event.text.startswith(
        "recipient oncall did not take 49 events: HTTP 400. critical storage-fault"
    )
    assert second.event.text.endswith(" and more")


def test_recipients_that_all_refuse_end_it(tmp_path: Path) -> None:
    names = ["oncall", "mail", "log", "page"]
    senders = [InlineSender(name, REFUSED) for name in names]
    rig = Echo(tmp_path, router("{recipients: [oncall, mail]}", names=" ".join(names)), senders)
    rig.add(critical(1))
    rig.run(20 * MINUTE_S)
    levels = [told.details["level"] for told in rig.told]
    assert sorted(set(levels)) == [1, 2, 3]
    for sender in senders:
        for notice in _received(sender):
            assert sender.name not in str(notice.event.details.get("not_taken_by", "")).split()
    assert rig.main.read(0)[0] == []
    before = [len(sender.batches) for sender in senders]
    rig.run(20 * MINUTE_S)
    assert [len(sender.batches) for sender in senders] == before


def test_one_that_takes_events_gets_it_in_the_end_though_a_fallback_is_dead_too(tmp_path: Path) -> None:
    oncall, mail, log = (InlineSender(name, REFUSED) for name in ("oncall", "mail", "log"))
    log.answer = CONFIRMED
    rig = Echo(
        tmp_path,
        router("{recipients: [oncall]}", names="oncall mail log", oncall="mail"),
        [oncall, mail, log],
    )
    rig.add(critical(1))
    rig.run(2)
    assert _kinds(mail) == [("delivery-failed", "oncall")]
    (last,) = _received(log)
    assert (last.event.subject, last.event.details["not_taken_by"]) == ("mail", "mail oncall")
    assert "critical storage-fault erp: p95 is 12 ms" in last.event.text
    assert _kinds(oncall) == [("storage-fault", "erp")]


def test_what_is_tried_for_too_long_reaches_the_other_one(tmp_path: Path) -> None:
    oncall, mail = InlineSender("oncall", retry("away")), InlineSender("mail")
    rules = RetryRules(first_s=10, max_s=10, give_up_s=60, jitter_ratio=0.0)
    rig = Echo(tmp_path, router("{recipients: [oncall]}", names="oncall mail"), [oncall, mail], rules=rules)
    rig.add(critical(1))
    rig.run(90)
    assert _kinds(mail) == [("delivery-failed", "oncall")]


def test_a_dead_letter_is_sent_again_when_a_person_asks_for_it(tmp_path: Path) -> None:
    oncall, mail = InlineSender("oncall", REFUSED), InlineSender("mail")
    rig = Echo(tmp_path, router("{recipients: [oncall]}", names="oncall mail"), [oncall, mail])
    rig.add(critical(1))
    rig.run(2)
    assert _kinds(mail) == [("delivery-failed", "oncall")]
    oncall.answer = CONFIRMED
    again = event(2, "event-sent-again", "oncall", element="recipient", severity="critical")
    rig.add(again)
    rig.run(2)
    assert _kinds(oncall)[-1] == ("event-sent-again", "oncall")
    assert _kinds(mail) == [("delivery-failed", "oncall")], "it is the affair of that recipient alone"


@pytest.mark.parametrize("kind", ["notify-test", "event-sent-again"])
def test_what_a_person_sends_and_is_refused_is_shown_and_sent_to_no_other_recipient(
    tmp_path: Path, kind: str
) -> None:
    oncall, mail = InlineSender("oncall", REFUSED), InlineSender("mail")
    rig = Echo(tmp_path, router("{recipients: [oncall, mail]}", names="oncall mail"), [oncall, mail])
    rig.add(event(1, kind, "oncall", element="recipient"))
    rig.run(2)
    assert (rig.raised, _received(mail)) == ([("delivery-failed", "oncall")], [])


def test_what_was_sent_again_to_a_relay_and_is_refused_behind_it_reaches_others(tmp_path: Path) -> None:
    oncall, mail = InlineSender("oncall", REFUSED), InlineSender("mail")
    rig = Echo(tmp_path, router("{recipients: [oncall]}", names="oncall mail"), [oncall, mail])
    rig.add(event(1, "event-sent-again", "site-b", element="recipient", severity="critical"))
    rig.run(2)
    assert _kinds(mail) == [("delivery-failed", "oncall")], "who has sent it sees that the relay took it"


def test_what_was_given_up_and_not_said_yet_is_said_after_a_kill(tmp_path: Path) -> None:
    oncall, mail = InlineSender("oncall", REFUSED), InlineSender("mail")
    rig = Echo(tmp_path, router("{recipients: [oncall]}", names="oncall mail"), [oncall, mail])
    rig.add(event(1))
    rig.run(1)
    rig.add(critical(2))
    rig.run(5)
    assert [told.details["events"] for told in rig.told] == [["e1"]]  # the second one comes within the minute
    rig.restart()
    rig.run(2)
    assert [told.details["events"] for told in rig.told] == [["e1"], ["e2"]]
    assert _kinds(mail) == [("delivery-failed", "oncall")] * 2
    rig.restart()
    rig.run(2 * MINUTE_S)
    assert len(rig.told) == 2


def test_an_event_of_many_long_names_keeps_what_ends_it(tmp_path: Path) -> None:
    oncall, mail = InlineSender("oncall", REFUSED), InlineSender("mail")
    rig = Echo(tmp_path, router("{recipients: [oncall]}", names="oncall mail"), [oncall, mail])
    rig.add(*(event(number, event_id=f"{number:0255d}", text="ä" * 2000) for number in range(30)))
    rig.run(2 * MINUTE_S)
    assert {(told.details["level"], told.details["not_taken_by"]) for told in rig.told} == {(1, "oncall")}
    assert all("delivery-failed" not in kind for kind, _ in _kinds(oncall))


def test_an_answer_that_is_no_unicode_leaves_a_state_that_can_be_read(tmp_path: Path) -> None:
    oncall = InlineSender("oncall", refused("/srv/\udcff: not found"))
    rig = Echo(tmp_path, router("{recipients: [oncall]}", names="oncall"), [oncall])
    for number in (1, 2):
        rig.add(event(number))
        rig.run(1)
    rig.restart()
    rig.run(1)
    assert len(rig.told) == 2
    assert list(tmp_path.glob("*.unreadable")) == []
