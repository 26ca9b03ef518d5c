"""What agents send, carried out: registrations, cuts, holes, answers; fake clock, agents on socket pairs."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from pmdaemon.poller.catch_up import BEYOND
from pmdaemon.poller.cut_batch import BATCH_AGE_NS
from pmdaemon.wire import cut, frame
from pmdaemon.wire.frame import FLAG_LIVE
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.space import Space
from tests.support.gateways import GATEWAY, hello, make_cut, register, schema, streams
from tests.support.pair import SECOND, PairRig


def test_registration_is_announced_to_both(rig: PairRig) -> None:
    rig.up()
    for who in ("services", "dbmanager"):
        up = rig.mailbox.to(who, Kind.GATEWAY)[0].header
        assert (up["gw"], up["state"], up["name"], up["ep"]) == (GATEWAY, "up", "gw-0001", 7)
        assert "features" not in up, "an agent of before says none"
        assert "volumes" not in up, "no certificate, no list"
        assert up["exports"][0]["backend"] == "disk-1"
        seen = rig.mailbox.to(who, Kind.STREAMS_SEEN)[0].header
        assert seen["streams"][0]["client"] == "host-a"


def test_cuts_go_to_both_with_offset_and_times(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    for _ in range(3):
        while not (polls := rig.polls(agent)):
            rig.pass_time(0.1)
        rig.clock.advance(0.01)
        agent.answer(polls[0], wall_us=rig.clock.unix_us() - 5_000_000)
        rig.step()
    rig.clock.advance(BATCH_AGE_NS / 1e9)
    rig.step()
    assert (
        rig.mailbox.cuts_to("dbmanager")
        == rig.mailbox.cuts_to("services")
        == [(1, False), (2, False), (3, False)]
    )
    offsets = [item.header["offset_us"][0] for item in rig.mailbox.to("dbmanager", Kind.CUTS)]
    assert offsets[0] == 0  # nothing was known yet
    assert offsets[-1] == pytest.approx(5_000_000, abs=10_000)


def test_a_gateway_is_registered_before_services_hears_of_it(
    rig: PairRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thresholds that services answers with could meet a session that may not get them yet."""
    agent, post = rig.dial(), rig.publisher.news
    heard: list[list[int]] = []

    def news(message: bytes, *recipients: str) -> None:
        heard.append([item.kind for item in rig.received(agent)])
        post(message, *recipients)

    monkeypatch.setattr(rig.publisher, "news", news)
    agent.send(hello(), schema(), register(()))
    rig.step()
    assert heard == [[Kind.WELCOME, Kind.REGISTERED]]


def test_refused_by_dbmanager_is_asked_for_again_and_judged_once(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.mailbox.full = {"dbmanager"}
    rig.pass_time(1)
    agent.answer(rig.polls(agent)[0])
    rig.step()
    rig.pass_time(0.1)
    rig.mailbox.full = set()
    rig.pass_time(1)
    (poll,) = rig.polls(agent)
    assert poll.header["from"] == [7, BEYOND], "for the moment the newest alone"
    agent.answer(poll)
    rig.step()
    rig.pass_time(1)
    (poll,) = rig.polls(agent)
    assert poll.header["from"] == [7, 1]
    agent.answer(poll)
    rig.step()
    rig.pass_time(0.1)
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False), (2, False), (3, False)]
    assert rig.mailbox.cuts_to("services") == [(1, False), (2, True), (3, False)]


def test_hole_that_no_gap_explains_is_announced_before_the_cut(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(1)
    rig.polls(agent)
    rig.mailbox.posts.clear()
    agent.send(make_cut(seq=1), make_cut(seq=5))
    rig.step()
    rig.pass_time(0.1)
    mail = rig.mailbox.to("dbmanager")
    assert [item.kind for item in mail] == [Kind.CUTS, Kind.GATEWAY, Kind.CUTS]
    assert mail[1].header["spool"] == [[7, 5, 5]]
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False), (5, False)]
    assert rig.counters["unexplained_holes"] == 1


