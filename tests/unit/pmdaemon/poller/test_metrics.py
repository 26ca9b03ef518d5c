"""The daemon's figures as text: every line declared, labels, whole files; reports of back-"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.poller import metrics
from pmdaemon.poller.channel_messages import PairReport
from pmdaemon.poller.metrics import BackpressureReporter
from pmdaemon.poller.parent import PairManager
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.messages.server import MOST_PROBLEMS, REASON_CHARS, Pressure, Problem


class FakeChild:
    def __init__(self, index: int, **figures: float) -> None:
        self.index = index
        self.is_running = True
        self.restarts = index
        self.last = PairReport(metrics=figures)


class FakeTraffic:
    needed, moves, passed_on, lost = 3, 64, 12, 0

    def __init__(self, *children: FakeChild) -> None:
        self.children = children


def families(*children: FakeChild) -> dict[str, Any]:
    text = metrics.text(cast(PairManager, FakeTraffic(*children)), 5)
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_figures_of_all_pairs_and_of_the_parent() -> None:
    found = families(FakeChild(0, polls=10.0, t_ptmax_seconds=55e-6, undeclared=1.0), FakeChild(1, polls=7.0))
    polls = found["sla_pmdaemon_polls"]
    assert polls.type == "counter"
    assert {sample.labels["pair"]: sample.value for sample in polls.samples} == {"0": 10.0, "1": 7.0}
    assert found["sla_pmdaemon_t_ptmax_seconds"].samples[0].value == 55e-6
    assert found["sla_pmdaemon_pairs"].samples[0].value == 2
    assert found["sla_pmdaemon_shards_moved"].samples[0].value == 64
    assert found["sla_pmdaemon_refused_connections"].samples[0].value == 5
    assert [sample.value for sample in found["sla_pmdaemon_late_replies"].samples] == [0, 0], "none so far"
    assert not any("undeclared" in name for name in found)
    assert all(family.documentation.endswith(".") for family in found.values())


def test_refusals_have_their_code_as_a_label() -> None:
    found = families(FakeChild(0, refusal_token_used=2.0, refusal_not_tls=1.0), FakeChild(1))
    refusals = found["sla_pmdaemon_refusals"]
    assert {sample.labels["code"]: sample.value for sample in refusals.samples} == {
        "token-used": 2,
        "not-tls": 1,
    }
    assert {sample.labels["pair"] for sample in refusals.samples} == {"0"}


def test_every_declared_figure_has_one_name_and_a_sentence() -> None:
    names = [item.name for item in (*metrics.PAIR, *metrics.PARENT)]
    assert len(set(names)) == len(names)
    for item in (*metrics.PAIR, *metrics.PARENT):
        assert item.about[0].isupper()
        assert item.about.endswith(".")
        assert item.name.endswith("_total") == (item.type == "counter")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "pmdaemon.prom"
    metrics.write(path, "a 1\n")
    metrics.write(path, "a 2\n")
    assert path.read_text() == "a 2\n"
    assert [item.name for item in path.parent.iterdir()] == ["pmdaemon.prom"]


class Box:
    name = "pair-0"

    def __init__(self) -> None:
        self.posted: list[tuple[str, bytes]] = []
        self.is_full = False

    def post(self, recipients: str, payload: bytes) -> None:
        if self.is_full:
            raise MailboxFull(self.name, (recipients,))
        self.posted.append((recipients, payload))

    def stats(self) -> dict[str, Any]:
        return {"full": 4, "ring_fill_ratio": {"services": 0.5, "dbmanager": 0.0}}


def test_it_tells_rings_and_counters_every_other_second() -> None:
    box, clock = Box(), FakeClock()
    reporter = BackpressureReporter(box, clock, lambda: {"ingest-queue": 0.25}, lambda: {"news": 1})
    for _ in range(5):
        reporter.tick()
        clock.advance(1)
    assert [to for to, _ in box.posted] == ["services"] * 3
    told = Pressure.parse(frame.decode(box.posted[0][1]).header)
    assert told.fullness == {"services": 0.5, "dbmanager": 0.0, "ingest-queue": 0.25}
    assert told.refused == {"posts": 4, "news": 1}
    assert told.problems == ()


def test_it_tells_problems_at_once_when_asked_to_and_then_in_time() -> None:
    box, clock = Box(), FakeClock()
    trouble = Problem("database", 7, "away " * 200)
    reporter = BackpressureReporter(box, clock, dict, dict, lambda: [trouble] * 40)
    reporter.tick()
    reporter.report()
    reporter.tick()
    assert len(box.posted) == 2
    told = Pressure.parse(frame.decode(box.posted[1][1]).header)
    assert len(told.problems) == MOST_PROBLEMS
    assert told.problems[0] == trouble._replace(reason=trouble.reason[:REASON_CHARS])


def test_others_get_the_same_whoever_has_no_room() -> None:
    box, other, clock = Box(), Box(), FakeClock()
    reporter = BackpressureReporter(box, clock, dict, dict, copies=[(other, "appserver")])
    box.is_full = True
    reporter.tick()
    assert [to for to, _ in other.posted] == ["appserver"]


def test_without_room_it_says_nothing_and_goes_on() -> None:
    box, clock = Box(), FakeClock()
    reporter = BackpressureReporter(box, clock, dict, dict)
    box.is_full = True
    reporter.tick()
    box.is_full = False
    clock.advance(2)
    reporter.tick()
    assert len(box.posted) == 1
