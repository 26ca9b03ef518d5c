"""The core of the link between a fake plane and a fake server."""

import pytest

from gateway_agent.errors import PlaneLost, ServerLost
from gateway_agent.link import state_files
from gateway_agent.link.spool import Spool
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import PLANE_FEATURES
from pmdaemon.wire.names import stream_id
from pmdaemon.wire.session import SessionState
from tests.support.link import EPOCH, Bench, FakeEnforcer, FakePlane, caps, thresholds, welcome


@pytest.fixture
def plane():
    return FakePlane()


@pytest.fixture
def bench(tmp_path, plane):
    made = Bench(tmp_path, plane)
    made.connect_server()
    return made


def test_registration_speaks_in_the_order_of_the_contract(bench):
    assert bench.server.kinds == [Kind.HELLO, Kind.SCHEMA, Kind.REGISTER]
    assert bench.server.last(Kind.HELLO)["ep"] == EPOCH
    exports = bench.server.last(Kind.REGISTER)["exports"]
    assert exports == [
        {"volume": "vol-1", "backend": "b0", "size_bytes": 4096, "read_only": False, "source": "nbd"}
    ]
    assert bench.core.session.state is SessionState.REGISTERED


def test_a_poll_makes_one_cut_and_closes_with_a_reply(bench, plane):
    plane.io(reads=3)
    bench.clock.advance(1)
    reply = bench.poll(start=(EPOCH, 1))
    assert bench.server.kinds[-3:] == [Kind.STREAMS, Kind.CUT, Kind.REPLY]
    assert (reply["cuts"], reply["first"], reply["last"]) == (1, [EPOCH, 1], [EPOCH, 1])
    one = bench.server.cuts[EPOCH, 1]
    assert one.duration_us == 1_000_000
    assert one.column("reads").tolist() == [3]
    assert one.column("stream_id").tolist() == [stream_id(one.gateway_id, "vol-1", "c")]
    assert one.hist["count"].tolist() == [3]
    assert one.extra["dp"] == {"nbd-0": 1001}


def test_an_idle_poll_covers_its_time_with_a_cut_without_rows(bench):
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 1))
    one = bench.server.cuts[EPOCH, 1]
    assert (one.rows, one.duration_us) == (0, 1_000_000)


@pytest.mark.parametrize(("away_s", "said"), [(5, None), (25, {"nbd-0": 23_500_000})])
def test_a_machine_that_was_paused_accounts_for_no_plane(bench, away_s, said):
    """Until 1.5 intervals behind the cut before the link need not have asked."""
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 1))
    bench.core.tick()
    bench.clock.advance(away_s)
    bench.poll(start=(EPOCH, 2))
    assert bench.server.cuts[EPOCH, 2].extra.get("un") == said
    bench.core.tick()
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 3))
    assert "un" not in bench.server.cuts[EPOCH, 3].extra


def test_streams_are_announced_once_and_before_their_first_cut(bench, plane):
    plane.io()
    bench.poll(start=(EPOCH, 1))
    plane.io()
    bench.poll(start=(EPOCH, 2))
    assert len(bench.server.headers[Kind.STREAMS]) == 1
    assert bench.server.kinds.index(Kind.STREAMS) < bench.server.kinds.index(Kind.CUT)


def test_a_new_session_hears_all_streams_again(bench, plane):
    plane.io()
    bench.poll(start=(EPOCH, 1))
    bench.core.server_lost("test")
    bench.connect_server()
    assert len(bench.server.headers[Kind.STREAMS]) == 2
    assert bench.server.last(Kind.REGISTER)["spool"] == [[EPOCH, 1, 1]]


def test_only_an_ack_lets_the_agent_forget(bench, plane):
    for _ in range(3):
        plane.io()
        bench.poll(start=(EPOCH, 1))
    assert bench.server.order == [(EPOCH, 1), (EPOCH, 1), (EPOCH, 2), (EPOCH, 1), (EPOCH, 2), (EPOCH, 3)]
    reply = bench.poll(ack=[(EPOCH, 2)], start=(EPOCH, 3))
    assert reply["first"] == [EPOCH, 3]
    assert bench.spool.epochs() == [[EPOCH, 3, 4]]


