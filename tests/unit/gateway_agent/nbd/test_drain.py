"""Exports that change or go while clients use them, and how a connection to one that has gone ends."""

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.exports import ExportTable
from gateway_agent.nbd.loop import GONE, IN
from gateway_agent.nbd.proxy_session import ProxySession
from gateway_agent.nbd.session import DRAIN_NS, LINGER_NS
from pmdaemon.wire.rates import Rates
from tests.support.nbd import FakeSocket, Rig, plane_config, replies
from tests.support.nbd_proxy import upstream_of

DRAIN_S, LINGER_S = DRAIN_NS / 1e9, LINGER_NS / 1e9


def read(cookie, length=512):
    return p.request(p.Cmd.READ, cookie, 0, length)


def write(cookie, payload):
    return p.request(p.Cmd.WRITE, cookie, 0, len(payload)) + payload


# -- a connection


class Pair:
    """A proxy session with both its sockets."""

    def __init__(self, caps=None):
        self.rig, self.near, self.far = Rig(caps=caps), FakeSocket(), FakeSocket()
        stream, upstream = self.rig.stream(), upstream_of(self.rig, self.far)
        self.session = ProxySession(
            self.rig.context, self.near, self.rig.volume, stream, self.rig.facts, upstream
        )

    def say(self, *data):
        self.rig.deliver(self.near, b"".join(data))

    def answer(self, *data):
        self.rig.deliver(self.far, b"".join(data))

    def heard(self):
        return replies(bytes(self.near.sent), {1: 512, 2: 512})


@pytest.fixture
def pair():
    return Pair()


def test_what_is_under_way_is_answered_and_then_the_connection_ends(pair):
    pair.say(read(1), write(3, b"x" * 100))
    pair.rig.clock.advance(0.1)
    pair.session.drain()
    pair.rig.loop.turn()
    assert not pair.near.is_shut
    pair.answer(p.simple_reply(3), p.simple_reply(1) + b"r" * 512)
    pair.rig.loop.turn()
    assert [(cookie, error) for cookie, error, _ in pair.heard()] == [(3, 0), (1, 0)]
    assert pair.near.is_shut, "its client closes"
    assert not pair.near.is_closed
    pair.near.is_ended = True
    pair.rig.loop.handlers[pair.near.fileno()](IN | GONE)
    assert pair.near.is_closed
    assert bytes(pair.far.sent).endswith(p.request(p.Cmd.DISC, 0, 0, 0))
    assert pair.rig.volume.sessions == set()


def test_what_comes_later_is_refused_and_never_reaches_the_storage(pair):
    pair.say(read(1))
    pair.rig.clock.advance(0.1)
    pair.session.drain()
    sent = len(pair.far.sent)
    pair.rig.clock.advance(0.1)
    pair.say(read(2), write(3, b"y" * 100))
    assert len(pair.far.sent) == sent
    pair.answer(p.simple_reply(1) + b"r" * 512)
    found = [(cookie, error) for cookie, error, _ in pair.heard()]
    assert sorted(found) == [(1, 0), (2, p.ESHUTDOWN), (3, p.ESHUTDOWN)]
    pair.rig.loop.turn()
    assert pair.near.is_shut


def test_what_has_arrived_is_read_before_the_end(pair):
    """The client had sent it before it could know: it gets an answer."""
    pair.session.drain()
    pair.rig.clock.advance(0.1)
    pair.say(read(2))  # the loop reads sockets before it looks at its timers
    pair.rig.loop.turn()
    assert [(cookie, error) for cookie, error, _ in pair.heard()] == [(2, p.ESHUTDOWN)]
    assert pair.near.is_shut


def test_a_write_that_has_begun_to_arrive_is_waited_for(pair):
    said = write(3, b"x" * 1000)
    pair.say(said[:500])
    pair.rig.clock.advance(0.1)
    pair.session.drain()
    pair.rig.loop.turn()
    assert not pair.near.is_shut
    pair.say(said[500:])
    assert bytes(pair.far.sent) == said
    pair.answer(p.simple_reply(3))
    pair.rig.loop.turn()
    assert [(cookie, error) for cookie, error, _ in pair.heard()] == [(3, 0)]
    assert pair.near.is_shut


def test_held_requests_complete_under_their_caps():
    pair = Pair(Rates(1.0, None, None))
    pair.say(read(1), read(2))
    pair.rig.clock.advance(0.1)
    pair.session.drain()
    pair.answer(p.simple_reply(1) + b"r" * 512)
    assert not pair.near.is_shut
    pair.rig.loop.fire(1.0)
    pair.answer(p.simple_reply(2) + b"r" * 512)
    pair.rig.loop.turn()
    assert [cookie for cookie, _, _ in pair.heard()] == [1, 2]
    assert pair.near.is_shut


