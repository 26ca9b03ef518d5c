"""What servers say to each other of who could act, and what becomes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

from pmdaemon.runtime.clock import FakeClock
from sla_server.acting_file import ActingFile, ActingParts, FailingPart
from sla_server.cluster import commands, offers
from sla_server.cluster.giving_up import GivingUp, Offer
from sla_server.cluster.leases import ClusterLease, LeaseRecord
from sla_server.cluster.offers import StandInOffers
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.reach import DatabaseFound, DatabaseReach

LIMIT_S: Final = 30.0
OURS: Final = "c1"


class Server:
    """Of node ``n1``: its database and its lease are what the test says."""

    def __init__(self, folder: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.found = DatabaseFound(OURS)
        self.is_away = False
        self.published = 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lease = ClusterLease("n1", 6.0)
        self.giving_up = GivingUp(LIMIT_S)
        self.parts = ActingFile(folder)
        self.reach = DatabaseReach(self._check, clock.monotonic_ns)
        self.offers = StandInOffers(
            "n1",
            OURS,
            self.lease,
            self.giving_up,
            self.reach,
            self.parts,
            self._publish,
            self._raise,
            boot_ns=clock.monotonic_ns,
            now_ns=clock.monotonic_ns,
        )

    def _check(self) -> DatabaseFound:
        if self.is_away:
            raise DatabaseUnavailable("sla at db", "connection refused")
        return self.found

    def _publish(self, _lease: ClusterLease) -> None:
        self.published += 1

    def _raise(self, text: str, details: Mapping[str, str | int]) -> None:
        self.events.append((text, dict(details)))

    def hold(self) -> None:
        self.lease.stored(LeaseRecord("n1", 7, 6.0), 1, self.clock.monotonic_ns())

    def pass_s(self, seconds: float) -> None:
        """Checks of the database each five seconds; the lease is renewed if it is held."""
        is_held = self.lease.is_held(self.clock.monotonic_ns())
        for _ in range(round(seconds / 5)):
            self.reach.probe()
            self.clock.advance(5)
        if is_held:
            self.hold()

    def answer(self) -> dict[str, Any]:
        return dict(asyncio.run(self.offers.answer({})))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, FakeClock())


def test_a_server_that_stands_by_offers_itself_while_it_reaches_the_database(server: Server) -> None:
    assert server.answer() == {"reached_s": 0.0, "why_not": "it does not reach the database: no answer"}
    server.pass_s(40)
    assert server.answer() == {"reached_s": 40.0, "why_not": ""}
    server.is_away = True
    server.pass_s(5)
    answer = server.answer()
    assert answer["reached_s"] == 0.0
    assert "connection refused" in answer["why_not"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (DatabaseFound(), "is not that of the servers of this cluster"),
        (DatabaseFound("c2"), "is not that of the servers of this cluster"),
        (DatabaseFound(OURS, "the schema is newer"), "the schema is newer"),
    ],
)
def test_a_server_that_reaches_another_database_or_cannot_use_it_could_not_act(
    server: Server, found: DatabaseFound, said: str
) -> None:
    server.found = found
    server.pass_s(40)
    assert said in server.answer()["why_not"]


def test_the_server_that_acts_is_no_offer_of_itself(server: Server) -> None:
    server.hold()
    server.pass_s(40)
    assert server.answer()["why_not"] == "it acts"


def test_the_lease_is_published_as_ended_with_an_event_and_a_line_that_name_the_limit(server: Server) -> None:
    server.hold()
    server.is_away = True
    server.pass_s(30)
    with structlog.testing.capture_logs() as said:
        server.offers.decide([Offer("n2", 100.0)])
    reason = "has not reached the database for 30 s (limit 30 s): connection refused"
    (line,) = said
    assert (line["event"], line["setting"], line["to"]) == (
        "lease-given-up",
        "cluster.takeover.give_up_after_s",
        "n2",
    )
    assert line["reason"] == reason
    ((text, details),) = server.events
    assert text == f"the server of node n1 gives the lease up to that of node n2: it {reason}"
    assert details == {"successor": "n2", "reason": reason}
    assert server.published == 1
    assert server.giving_up.reason == reason


def test_a_lease_that_is_kept_for_want_of_another_server_is_said_once(server: Server) -> None:
    server.hold()
    server.is_away = True
    server.pass_s(30)
    with structlog.testing.capture_logs() as said:
        for _ in range(3):
            server.offers.decide([Offer("n2", 0.0, "it does not reach the database: refused")])
    (line,) = said
    assert line["event"] == "lease-kept"
    assert line["no_other_could_act"] == {"n2": "it does not reach the database: refused"}
    assert (server.published, server.events) == (0, [])


def test_a_part_that_ends_again_and_again_and_the_end_of_all_are_read_of_the_supervisor(
    server: Server,
) -> None:
    assert not server.offers.situation().has_ended  # nothing is known
    server.hold()
    server.pass_s(5)
    since_ns = server.clock.monotonic_ns()
    failing = (
        FailingPart("services", since_ns + 10**9, 9, "x"),
        FailingPart("pmdaemon", since_ns, 3, "exit status 1"),
    )
    server.parts.publish(ActingParts(7, failing))
    server.pass_s(30)
    now = server.offers.situation()
    assert (now.is_held, now.failing_s, now.failing) == (True, 30.0, "pmdaemon ended 3 times: exit status 1")
    assert not now.has_ended
    server.offers.decide([Offer("n2", 100.0)])
    assert server.giving_up.reason.startswith("cannot keep a part running, for 30 s (limit 30 s): pmdaemon")
    server.parts.publish(ActingParts())
    assert server.offers.situation().has_ended


def test_others_are_asked_only_in_trouble_and_each_five_seconds_and_by_a_question_not_all_know(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    rows = (
        commands.NodeAnswer("n1", 4, {"reached_s": 99, "why_not": ""}),  # this one itself
        commands.NodeAnswer("n2", 4, {}, "there is no command 'could-act'"),
        commands.NodeAnswer("n3", 4, {"reached_s": "?"}),
    )

    async def ask(_client: object, command: str, _arguments: object, *, limit_s: float) -> commands.Answers:
        asked.append(command)
        return commands.Answers(rows, 4)

    monkeypatch.setattr(commands, "ask", ask)
    client: Any = None
    server.hold()
    server.pass_s(30)
    asyncio.run(server.offers._round(client))  # what ``run`` does, which sleeps between
    assert asked == []
    server.is_away = True
    server.pass_s(30)
    for _ in range(3):
        asyncio.run(server.offers._round(client))
    assert asked == [offers.COULD_ACT]
    assert server.giving_up.reason == ""
    rows += (commands.NodeAnswer("n4", 4, {"reached_s": 99.5, "why_not": ""}),)
    server.pass_s(5)
    asyncio.run(server.offers._round(client))
    assert (len(asked), server.giving_up.successor) == (2, "n4")
