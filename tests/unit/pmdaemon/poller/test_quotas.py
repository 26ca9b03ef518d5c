"""What a gateway may send is bounded for each kind; the excess is counted, refused and said once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pmdaemon.poller import quotas
from pmdaemon.poller.gateway import ANSWER_BYTES
from pmdaemon.poller.quotas import EVENT_NS, LIMITS, REMEMBERED, Quotas
from pmdaemon.wire import frame, names
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import GATEWAY, Agent, hello, make_cut, register, schema
from tests.support.pair import OTHER, PairRig

SECOND = 10**9


@pytest.fixture
def rig() -> Iterator[PairRig]:
    made = PairRig()
    yield made
    made.close()


def alert(**over: Any) -> bytes:
    header = {"kind": "plane-died", "severity": "warning", "text": "x", "at_us": 1, "details": {}}
    return frame.encode(Kind.ALERT, header | over)


def events(rig: PairRig) -> list[dict[str, Any]]:
    rows = [row for item in rig.mailbox.to("dbmanager", Kind.RECORD) for row in item.header["rows"]]
    return [row for table, row in rows if table == "events" and row["kind"] == "gateway-over-limit"]


def refused(agent: Agent) -> str:
    code: str = agent.expect(Kind.ERROR).header["code"]
    return code


def test_a_bucket_is_a_burst_and_a_rate() -> None:
    quotas, limit = Quotas(), LIMITS["alerts"]
    assert [quotas.take("alerts", 0) for _ in range(limit.burst + 2)] == [True] * limit.burst + [False] * 2
    assert quotas.refused == {"alerts": 2}
    assert [quotas.take("alerts", 3 * SECOND) for _ in range(5)] == [True] * 3 + [False] * 2
    assert quotas.take("alerts", 10**6 * SECOND, limit.burst)
    assert not quotas.take("alerts", 10**6 * SECOND)
    assert quotas.take("streams", 0)  # each kind has its own


def test_names_count_once() -> None:
    quotas, burst = Quotas(), LIMITS["volumes"].burst
    first = [f"vol-{number}" for number in range(burst)]
    for _ in range(3):
        assert quotas.take_new("volumes", first, 0)
    assert not quotas.take_new("volumes", ["one more"], 0)
    assert quotas.take_new("volumes", [*first, "one more"], SECOND)
    for number in range(REMEMBERED * 2 // burst):
        assert quotas.take_new(
            "volumes", range(number * burst, (number + 1) * burst), 10**9 * SECOND * (number + 1)
        )
    assert len(quotas._known["volumes"]) <= REMEMBERED  # memory, which shows nowhere else


def test_one_event_in_a_while() -> None:
    quotas = Quotas()
    assert [quotas.should_report("alerts", at_ns) for at_ns in (5, 6, EVENT_NS + 4, EVENT_NS + 5)] == [
        True,
        False,
        False,
        True,
    ]


def test_ten_thousand_alerts_are_dropped_but_the_session_lives(rig: PairRig) -> None:
    good, bad = rig.up(OTHER), rig.up()
    for _ in range(100):
        bad.send(*[alert() for _ in range(100)])
        rig.step()
    burst = LIMITS["alerts"].burst
    assert len(rig.mailbox.to("services", Kind.GATEWAY_ALERT)) == burst
    assert rig.counters["over_limit"] == 10_000 - burst
    (event,) = events(rig)
    assert (event["severity"], event["details"]["what"]) == ("warning", "alerts")
    assert "50 at once" in event["text"]
    good.send(alert())
    rig.step()
    assert len(rig.mailbox.to("services", Kind.GATEWAY_ALERT)) == burst + 1
    rig.pass_time(3.1)
    bad.send(*[alert() for _ in range(10)])
    rig.step()
    assert len(rig.mailbox.to("services", Kind.GATEWAY_ALERT)) == burst + 1 + 3


FLOODS = {
    "answers": frame.encode(Kind.CAPS_ACK, {"gen": 1, "ok": True, "reason": ""}),
    "unknown": frame.encode(50, {}),
    "changes": register(),
}


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_of_other_kinds_ends_the_session(rig: PairRig, what: str) -> None:
    agent = rig.up()
    burst = LIMITS["answers" if what == "unknown" else what].burst
    for _ in range(burst):
        agent.send(FLOODS[what])
        rig.step()
        if what != "answers":  # which are not answered themselves
            agent.read()
    agent.send(FLOODS[what])
    rig.step()
    assert refused(agent) == "over-limit"
    assert len(events(rig)) == 1


@pytest.mark.parametrize("what", ["epochs", "volumes"])
def test_names_that_were_never_used_before_are_bounded(rig: PairRig, what: str) -> None:
    agent = rig.up()
    burst = LIMITS[what].burst
    for first in range(0, burst, 250):
        if what == "epochs":
            said = register([[100 + number, 1, 1] for number in range(first, first + 250)])
        else:
            said = register(volumes=[f"new-{number}" for number in range(first, first + 250)])
        agent.send(said)
        rig.step()
    while (received := agent.read()).kind != Kind.ERROR:
        assert received.kind == Kind.REGISTERED
    assert received.header["code"] == "over-limit"
    (event,) = events(rig)
    assert event["details"]["what"] == what


def test_streams_are_bounded(rig: PairRig) -> None:
    agent = rig.up()
    burst, a_frame = LIMITS["streams"].burst, 500
    for first in range(0, burst + a_frame, a_frame):
        rows = [
            {
                "id": names.stream_id(GATEWAY, "v", f"c{number}"),
                "volume": "v",
                "client": f"c{number}",
                "backend": "b",
            }
            for number in range(first, first + a_frame)
        ]
        agent.send(frame.encode(Kind.STREAMS, {"streams": rows}))
        rig.step()
    assert refused(agent) == "over-limit"


def test_sessions_are_bounded(rig: PairRig) -> None:
    for _ in range(LIMITS["sessions"].burst):
        rig.up().sock.close()
        rig.step()
    agent = rig.dial()
    agent.send(hello(), schema(), register())
    rig.step()
    agent.expect(Kind.WELCOME)
    assert refused(agent) == "over-limit"
    rig.up(OTHER)  # another's
    rig.pass_time(6)
    rig.up()


def test_a_process_knows_so_many_gateways(rig: PairRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_GATEWAYS", 2)
    rig.up()
    rig.up(OTHER)
    third = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0003"
    agent = rig.dial(third)
    agent.send(hello(third), schema(), register())
    rig.step()
    agent.expect(Kind.WELCOME)
    assert refused(agent) == "too-many-gateways"


def test_a_gateway_that_is_away_makes_room_for_a_new_one(
    rig: PairRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MAX_GATEWAYS", 3)
    third, fourth = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0003", "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0004"
    rig.up()  # the least recently heard, and there
    for gateway_id in (OTHER, third):
        rig.up(gateway_id).sock.close()
        rig.step()
    rig.up(fourth)
    assert [item.gateway_id for item in rig.registry.all()] == [GATEWAY, third, fourth]
    rig.up(OTHER)
    assert [item.gateway_id for item in rig.registry.all()] == [GATEWAY, fourth, OTHER]


def test_gateways_are_forgotten_at_a_limited_rate(rig: PairRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_GATEWAYS", 1)
    ids = [f"6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f{number:04x}" for number in range(LIMITS["newcomers"].burst + 2)]
    for gateway_id in ids[:-1]:
        rig.up(gateway_id).sock.close()
        rig.step()
    agent = rig.dial(ids[-1])
    agent.send(hello(ids[-1]), schema(), register())
    rig.step()
    agent.expect(Kind.WELCOME)
    assert refused(agent) == "too-many-gateways"
    rig.pass_time(1.1)
    rig.up(ids[-1])


@pytest.mark.parametrize("flags", [0, frame.FLAG_LIVE])
def test_cuts_come_in_answers_of_bounded_size(rig: PairRig, flags: int) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(1)
    assert len(rig.polls(agent)) == 1
    size_bytes = len(make_cut(rows=1000))
    fitting = ANSWER_BYTES // size_bytes
    for seq in range(1, fitting + 1):
        agent.send(make_cut(seq=seq, rows=1000, flags=flags))
        rig.step()
    assert rig.counters["cuts"] == fitting
    agent.send(make_cut(seq=fitting + 1, rows=1000, flags=flags))
    rig.step()
    error = agent.expect(Kind.ERROR).header
    assert error["code"] == "bad-cut"
    assert f"more than {ANSWER_BYTES} bytes" in error["text"]
    assert rig.counters["cuts"] == fitting


def test_each_poll_may_be_answered_in_full(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    a_poll = ANSWER_BYTES // len(make_cut(rows=1000))
    for turn in range(3):
        rig.pass_time(1)
        (poll,) = rig.polls(agent)
        for seq in range(turn * a_poll + 1, (turn + 1) * a_poll + 1):
            agent.send(make_cut(seq=seq, rows=1000))
            rig.step()
        reply = {"poll": poll.header["poll"], "sent_ns": poll.header["sent_ns"], "wall_us": 1, "dropped": 0}
        agent.send(frame.encode(Kind.REPLY, {**reply, "cuts": a_poll, "first": None, "last": None}))
        rig.step()
    assert rig.counters["cuts"] == 3 * a_poll
    assert rig.counters["replies"] == 3


def test_a_refused_claim_does_not_touch_who_is_there(rig: PairRig) -> None:
    """Without TLS a peer may use another gateway's id, and be refused under it."""
    rig.up(OTHER)
    for gateway_id in (OTHER, GATEWAY):
        rig.dial().send(hello(gateway_id, proto_min=9, proto_max=9))
        rig.step()
    assert rig.mailbox.states() == [(OTHER, "up"), (GATEWAY, "refused")]


def test_refused_claims_are_bounded(rig: PairRig) -> None:
    for number in range(LIMITS["refusals"].burst + 20):
        rig.dial().send(hello(f"6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f{number:04x}", proto_min=9, proto_max=9))
        rig.step()
    assert len(rig.mailbox.states()) == LIMITS["refusals"].burst
    assert rig.counters["over_limit"] == 20
