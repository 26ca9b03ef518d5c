"""What of the announcements reaches control and thresholds, and what people decide."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.wire.kinds import Kind
from sla_server.ownership import APPROVED, PENDING, VolumeClaim
from sla_server.services.sql_worker import SqlState
from sla_server.services.startup import KnownGateway, Start
from sla_server.services.volume_gate import MOST_PROBLEMS, DecisionRefused, VolumeGate
from tests.support.agreements import simple
from tests.support.services import GATEWAY, START_US, Bench

FALSE = "99999999-2222-3333-4444-555555555555"
NOW_US = START_US


def export(volume: str, backend: str = "b") -> dict[str, Any]:
    return {"volume": volume, "backend": backend, "size_bytes": 1, "read_only": False, "source": "nbd"}


def stream(number: int, volume: str, backend: str = "b") -> dict[str, Any]:
    return {"id": number, "volume": volume, "client": "c", "backend": backend}


def announce(bench: Bench, gateway_id: str, name: str, *volumes: str, **header: Any) -> None:
    full = {
        "gw": gateway_id, "name": name, "state": "up", "reason": "", "address": "", "software": "", "ep": 5,
        "at_us": START_US, "offset_us": 0, "dropped": 0, "exports": [export(v) for v in volumes], **header,
    }  # fmt: skip
    bench.message(Kind.GATEWAY, full)
    rows = [stream(hash((gateway_id, v)) & 0xFFFF, v) for v in volumes]
    bench.message(Kind.STREAMS_SEEN, {"gw": gateway_id, "streams": rows})
    bench.tick(0.25)


def seen(bench: Bench, name: str, gateway_id: str) -> list[Any]:
    """Arguments of the calls of the controller for one gateway."""
    return [args for called, args in bench.controller.calls if called == name and args[0] == gateway_id]


def exported(bench: Bench, gateway_id: str) -> list[str]:
    return [row["volume"] for row in seen(bench, "gateway_up", gateway_id)[-1][2]]


def streamed(bench: Bench, gateway_id: str) -> list[str]:
    return [row["volume"] for args in seen(bench, "add_streams", gateway_id) for row in args[1]]


def thresholds(bench: Bench) -> dict[str, list[str]]:
    """Gateway to the volumes it is sent thresholds for, of the newest set of each."""
    posted = bench.main.take_posted(Kind.SET_THRESHOLDS)
    return {header["gw"]: [entry["volume"] for entry in header["entries"]] for _, header in posted}


def problems(bench: Bench) -> list[dict[str, Any]]:
    return [row for row in bench.core.gate.problems() if row["what"] == "volumes"]


def claim(state: str = PENDING, gateway_id: str = FALSE, **over: Any) -> VolumeClaim:
    row = {"volume": "vol-1", "gateway_id": gateway_id, "name": "evil-gw", "state": state, "backend": "b"}
    return VolumeClaim.of_row({**row, "shown_backend": "b", "version": 7, **over})


def test_anothers_volume_reaches_neither_control_nor_thresholds() -> None:
    bench = Bench()
    bench.request("apply", {"documents": simple("gold", volumes="vol-1"), "dry_run": False})
    bench.confirm()
    announce(bench, GATEWAY, "host-1", "vol-1")
    announce(bench, FALSE, "evil-gw", "vol-1", "vol-2")
    assert exported(bench, GATEWAY) == ["vol-1"]
    assert exported(bench, FALSE) == ["vol-2"]
    assert streamed(bench, FALSE) == ["vol-2"]
    sets = thresholds(bench)
    assert sets[GATEWAY] == ["vol-1"]
    assert sets[FALSE] == []
    [problem] = problems(bench)
    assert problem["process"] == "evil-gw"
    assert problem["reason"].endswith("until: sla volumes approve vol-1 --gateway evil-gw")


def test_approved_it_reaches_them_at_once_and_is_recorded() -> None:
    bench = Bench()
    bench.request("apply", {"documents": simple("gold", volumes="vol-1"), "dry_run": False})
    bench.confirm()
    announce(bench, GATEWAY, "host-1", "vol-1")
    announce(bench, FALSE, "host-2", "vol-1")
    thresholds(bench)
    bench.request("volumes_approve", {"volumes": ["vol-1"], "gateways": []})
    assert exported(bench, FALSE) == ["vol-1"]
    assert streamed(bench, FALSE) == ["vol-1"]
    assert thresholds(bench)[FALSE] == ["vol-1"]
    rows = dict(bench.confirm())
    owner = {"volume": "vol-1", "gateway_id": FALSE, "state": "approved", "decided_by": "ann"}
    assert owner.items() <= rows["volume_owners"].items()
    assert (rows["audit"]["action"], rows["audit"]["subject"], rows["audit"]["who"]) == (
        "volume-approved", "vol-1", "ann",
    )  # fmt: skip
    assert [entry["state"] for entry in rows["audit"]["before"]] == ["pending"]
    assert (
        rows["events"]["text"] == "volume vol-1 of gateway host-2 approved by ann; it also belongs to host-1"
    )
    [answer] = [a for a in bench.answers() if "approved" in a["body"]]
    assert answer["body"]["approved"] == [
        {"volume": "vol-1", "gateway": "host-2", "gateway_id": FALSE, "backend": "b",
         "owners": ["host-1", "host-2"]}
    ]  # fmt: skip
    assert problems(bench) == []


def test_revoked_it_is_taken_away_again() -> None:
    bench = Bench()
    announce(bench, GATEWAY, "host-1", "vol-1", "vol-2")
    bench.request("volumes_revoke", {"volumes": ["vol-1"], "gateways": ["host-1"]})
    assert seen(bench, "forget_volumes", GATEWAY) == [(GATEWAY, frozenset({"vol-1"}))]
    assert exported(bench, GATEWAY) == ["vol-2"]
    assert problems(bench) == [], "a person has decided"
    bench.request("volumes_approve", {"volumes": ["vol-1"], "gateways": [GATEWAY]}, req="r2")
    assert exported(bench, GATEWAY) == ["vol-1", "vol-2"]
    assert seen(bench, "add_streams", GATEWAY)[-1][1][0]["volume"] == "vol-1"


def test_what_sql_says_is_taken_over() -> None:
    bench = Bench()
    announce(bench, FALSE, "evil-gw", "vol-1")
    assert exported(bench, FALSE) == ["vol-1"], "the first one this process saw"
    bench.sql_worker.found.put(SqlState(claims=[claim(), claim(APPROVED, GATEWAY, name="host-1")]))
    bench.tick(0.25)
    assert seen(bench, "forget_volumes", FALSE) == [(FALSE, frozenset({"vol-1"}))]
    assert exported(bench, FALSE) == []
    bench.sql_worker.found.put(SqlState(claims=[claim(APPROVED, GATEWAY, name="host-1")]))
    bench.tick(0.25)
    assert len(seen(bench, "forget_volumes", FALSE)) == 1


def test_a_start_knows_the_claims() -> None:
    known = KnownGateway(FALSE, "evil-gw", [export("vol-1"), export("vol-2")], [stream(1, "vol-1")])
    claims = [claim(), claim(APPROVED, GATEWAY), claim(APPROVED, FALSE, volume="vol-2")]
    bench = Bench(Start(gateways=[known], claims=claims))
    assert exported(bench, FALSE) == ["vol-2"]
    assert streamed(bench, FALSE) == []


def test_with_approve_all_wait_and_with_open_none() -> None:
    bench = Bench(ownership="approve")
    announce(bench, GATEWAY, "host-1", "vol-1", "vol-2")
    assert exported(bench, GATEWAY) == []
    bench.request("volumes_approve", {"volumes": ["*"], "gateways": ["host-1"]})
    assert exported(bench, GATEWAY) == ["vol-1", "vol-2"]
    bench = Bench(ownership="open")
    for gateway_id in (GATEWAY, FALSE):
        announce(bench, gateway_id, "host", "vol-1")
        assert exported(bench, gateway_id) == ["vol-1"]
    assert problems(bench) == []


def test_a_list_in_the_certificate_is_heeded() -> None:
    bench = Bench()
    announce(bench, GATEWAY, "host-1", "vol-1")
    announce(bench, FALSE, "host-2", "vol-1", "vol-9", volumes=["vol-1"])
    assert exported(bench, FALSE) == ["vol-1"]
    assert "does not list" in problems(bench)[0]["reason"]


def test_a_narrower_list_takes_a_volume_away() -> None:
    bench = Bench()
    announce(bench, GATEWAY, "host-1", "vol-1", "vol-2")
    announce(bench, GATEWAY, "host-1", "vol-1", "vol-2", volumes=["vol-1"])
    assert exported(bench, GATEWAY) == ["vol-1"]
    assert seen(bench, "forget_volumes", GATEWAY) == [(GATEWAY, frozenset({"vol-2"}))]
    assert "does not list" in problems(bench)[0]["reason"]


@pytest.mark.parametrize(("listed", "own"), [(None, ["vol-1", "vol-7"]), (["vol-1"], ["vol-1"])])
def test_after_a_start_streams_wait_for_the_gateway(listed: list[str] | None, own: list[str]) -> None:
    gate = VolumeGate("first")
    gate.up("g-1", "host-1", [export("vol-1")], None, NOW_US, is_start=True)
    assert gate.streams("g-1", [stream(7, "vol-7")], NOW_US) == []
    change = gate.up("g-1", "host-1", [export("vol-1")], listed, NOW_US)
    assert sorted(change.volumes) == own
    assert [row["volume"] for row in change.streams] == own[1:]


def test_another_backend_counts_on_the_one_before() -> None:
    bench = Bench()
    announce(bench, GATEWAY, "host-1", "vol-1")
    announce(bench, GATEWAY, "host-1", exports=[export("vol-1", "other")])
    assert seen(bench, "gateway_up", GATEWAY)[-1][2] == [export("vol-1", "b")]
    [problem] = problems(bench)
    assert "on backend other" in problem["reason"]
    bench.request("volumes_approve", {"volumes": ["vol-1"], "gateways": []})
    assert seen(bench, "gateway_up", GATEWAY)[-1][2] == [export("vol-1", "other")]


def test_a_gateway_that_is_gone_is_no_problem_and_is_not_brought_up() -> None:
    bench = Bench()
    announce(bench, GATEWAY, "host-1", "vol-1")
    announce(bench, FALSE, "evil-gw", "vol-1")
    lost = {
        "gw": FALSE, "name": "evil-gw", "state": "lost", "reason": "closed", "address": "", "software": "",
        "ep": 5, "at_us": START_US, "offset_us": 0, "dropped": 0,
    }  # fmt: skip
    bench.message(Kind.GATEWAY, lost)
    assert problems(bench) == []
    ups = len(seen(bench, "gateway_up", FALSE))
    bench.request("volumes_approve", {"volumes": ["vol-1"], "gateways": ["evil-gw"]})
    assert len(seen(bench, "gateway_up", FALSE)) == ups
    assert streamed(bench, FALSE) == ["vol-1"]


@pytest.mark.parametrize(
    ("op", "body", "code", "text"),
    [
        ("volumes_approve", {"volumes": ["vol-9"]}, 404, "no volume 'vol-9' waits for approval"),
        ("volumes_approve", {"volumes": ["x*"], "gateways": ["host-1"]}, 404, "at host-1"),
        ("volumes_revoke", {"volumes": ["vol-9"]}, 404, "belongs to a gateway, or waits"),
        ("volumes_approve", {"volumes": []}, 422, "volumes"),
        ("volumes_revoke", {"volumes": ["vol-1"]}, 409, "vol-1 is shown by 3 gateways"),
        ("volumes_approve", {"volumes": ["vol-1"]}, 409, "--gateway evil-gw, --gateway host-3"),
    ],
)
def test_what_cannot_be_decided_says_why(op: str, body: dict[str, Any], code: int, text: str) -> None:
    bench = Bench()
    announce(bench, GATEWAY, "host-1", "vol-1")
    announce(bench, FALSE, "evil-gw", "vol-1")
    announce(bench, FALSE.replace("9", "8"), "host-3", "vol-1")
    bench.request(op, body)
    [answer] = bench.answers()
    assert answer["code"] == code
    [error] = answer["body"]["errors"]
    assert text in f"{error['problem']} {error['fix']}"
    assert not [row for table, row in bench.records() if table == "volume_owners"]


def test_two_gateways_are_approved_in_one_request_and_one_ahead() -> None:
    gate = VolumeGate("approve")
    gate.up("g-1", "host-1", [export("vol-1")], None, NOW_US)
    gate.up("g-2", "host-2", [export("vol-1")], None, NOW_US)
    gate.up("g-3", "host-3", [], None, NOW_US)
    rows, answer = gate.decide(["vol-1"], ["host-1", "g-2", "host-3"], "ann", NOW_US, approve=True)
    assert [row["gateway"] for row in answer["approved"]] == ["host-1", "host-2"]
    assert answer["approved"][0]["owners"] == ["host-1", "host-2"]
    assert len([row for table, row in rows if table == "audit"]) == 1
    _, answer = gate.decide(["vol-1"], ["host-3"], "ann", NOW_US, approve=True)
    assert answer["approved"][0]["backend"] == "", "wherever it shows it first"
    change = gate.up("g-3", "host-3", [export("vol-1", "pool-7")], None, NOW_US)
    assert change.exports == [export("vol-1", "pool-7")]
    with pytest.raises(DecisionRefused, match="no volume 'vol-1'"):
        gate.decide(["vol-1"], ["nowhere"], "ann", NOW_US, approve=True)


def test_many_gateways_that_wait_are_a_number() -> None:
    gate = VolumeGate("approve")
    for number in range(MOST_PROBLEMS + 3):
        gate.up(f"g-{number}", f"host-{number}", [export(f"vol-{number}")], None, NOW_US)
    rows = gate.problems()
    assert len(rows) == MOST_PROBLEMS + 1
    assert rows[-1]["reason"] == "3 more gateways show volumes that need approval: sla volumes pending"


def test_a_pattern_does_not_approve_what_a_person_revoked() -> None:
    gate = VolumeGate("first")
    gate.up("g-1", "host-1", [export("vol-1"), export("vol-2")], None, NOW_US)
    gate.decide(["vol-1"], ["host-1"], "ann", NOW_US, approve=False)
    gate.up("g-2", "host-2", [export("vol-1"), export("vol-2")], None, NOW_US)
    _, answer = gate.decide(["*"], ["host-1", "host-2"], "ann", NOW_US, approve=True)
    assert {(row["volume"], row["gateway"]) for row in answer["approved"]} == {
        ("vol-1", "host-2"), ("vol-2", "host-2"),
    }  # fmt: skip
    with pytest.raises(DecisionRefused, match="waits for approval"):
        gate.decide(["vol-*"], ["host-1"], "ann", NOW_US, approve=True)
    _, answer = gate.decide(["vol-1"], ["host-1"], "ann", NOW_US, approve=True)
    assert [row["gateway"] for row in answer["approved"]] == ["host-1"]


def test_a_name_that_two_gateways_have_is_refused_and_an_id_wins() -> None:
    gate = VolumeGate("first")
    gate.up(GATEWAY, "host-1", [export("vol-1")], None, NOW_US)
    gate.up(FALSE, "host-1", [export("vol-1")], None, NOW_US)
    for approve in (True, False):
        with pytest.raises(DecisionRefused, match=f"2 gateways are named host-1: {GATEWAY}, {FALSE}") as said:
            gate.decide(["*"], ["host-1"], "ann", NOW_US, approve=approve)
        assert said.value.code == 409
    [problem] = gate.problems()
    assert problem["reason"].startswith(f"gateway host-1 ({FALSE}) shows volume vol-1")
    assert problem["reason"].endswith(f"--gateway {FALSE}")
    rows, answer = gate.decide(["*"], [FALSE], "ann", NOW_US, approve=True)
    assert [row["gateway_id"] for row in answer["approved"]] == [FALSE]
    [event] = [row for table, row in rows if table == "events"]
    assert f"of gateway host-1 ({FALSE}) approved" in event["text"]
    gate = VolumeGate("first")
    gate.up(GATEWAY, "host-1", [export("vol-1")], None, NOW_US)
    gate.up(FALSE, GATEWAY, [export("vol-1")], None, NOW_US)
    _, answer = gate.decide(["vol-1"], [GATEWAY], "ann", NOW_US, approve=False)
    assert [row["gateway_id"] for row in answer["revoked"]] == [GATEWAY]