def test_rewind_sends_the_same_cuts_again(bench, plane):
    for seq in (1, 2, 3):
        plane.io()
        bench.poll(start=(EPOCH, seq))
    reply = bench.poll(ack=[(EPOCH, 1)], start=(EPOCH, 2))
    assert (reply["first"], reply["last"], reply["cuts"]) == ([EPOCH, 2], [EPOCH, 4], 3)


def test_without_polls_the_agent_cuts_by_itself_after_one_and_a_half_intervals(bench, plane):
    plane.io()
    bench.pass_time(1.4)
    assert bench.spool.cuts == 0
    bench.pass_time(0.2)
    assert bench.spool.cuts == 1
    reply = bench.poll(start=(EPOCH, 1))
    assert reply["cuts"] == 2


def test_next_due_time_is_that_of_the_own_cut(bench):
    bench.poll()
    assert bench.core.next_due_ns() == bench.clock.monotonic_ns() + 1_500_000_000


def test_caps_reach_the_plane_and_are_acknowledged_by_proof(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.clock.advance(0.5)
    bench.say(caps(7))
    assert (Kind.DP_CAPS, 7) in [(kind, header.get("gen")) for kind, header in plane.commands]
    assert bench.server.last(Kind.CAPS_ACK) == {"gen": 7, "ok": True, "reason": ""}
    bench.clock.advance(0.5)
    bench.poll(start=(EPOCH, 2))
    assert [bench.server.cuts[EPOCH, seq].throttle_gen for seq in (1, 2, 3)] == [0, -1, 7]


def test_caps_and_poll_in_one_write_make_one_cut(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.clock.advance(1)
    bench.say(caps(7), bench.server.poll(start=(EPOCH, 2)))
    assert bench.spool.cuts == 2
    assert bench.server.last(Kind.CAPS_ACK)["gen"] == 7


def test_caps_are_not_acknowledged_while_the_plane_is_silent(bench, plane):
    bench.poll(start=(EPOCH, 1))
    plane.answers = False
    bench.say(caps(7))
    bench.pass_time(0.3)
    assert Kind.CAPS_ACK not in bench.server.headers
    plane.answers = True
    bench.carry()
    bench.poll(start=(EPOCH, 2))
    assert bench.server.last(Kind.CAPS_ACK)["gen"] == 7


def test_refused_caps_are_reported_as_refused(bench, plane):
    plane.refuses_caps = True
    bench.poll(start=(EPOCH, 1))
    bench.say(caps(7))
    assert Kind.CAPS_ACK not in bench.server.headers
    bench.poll(start=(EPOCH, 2))
    acknowledgement = bench.server.last(Kind.CAPS_ACK)
    assert not acknowledgement["ok"]
    assert "nbd-0" in acknowledgement["reason"]


def test_a_gateway_without_planes_refuses_caps(tmp_path):
    bench = Bench(tmp_path)
    bench.connect_server()
    bench.poll()
    bench.say(caps(3))
    assert bench.server.last(Kind.CAPS_ACK)["ok"] is False


def caps_of(gen, *volumes):
    entries = [{"volume": volume, "cost_per_s": 50.0} for volume in volumes]
    return frame.encode(Kind.CAPS, {"gen": gen, "lease_us": 30_000_000, "caps": entries})


@pytest.mark.parametrize(
    ("volumes", "ok", "refused"),
    [
        ((), True, None),
        (("vol-1",), True, None),
        (("vol-1", "vol-9", "host:gw-a:sda"), True, ["host:gw-a:sda", "vol-9"]),
        (("vol-9",), False, ["vol-9"]),
    ],
)
def test_caps_of_volumes_that_no_plane_serves_are_refused_by_name(bench, plane, volumes, ok, refused):
    bench.poll(start=(EPOCH, 1))
    bench.say(caps_of(7, *volumes))
    said = bench.server.last(Kind.CAPS_ACK)
    assert (said["gen"], said["ok"], said.get("refused")) == (7, ok, refused)
    assert ("vol-9" in said["reason"]) is bool(refused)
    assert (Kind.DP_CAPS, 7) in [(kind, header.get("gen")) for kind, header in plane.commands]


def test_a_volume_of_a_plane_that_is_not_there_now_is_not_refused(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.core.plane_lost("nbd-0", "it died")
    bench.carry()
    bench.connect_plane(plane)
    bench.say(caps_of(7, "vol-1"))
    assert bench.server.last(Kind.CAPS_ACK) == {"gen": 7, "ok": True, "reason": ""}


def test_lease_is_passed_on_and_its_end_is_told(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.say(caps(7, lease_us=3_000_000))
    bench.pass_time(2)
    bench.poll(lease=True)
    assert plane.commands[-2][0] is Kind.DP_LEASE
    bench.pass_time(2)
    assert Kind.ALERT not in bench.server.headers
    bench.pass_time(1)
    assert bench.server.last(Kind.ALERT)["kind"] == "lease-expired"


def test_a_plane_that_comes_back_gets_caps_for_the_rest_of_their_lease_and_thresholds(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.say(caps(7), thresholds(4))
    bench.core.plane_lost("nbd-0", "died")
    bench.clock.advance(10)
    plane.commands.clear()
    bench.connect_plane(plane)
    sent = dict(plane.commands)
    assert sent[Kind.DP_CAPS]["lease_us"] == 20_000_000
    assert sent[Kind.DP_THRESHOLDS]["version"] == 4
    bench.core.plane_lost("nbd-0", "died")
    bench.clock.advance(20)
    plane.commands.clear()
    bench.connect_plane(plane)
    assert Kind.DP_CAPS not in dict(plane.commands)


def test_caps_outlive_the_link_at_control_groups_too_and_a_wall_clock_that_is_set(tmp_path, plane):
    first, second = (FakeEnforcer(frozenset({"vol-2"}), "cgroup") for _ in range(2))
    bench = Bench(tmp_path, plane, enforcers=[first])
    bench.connect_server()
    bench.poll(start=(EPOCH, 1))
    bench.say(caps(7, volume="vol-2"))
    bench.pass_time(10)
    bench.clock.step_wall(86_400)
    plane.commands.clear()
    restarted = Bench(tmp_path, plane, epoch=43, enforcers=[second])  # no server is there
    assert [(each.gen, *each.volumes) for each in second.sets] == [(7, "vol-2")]
    assert (second.leases_us, dict(plane.commands)[Kind.DP_CAPS]["lease_us"]) == ([20_000_000], 20_000_000)
    restarted.clock.step_wall(-200_000)
    restarted.pass_time(19.9)
    assert (second.lapses, restarted.core.caps_in_force) == (0, (7, pytest.approx(0.1)))
    restarted.pass_time(0.1)
    assert (second.lapses, restarted.core.caps_in_force) == (1, None)


def test_thresholds_in_force_already_are_acknowledged_and_nothing_else(bench, plane, monkeypatch):
    bench.poll(start=(EPOCH, 1))
    bench.say(thresholds(4))
    plane.commands.clear()
    monkeypatch.setattr(
        state_files, "write_json", None
    )  # nothing is written: services says it at each registration
    bench.say(thresholds(4))
    assert bench.server.last(Kind.THRESHOLDS_ACK) == {"version": 4}
    assert plane.commands == []


def test_thresholds_are_acknowledged_kept_and_counted_from_a_cut_boundary(bench, plane, tmp_path):
    bench.poll(start=(EPOCH, 1))
    plane.io(reads=2)
    bench.say(thresholds(4))
    assert bench.server.last(Kind.THRESHOLDS_ACK) == {"version": 4}
    plane.io(reads=5)
    bench.poll(start=(EPOCH, 2))
    versions = [(cut.threshold_version, int(cut.column("reads").sum())) for cut in bench.server.cuts.values()]
    assert versions == [(0, 0), (0, 2), (4, 5)]
    restarted = Bench(tmp_path, plane, epoch=43)
    assert [h["version"] for k, h in plane.commands if k is Kind.DP_THRESHOLDS] == [4, 4]
    assert restarted.core.session.state is SessionState.CLOSED


def test_costs_reach_planes_once_are_kept_and_hold_without_a_server(bench, plane, tmp_path):
    entry = {"backend": "b0", "cost_write": 2.0, "cost_bytes": 4096.0}
    said = frame.encode(Kind.COSTS, {"version": 4, "backends": [entry]})
    bench.poll(start=(EPOCH, 1))
    bench.say(said)
    bench.say(said)
    assert costs_in(plane) == [{"version": 4, "backends": [entry]}]
    bench.say(frame.encode(Kind.COSTS, {"version": 5, "backends": []}))
    assert [each["version"] for each in costs_in(plane)] == [4, 5]
    restarted = Bench(tmp_path, plane, epoch=43)
    assert [each["version"] for each in costs_in(plane)] == [4, 5, 5]
    assert restarted.core.session.state is SessionState.CLOSED


def test_a_plane_that_is_new_has_the_costs_before_the_caps_that_are_in_units_of_them(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.say(caps(7), frame.encode(Kind.COSTS, {"version": 5, "backends": []}))
    bench.core.plane_lost("nbd-0", "died")
    plane.commands.clear()
    bench.connect_plane(plane)
    kinds = [kind for kind, _ in plane.commands if kind in (Kind.DP_COSTS, Kind.DP_CAPS)]
    assert kinds == [Kind.DP_COSTS, Kind.DP_CAPS]


def costs_in(plane):
    return [header for kind, header in plane.commands if kind is Kind.DP_COSTS]


def test_a_stalled_plane_is_left_out_told_once_and_its_counts_come_later(tmp_path):
    clock = FakeClock()
    good, bad = FakePlane("nbd-0", clock), FakePlane("nbd-1", clock, ("vol-2",))
    bench = Bench(tmp_path, good, bad)
    bench.connect_server()
    bench.poll(start=(EPOCH, 1))
    bad.answers = False
    good.io("vol-1", 3)
    bad.io("vol-2", 4)
    bench.clock.advance(1)
    bench.say(bench.server.poll(start=(EPOCH, 2)))
    assert bench.server.headers[Kind.REPLY][-1]["poll"] == 1  # it still waits for nbd-1
    bench.pass_time(0.2)
    assert bench.server.last(Kind.REPLY)["poll"] == 2
    assert bench.server.reads() == 3
    assert [a["kind"] for a in bench.server.headers[Kind.ALERT]] == ["plane-stalled"]
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 3))  # not waited for a second time
    assert bench.server.last(Kind.REPLY)["poll"] == 3
    bad.answers = True
    bench.carry()
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 4))
    assert bench.server.reads() == 7
    assert [a["kind"] for a in bench.server.headers[Kind.ALERT]] == ["plane-stalled", "plane-back"]


def test_a_dead_plane_is_told_and_makes_no_cut(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.core.plane_lost("nbd-0", "connection reset")
    bench.carry()
    alert = bench.server.last(Kind.ALERT)
    assert (alert["kind"], alert["severity"]) == ("plane-died", "critical")
    reply = bench.poll(start=(EPOCH, 2))
    assert (reply["cuts"], reply["first"]) == (0, None)


def kinds_of_alerts(bench):
    return [alert["kind"] for alert in bench.server.headers[Kind.ALERT]]


def test_a_plane_that_died_is_told_to_be_back(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.core.plane_lost("nbd-0", "connection reset")
    bench.connect_plane(plane)
    bench.carry()
    assert kinds_of_alerts(bench) == ["plane-died", "plane-back"]
    assert [alert["details"]["subject"] for alert in bench.server.headers[Kind.ALERT]] == ["nbd-0"] * 2


def test_of_a_plane_that_dies_again_and_again_the_server_knows_in_the_end_how_it_is(bench, plane):
    bench.poll(start=(EPOCH, 1))
    for _ in range(3):
        bench.core.plane_lost("nbd-0", "connection reset")
        bench.connect_plane(plane)
    bench.core.plane_lost("nbd-0", "connection reset")
    bench.carry()
    assert kinds_of_alerts(bench) == ["plane-died", "plane-back"]  # no flood of them
    bench.clock.advance(10)
    bench.core.tick()
    bench.carry()
    assert kinds_of_alerts(bench) == ["plane-died", "plane-back", "plane-died"]


def test_of_a_plane_that_is_connected_for_the_first_time_nothing_is_told(bench):
    bench.poll(start=(EPOCH, 1))
    assert Kind.ALERT not in bench.server.headers


def test_alerts_without_a_session_wait_for_the_next(bench):
    bench.core.server_lost("test")
    bench.core.plane_lost("nbd-0", "died")
    bench.connect_server()
    assert Kind.ALERT not in bench.server.headers
    bench.poll()
    assert bench.server.last(Kind.ALERT)["kind"] == "plane-died"


def test_changed_exports_are_registered_again(bench, plane):
    bench.poll()
    plane.volumes = ("vol-1", "vol-9")
    bench.core.plane_data("nbd-0", plane.hello())
    bench.carry()
    assert [e["volume"] for e in bench.server.last(Kind.REGISTER)["exports"]] == ["vol-1", "vol-9"]
    assert len(bench.server.headers[Kind.REGISTER]) == 2
    bench.core.plane_data("nbd-0", plane.hello())
    bench.carry()
    assert len(bench.server.headers[Kind.REGISTER]) == 2


def test_a_silent_server_is_given_up_after_three_intervals_and_ten_seconds(bench):
    bench.poll()
    bench.pass_time(12.9)
    bench.clock.advance(0.2)
    with pytest.raises(ServerLost, match="silent"):
        bench.core.tick()


def test_unknown_kinds_are_answered_and_forgotten(bench):
    bench.say(frame.encode(63, {}), frame.encode(Kind.DP_CAPS, {}))
    assert [h["kind"] for h in bench.server.headers[Kind.UNSUPPORTED]] == [63, Kind.DP_CAPS]
    assert bench.core.session.state is SessionState.REGISTERED


def test_a_frame_out_of_turn_ends_the_session_with_a_reason(bench):
    with pytest.raises(ServerLost, match="WELCOME is not allowed while registered"):
        bench.core.server_data(welcome())
    bench.carry()
    assert "WELCOME" in bench.server.last(Kind.ERROR)["text"]


def test_goodbye_of_the_server_ends_the_session(bench):
    with pytest.raises(ServerLost, match="maintenance"):
        bench.core.server_data(frame.encode(Kind.BYE, {"reason": "maintenance"}))


def test_a_plane_that_breaks_the_protocol_is_dropped(bench, plane):
    with pytest.raises(PlaneLost, match="was not asked for"):
        bench.core.plane_data("nbd-0", plane._collect(0))
    with pytest.raises(PlaneLost, match="malformed"):
        bench.core.plane_data("nbd-0", b"\x09\0\0\0\xff\xff\0\0")


def test_a_plane_of_another_name_is_refused(bench):
    with pytest.raises(PlaneLost, match="control_socket"):
        bench.core.plane_data("nbd-0", FakePlane("nbd-1").hello())


def test_a_backlog_is_answered_in_parts_with_the_newest_live(bench, plane, monkeypatch):
    monkeypatch.setattr("gateway_agent.link.reply.BACKLOG_BYTES", 1000)
    for _ in range(8):
        plane.io()
        bench.pass_time(1.5)
    first = bench.poll(start=(EPOCH, 1))
    assert first["cuts"] < 9
    assert bench.server.live == [(EPOCH, 9)]
    start = first["last"][1] + 1
    while (EPOCH, 9) not in bench.server.cuts:
        start = bench.poll(start=(EPOCH, start))["last"][1] + 1
    assert bench.server.reads() == 8


def test_a_poll_from_behind_all_cuts_asks_for_the_newest_alone(bench, plane):
    for _ in range(3):
        plane.io()
        bench.pass_time(1.5)
    reply = bench.poll(start=(EPOCH, 1 << 62))
    assert reply["cuts"] == 0
    (newest,) = bench.server.live
    assert not bench.server.cuts
    assert bench.poll(start=(EPOCH, 1))["last"] == [EPOCH, newest[1] + 1], "the poll itself made one"
    assert bench.server.live == [newest]


def test_a_full_disk_loses_nothing_and_is_told(bench, plane, monkeypatch):
    bench.poll(start=(EPOCH, 1))
    plane.io(reads=2)

    def no_space(_self, _offset, _buffers):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pmdaemon.diskqueue.storage.FileStorage.write", no_space)
        assert bench.poll(start=(EPOCH, 2))["cuts"] == 0
        assert bench.server.last(Kind.ALERT)["kind"] == "spool-write-failed"
    plane.io(reads=3)
    bench.poll(start=(EPOCH, 2))
    assert bench.server.reads() == 5


def test_a_full_spool_drops_its_oldest_cuts_and_each_time_is_an_alert(tmp_path, plane):
    bench = Bench(tmp_path, plane, spool_bytes=4096)
    bench.connect_server()
    while bench.spool.dropped == 0:
        assert Kind.ALERT not in bench.server.headers
        plane.io(reads=1)
        bench.poll()
    alert = bench.server.last(Kind.ALERT)
    lost = bench.spool.dropped
    assert (alert["kind"], alert["severity"]) == ("spool-overflow", "critical")
    assert alert["details"]["dropped"] == lost
    assert f"the spool is full: {lost} cuts were dropped so far; their time is no-data" in alert["text"]


def test_what_caps_held_for_too_long_is_in_the_cut_and_one_event_tells_of_ten_minutes(bench, plane):
    for second in range(1, 700):
        plane.late = {"vol-1": [10, 6_000_000 + second]}
        bench.clock.advance(1)
        bench.poll(start=(EPOCH, second))
        assert bench.server.cuts[EPOCH, second].extra["late"] == {"vol-1": [10, 6_000_000 + second]}
    alerts = [header for header in bench.server.headers[Kind.ALERT] if header["kind"] == "throttle-bound-hit"]
    assert [alert["details"]["ios"] for alert in alerts] == [10, 6000]
    assert alerts[1]["details"]["longest_us"] == 6_000_601
    assert alerts[1]["details"]["subject"] == "vol-1"
    assert "queue depth" in alerts[0]["text"]


def test_a_cut_says_nothing_of_delays_when_there_are_none(bench, plane):
    plane.io()
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 1))
    assert "late" not in bench.server.cuts[EPOCH, 1].extra


def test_a_plane_that_stops_is_collected_until_it_has_nothing_more_and_its_end_is_no_alert(bench, plane):
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 1))
    plane.io(reads=5)
    bench.core.plane_data("nbd-0", plane.stop())
    bench.carry()
    assert plane.is_emptied
    bench.core.plane_lost("nbd-0", "closed")
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 2))
    assert bench.server.reads() == 5
    assert Kind.ALERT not in bench.server.kinds


