"""What ``sla why`` asks, on both databases: only what was so at the moment, newest first."""

from __future__ import annotations

from sqlalchemy import text

from sla_server.db.engine import begin
from sla_server.db.queries.explanations import cursor_of
from tests.support.samples import T0, gateway_message, record_message

S = 1_000_000


def record(rig, *rows):
    rig.feed(record_message(rows))


def decision(name, at_s, kind="cap-set", **columns):
    row = {"decision_id": name, "at_us": T0 + at_s * S, "kind": kind, "figures": {"c_after": at_s}}
    return "decisions", {**row, **columns}


def test_decisions_by_what_they_are_about(rig):
    record(
        rig,
        decision("step", 1, "start", backend="b", victim="gold/latency"),
        decision("cap", 1, backend="b", volume="v", victim="gold/latency"),
        decision("other", 2, backend="c", volume="w"),
        decision("later", 3, "cap-released", backend="b", volume="v"),
    )
    reader = rig.reader

    def names(**asked):
        return [row["decision_id"] for row in reader.decisions(**asked)]

    assert names() == ["later", "other", "cap", "step"]
    assert names(newest_first=False) == ["step", "cap", "other", "later"]
    assert names(volume="v") == ["later", "cap"]
    assert names(volume="v", until_us=T0 + 2 * S) == ["cap"]
    assert names(backend="b", from_us=T0 + S) == ["later"]
    assert names(victims=["gold/latency", "x/y"], kinds=["start"]) == ["step"]
    assert names(limit=1) == ["later"]
    pages, before = [], None
    while page := reader.decisions(limit=1, before=before):  # two have one time, one of them no volume
        pages += [row["decision_id"] for row in page]
        before = cursor_of(page[-1])
    assert pages == names()
    assert reader.decision_count(volume="v", from_us=T0) == 2
    assert reader.decisions(limit=1)[0]["figures"] == {"c_after": 3}


def test_a_confirmation_completes_a_row(rig):
    record(rig, decision("cap", 1, volume="v"))
    record(rig, decision("cap", 1, volume="v", confirmed_us=T0 + 2 * S))
    (row,) = rig.reader.decisions()
    assert (row["confirmed_us"], row["seen_us"], row["volume"]) == (T0 + 2 * S, None, "v")


def test_throttles_in_force_at_a_time(rig):
    common = {"volume": "v", "victim": "gold/latency", "state": "seen"}
    record(
        rig,
        ("throttles", {**common, "throttle_id": "open", "requested_us": T0}),
        ("throttles", {**common, "throttle_id": "ended", "requested_us": T0, "released_us": T0 + 2 * S}),
        ("throttles", {**common, "throttle_id": "new", "volume": "w", "requested_us": T0 + 3 * S}),
        ("throttles", {**common, "throttle_id": "observed", "state": "observed", "requested_us": T0}),
    )

    def names(at_s, **asked):
        return {row["throttle_id"] for row in rig.reader.throttles_at(T0 + at_s * S, **asked)}

    assert names(1, volumes=["v"]) == {"open", "ended"}
    assert names(2, volumes=["v"]) == {"open"}, "its end is no part of it"
    assert names(4, victims=["gold/latency"]) == {"open", "new"}
    assert names(4, volumes=["w"], victims=["none"]) == {"new"}
    assert names(-1, volumes=["v"]) == names(4) == set()


def test_throttles_of_a_group_and_of_a_whole_client_are_those_of_their_volumes(rig):
    common = {"volume": "", "members": '{"v": 1.0, "w": 1.0}', "state": "seen", "requested_us": T0}
    record(
        rig,
        ("throttles", {**common, "throttle_id": "group", "group_name": "night"}),
        ("throttles", {**common, "throttle_id": "client", "client": "greedy"}),
        ("throttles", {**common, "throttle_id": "other", "client": "c", "members": '{"x": 1.0}'}),
    )
    found = rig.reader.throttles_at(T0 + S, volumes=["w"])
    assert {row["throttle_id"] for row in found} == {"group", "client"}