def test_hole_is_not_given_up_when_the_cuts_before_it_were_refused(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(1)
    rig.polls(agent)
    rig.mailbox.full = {"dbmanager"}
    agent.send(make_cut(seq=1), make_cut(seq=5))
    rig.step()
    rig.mailbox.full = set()
    rig.pass_time(0.1)
    assert rig.mailbox.cuts_to("dbmanager") == []
    assert rig.counters["unexplained_holes"] == 0
    assert rig.registry.get(GATEWAY).record.spool() == [[7, 1, 0]]


def test_spool_of_the_agent_is_announced(rig: PairRig) -> None:
    rig.up(spool=[[3, 5, 9], [7, 2, 4]])
    assert rig.mailbox.to("dbmanager", Kind.GATEWAY)[0].header["spool"] == [[3, 5, 9], [7, 2, 1]]


def test_live_cut_is_not_kept(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(1)
    rig.polls(agent)
    agent.send(make_cut(seq=1), make_cut(seq=50, flags=FLAG_LIVE))
    rig.step()
    rig.pass_time(0.1)
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False)]
    assert rig.mailbox.cuts_to("services") == [(1, False), (50, True)]


def test_a_late_reply_is_kept_and_counted_and_shifts_nothing(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(1.0)
    (poll,) = rig.polls(agent)
    sent_ns = poll.header["sent_ns"]
    rig.pass_time(1.5)  # later than the interval, earlier than stalled
    assert rig.counters["late_replies"] == 0
    agent.answer(poll)
    rig.step()
    assert rig.counters["late_replies"] == 1
    assert rig.counters["replies"] == 1
    rig.pass_time(1.0)
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False)]
    (following,) = rig.polls(agent)
    # On its phase, a whole number of intervals later, whatever the late one did.
    assert round((following.header["sent_ns"] - sent_ns) / SECOND, 1) % 1.0 == 0
    agent.answer(following)
    rig.step()
    assert rig.counters["late_replies"] == 1


def test_newer_session_wins_and_is_not_a_loss(rig: PairRig) -> None:
    rig.watermarks()
    older = rig.up()
    rig.pass_time(1)
    newer = rig.up(epoch=8)
    told = rig.received(older)
    assert told[-1].kind == Kind.ERROR
    assert told[-1].header["code"] == "superseded"
    rig.pass_time(2)
    assert (GATEWAY, "lost") not in rig.mailbox.states()
    assert [item.header["from"] for item in rig.polls(newer)] == [[8, 1]]
    assert rig.inbound.connections == 1
    older.close()
    rig.step()
    assert (GATEWAY, "lost") not in rig.mailbox.states()


def test_what_an_agent_can_do_is_announced_with_it(rig: PairRig) -> None:
    agent = rig.dial()
    agent.send(hello(features=["client-caps", "later"]), schema(), register())
    rig.step()
    up = rig.mailbox.to("services", Kind.GATEWAY)[-1].header
    assert up["features"] == ["client-caps", "later"]


def test_refused_version_is_news(rig: PairRig) -> None:
    agent = rig.dial()
    agent.send(hello(proto_min=7, proto_max=8))
    rig.step()
    assert rig.received(agent)[0].kind == Kind.ERROR
    refused = rig.mailbox.to("services", Kind.GATEWAY)[-1].header
    assert (refused["gw"], refused["state"]) == (GATEWAY, "refused")
    assert "7..8" in refused["reason"]


def test_register_without_schema_is_refused(rig: PairRig) -> None:
    agent = rig.dial()
    agent.send(hello(), register())
    rig.step()
    assert "SCHEMA" in rig.received(agent)[-1].header["text"]