def test_a_spool_whose_damage_cost_cuts_is_an_alert(tmp_path, monkeypatch):
    monkeypatch.setattr(Spool, "_count_holes", lambda _spool: 2)
    bench = Bench(tmp_path)
    bench.connect_server()
    bench.poll()
    [alert] = bench.server.headers[Kind.ALERT]
    assert (alert["kind"], alert["severity"], alert["details"]["lost"]) == ("spool-damaged", "critical", 2)
    assert "2 cuts in the spool were damaged" in alert["text"]


def test_more_caps_than_a_header_holds_reach_the_plane(bench, plane):
    bench.poll(start=(EPOCH, 1))
    bench.clock.advance(0.5)
    volumes = [f"v{number}" + "x" * 120 for number in range(600)]
    entries = [{"volume": volume, "cost_per_s": 5.0} for volume in [*volumes, "vol-1"]]
    bench.say(frame.encode_folding(Kind.CAPS, {"gen": 7, "lease_us": 30_000_000, "caps": entries}))
    (given,) = [header for kind, header in plane.commands if kind is Kind.DP_CAPS]
    assert [entry["volume"] for entry in given["caps"]] == [*volumes, "vol-1"]
    assert bench.server.last(Kind.CAPS_ACK)["ok"]


# -- reloads


