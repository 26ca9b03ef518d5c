from __future__ import annotations

import numpy as np

from sla_server.services.entity import GatewayTable, Stream, Taken
from sla_server.services.scopes import Scopes
from sla_server.services.settings import ControlSettings

from .worlds import A, B, cut, promise, streams


def table(gateway: str, *volumes: str, backend: str = "disk") -> GatewayTable:
    made = GatewayTable(gateway)
    add(made, *volumes, backend=backend)
    return made


def add(made: GatewayTable, *volumes: str, backend: str = "disk") -> list[int]:
    found = streams(made.gateway_id, *volumes, backend=backend)
    return made.add_streams([Stream(s["id"], s["volume"], s["client"], s["backend"]) for s in found])


def rows(scopes: Scopes, gateway: str, backend: str) -> list[list[bool]]:
    return [s.masks[gateway].tolist() for s in scopes.at(gateway) if s.backend == backend]


def test_streams_that_come_later_extend_the_masks():
    made, scopes = table(A, "x", "gold-1"), Scopes(ControlSettings())
    scopes.set_promises([promise(volumes=("gold-*",))], [made])
    assert rows(scopes, A, "disk") == [[False, True]]
    scopes.extend(made, add(made, "gold-2", "y"))
    assert rows(scopes, A, "disk") == rows(scopes, A, "") == [[False, True, True, False]]


def test_one_scope_a_backend_and_one_over_all():
    made = table(A, "gold-1")
    add(made, "gold-2", backend="other")
    scopes = Scopes(ControlSettings())
    scopes.set_promises([promise(volumes=("gold-*",))], [made])
    assert scopes.backends() == {"disk", "other"}
    assert rows(scopes, A, "disk") == [[True, False]]
    assert rows(scopes, A, "other") == [[False, True]]
    assert rows(scopes, A, "") == [[True, True]]


def test_clients_narrow_a_promise():
    made, scopes = table(A, "gold"), Scopes(ControlSettings())
    scopes.set_promises([promise(clients=("host-*",))], [made])
    assert scopes.at(A) == []


def test_an_unchanged_promise_keeps_its_windows_a_changed_one_does_not():
    made, scopes = table(A, "gold"), Scopes(ControlSettings())
    scopes.set_promises([promise()], [made])
    (before,) = scopes.on_backend("disk")
    scopes.set_promises([promise(), promise("later")], [made])
    assert scopes.on_backend("disk")[0].tracker is before.tracker
    scopes.set_promises([promise(ms=5)], [made])
    assert scopes.on_backend("disk")[0].tracker is not before.tracker


def test_rows_of_a_cut_that_names_strangers():
    made, scopes = table(A, "x", "gold"), Scopes(ControlSettings())
    scopes.set_promises([promise()], [made])
    (scope,) = scopes.on_backend("disk")
    taken = Taken(cut(A, 1, {"gold": (1, 1), "?": (1, 1), "x": (1, 1)}), np.array([1, -1, 0]), 0)
    assert scope.rows_of(taken).tolist() == [True, False, False]


def test_silent_gateways_are_not_waited_for():
    front, back, scopes = table(A, "gold"), table(B, "gold"), Scopes(ControlSettings())
    scopes.set_promises([promise()], [front, back])
    (scope,) = scopes.on_backend("disk")
    tables = {A: front, B: back}
    front.last_cut_ns = 10_000_000_000
    assert scope.needed(tables, 11_000_000_000) == {A}
    back.last_cut_ns = 10_000_000_000
    assert scope.needed(tables, 11_000_000_000) == {A, B}
    back.state = "lost"
    assert scope.needed(tables, 11_000_000_000) == {A}
