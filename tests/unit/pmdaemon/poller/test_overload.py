"""A pair whose recipients have no room: less work than otherwise, the newest cuts arrive, nothing is lost."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator

import pytest

from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.positions import FULL_LAG_NS
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import Agent
from tests.support.pair import SECOND, PairRig

GATEWAYS = [f"6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f{number:04x}" for number in range(8)]
OVERLOADED_S = 60


class Fleet(PairRig):
    """A pair, its gateways, and a dbmanager that stores what it has room for; counts work, not time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock.advance(10)
        self.watermarks()
        for gateway_id in GATEWAYS:
            self.up(gateway_id)
        self.polled: Counter[str] = Counter()
        self.is_storing = True
        self.high = dict.fromkeys(GATEWAYS, 0)  # stored without a hole
        self._taken = 0

    def go(self, seconds: int) -> None:
        """Time passes; agents answer, dbmanager takes what is posted and says that it is durable."""
        for _ in range(seconds * 10):
            self.pass_time(0.1)
            for agent in self.agents:
                for poll in self.polls(agent):
                    self.polled[agent.gateway_id] += 1
                    agent.answer(poll)
            self.step()
            if not self.is_storing:
                continue
            taken = [(gw, seq) for gw, seq, _ in _cuts(self.discard(), "dbmanager")]
            for gateway_id, seq in taken:
                self.high[gateway_id] += seq == self.high[gateway_id] + 1
            if taken:
                self.deliver(Kind.DURABLE, inc=1, hw=[[gw, 7, self.high[gw]] for gw, _ in taken])

    def discard(self) -> list[tuple[tuple[str, ...], bytes]]:
        """Take what was posted since the last time."""
        posts, self._taken = self.mailbox.posts[self._taken :], len(self.mailbox.posts)
        return posts

    def cuts_to(self, recipient: str) -> dict[str, list[int]]:
        """What a recipient got, by gateway."""
        found: dict[str, list[int]] = {gateway_id: [] for gateway_id in GATEWAYS}
        for gateway_id, seq, _ in _cuts(self.mailbox.posts, recipient):
            found[gateway_id].append(seq)
        return found

    def newest(self, agent: Agent) -> int:
        return agent.next_seq - 1


def _cuts(posts: list[tuple[tuple[str, ...], bytes]], recipient: str) -> Iterator[tuple[str, int, bool]]:
    for names, payload in posts:
        batch = frame.decode(payload)
        if recipient in names and batch.kind == Kind.CUTS:
            for raw, live in zip(frame.split(batch.blob), batch.header["live"], strict=True):
                header = frame.decode(raw).header
                yield str(uuid.UUID(bytes=header["gw"])), header["seq"], live


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def test_without_room_a_pair_polls_half_as_often_and_rarely_tries_again(fleet: Fleet) -> None:
    fleet.go(10)
    fleet.mailbox.full = {"dbmanager", "services"}
    fleet.go(20)  # refusals follow each other, pauses grow to their longest
    fleet.polled.clear()
    refused = fleet.publisher.refused_keeping
    fleet.go(OVERLOADED_S)
    assert max(fleet.polled.values()) <= 0.6 * OVERLOADED_S
    assert min(fleet.polled.values()) >= 0.4 * OVERLOADED_S
    tries = fleet.publisher.refused_keeping - refused
    assert tries <= OVERLOADED_S / 4 * len(GATEWAYS), "a pause of 8 s, spread over 4 to 12"
    assert fleet.counters["polls_spared"] > 0


def test_no_poll_is_left_out_that_a_lease_of_caps_would_not_outlast(fleet: Fleet) -> None:
    fleet.go(5)
    fleet.deliver(Kind.SET_CAPS, gw=GATEWAYS[0], gen=1, lease_us=2_500_000, caps=[])
    fleet.mailbox.full = {"dbmanager", "services"}
    fleet.polled.clear()
    fleet.go(20)
    assert fleet.counters["polls_spared"] == 0
    assert min(fleet.polled.values()) >= 19


@pytest.mark.parametrize("full", [("services",), ("dbmanager",), ("dbmanager", "services")])
def test_the_newest_cut_of_every_gateway_arrives_and_none_is_lost_or_stored_twice(
    fleet: Fleet, full: tuple[str, ...]
) -> None:
    fleet.go(5)
    fleet.mailbox.full = set(full)
    fleet.go(OVERLOADED_S)
    fleet.mailbox.full -= {"services"}
    fleet.go(2)
    live = fleet.cuts_to("services")
    for agent in fleet.agents:
        assert live[agent.gateway_id][-1] >= fleet.newest(agent) - 1, "the one before may just be on its way"
        assert live[agent.gateway_id] == sorted(set(live[agent.gateway_id])), (
            "each once, none after a newer one"
        )
    fleet.mailbox.full = set()
    fleet.go(20)  # beyond the longest pause
    stored = fleet.cuts_to("dbmanager")
    for agent in fleet.agents:
        seqs = stored[agent.gateway_id]
        assert seqs == list(range(1, len(seqs) + 1)), "in order, without a hole, each once"
        assert len(seqs) >= fleet.newest(agent) - 1
    assert all(len(agent.cuts) <= 3 for agent in fleet.agents), "what is confirmed is forgotten"
    spared = fleet.counters["polls_spared"]
    fleet.go(10)
    assert fleet.counters["polls_spared"] == spared, "all as before"


def test_what_waits_in_the_mailbox_of_dbmanager_is_not_posted_again(fleet: Fleet) -> None:
    fleet.go(5)
    fleet.is_storing = False
    fleet.go(3)
    waiting = sum(map(len, fleet.cuts_to("dbmanager").values()))
    fleet.mailbox.full = {"dbmanager"}
    fleet.go(OVERLOADED_S)
    fleet.mailbox.full, fleet.is_storing = set(), True
    fleet.go(20)
    stored = fleet.cuts_to("dbmanager")
    assert sum(map(len, stored.values())) > waiting
    for seqs in stored.values():
        assert seqs == list(range(1, len(seqs) + 1))


def test_what_dbmanager_has_discarded_comes_again_also_while_it_refuses_other_cuts(fleet: Fleet) -> None:
    fleet.go(5)
    fleet.is_storing = False
    fleet.go(1)
    fleet.discard()  # damaged messages
    fleet.is_storing = True
    for turn in range(FULL_LAG_NS // SECOND // 5 + 10):
        fleet.mailbox.full = {"dbmanager"}
        fleet.go(1)
        fleet.mailbox.full = set()
        fleet.go(2 + turn % 5)
    assert min(fleet.high.values()) > FULL_LAG_NS // SECOND, "all but those of a pause"


def test_who_comes_back_in_step_with_refusals_is_not_refused_for_ever(fleet: Fleet) -> None:
    fleet.go(5)
    fleet.mailbox.full = {"dbmanager"}
    fleet.go(61)  # pauses grow to their longest
    for _ in range(20):
        fleet.mailbox.full = set()
        fleet.go(4)
        fleet.mailbox.full = {"dbmanager"}
        fleet.go(1)
    assert min(fleet.high.values()) > 100


def test_the_budget_for_backlog_knows_what_the_fleet_makes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    present: list[float] = []
    monkeypatch.setattr(CatchUp, "set_present", lambda _self, size_bytes: present.append(size_bytes))
    fleet.go(10)
    answer_bytes = fleet.inbound.received_bytes / fleet.counters["cuts"]
    assert present[-1] == pytest.approx(len(GATEWAYS) * answer_bytes, rel=0.3)