def exported(bench):
    return sorted(export["volume"] for export in bench.server.last(Kind.REGISTER)["exports"])


def test_a_plane_that_is_added_is_collected_from_and_its_exports_are_registered(bench, plane):
    bench.poll(start=(EPOCH, 1))
    added = FakePlane("nbd-1", bench.clock, ("vol-2",))
    bench.core.replan({"nbd-0": ["vol-1"], "nbd-1": ["vol-2"]}, {})
    bench.fakes["nbd-1"] = added
    bench.connect_plane(added)
    assert exported(bench) == ["vol-1", "vol-2"]
    plane.io("vol-1", 2)
    added.io("vol-2", 3)
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 2))
    assert bench.server.reads() == 5
    bench.say(caps(7, volume="vol-2"))
    assert bench.server.last(Kind.CAPS_ACK)["ok"]
    assert added.cap_gen == 7


def test_a_plane_that_was_not_there_when_it_was_removed_and_comes_back_repeats_nothing(tmp_path):
    clock = FakeClock()
    plane, other = FakePlane("nbd-0", clock), FakePlane("nbd-1", clock, ("vol-2",))
    bench = Bench(tmp_path, plane, other)
    bench.connect_server()
    plane.io(reads=3)
    bench.poll(start=(EPOCH, 1))
    del bench.fakes["nbd-0"]
    bench.core.plane_lost("nbd-0", "it is stopped")
    bench.core.replan({"nbd-1": ["vol-2"]}, {})
    bench.pass_time(1)
    bench.poll(start=(EPOCH, 2))
    assert "nbd-0" not in bench.spool.marks
    bench.core.replan({"nbd-0": ["vol-1"], "nbd-1": ["vol-2"]}, {})
    bench.fakes["nbd-0"] = plane
    bench.connect_plane(plane)
    plane.io(reads=4)
    for _ in range(3):
        bench.pass_time(1)
        bench.poll(start=(EPOCH, 3))
    assert bench.server.reads() == 7


