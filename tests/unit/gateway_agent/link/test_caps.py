"""The caps in force as the link holds them, and the threshold set that outlives it."""

from gateway_agent.link.caps import LeasedCaps, ThresholdStore
from pmdaemon.wire.messages.agent import CapSet, Thresholds
from tests.support.link import FakeEnforcer

SECOND = 10**9


def test_thresholds_survive_and_a_broken_file_is_begun_anew(tmp_path):
    path = tmp_path / "thresholds.json"
    entry = {"volume": "v", "client": "*", "io": "any", "threshold_us": 9}
    ThresholdStore(path).replace(Thresholds(4, (entry,)))
    assert ThresholdStore(path).current == Thresholds(4, (entry,))
    path.write_text('{"version": "x"}')
    assert ThresholdStore(path).current is None


def client_cap(volume, client="c"):
    return {"volume": volume, "client": client, "ops_per_s": 5, "bytes_per_s": None, "cost_per_s": None}


def test_caps_of_clients_are_refused_by_their_volume_where_no_plane_serves_it():
    enforcer = FakeEnforcer(frozenset({"v"}))
    caps = LeasedCaps([enforcer])
    caps.replace(CapSet(4, 30_000_000, (), (client_cap("v"), client_cap("w"))), 0)
    assert enforcer.sets[0].clients == (client_cap("v"), client_cap("w"))
    ack = caps.due_ack()
    assert ack is not None
    assert (ack.gen, ack.ok, ack.refused) == (4, True, ("w",))
    caps.replace(CapSet(5, 30_000_000, (), (client_cap("w"),)), 0)
    ack = caps.due_ack()
    assert ack is not None
    assert (ack.ok, ack.refused) == (False, ("w",))


def test_a_set_of_clients_alone_has_a_lease():
    caps = LeasedCaps([FakeEnforcer(frozenset({"v"}))])
    caps.replace(CapSet(4, 30_000_000, (), (client_cap("v"),)), 0)
    assert caps.lease_end_ns == 30 * SECOND
    lapsed = caps.expire(30 * SECOND)
    assert lapsed is not None
    assert lapsed.gen == 4


def test_an_answer_names_no_more_volumes_than_it_holds():
    volumes = [f"w{number:04}" + "x" * 120 for number in range(700)]
    caps = LeasedCaps([FakeEnforcer(frozenset({"v"}))])
    caps.replace(CapSet(4, 30_000_000, tuple({"volume": volume} for volume in [*volumes, "v"])), 0)
    ack = caps.due_ack()
    assert ack is not None
    assert ack.ok
    assert 0 < len(ack.refused) < 700
    assert list(ack.refused) == volumes[: len(ack.refused)]
    assert ack.encode()