def test_a_storage_that_hangs_is_waited_for_as_long_as_said(pair):
    pair.say(read(1))
    pair.session.drain()
    pair.rig.loop.fire(DRAIN_S - 0.1)
    assert not pair.near.is_closed
    pair.rig.loop.fire(0.2)
    assert pair.near.is_closed


def test_a_client_that_does_not_close_is_closed(pair):
    pair.session.drain()
    pair.rig.loop.turn()
    assert pair.near.is_shut
    assert pair.rig.loop.masks.get(pair.far.fileno(), 0) == 0, "its upstream is not watched"
    pair.rig.loop.fire(LINGER_S - 0.1)
    assert not pair.near.is_closed
    pair.rig.loop.fire(0.2)
    assert pair.near.is_closed


def test_disc_ends_it_as_ever(pair):
    pair.session.drain()
    pair.session.drain()
    pair.say(p.request(p.Cmd.DISC, 0, 0, 0))
    assert pair.near.is_closed


# -- a client that moves to another process


def test_a_client_that_moves_gets_answers_to_what_has_begun_and_none_to_the_rest(pair):
    stream = pair.session._stream
    pair.say(read(1), write(3, b"x" * 100))
    pair.rig.clock.advance(0.1)
    pair.session.drain(moves=True)
    pair.say(read(2), write(4, b"y" * 100))
    assert bytes(pair.far.sent) == read(1) + write(3, b"x" * 100)
    pair.answer(p.simple_reply(3), p.simple_reply(1) + b"r" * 512)
    pair.rig.loop.turn()
    assert [(cookie, error) for cookie, error, _ in pair.heard()] == [(3, 0), (1, 0)]
    assert pair.near.is_shut, "its client repeats the others at the next process"
    assert stream.arrived == 2, "what is repeated is counted there"


def test_what_the_throttle_holds_is_left_to_the_next_process():
    pair = Pair(Rates(1.0, None, None))
    pair.say(read(1), read(2), write(3, b"x" * 100))
    pair.session.drain(moves=True)
    pair.answer(p.simple_reply(1) + b"r" * 512)
    pair.rig.loop.turn()
    assert [(cookie, error) for cookie, error, _ in pair.heard()] == [(1, 0)]
    assert bytes(pair.far.sent) == read(1)
    assert pair.near.is_shut
    assert pair.session._stream.arrived == 1


def test_what_a_cut_has_as_arrived_stays_so():
    pair = Pair(Rates(1.0, None, None))
    pair.say(read(1), read(2))
    pair.session._stream.take(pair.rig.clock.monotonic_ns())
    pair.session.drain(moves=True)
    assert pair.session._stream.arrived == 2, "no column of a cut is negative"


def test_a_write_that_has_begun_is_waited_for_as_long_as_its_storage_takes(pair):
    """Done later, behind the client's back, it would undo what the client writes through the next process."""
    pair.say(write(3, b"x" * 100))
    pair.session.drain(moves=True)
    pair.rig.loop.fire(10 * DRAIN_S)
    assert not pair.near.is_closed
    pair.answer(p.simple_reply(3))
    pair.rig.loop.turn()
    assert pair.near.is_shut


@pytest.mark.parametrize("said", [read(1), p.request(p.Cmd.FLUSH, 1, 0, 0), write(3, b"x" * 1000)[:500]])
def test_nothing_else_is_waited_for_longer_than_said(pair, said):
    pair.say(said)
    pair.session.drain(moves=True)
    pair.rig.loop.fire(DRAIN_S - 0.1)
    assert not pair.near.is_closed
    pair.rig.loop.fire(0.2)
    assert pair.near.is_closed


def test_a_volume_that_was_removed_first_refuses_as_said(pair):
    pair.session.drain()
    pair.session.drain(moves=True)
    pair.rig.clock.advance(0.1)
    pair.say(read(2))
    assert [(cookie, error) for cookie, error, _ in pair.heard()] == [(2, p.ESHUTDOWN)]


# -- exports


class Files:
    """An export table over files of one letter each; clients read what they are served."""

    def __init__(self, folder):
        self.folder, self.rig, self.hellos = folder, Rig(), []
        for name in "abc":
            (folder / name).write_bytes(name.encode() * 4096)
        self.table = ExportTable(self.config("a", "b"), self.rig.context, lambda: None)

    def config(self, *volumes, **more):
        """Exports: names, and ``name={keys}`` for those with more."""
        chosen = {name: {} for name in volumes} | more
        return plane_config(
            *(
                {"volume": name, "backend": "disk", "file": str(self.folder / name), **keys}
                for name, keys in chosen.items()
            )
        )

    def client(self, volume):
        sock = FakeSocket()
        found = self.table.volumes[volume]
        stream = self.table.stream(found, "host-a")
        made = self.table.session(sock, found, stream, self.table.file_facts(found), None)
        return sock, made

    def reads(self, sock):
        sock.sent.clear()
        self.rig.deliver(sock, read(1, 1))
        return [payload.decode() or error for _, error, payload in replies(bytes(sock.sent), {1: 1})]