def test_a_plane_that_is_removed_hands_over_its_last_counts_and_is_forgotten(tmp_path):
    clock = FakeClock()
    stays, goes = FakePlane("nbd-0", clock), FakePlane("nbd-1", clock, ("vol-2",))
    bench = Bench(tmp_path, stays, goes)
    bench.connect_server()
    bench.poll(start=(EPOCH, 1))
    goes.io("vol-2", 3)
    bench.core.replan({"nbd-0": ["vol-1"]}, {})
    assert set(bench.core.planes) == {"nbd-0", "nbd-1"}, "its counts are not here yet"
    bench.core.plane_data("nbd-1", goes.stop())
    bench.carry()
    assert goes.is_emptied
    bench.core.plane_lost("nbd-1", "it has stopped")
    del bench.fakes["nbd-1"]
    bench.carry()
    assert set(bench.core.planes) == {"nbd-0"}
    assert exported(bench) == ["vol-1"]
    bench.clock.advance(1)
    bench.poll(start=(EPOCH, 2))
    assert bench.server.reads() == 3
    assert Kind.ALERT not in bench.server.headers, "nothing has died"
    bench.say(caps(7, volume="vol-2"))
    assert bench.server.last(Kind.CAPS_ACK)["refused"] == ["vol-2"]


def test_a_plane_that_is_not_there_is_forgotten_at_once(bench, plane):
    bench.core.plane_lost("nbd-0", "died")
    bench.core.replan({"nbd-1": ["vol-2"]}, {})
    assert set(bench.core.planes) == {"nbd-1"}


