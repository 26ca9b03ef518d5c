"""Conditions of an agent end at the server, whichever process dies between beginning and end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway_agent.link import conditions, state_files
from pmdaemon.space.watcher import SourceBack, SourceFailed
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.alerts import Alert
from pmdaemon.wire.messages.space import Space
from tests.support.link import Bench, FakePlane

NAME = "nbd-0"


def link(directory: Path, plane: FakePlane, *, is_connected: bool = True) -> Bench:
    """A link in a session; what lies in the directory is of those before."""
    bench = Bench(directory, *((plane,) if is_connected else ()), clock=plane.clock)
    bench.connect_server()
    bench.say(bench.server.poll())  # whose plane need not answer
    return bench


def absent(directory: Path, plane: FakePlane) -> Bench:
    """A link whose plane is configured, and not connected."""
    bench = Bench(directory, clock=plane.clock)
    bench.core.replan({NAME: ["vol-1"]}, {})
    bench.connect_server()
    bench.poll()
    return bench


def said(bench: Bench) -> list[str]:
    return [alert["kind"] for alert in bench.server.headers.get(Kind.ALERT, [])]


def times(bench: Bench) -> list[int]:
    return [alert["at_us"] for alert in bench.server.headers[Kind.ALERT]]


def settle(bench: Bench) -> None:
    for _ in range(8):
        bench.poll()
        bench.pass_time(10)


def kept(directory: Path) -> list[str]:
    return [row["kind"] for row in json.loads((directory / conditions.FILE).read_text())]


@pytest.fixture
def plane() -> FakePlane:
    return FakePlane(NAME)


def test_a_plane_that_comes_back_while_the_link_is_dead_is_reported_by_the_next(
    tmp_path: Path, plane: FakePlane
) -> None:
    bench = link(tmp_path, plane)
    bench.core.plane_lost(NAME, "connection reset")
    bench.carry()
    assert said(bench) == ["plane-died"]
    settle(bench)
    after = link(tmp_path, plane)
    assert said(after) == ["plane-back"]
    settle(after)
    assert kept(tmp_path) == []
    assert said(link(tmp_path, plane)) == []


def test_a_plane_that_stays_dead_over_a_restart_of_the_link_is_open(tmp_path: Path, plane: FakePlane) -> None:
    bench = link(tmp_path, plane)
    bench.core.plane_lost(NAME, "connection reset")
    bench.carry()
    after = absent(tmp_path, plane)
    settle(after)
    assert said(after) == ["plane-died"]
    assert times(after) == times(bench), "sent again it is the same event"
    assert kept(tmp_path) == ["plane-died"]


def test_of_a_plane_that_did_not_answer_the_next_links_answer_is_the_end(
    tmp_path: Path, plane: FakePlane
) -> None:
    bench = link(tmp_path, plane)
    plane.answers = False
    bench.poll()
    bench.pass_time(0.3)
    assert said(bench) == ["plane-stalled"]
    after = link(tmp_path, plane)
    after.pass_time(0.3)
    assert said(after) == ["plane-stalled"], "connected, and as silent as before"
    plane.answers = True
    after.core.plane_data(NAME, plane.receive(b""))
    after.poll()
    after.carry()
    assert said(after)[-1] == "plane-back"


def test_a_plane_that_never_comes_is_reported_and_so_is_its_coming(tmp_path: Path, plane: FakePlane) -> None:
    bench = absent(tmp_path, plane)
    bench.pass_time(9)
    bench.poll()
    assert said(bench) == [], "it may be starting"
    bench.pass_time(2)
    bench.poll()
    assert said(bench) == ["plane-died"]
    assert "does not run" in bench.server.last(Kind.ALERT)["text"]
    settle(bench)
    assert said(bench) == ["plane-died"], "once"
    bench.core.plane_connected(NAME)
    bench.carry()
    assert said(bench) == ["plane-died", "plane-back"]


def test_a_plane_that_the_file_names_no_more_has_ended(tmp_path: Path, plane: FakePlane) -> None:
    link(tmp_path, plane).core.plane_lost(NAME, "connection reset")
    bench = link(tmp_path, plane, is_connected=False)
    bench.pass_time(0.1)
    assert said(bench)[-1] == "plane-back"
    assert "served no more" in bench.server.last(Kind.ALERT)["text"]


def test_a_stalled_plane_that_is_gone_does_not_answer_again(tmp_path: Path, plane: FakePlane) -> None:
    bench = link(tmp_path, plane)
    plane.answers = False
    bench.poll()
    bench.pass_time(0.3)
    after = absent(tmp_path, plane)
    after.pass_time(1)
    assert said(after) == ["plane-stalled"], "the same event as before"
    assert times(after) == times(bench)


@pytest.mark.parametrize("outcome", [SourceBack("data"), Space("data", "path", "", 10, 1, None, 0, 0, (), 7)])
def test_a_source_of_space_that_is_read_by_the_next_link_is_back(
    tmp_path: Path, plane: FakePlane, outcome: SourceBack | Space
) -> None:
    link(tmp_path, plane).core.space.take(SourceFailed("data", "no disk"))
    bench = link(tmp_path, plane)
    bench.core.space.keep_only(["data"])
    bench.core.space.take(SourceFailed("data", "no disk"))
    bench.carry()
    assert said(bench) == ["space-source-failed"], "once"
    bench.core.space.take(outcome)
    bench.carry()
    assert said(bench)[1:] == ["space-source-back"]


def test_a_source_of_space_that_is_read_no_more_has_ended(tmp_path: Path, plane: FakePlane) -> None:
    link(tmp_path, plane).core.space.take(SourceFailed("data", "no disk"))
    bench = link(tmp_path, plane)
    bench.core.space.keep_only(["other"])
    bench.carry()
    assert said(bench)[-1] == "space-source-back"
    assert bench.server.last(Kind.ALERT)["text"] == "data is no source of space any more"


def test_an_end_that_died_with_its_connection_is_sent_again_with_its_time(
    tmp_path: Path, plane: FakePlane
) -> None:
    bench = link(tmp_path, plane)
    bench.core.plane_lost(NAME, "connection reset")
    bench.carry()
    settle(bench)
    bench.core.plane_connected(NAME)
    assert bench.core.session.outgoing
    bench.core.server_lost("reset")  # the alert was written, and never arrived
    bench.connect_server()
    bench.poll()
    bench.pass_time(1)
    assert said(bench) == ["plane-died", "plane-back"], "what had settled is not sent again"
    bench.core.server_lost("reset")
    bench.clock.advance(5)
    bench.connect_server()
    bench.poll()
    bench.pass_time(1)
    assert said(bench) == ["plane-died", "plane-back", "plane-back"]
    assert len(set(times(bench)[1:])) == 1


def test_what_waits_for_a_session_is_sent_once(tmp_path: Path, plane: FakePlane) -> None:
    bench = link(tmp_path, plane)
    bench.core.server_lost("reset")
    bench.core.plane_lost(NAME, "connection reset")
    bench.connect_plane(plane)
    bench.connect_server()
    bench.poll()
    bench.pass_time(1)
    assert said(bench) == ["plane-died", "plane-back"]


def test_what_the_server_has_is_not_sent_again_by_the_next_link(tmp_path: Path, plane: FakePlane) -> None:
    bench = link(tmp_path, plane)
    bench.core.plane_lost(NAME, "connection reset")
    bench.carry()
    settle(bench)
    plane.clock.advance(2 * 86_400)
    bench = absent(tmp_path, plane)
    bench.pass_time(1)
    assert said(bench) == []
    assert kept(tmp_path) == ["plane-died"]
    assert said(link(tmp_path, plane)) == ["plane-back"]


def test_an_old_beginning_that_the_server_may_not_have_is_one_event_of_now(
    tmp_path: Path, plane: FakePlane
) -> None:
    link(tmp_path, plane).core.plane_lost(NAME, "connection reset")  # and it never left
    plane.clock.advance(2 * 86_400)
    bench = absent(tmp_path, plane)
    bench.pass_time(1)
    assert said(bench) == ["plane-died"], "people hear of it"
    assert abs(times(bench)[0] - plane.clock.unix_us()) < 10_000_000, "a time that the server takes"
    plane.clock.advance(5)
    after = absent(tmp_path, plane)
    after.pass_time(1)
    assert times(after) == times(bench), "sent again it is the same event"


def test_a_time_of_a_clock_that_was_ahead_is_replaced_once(tmp_path: Path, plane: FakePlane) -> None:
    row = {"kind": "plane-died", "severity": "critical", "text": "gone", "details": {"subject": NAME}}
    ahead_us = plane.clock.unix_us() + 3 * 86_400_000_000
    (tmp_path / conditions.FILE).write_text(json.dumps([{**row, "condition": "plane", "at_us": ahead_us}]))
    found = []
    for _ in range(2):
        bench = absent(tmp_path, plane)
        bench.pass_time(1)
        found += times(bench)
    assert len(found) == 2
    assert len(set(found)) == 1, "another event in each session"
    assert found[0] < ahead_us


def test_what_waited_for_the_session_is_no_more_than_a_server_takes(tmp_path: Path, plane: FakePlane) -> None:
    bench = link(tmp_path, plane)
    for number in range(25):
        bench.core.space.take(SourceFailed(f"first-{number}", "no disk"))
    bench.carry()
    bench.core.server_lost("reset")
    for number in range(80):
        bench.clock.advance(2)
        bench.core.space.take(SourceFailed(f"pool-{number}", "no disk"))
    before = len(said(bench))
    bench.connect_server()
    bench.poll()
    bench.carry()
    assert len(said(bench)) - before <= conditions.AT_ONCE
    for _ in range(200):
        bench.poll()
        bench.pass_time(1)
    alerts = [alert["details"]["subject"] for alert in bench.server.headers[Kind.ALERT]]
    assert {f"pool-{number}" for number in range(80)} <= set(alerts)


def test_a_beginning_waits_while_other_alerts_use_what_a_server_takes(
    tmp_path: Path, plane: FakePlane
) -> None:
    bench = link(tmp_path, plane)
    for number in range(60):
        bench.core._alerts.report("throttle-bound-hit", "warning", f"vol-{number}", "too many")
    bench.core.plane_lost(NAME, "connection reset")
    bench.carry()
    assert "plane-died" not in said(bench), "the server would drop it"
    for _ in range(10):
        bench.poll()
        bench.pass_time(1)
    assert said(bench)[60:] == ["plane-died"]
    for number in range(300):  # more than a server takes goes on for long
        bench.core._alerts.report("throttle-bound-hit", "warning", f"more-{number}", "too many")
        bench.core._alerts.report("throttle-bound-hit", "warning", f"other-{number}", "too many")
        if number == 100:
            bench.core.plane_connected(NAME)
        bench.poll()
        bench.pass_time(1)
    assert "plane-back" in said(bench)


def test_one_that_begins_behind_others_that_take_turns_is_reported(tmp_path: Path, plane: FakePlane) -> None:
    bench = link(tmp_path, plane)
    for number in range(60):
        bench.poll()
        bench.pass_time(1)
        for source in (f"turns-{each}" for each in range(20)):
            bench.core.space.take(SourceFailed(source, "no disk") if number % 2 else SourceBack(source))
        if number == 35:
            bench.core.space.take(SourceFailed("steady", "no disk"))
    alerts = [alert["details"]["subject"] for alert in bench.server.headers[Kind.ALERT]]
    assert "steady" in alerts


def test_many_at_once_are_no_more_than_a_server_takes_and_all_are_reported(
    tmp_path: Path, plane: FakePlane
) -> None:
    bench = link(tmp_path, plane)
    for number in range(80):
        bench.core.space.take(SourceFailed(f"pool-{number}", "no disk"))
    for number in range(40):
        bench.core.space.take(SourceBack(f"pool-{number}"))
    bench.carry()
    assert len(said(bench)) <= conditions.AT_ONCE
    for _ in range(200):
        bench.poll()
        bench.pass_time(1)
    alerts = [(alert["kind"], alert["details"]["subject"]) for alert in bench.server.headers[Kind.ALERT]]
    begun = [subject for kind, subject in alerts if kind == "space-source-failed"]
    ended = [subject for kind, subject in alerts if kind == "space-source-back"]
    assert len(begun) == len(set(begun))
    assert sorted(ended) == sorted(set(begun) - {f"pool-{number}" for number in range(40, 80)})
    assert set(begun) >= {f"pool-{number}" for number in range(40, 80)}


def test_a_file_that_cannot_be_written_is_tried_again(
    tmp_path: Path, plane: FakePlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = link(tmp_path, plane)
    with monkeypatch.context() as patch:

        def is_full(*_args: object, **_more: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(state_files, "write_json", is_full)  # a full disk
        bench.core.plane_lost(NAME, "connection reset")
        bench.carry()
        assert said(bench) == ["plane-died"]
    bench.pass_time(1)
    assert kept(tmp_path) == ["plane-died"]


def test_a_file_that_cannot_be_written_does_not_hold_up_the_loop(
    tmp_path: Path, plane: FakePlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = link(tmp_path, plane)
    tries = []

    def fails_slowly(*_args: object, **_more: object) -> None:
        tries.append(bench.clock.unix_us())
        bench.clock.advance(0.5)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(state_files, "write_json", fails_slowly)
    bench.core.plane_lost(NAME, "connection reset")
    begun_us = tries[0]
    while bench.clock.unix_us() - begun_us < 10_000_000:
        bench.clock.advance(0.1)
        bench.core.tick()
    assert len(tries) <= 3


@pytest.mark.parametrize("content", ["{", "7", "[7]", '[{"condition": "plane", "details": {}}]'])
def test_a_file_of_another_form_is_forgotten(tmp_path: Path, plane: FakePlane, content: str) -> None:
    (tmp_path / conditions.FILE).write_text(content)
    assert said(link(tmp_path, plane)) == []


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "Plane-died"},
        {"text": "\ud800"},
        {"at_us": 10**40},
        {"details": {"subject": NAME, "more": [1]}},
        {"details": {"subject": NAME, "more": "x" * 5000, "z" * 99: 1}},
        {"severity": ["critical"]},
    ],
)
def test_what_no_server_would_take_is_not_sent(
    tmp_path: Path, plane: FakePlane, damage: dict[str, object]
) -> None:
    row = {"kind": "plane-died", "severity": "critical", "text": "gone", "at_us": plane.clock.unix_us()}
    row |= {"condition": "plane", "details": {"subject": NAME}} | damage
    (tmp_path / conditions.FILE).write_text(json.dumps([row]))
    bench = absent(tmp_path, plane)
    bench.pass_time(1)
    for header in bench.server.headers.get(Kind.ALERT, []):
        Alert.parse(header, plane.clock.unix_us())


def test_storage_that_has_never_answered_is_reported_until_it_does(tmp_path: Path, plane: FakePlane) -> None:
    """Nothing but the agent's own status said so: the volume looked like one that is idle."""
    plane.sizes["vol-1"] = 0
    bench = link(tmp_path, plane)
    bench.poll()
    bench.pass_time(9)
    bench.poll()
    assert said(bench) == [], "storage and agent of a machine start at once"
    bench.pass_time(2)
    bench.poll()
    bench.carry()
    assert said(bench) == ["storage-away"]
    alert = bench.server.last(Kind.ALERT)
    assert (alert["severity"], alert["details"]["subject"]) == ("warning", "vol-1")
    settle(bench)
    assert said(bench) == ["storage-away"], "once"
    after = link(tmp_path, plane)
    after.poll()
    assert said(after) == [], "of a link that was restarted it is the same one"
    plane.sizes.clear()
    after.core.plane_data(NAME, plane.hello())
    after.poll()
    after.carry()
    assert said(after) == ["storage-back"]


def test_a_plane_that_is_away_says_nothing_of_its_storage(tmp_path: Path, plane: FakePlane) -> None:
    plane.sizes["vol-1"] = 0
    bench = link(tmp_path, plane)
    bench.poll()
    bench.pass_time(11)
    bench.poll()
    bench.core.plane_lost(NAME, "connection reset")
    bench.pass_time(11)
    bench.carry()
    assert said(bench) == ["storage-away", "plane-died"]


def test_storage_of_a_volume_that_is_served_no_more_is_not_waited_for(
    tmp_path: Path, plane: FakePlane
) -> None:
    plane.sizes["vol-1"] = 0
    bench = link(tmp_path, plane)
    bench.poll()
    bench.pass_time(11)
    bench.poll()
    plane.volumes = ("vol-2",)
    bench.core.plane_data(NAME, plane.hello())
    bench.poll()
    bench.carry()
    assert said(bench) == ["storage-away", "storage-back"]
    assert "vol-1 is served no more" in bench.server.last(Kind.ALERT)["text"]
