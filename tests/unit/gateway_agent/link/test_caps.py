"""The caps in force as the link holds them and leaves them to the next one, and the threshold set."""

from pathlib import Path

import pytest

from gateway_agent.link import state_files
from gateway_agent.link.caps import KeptCaps, LeasedCaps, ThresholdStore
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.messages.thresholds import Thresholds
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


def test_the_cap_of_a_whole_client_holds_beside_those_of_volumes_that_no_plane_serves():
    caps = LeasedCaps([FakeEnforcer(frozenset({"v"}))])
    whole = {"client": "c", "ops_per_s": 5, "bytes_per_s": None, "cost_per_s": None}
    caps.replace(CapSet(4, 30_000_000, ({"volume": "w", "ops_per_s": 5},), whole_clients=(whole,)), 0)
    ack = caps.due_ack()
    assert ack is not None
    assert (ack.ok, ack.refused) == (True, ("w",))


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


class Host:
    """Where links come and go: time since boot, the boot's id, and the file between them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "caps.json"
        self.boot_ns, self.boot_id = 500 * SECOND, "boot-1"
        self.now_ns = 7 * SECOND  # of the monotonic clock, which begins elsewhere

    def link(self) -> tuple[LeasedCaps, FakeEnforcer]:
        """Another link, as it starts."""
        enforcer = FakeEnforcer(frozenset({"v"}), "cgroup")
        caps = LeasedCaps([enforcer], KeptCaps(self.path, lambda: self.boot_ns, lambda: self.boot_id))
        caps.resume(self.now_ns)
        return caps, enforcer

    def later(self, seconds: float) -> None:
        self.boot_ns += round(seconds * SECOND)
        self.now_ns += round(seconds * SECOND)


SET = CapSet(
    4,
    30_000_000,
    ({"volume": "v", "ops_per_s": 5.0, "bytes_per_s": None, "cost_per_s": 2.5, "burst_s": 0.5},),
    (client_cap("v"),),
    ({"group": "g", "volumes": {"v": 2.0}, "ops_per_s": 9.0, "bytes_per_s": None, "cost_per_s": None},),
)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_next_link_puts_the_caps_in_force_for_what_is_left_of_their_lease(host):
    host.link()[0].replace(SET, host.now_ns)
    host.later(12)
    caps, enforcer = host.link()
    assert (enforcer.sets, enforcer.leases_us) == ([SET], [18_000_000])
    assert (caps.generation, caps.lease_end_ns) == (4, host.now_ns + 18 * SECOND)
    assert caps.due_ack() is None, "no server has asked for one"
    host.later(18)
    assert caps.expire(host.now_ns) == SET
    assert enforcer.lapses == 1


def test_a_renewed_lease_is_what_counts(host):
    caps, _ = host.link()
    caps.replace(SET, host.now_ns)
    host.later(20)
    caps.renew(host.now_ns)
    host.later(20)
    assert host.link()[1].leases_us == [10_000_000]


def test_one_that_was_given_what_is_left_is_given_the_whole_lease_with_the_next_renewal(host):
    caps, enforcer = host.link()
    caps.replace(SET, host.now_ns)
    host.later(29.5)
    caps.enforcer_connected(enforcer, host.now_ns)
    for _ in range(3):
        host.later(0.4)
        caps.renew(host.now_ns)
    assert enforcer.leases_us == [30_000_000, 500_000, 30_000_000]
    host.later(20)
    caps, enforcer = host.link()
    for _ in range(3):
        caps.renew(host.now_ns)
    assert enforcer.leases_us == [10_000_000, 30_000_000]


def test_a_renewal_that_comes_behind_the_end_renews_nothing(host):
    caps, enforcer = host.link()
    caps.replace(SET, host.now_ns)
    host.later(30)
    caps.renew(host.now_ns)
    assert caps.expire(host.now_ns) == SET
    assert enforcer.lapses == 1


def test_renewals_that_move_the_end_by_little_are_not_written(host, monkeypatch):
    written = []
    write = state_files.write_json
    monkeypatch.setattr(state_files, "write_json", lambda *args, **keys: written.append(write(*args, **keys)))
    caps, _ = host.link()
    caps.replace(SET, host.now_ns)
    for _ in range(20):
        host.later(0.1)
        caps.renew(host.now_ns)
    assert len(written) == 1 + 4
    host.later(29.9)
    assert host.link()[1].sets == [SET]


@pytest.mark.parametrize("seconds", [30, 31, 1_000_000])
def test_a_set_whose_lease_has_ended_is_forgotten(host, seconds):
    host.link()[0].replace(SET, host.now_ns)
    host.later(seconds)
    caps, enforcer = host.link()
    assert (enforcer.sets, caps.generation) == ([], None)
    assert not host.path.exists()


def test_of_another_boot_nothing_is_left(host):
    host.link()[0].replace(SET, host.now_ns)
    host.boot_ns, host.boot_id = 501 * SECOND, "boot-2"
    assert host.link()[1].sets == []


def test_a_set_that_has_ended_or_was_replaced_does_not_come_back(host):
    caps, _ = host.link()
    caps.replace(SET, host.now_ns)
    caps.replace(CapSet(5, 30_000_000, ()), host.now_ns)
    _, enforcer = host.link()
    assert [each.gen for each in enforcer.sets] == [5]
    caps.replace(SET, host.now_ns)
    caps.expire(host.now_ns + 30 * SECOND)
    assert host.link()[1].sets == []


def test_a_set_that_cannot_be_written_leaves_no_older_one(host, monkeypatch):
    caps, enforcer = host.link()
    caps.replace(SET, host.now_ns)

    def fails(*_args, **_keys):
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(state_files, "write_json", fails)
        caps.replace(CapSet(5, 30_000_000, ()), host.now_ns)
        assert [each.gen for each in enforcer.sets] == [4, 5], "it holds all the same"
        assert host.link()[1].sets == []
    host.later(1)
    caps.renew(host.now_ns)
    assert [each.gen for each in host.link()[1].sets] == [5], "written as soon as that can be"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"boot_id": "boot-1"}',
        '{"boot_id": "boot-1", "caps": [], "end_boot_ns": 510000000000}',
        '{"boot_id": "boot-1", "caps": {"gen": 4, "lease_us": 1000000, "caps": []}, "end_boot_ns": "x"}',
        '{"boot_id": "boot-1", "caps": {"gen": 4, "lease_us": 1000000, "caps": []}, "end_boot_ns": 9e99}',
    ],
)
def test_a_file_of_another_form_is_left_aside(host, text):
    host.path.write_text(text)
    caps, enforcer = host.link()
    assert (enforcer.sets, caps.generation) == ([], None)