def test_a_volume_that_is_no_longer_exported_cannot_be_capped(bench, plane):
    bench.poll(start=(EPOCH, 1))
    plane.volumes = ("vol-2",)
    bench.core.replan({"nbd-0": ["vol-2"]}, {})
    bench.core.plane_data("nbd-0", plane.hello())
    bench.carry()
    assert exported(bench) == ["vol-2"]
    bench.say(caps(7, volume="vol-1"))
    acknowledged = bench.server.last(Kind.CAPS_ACK)
    assert (acknowledged["ok"], acknowledged["refused"]) == (False, ["vol-1"])


@pytest.mark.parametrize(
    ("record", "alerts"),
    [
        ({"state": "refused", "text": "x: no such key"}, [("reload-refused", "warning", "x: no such key")]),
        (
            {"state": "pending", "changes": ["exports added: a", "planes added: b"]},
            [("reloaded", "info", "exports added: a; planes added: b")],
        ),
        (
            {"state": "pending", "changes": [], "needs_restart": ["name"]},
            [("reload-incomplete", "warning", "not in force before the agent is restarted: name")],
        ),
        ({"state": "unchanged", "text": "the file says what is in force"}, []),
        ({}, []),
    ],
)
def test_what_came_of_a_reload_is_an_alert(bench, record, alerts):
    bench.poll(start=(EPOCH, 1))
    bench.core.reload_ended(record)
    bench.carry()
    found = bench.server.headers.get(Kind.ALERT, [])
    assert [(alert["kind"], alert["severity"], alert["text"]) for alert in found] == alerts