def test_the_version_of_an_agreement_that_was_in_force(rig):
    def version(name, number, applied_s, ended_s=None):
        ended_us = None if ended_s is None else T0 + ended_s * S
        row = {"name": name, "version": number, "applied_us": T0 + applied_s * S, "ended_us": ended_us}
        return "agreements", {**row, "spec": {"n": number}, "document": "yaml"}

    record(rig, version("a", 1, 0), version("a", 2, 10), version("b", 1, 5, 8), version("c", 1, 0))

    def found(at_s, name=None, page=1):
        return [(row["name"], row["version"]) for row in rig.reader.agreements_at(T0 + at_s * S, name, page)]

    assert found(1) == [("a", 1), ("c", 1)]
    assert found(6) == [("a", 1), ("b", 1), ("c", 1)]
    assert found(11, page=2048) == [("a", 2), ("c", 1)], "one that has ended takes no other with it"
    assert found(11, "a") == [("a", 2)]
    assert found(11, "b") == found(-1) == []
    assert next(rig.reader.agreements_at(T0 + S, "a"))["spec"] == {"n": 1}


def test_slices_and_episodes_around_a_time(rig):
    slice_ = {"name": "gold", "objective": "latency", "length_us": 60 * S, "revision": 1}
    record(
        rig,
        ("slices", {**slice_, "start_us": T0, "state": "good"}),
        ("slices", {**slice_, "start_us": T0, "revision": 2, "state": "bad"}),
        ("slices", {**slice_, "start_us": T0 + 120 * S, "state": "good"}),
        *(
            (
                "episodes",
                {"episode_id": str(n), "name": "gold", "objective": "latency", "opened_us": T0 + n * S},
            )
            for n in (1, 5)
        ),
    )
    reader = rig.reader
    assert reader.slice_at("gold", "latency", T0 + 59 * S)["state"] == "bad"
    assert reader.slice_at("gold", "latency", T0 + 60 * S) is None
    assert reader.slice_at("gold", "latency", T0 - 1) is None
    assert [row["episode_id"] for row in reader.episodes_until("gold", "latency", T0 + 9 * S)] == ["5", "1"]
    assert [row["episode_id"] for row in reader.episodes_until("gold", "latency", T0 + 4 * S)] == ["1"]
    assert reader.episodes_until("gold", "other", T0 + 9 * S) == []


def test_names_mode_backend_and_reach(rig):
    rig.feed(gateway_message())
    record(
        rig,
        ("agreements", {"name": "gold", "version": 1}),
        ("audit", {"audit_id": "1", "at_us": T0, "action": "mode", "after": {"mode": "enforce"}}),
        ("audit", {"audit_id": "2", "at_us": T0 + 5 * S, "action": "mode", "after": {"mode": "observe"}}),
        ("audit", {"audit_id": "3", "at_us": T0 + 6 * S, "action": "apply", "after": {"mode": "none"}}),
    )
    reader = rig.reader
    volumes = [row["volume"] for row in reader.volumes()]
    assert volumes
    assert set(reader.known_names()) == {("gold", "sla"), *((name, "volume") for name in volumes)}
    assert reader.backend_of(volumes[0]) == reader.volumes()[0]["backend"]
    assert reader.backend_of("none") is None
    assert [reader.kinds_of(name) for name in ("gold", volumes[0], "none")] == [{"sla"}, {"volume"}, set()]
    assert [reader.mode_at(T0 + at_s * S) for at_s in (-1, 4, 9)] == [None, "enforce", "observe"]
    rig.retention.step()
    assert reader.decisions_from_us() == rig.clock.unix_us()
    with begin(rig.engine) as connection:
        connection.execute(text("DELETE FROM meta WHERE key = 'decisions_from_us'"))
    assert reader.decisions_from_us() is None


def test_throttles_of_a_backends_loop_and_modes_of_backends(rig):
    common = {"victim": "gold/latency", "state": "seen", "requested_us": T0, "backend": "b"}
    modes = [{"backends": {"b": "observe"}}, {"backends": {}}]
    rig.feed(gateway_message())
    record(
        rig,
        ("throttles", {**common, "throttle_id": "loop", "volume": "v", "source": "control"}),
        ("throttles", {**common, "throttle_id": "hand", "volume": "w", "source": "manual"}),
        *(
            ("audit", {"audit_id": str(n), "at_us": T0 + n * S, "action": "backend-mode", "after": after})
            for n, after in enumerate(modes, 1)
        ),
    )
    reader = rig.reader
    assert [row["throttle_id"] for row in reader.throttles_at(T0 + S, backends=["b", "c"])] == ["loop"]
    assert reader.throttles_at(T0 + S, backends=["c"]) == []
    assert [reader.backend_modes_at(T0 + n * S) for n in range(3)] == [{}, {"b": "observe"}, {}]
    volumes = {row["volume"]: row["backend"] for row in reader.volumes()}
    assert reader.backends_of([*volumes, "none"]) == set(volumes.values())
    assert reader.backends_of([]) == set()