def test_another_schema_is_refused_and_says_which_key(rig: PairRig) -> None:
    agent = rig.dial()
    agent.send(hello(), frame.encode(Kind.SCHEMA, cut.schema_header() | {"columns": ["t"]}), register())
    rig.step()
    told = rig.received(agent)[-1]
    assert told.kind == Kind.ERROR
    assert "columns" in told.header["text"]
    assert rig.mailbox.states() == [(GATEWAY, "refused")]


def test_unknown_kind_is_answered_unsupported(rig: PairRig) -> None:
    agent = rig.up()
    agent.send(frame.encode(60, {}))
    rig.step()
    (answer,) = rig.received(agent)
    assert (answer.kind, answer.header) == (Kind.UNSUPPORTED, {"kind": 60})
    assert rig.inbound.connections == 1


def test_exports_may_change_within_a_session(rig: PairRig) -> None:
    agent = rig.up()
    agent.send(register(volumes=("vol-0", "vol-new")), streams(volumes=("vol-0", "vol-new")))
    rig.step()
    assert [item.kind for item in rig.received(agent)] == [Kind.REGISTERED]
    assert [item["volume"] for item in rig.mailbox.to("services", Kind.GATEWAY)[-1].header["exports"]] == [
        "vol-0",
        "vol-new",
    ]
    assert [
        item["volume"] for item in rig.mailbox.to("services", Kind.STREAMS_SEEN)[-1].header["streams"]
    ] == ["vol-new"]


@pytest.mark.parametrize("takes_labels", [True, False])
def test_labels_of_agents_are_passed_on_or_left_out_as_the_server_is_set(takes_labels: bool) -> None:
    with closing(PairRig(takes_labels=takes_labels)) as rig:
        agent = rig.up()
        agent.send(register(labels={"tier": "gold"}))
        rig.step()
        assert [item.kind for item in rig.received(agent)] == [Kind.REGISTERED]
        expected = {"tier": "gold"} if takes_labels else None
        for who in ("services", "dbmanager"):
            (export,) = rig.mailbox.to(who, Kind.GATEWAY)[-1].header["exports"]
            assert export.get("labels") == expected


def test_dropped_cuts_of_the_agent_are_announced(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(11)
    agent = rig.up()
    rig.pass_time(1)
    poll = rig.polls(agent)[0].header
    reply = {"poll": poll["poll"], "wall_us": 1, "dropped": 17, "cuts": 0}
    agent.send(frame.encode(Kind.REPLY, reply))
    rig.step()
    rig.mailbox.posts.clear()
    rig.pass_time(11)
    assert 17 in [item.header["dropped"] for item in rig.mailbox.to("services", Kind.GATEWAY)]


def test_alert_is_passed_on_with_its_gateway(rig: PairRig) -> None:
    agent = rig.up()
    alert: dict[str, Any] = {
        "kind": "plane-died",
        "severity": "warning",
        "text": "nbd-0",
        "details": {"a": 1},
    }
    alert["at_us"] = rig.clock.unix_us() - 5
    agent.send(frame.encode(Kind.ALERT, alert))
    rig.step()
    assert rig.mailbox.to("services", Kind.GATEWAY_ALERT)[0].header == {**alert, "gw": GATEWAY}


def test_space_is_passed_on_to_services_alone_with_its_gateway(rig: PairRig) -> None:
    agent = rig.up()
    space = Space("data", "path", "disk-1", 100, 60, None, 0, 0, (), rig.clock.unix_us() - 5)
    agent.send(space.encode())
    rig.step()
    (passed_on,) = rig.mailbox.to("services", Kind.GATEWAY_SPACE)
    assert passed_on.header == {**space.header(), "volumes": [], "gw": GATEWAY}
    assert rig.mailbox.to("dbmanager", Kind.GATEWAY_SPACE) == []


def test_a_welcome_says_that_space_is_taken(rig: PairRig) -> None:
    agent = rig.dial()
    agent.send(hello())
    rig.step()
    assert [item.header["features"] for item in rig.received(agent)] == [["space"]]