@pytest.fixture
def files(tmp_path):
    made = Files(tmp_path)
    yield made
    made.table.close()


def test_a_new_export_is_served_and_the_others_are_the_same_objects(files):
    before, names = dict(files.table.volumes), files.table.names
    sock, _ = files.client("a")
    assert files.table.apply(files.config("c", "a", "b")) == []
    assert names == ["c", "a", "b"], "negotiations under way list it"
    assert [item["volume"] for item in files.table.describe()] == ["c", "a", "b"]
    assert [files.table.volumes[name] for name in "ab"] == [before[name] for name in "ab"]
    assert files.reads(sock) == ["a"]
    assert files.reads(files.client("c")[0]) == ["c"]


def test_a_removed_export_is_let_go_when_its_last_client_has_left(files):
    (one, session), (other, _) = files.client("a"), files.client("b")
    storage = session.storage
    files.table.apply(files.config("b"))
    assert files.table.leaving() == {"a": 1}
    assert not files.table.is_drained
    files.rig.loop.turn()
    assert one.is_shut
    assert files.reads(other) == ["b"]
    session.close("its client has gone")
    assert files.table.is_drained
    files.rig.loop.fire(0.6)
    assert files.table.leaving() == {}
    assert storage._holders == 0
    assert [volume.export.volume for volume in files.rig.cuts.volumes] == ["vol-1", "b"]


def test_a_removed_export_may_come_back_while_its_former_clients_leave(files):
    one, session = files.client("a")
    files.table.apply(files.config("b"))
    files.table.apply(files.config("a", "b"))
    again, _ = files.client("a")
    assert files.reads(again) == ["a"]
    session.close("its client has gone")
    files.rig.loop.fire(0.6)
    assert files.reads(again) == ["a"]
    assert one.is_closed
    assert not again.is_closed


@pytest.mark.parametrize("workers", [0, 2])
def test_new_clients_see_another_file_and_those_that_are_there_keep_theirs(files, workers):
    one, session = files.client("a")
    volume = files.table.volumes["a"]
    files.table.apply(files.config("b", a={"file": str(files.folder / "c"), "workers": workers}))
    assert files.table.volumes["a"] is volume, "its caps hold for both"
    assert files.reads(one) == ["a"]
    assert files.table.leaving() == {"a": 1}
    two, other = files.client("a")
    if not workers:
        assert files.reads(two) == ["c"]
    assert volume.sessions == {session, other}
    session.close("done")
    files.rig.loop.fire(0.6)
    assert files.table.leaving() == {}
    assert not two.is_closed


def test_read_only_holds_for_new_clients(files):
    files.client("a")
    files.table.apply(files.config("b", a={"read_only": True}))
    sock, _ = files.client("a")
    files.rig.deliver(sock, write(1, b"x" * 512))
    assert replies(bytes(sock.sent)) == [(1, p.EPERM, b"")]
    assert [item["read_only"] for item in files.table.describe()] == [False, True]


def test_another_backend_and_other_costs_touch_no_connection(files):
    sock, _ = files.client("a")
    files.table.apply(files.config("b", a={"backend": "array", "cost_read": 9.0}))
    assert files.reads(sock) == ["a"]
    assert files.table.leaving() == {}
    assert [item["backend"] for item in files.table.describe()] == ["disk", "array"]
    assert {stream.backend for stream in files.rig.cuts.table.streams} == {"array"}


def test_a_volume_with_another_upstream_is_asked_for_its_size(files):
    config = plane_config(
        {"volume": "a", "backend": "disk", "upstream": "nbd://127.0.0.1/x"},
        {"volume": "b", "backend": "disk", "file": str(files.folder / "b")},
    )
    [asked] = files.table.apply(config)
    assert asked is files.table.volumes["a"]
    assert [item["size_bytes"] for item in files.table.describe()] == [0, 4096]
    assert files.table.apply(config) == []


def test_a_client_whose_volume_was_removed_while_its_upstream_was_asked_is_let_go(files):
    volume = files.table.volumes["a"]
    stream = files.table.stream(volume, "host-a")
    files.table.apply(files.config("b"))
    sock = FakeSocket()
    upstream = upstream_of(files.rig, FakeSocket())
    files.table.session(sock, volume, stream, upstream.facts, upstream)
    files.rig.loop.turn()
    assert sock.is_shut