def test_what_a_plane_could_not_take_is_an_alert_and_published_once(bench, plane):
    bench.poll(start=(EPOCH, 1))
    published = []
    bench.core.on_planes_changed = lambda: published.append(bench.core.planes["nbd-0"].problems)
    header = frame.decode(plane.hello()).header
    said = frame.encode(Kind.DP_HELLO, header | {"config": "ab12", "problems": ["tcp:x: cannot listen"]})
    for _ in range(2):
        bench.core.plane_data("nbd-0", said)
    bench.carry()
    assert bench.core.planes["nbd-0"].config == "ab12"
    assert published == [("tcp:x: cannot listen",)]
    [alert] = bench.server.headers[Kind.ALERT]
    assert (alert["kind"], alert["text"]) == ("reload-incomplete", "tcp:x: cannot listen")


def test_a_plane_of_before_takes_away_what_it_cannot_do_and_gives_it_back(bench, plane):
    """As in an upgrade: the link is new, its plane is not yet. Caps that it skips would be confirmed else."""
    assert set(PLANE_FEATURES) <= set(bench.server.last(Kind.HELLO)["features"])
    plane.features = None
    bench.core.plane_data("nbd-0", plane.hello())
    with pytest.raises(ServerLost, match="can do has changed"):
        bench.core.tick()
    bench.core.server_lost("test")
    bench.connect_server()
    assert not set(PLANE_FEATURES) & set(bench.server.last(Kind.HELLO)["features"])
    bench.core.tick()
    plane.features = (*PLANE_FEATURES, "one-of-later")
    bench.core.plane_data("nbd-0", plane.hello())
    with pytest.raises(ServerLost):
        bench.core.tick()


def test_a_parent_that_hangs_is_told_to_the_server(bench):
    bench.poll(start=(EPOCH, 1))
    bench.core.parent_stalled("has made no progress for 120 s")
    bench.carry()
    alert = bench.server.last(Kind.ALERT)
    assert (alert["kind"], alert["details"]) == ("process-stalled", {"subject": "agent"})
    assert alert["text"] == "the agent's parent has made no progress for 120 s"
