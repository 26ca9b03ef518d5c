from __future__ import annotations

from sla_server.services.control.scopes import PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.usage import GatewayTable, KnownStream
from tests.support.worlds import A, B, cut, promise, streams


def table(gateway: str, *volumes: str, backend: str = "disk") -> GatewayTable:
    made = GatewayTable(gateway)
    add(made, *volumes, backend=backend)
    return made


def add(made: GatewayTable, *volumes: str, backend: str = "disk") -> list[int]:
    found = streams(made.gateway_id, *volumes, backend=backend)
    return made.add_streams([KnownStream(s["id"], s["volume"], s["client"], s["backend"]) for s in found])


def rows(scopes: PromiseScopes, gateway: str, backend: str) -> list[list[bool]]:
    return [s.parts[gateway].mask.tolist() for s in scopes.at(gateway) if s.backend == backend]


def test_streams_that_come_later_extend_the_masks():
    made, scopes = table(A, "x", "gold-1"), PromiseScopes(ControlSettings())
    scopes.set_promises([promise(volumes=("gold-*",))], [made])
    assert rows(scopes, A, "disk") == [[False, True]]
    scopes.extend(made, add(made, "gold-2", "y"))
    assert rows(scopes, A, "disk") == rows(scopes, A, "") == [[False, True, True, False]]


def test_one_scope_a_backend_and_one_over_all():
    made = table(A, "gold-1")
    add(made, "gold-2", backend="other")
    scopes = PromiseScopes(ControlSettings())
    scopes.set_promises([promise(volumes=("gold-*",))], [made])
    assert scopes.backends() == {"disk", "other"}
    assert rows(scopes, A, "disk") == [[True, False]]
    assert rows(scopes, A, "other") == [[False, True]]
    assert rows(scopes, A, "") == [[True, True]]


def test_what_is_promised_of_a_volume_by_name_and_by_pattern_but_for_availability():
    scopes = PromiseScopes(ControlSettings())
    up = promise("up", metric="availability")
    scopes.set_promises([promise(), promise("p", volumes=("team-*",)), up], [])
    assert [scopes.is_promised(v) for v in ("gold", "team-1", "up", "other")] == [True, True, False, False]
    scopes.set_promises([up], [])
    assert not scopes.is_promised("gold")


def test_what_is_promised_of_one_client_of_a_volume():
    scopes = PromiseScopes(ControlSettings())
    scopes.set_promises([promise(clients=("db-*",))], [])
    assert scopes.is_promised("gold"), "of some client of it"
    assert [scopes.is_promised(f"gold/{client}") for client in ("db-1", "job")] == [True, False]


def test_on_which_backends_promises_are_new_others_or_gone():
    made, other = table(A, "gold"), table(B, "silver", backend="other")
    scopes, gold, silver = PromiseScopes(ControlSettings()), promise(), promise("silver")
    assert scopes.set_promises([gold, silver], [made, other]) == {"disk", "other"}
    assert scopes.set_promises([gold, silver], [made, other]) == set()
    assert scopes.set_promises([gold, promise("silver", ms=5)], [made, other]) == {"other"}
    assert scopes.set_promises([silver], [made, other]) == {"disk", "other"}


def test_clients_narrow_a_promise():
    made, scopes = table(A, "gold"), PromiseScopes(ControlSettings())
    scopes.set_promises([promise(clients=("host-*",))], [made])
    assert scopes.at(A) == []


def test_an_unchanged_promise_keeps_its_windows_a_changed_one_does_not():
    made, scopes = table(A, "gold"), PromiseScopes(ControlSettings())
    scopes.set_promises([promise()], [made])
    (before,) = scopes.on_backend("disk")
    scopes.set_promises([promise(), promise("later")], [made])
    assert scopes.on_backend("disk")[0].row is before.row
    scopes.set_promises([promise(ms=5)], [made])
    assert scopes.on_backend("disk")[0].row is not before.row


def test_the_plan_of_a_cut_that_names_strangers():
    made, scopes = table(A, "x", "gold"), PromiseScopes(ControlSettings())
    scopes.set_promises([promise()], [made])
    ids = cut(A, 1, {"gold": (1, 1), "?": (1, 1), "x": (1, 1)}).column("stream_id")
    plan = scopes.plan(made, ids)
    assert plan.rows.tolist() == [1, -1, 0]
    assert plan.pairs.tolist() == [[0], [0]]
    assert plan.of_known[:2].tolist() == [[0, 2], [1, 0]]
    assert scopes.plan(made, ids) is plan
    scopes.extend(made, add(made, "?"))
    assert scopes.plan(made, ids).rows.tolist() == [1, 2, 0]


def test_a_stream_that_moves_takes_its_promise_along_and_leaves_the_others():
    made, other = table(A, "gold-1", "gold-2"), table(B, "gold-3")
    scopes = PromiseScopes(ControlSettings())
    scopes.set_promises([promise(volumes=("gold-*",))], [made, other])
    over_all = scopes.over_all(("gold", "latency"))
    moved = made.set_backends({"gold-2": "other"})
    assert moved == [1]
    scopes.move(made, moved, {A: made, B: other})
    assert scopes.over_all(("gold", "latency")) is over_all, "where it is in force has not changed"
    (left,), (new,) = scopes.on_backend("disk"), scopes.on_backend("other")
    assert (left.volumes, new.volumes) == ({"gold-1", "gold-3"}, {"gold-2"})
    assert (rows(scopes, A, "disk"), rows(scopes, A, "other")) == ([[True, False]], [[False, True]])
    assert rows(scopes, B, "disk") == [[True]]
    scopes.move(made, made.set_backends({"gold-1": "other"}), {A: made, B: other})
    assert [s.volumes for s in scopes.on_backend("disk")] == [{"gold-3"}]
    scopes.move(other, other.set_backends({"gold-3": "other"}), {A: made, B: other})
    assert scopes.backends() == {"other"}
