"""A promise whose labels choose other volumes now: who is in it, and which windows and episodes go on."""

from __future__ import annotations

from sla_server.services.control.controller import Controller
from sla_server.services.control.scopes import PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.usage import GatewayTable, KnownStream
from tests.support.worlds import A, B, promise, streams


def table(gateway: str, *volumes: str, backend: str = "disk") -> GatewayTable:
    made = GatewayTable(gateway)
    found = streams(gateway, *volumes, backend=backend)
    made.add_streams([KnownStream(s["id"], s["volume"], s["client"], s["backend"]) for s in found])
    return made


def members(scopes: PromiseScopes, backend: str) -> list[set[str]]:
    return [scope.volumes for scope in scopes.on_backend(backend)]


def test_a_volume_that_is_chosen_too_joins_the_windows_there_are():
    here, other = table(A, "a", "b"), table(B, "c", backend="other")
    scopes = PromiseScopes(ControlSettings())
    scopes.set_promises([promise(volumes=("a",))], [here, other])
    (before,) = scopes.on_backend("disk")
    row = before.row
    assert scopes.set_promises([promise(volumes=("a", "b"))], [here, other]) == set(), "nothing begins again"
    assert scopes.on_backend("disk")[0].row is row
    assert members(scopes, "disk") == [{"a", "b"}]
    assert scopes.at(A)[0].parts[A].mask.tolist() == [True, True]
    assert scopes.set_promises([promise(volumes=("a", "b", "c"))], [here, other]) == {"other"}
    assert (members(scopes, "disk"), members(scopes, "other")) == ([{"a", "b"}], [{"c"}])
    assert scopes.on_backend("disk")[0].row is row


def test_where_a_volume_is_chosen_no_more_the_windows_begin_again_without_it():
    here, other = table(A, "a", "b"), table(B, "c", backend="other")
    scopes = PromiseScopes(ControlSettings())
    scopes.set_promises([promise(volumes=("a", "b", "c"))], [here, other])
    disk, kept = scopes.on_backend("disk")[0].row, scopes.on_backend("other")[0].row
    assert scopes.set_promises([promise(volumes=("b", "c"))], [here, other]) == {"disk"}
    assert scopes.on_backend("disk")[0].row is not disk
    assert scopes.on_backend("other")[0].row is kept
    assert members(scopes, "disk") == [{"b"}]
    assert scopes.at(A)[0].parts[A].mask.tolist() == [False, True]
    assert not scopes.is_promised("a")


def test_a_promise_without_any_volume_is_there_and_takes_the_first_that_is_chosen():
    here, scopes = table(A, "a"), PromiseScopes(ControlSettings())
    scopes.set_promises([promise(volumes=())], [here])
    assert scopes.backends() == set()
    assert scopes.set_promises([promise(volumes=("a",))], [here]) == {"disk"}
    assert scopes.set_promises([promise(volumes=())], [here]) == {"disk"}
    assert (scopes.backends(), scopes.over_all(promise().key)) == (set(), None)


def test_another_version_begins_again_whatever_its_volumes():
    here, scopes = table(A, "a", "b"), PromiseScopes(ControlSettings())
    scopes.set_promises([promise(volumes=("a",))], [here])
    before = scopes.on_backend("disk")[0].row
    scopes.set_promises([promise(volumes=("a", "b"), ms=5)], [here])
    assert scopes.on_backend("disk")[0].row is not before


def test_an_episode_goes_on_while_labels_choose_other_volumes():
    controller = Controller(ControlSettings())
    controller.set_agreements([promise(volumes=("a",))], [])
    live = controller.live[promise().key]
    live.violating, live.flaps = True, 2
    controller.set_agreements([promise(volumes=("a", "b"))], [])
    assert controller.live[promise().key] is live
    assert (live.promise.volumes, live.violating) == (("a", "b"), True)
    controller.set_agreements([promise(volumes=("a", "b"), ms=5)], [])
    assert controller.live[promise().key] is not live
