import contextlib
import dataclasses

import pytest
from structlog.testing import capture_logs

from gateway_agent.errors import UpstreamError
from gateway_agent.nbd import negotiation, session, upstream
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.exports import ExportTable
from gateway_agent.nbd.listeners import ListenerSecurity
from gateway_agent.nbd.loop import GONE, IN, OUT
from gateway_agent.nbd.negotiation import MOST_NEGOTIATIONS, Negotiation, NegotiationTable
from pmdaemon.wire.cut import COL, FAILED, OUTSTANDING
from tests.support.nbd import MIB, FakeSocket, Rig, plane_config, replies
from tests.support.nbd_certificates import NbdAuthority
from tests.support.nbd_tls import TlsPeer, client_context, guard_of, security

FLAGS = p.CLIENT_FLAGS.pack(p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES)
UPSTREAM_FLAGS = p.TX_HAS_FLAGS | p.TX_SEND_FLUSH | 1 << 7  # SEND_DF needs structured replies: not for us


class Gateway:
    """Exports ``up`` (upstream) and ``file``; one client in negotiation."""

    def __init__(self, tmp_path, monkeypatch):
        (tmp_path / "disk.img").write_bytes(bytes(range(256)) * 16)
        config = plane_config(
            {"volume": "up", "backend": "b", "upstream": "nbd://127.0.0.1/far", "read_only": True},
            {"volume": "file", "backend": "b", "file": str(tmp_path / "disk.img")},
        )
        self.rig, self.learned, self.over, self.far = Rig(), [], [], FakeSocket()
        self.connect_problem, self.refusal = "", ""
        self.exports = ExportTable(config, self.rig.context, self._learn)
        monkeypatch.setattr(upstream, "begin_connect", self._begin_connect)
        monkeypatch.setattr(upstream, "connect_error", lambda _sock: self.connect_problem)
        self.near = FakeSocket()
        self.talk = Negotiation(self.rig.loop, self.near, self.exports, self.over.append)
        self.talk.start()

    def _learn(self):
        self.learned.append(self.exports.describe())

    def _begin_connect(self, _address):
        if self.refusal:
            raise UpstreamError("tcp:127.0.0.1:10809", self.refusal)
        return self.far

    def say(self, *data):
        self.rig.deliver(self.near, b"".join(data))

    def heard(self):
        """Option replies since the last call, or raw bytes of the transmission phase."""
        raw, found = bytes(self.near.sent), []
        self.near.sent.clear()
        raw = raw.removeprefix(p.greeting())
        while raw[:8] == p.OPTION_REPLY_MAGIC.to_bytes(8, "big"):
            _, opt, kind, length = p.OPTION_REPLY.unpack_from(raw)
            found.append((opt, kind, raw[20 : 20 + length]))
            raw = raw[20 + length :]
        return found, raw

    def upstream_answers(self, opt=p.Opt.GO, *more):
        self.rig.loop.fire(0)  # the attempt begins
        self.rig.loop.handlers[self.far.fileno()](OUT)
        infos = (p.info_export(p.ExportFacts(MIB, UPSTREAM_FLAGS)), *more)
        said = b"".join(p.option_reply(opt, p.Rep.INFO, info) for info in infos)
        self.rig.deliver(self.far, p.greeting() + said + p.option_reply(opt, p.Rep.ACK))


@pytest.fixture
def gateway(tmp_path, monkeypatch):
    made = Gateway(tmp_path, monkeypatch)
    yield made
    made.exports.close()


def go(name, opt=p.Opt.GO, infos=()):
    return p.option(opt, p.go_data(name, infos))


def errors_of(gateway):
    """Errors and missed entries in the next cut of the only stream."""
    (stream,) = gateway.rig.cuts.table.streams
    taken = stream.take(gateway.rig.clock.monotonic_ns())
    return taken.row[COL["errors"]], taken.missed


def test_a_file_is_served_at_once(gateway):
    gateway.say(FLAGS, go("file"), p.request(p.Cmd.READ, 1, 10, 4))
    found, raw = gateway.heard()
    assert [item[1] for item in found] == [p.Rep.INFO, p.Rep.ACK]
    assert replies(raw, {1: 4}) == [(1, 0, bytes([10, 11, 12, 13]))]
    assert gateway.over == [gateway.talk]
    assert gateway.rig.cuts.table.streams[0].client == "10.0.0.7"


def test_a_file_that_is_missing_refuses_its_client_and_serves_the_next_when_it_is_there(gateway, tmp_path):
    path = tmp_path / "disk.img"
    config = plane_config({"volume": "gone", "backend": "b", "file": str(tmp_path / "gone.img")})
    table = ExportTable(config, gateway.rig.context, lambda: None)
    gateway.talk._exports = table
    gateway.say(FLAGS, go("gone"))
    ((_, kind, words),) = gateway.heard()[0]
    assert kind == p.Rep.ERR_UNKNOWN
    assert b"gone.img cannot be used" in words
    assert errors_of(gateway) == (1, [(FAILED, 0, 1, 0)]), "a volume that is not there has failed its client"
    path.rename(tmp_path / "gone.img")
    gateway.say(go("gone"))
    assert [item[1] for item in gateway.heard()[0]] == [p.Rep.INFO, p.Rep.ACK]
    table.close()


def test_an_upstream_is_asked_first_and_its_facts_are_passed_on_as_far_as_we_can_keep_them(gateway):
    gateway.say(FLAGS, go("up"))
    assert gateway.heard() == ([], b"")
    gateway.upstream_answers()
    flags = p.TX_HAS_FLAGS | p.TX_SEND_FLUSH | p.TX_READ_ONLY
    assert gateway.heard()[0][0][2] == p.info_export(p.ExportFacts(MIB, flags))
    assert gateway.learned[-1][0]["size_bytes"] == MIB
    assert p.go_data("far") in bytes(gateway.far.sent)
    gateway.say(p.request(p.Cmd.READ, 1, 0, 4))
    assert bytes(gateway.far.sent).endswith(p.request(p.Cmd.READ, 1, 0, 4))


@pytest.mark.parametrize("opt", [p.Opt.GO, p.Opt.INFO])
def test_block_sizes_of_the_upstream_are_asked_for_and_told_to_a_client_that_asks(gateway, opt):
    gateway.say(FLAGS, go("up", opt, (p.Info.BLOCK_SIZE,)))
    gateway.upstream_answers(opt, p.info_block_size(p.BlockSizes(512, 8192, 1 << 30)))
    assert go("far", opt, (p.Info.BLOCK_SIZE,)) in bytes(gateway.far.sent)
    found, _ = gateway.heard()
    assert found[1] == (opt, p.Rep.INFO, p.info_block_size(p.BlockSizes(512, 8192, 32 << 20)))


@pytest.mark.parametrize("asked", [p.option(p.Opt.EXPORT_NAME, b"up"), go("up")])
def test_an_upstream_that_insists_on_its_block_sizes_is_usable_by_a_client_that_asks_for_none(gateway, asked):
    gateway.say(FLAGS, asked)
    gateway.rig.loop.fire(0)
    gateway.rig.loop.handlers[gateway.far.fileno()](OUT)
    gateway.rig.deliver(gateway.far, p.greeting() + p.option_reply(p.Opt.GO, p.Rep.ERR_BLOCK_SIZE_REQD))
    sizes = p.info_block_size(p.BlockSizes(4096, 4096, MIB))
    infos = (sizes, p.info_export(p.ExportFacts(MIB, UPSTREAM_FLAGS)))
    said = b"".join(p.option_reply(p.Opt.GO, p.Rep.INFO, info) for info in infos)
    gateway.rig.deliver(gateway.far, said + p.option_reply(p.Opt.GO, p.Rep.ACK))
    told = [data for _, _, data in gateway.heard()[0][1:]]
    assert told == ([sizes, b""] if asked == go("up") else []), "what it must keep to, where there is a way"
    gateway.say(p.request(p.Cmd.READ, 1, 0, 512), p.request(p.Cmd.READ, 2, 0, 4096))
    assert replies(gateway.heard()[1]) == [(1, p.EINVAL, b"")]
    assert bytes(gateway.far.sent).endswith(p.request(p.Cmd.READ, 2, 0, 4096))


def test_information_does_not_keep_the_upstream_nor_make_a_stream(gateway):
    gateway.say(FLAGS, go("up", p.Opt.INFO))
    gateway.upstream_answers(p.Opt.INFO)
    assert [item[1] for item in gateway.heard()[0]] == [p.Rep.INFO, p.Rep.ACK]
    assert bytes(gateway.far.sent).endswith(p.option(p.Opt.ABORT)), "a client in transmission ends a qemu-nbd"
    gateway.rig.deliver(gateway.far, p.option_reply(p.Opt.ABORT, p.Rep.ACK))
    assert not gateway.far.is_closed, "it closes first"
    gateway.far.is_ended = True
    gateway.rig.loop.handlers[gateway.far.fileno()](IN)
    assert gateway.far.is_closed
    assert gateway.rig.cuts.table.streams == []
    gateway.say(p.option(p.Opt.LIST))
    assert [item[2][4:] for item in gateway.heard()[0]] == [b"up", b"file", b""]


@pytest.mark.parametrize("how", ["refused", "refused later", "silent", "ends", "rubbish"])
def test_an_upstream_that_is_not_there_is_told_to_the_client_who_may_try_again(gateway, how):
    gateway.refusal = "Connection refused" if how == "refused" else ""
    gateway.connect_problem = "Connection refused" if how == "refused later" else ""
    gateway.say(FLAGS, go("up"))
    gateway.rig.loop.fire(0)
    if how == "silent":
        gateway.rig.loop.fire(upstream.OPENING_LIMIT_NS / 1e9)
    elif how != "refused":
        gateway.rig.loop.handlers[gateway.far.fileno()](OUT)
        gateway.far.is_ended = how == "ends"
        gateway.far.incoming.extend([bytes(18)] if how == "rubbish" else [])
        if gateway.far.fileno() in gateway.rig.loop.masks:
            gateway.rig.loop.handlers[gateway.far.fileno()](IN)
    found, _ = gateway.heard()
    assert [item[:2] for item in found] == [(p.Opt.GO, p.Rep.ERR_UNKNOWN)]
    assert b"not available" in found[0][2]
    assert how == "refused" or gateway.far.is_closed
    stall_ms = upstream.OPENING_LIMIT_NS // 10**6 if how == "silent" else 0
    stall = [(OUTSTANDING + io, 0, 0, stall_ms) for io in range(3) if stall_ms]
    failure = (FAILED, 0, 1, 0)
    assert errors_of(gateway) == (1, [failure, *stall]), "storage that is not there has failed its client"
    gateway.say(go("file"))
    assert gateway.heard()[0][-1][1] == p.Rep.ACK


@pytest.mark.parametrize("name", ["file", "up"])
def test_what_is_no_request_behind_go_ends_the_connection_at_once(gateway, name):
    gateway.say(FLAGS, go(name), bytes(p.REQUEST.size))
    if name == "up":
        gateway.upstream_answers()
        assert gateway.far.is_closed
    assert [item[1] for item in gateway.heard()[0]] == [p.Rep.INFO, p.Rep.ACK]
    assert gateway.near.is_closed, "and not when the client says more, which it never may"
    assert [stream.sessions for stream in gateway.rig.cuts.table.streams] == [[]]
    assert gateway.over == [gateway.talk]


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_no_option_behind_a_question_to_the_upstream_ends_the_connection_at_once(gateway, is_there):
    gateway.connect_problem = "" if is_there else "Connection refused"
    gateway.say(FLAGS, go("up", p.Opt.INFO), bytes(p.OPTION.size))
    if is_there:
        gateway.upstream_answers(p.Opt.INFO)
    else:
        gateway.rig.loop.fire(0)
        gateway.rig.loop.handlers[gateway.far.fileno()](OUT)
    assert gateway.near.is_closed
    assert gateway.over == [gateway.talk]
    assert gateway.talk not in gateway.rig.loop.timers


@pytest.mark.parametrize("name", ["file", "up"])
def test_a_session_for_which_there_is_no_memory_leaves_no_connection(gateway, name, monkeypatch):
    def full(*_args, **_how):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(session, "RequestBuffer", full)
    is_raised = pytest.raises(OSError, match="memory")  # in the client's own event the loop logs it
    with is_raised if name == "file" else contextlib.nullcontext():
        gateway.say(FLAGS, go(name))
    if name == "up":
        gateway.upstream_answers()
        assert bytes(gateway.far.sent).endswith(p.request(p.Cmd.DISC, 0, 0, 0))
    assert gateway.near.is_closed
    assert [stream.sessions for stream in gateway.rig.cuts.table.streams] == [[]]
    assert gateway.over == [gateway.talk]


def test_an_unknown_volume_is_refused(gateway):
    gateway.say(FLAGS, go("nope"))
    assert gateway.heard()[0][0][1] == p.Rep.ERR_UNKNOWN
    gateway.say(p.option(p.Opt.EXPORT_NAME, b"nope"))
    assert gateway.near.is_closed
    assert gateway.over == [gateway.talk]


def test_a_client_that_leaves_cancels_the_opening(gateway):
    gateway.say(FLAGS, go("up"))
    gateway.rig.loop.fire(0)
    gateway.rig.loop.handlers[gateway.near.fileno()](GONE)
    assert gateway.near.is_closed
    assert gateway.far.is_closed
    assert gateway.rig.loop.timers == {}


def test_a_client_that_says_nothing_is_let_go(gateway):
    gateway.rig.loop.fire(negotiation.LIMIT_NS / 1e9)
    assert gateway.near.is_closed
    assert gateway.over == [gateway.talk]


def test_a_client_that_does_not_read_is_let_go(gateway):
    gateway.near.window = 10
    gateway.say(FLAGS, p.option(p.Opt.LIST))
    assert gateway.near.is_closed


def test_the_stream_of_a_client_that_still_waits_for_its_upstream_is_not_forgotten(gateway):
    gateway.say(FLAGS, go("up"))
    table = gateway.rig.cuts.table
    (stream,) = table.streams
    assert not stream.is_unused
    for number in range(400):
        table.get(gateway.rig.export, f"job-{number}", gateway.rig.cuts.thresholds)
    assert stream in table.streams
    gateway.upstream_answers()
    assert len(stream.sessions) == 1
    stream.sessions[0].close("the client leaves")
    assert stream.is_unused


def test_a_client_that_leaves_during_negotiation_leaves_its_stream(gateway):
    gateway.say(FLAGS, go("up"))
    (stream,) = gateway.rig.cuts.table.streams
    gateway.talk.close("the client left")
    assert stream.is_unused


def stall_of(gateway):
    """The stall of writes in the next cut of the only stream, ms."""
    (stream,) = gateway.rig.cuts.table.streams
    taken = stream.take(gateway.rig.clock.monotonic_ns())
    return next((stall for io, _, _, stall in taken.missed if io == OUTSTANDING + 2), 0) if taken else 0


def test_a_client_that_gives_up_before_its_upstream_is_given_up_leaves_the_time_that_it_waited(gateway):
    gateway.say(FLAGS, go("up"))
    gateway.rig.loop.fire(2)
    gateway.talk.close("the client left")
    gateway.rig.loop.fire(60)
    assert stall_of(gateway) == 2000
    assert stall_of(gateway) == 0


def test_a_client_that_is_let_in_ends_the_stall_of_those_that_were_refused(gateway):
    gateway.refusal = "Connection refused"
    gateway.say(FLAGS, go("up"))
    gateway.rig.loop.fire(4)
    gateway.refusal = ""
    gateway.say(go("up"))
    gateway.upstream_answers()
    assert gateway.over == [gateway.talk]
    gateway.rig.loop.fire(10)
    assert stall_of(gateway) == 4000
    gateway.rig.loop.fire(10)
    assert stall_of(gateway) == 0


class Crowd:
    """Clients of one plane, each with its socket."""

    def __init__(self, gateway, most=MOST_NEGOTIATIONS):
        self.rig, self._exports = gateway.rig, gateway.exports
        self.guard = guard_of(ListenerSecurity(plain_networks=("10.0.0.0/8",)), self.rig.loop)
        self.table = NegotiationTable(self.guard, most)
        self.socks = []

    def come(self, *said, times=1):
        for _ in range(times):
            sock = FakeSocket()
            self.socks.append(sock)
            if not self.table.make_room(negotiation.identity_of(sock)):
                sock.close()
                continue
            talk = Negotiation(self.rig.loop, sock, self._exports, self.table.discard, self.guard)
            self.table.add(talk)
            talk.start()
            self.rig.deliver(sock, b"".join(said))

    @property
    def gone(self):
        return [number for number, sock in enumerate(self.socks) if sock.is_closed]


def test_of_a_crowd_that_says_nothing_the_oldest_goes_and_the_loop_has_no_more_to_look_at(gateway):
    crowd = Crowd(gateway)
    before = len(gateway.rig.loop.masks), len(gateway.rig.loop.timers)
    with capture_logs() as lines:
        crowd.come(FLAGS)
        crowd.come(times=3000)
    assert not crowd.socks[0].is_closed, "it has spoken"
    assert crowd.gone == list(range(1, 1 + 3001 - 1024))
    assert len(crowd.table) == len(list(crowd.table)) == 1024
    assert len(gateway.rig.loop.masks) - before[0] == 1024
    assert len(gateway.rig.loop.timers) - before[1] == 1024 + 1, "and the line of totals"
    assert crowd.guard.turned_away == {"crowd": 3001 - 1024}
    shown = [line["event"] for line in lines if line["log_level"] != "debug"]
    assert shown == ["client-refused"] * 10


def test_of_a_crowd_that_has_spoken_the_oldest_goes_but_none_that_waits_for_its_upstream(gateway):
    crowd = Crowd(gateway, most=3)
    crowd.come(FLAGS, go("up"))
    crowd.come(FLAGS, times=3)
    assert crowd.gone == [1]
    crowd.come(b"\0\0", times=2)
    assert crowd.gone == [1, 2, 4], "half a word is nothing valid"
    crowd.come(FLAGS, go("file"), times=50)
    assert crowd.gone == [1, 2, 4, 5], "who is let in is in negotiation no more"


def test_a_client_is_turned_away_while_all_others_wait_for_their_upstream(gateway):
    crowd = Crowd(gateway, most=3)
    crowd.come(FLAGS, go("up"), times=5)
    assert crowd.gone == [3, 4]
    assert crowd.guard.turned_away == {"crowd": 2}
    gateway.refusal = "Connection refused"
    crowd.rig.loop.fire(0)
    crowd.come(FLAGS)
    assert crowd.gone == [0, 3, 4], "they were refused, and may ask again"


def test_room_is_made_with_few_looks_however_many_wait(gateway, monkeypatch):
    looks = []
    crowd = Crowd(gateway)
    for name in ("has_spoken", "awaits_storage"):
        monkeypatch.setattr(Negotiation, name, property(lambda _self, name=name: looks.append(name) or True))
    crowd.come(times=1024)
    assert looks == []
    crowd.come(times=100)
    assert looks.count("has_spoken") == 1024, "each is looked at once"
    assert looks.count("awaits_storage") == 100 * 16


STARTTLS = p.option(p.Opt.STARTTLS)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    authority = NbdAuthority(tmp_path_factory.mktemp("pki"))
    authority.issue("server", "gw")
    authority.issue("client", "host-a", "host-a.example")
    authority.issue("client", "host-b")
    return authority


class SecureGateway:
    """Exports ``mine``, for one certificate, and ``all``, for every client; a client with TLS."""

    def __init__(self, tmp_path, pki, name="host-a", **settings):
        self.path = tmp_path / "disk.img"
        self.path.write_bytes(bytes(range(256)) * 4096)
        common = {"backend": "b", "file": str(tmp_path / "disk.img")}
        config = plane_config(
            {"volume": "mine", "allow_names": ["*.example"]} | common, {"volume": "all"} | common
        )
        self.rig = Rig()
        config = dataclasses.replace(config, client_rule="tls-name")
        self.exports = ExportTable(config, self.rig.context, lambda: None)
        self.guard = guard_of(security(pki, pki.folder / "gw", **settings), self.rig.loop)
        self.near = FakeSocket()
        self.peer = TlsPeer(self.near, client_context(pki, pki.folder / name if name else None))
        self.talk = Negotiation(
            self.rig.loop,
            self.near,
            self.exports,
            lambda _talk: None,
            self.guard,
            settings.get("tls", "require"),
        )
        self.talk.start()

    def turn(self):
        fd = self.near.fileno()
        if self.near.incoming and self.rig.loop.masks.get(fd, 0) & IN:
            self.rig.loop.handlers[fd](IN)
        self.rig.loop.turn()
        while fd in self.rig.loop.buffered and self.rig.loop.masks.get(fd, 0) & IN:
            self.rig.loop.handlers[fd](IN)

    def secure(self):
        self.near.incoming.append(FLAGS + STARTTLS)
        self.turn()
        assert bytes(self.near.sent).endswith(p.option_reply(p.Opt.STARTTLS, p.Rep.ACK))
        self.peer.skip()
        while not self.peer.shake() or self.near.incoming:
            self.turn()
        for _ in range(3):
            self.turn()
        return self

    def ask(self, data):
        self.peer.say(data)
        self.turn()
        raw, found = self.peer.heard(), []
        while raw[:8] == p.OPTION_REPLY_MAGIC.to_bytes(8, "big"):
            _, _, kind, length = p.OPTION_REPLY.unpack_from(raw)
            found.append((kind, raw[20 : 20 + length]))
            raw = raw[20 + length :]
        return found, raw


@pytest.fixture
def secure_gateway(tmp_path, pki):
    made = []

    def make(name="host-a", **settings):
        made.append(SecureGateway(tmp_path, pki, name, **settings))
        return made[-1]

    yield make
    for each in made:
        each.exports.close()


def test_behind_tls_a_client_sees_what_its_certificate_may_and_is_counted_by_its_name(secure_gateway):
    gateway = secure_gateway().secure()
    found, _ = gateway.ask(p.option(p.Opt.LIST))
    assert [text[4:] for kind, text in found if kind == p.Rep.SERVER] == [b"mine", b"all"]
    found, _ = gateway.ask(go("mine"))
    assert [kind for kind, _ in found] == [p.Rep.INFO, p.Rep.ACK]
    gateway.peer.say(b"".join(p.request(p.Cmd.READ, n, n * 4096, 4096) for n in range(40)))
    gateway.turn()
    answers = replies(gateway.peer.heard(), dict.fromkeys(range(40), 4096))
    assert answers == [(n, 0, bytes(range(256)) * 16) for n in range(40)]
    (stream,) = gateway.rig.cuts.table.streams
    assert (stream.volume, stream.client) == ("mine", "host-a.example")


def test_an_export_for_others_does_not_exist_and_the_refusal_is_counted(secure_gateway):
    gateway = secure_gateway("host-b").secure()
    found, _ = gateway.ask(p.option(p.Opt.LIST))
    assert [text[4:] for kind, text in found if kind == p.Rep.SERVER] == [b"all"]
    ((hidden_kind, hidden),) = gateway.ask(go("mine", p.Opt.INFO))[0]
    ((unknown_kind, unknown),) = gateway.ask(go("nope", p.Opt.INFO))[0]
    assert hidden_kind == unknown_kind == p.Rep.ERR_UNKNOWN
    assert hidden.replace(b"mine", b"nope") == unknown, "names cannot be tried out"
    assert gateway.guard.turned_away == {"not-allowed": 1}
    found, _ = gateway.ask(go(""))
    assert found[-1][0] == p.Rep.ACK, "of those that it sees, there is just one"


def test_certificates_may_be_optional_and_then_no_name_is_known(secure_gateway):
    gateway = secure_gateway(None, client_certificates="optional").secure()
    assert gateway.ask(go("mine"))[0][0][0] == p.Rep.ERR_UNKNOWN
    assert gateway.ask(go("all"))[0][-1][0] == p.Rep.ACK
    assert gateway.rig.cuts.table.streams[0].client == "10.0.0.7"


def test_a_handshake_that_fails_closes_the_connection_and_is_counted(secure_gateway):
    gateway = secure_gateway(None).secure()
    assert gateway.near.is_closed
    assert gateway.guard.turned_away == {"tls": 1}
    assert (gateway.rig.loop.masks, gateway.rig.loop.buffered) == ({}, set())


def test_requests_in_the_clear_that_wait_behind_starttls_are_never_answered(secure_gateway):
    gateway = secure_gateway()
    gateway.near.incoming.extend([FLAGS + STARTTLS, go("all") + p.request(p.Cmd.READ, 1, 0, 512)])
    gateway.turn()
    before = bytes(gateway.near.sent)
    for _ in range(3):
        gateway.turn()
    said = bytes(gateway.near.sent)[len(before) :]
    assert said[:1] in (b"", b"\x15"), "nothing but an alert of TLS"
    assert gateway.near.is_closed
    assert gateway.rig.cuts.table.streams == []


def test_a_client_that_leaves_or_waits_during_the_handshake_is_let_go(secure_gateway):
    gateway = secure_gateway()
    gateway.near.incoming.append(FLAGS + STARTTLS)
    gateway.turn()
    gateway.rig.loop.fire(negotiation.LIMIT_NS / 1e9)
    assert gateway.near.is_closed
    assert (gateway.rig.loop.masks, len(gateway.rig.loop.timers)) == ({}, 1), "the line of totals"


def test_a_client_that_does_without_tls_where_it_is_required_is_counted(secure_gateway):
    gateway = secure_gateway()
    gateway.near.incoming.append(FLAGS + p.option(p.Opt.LIST) + p.option(p.Opt.ABORT))
    gateway.turn()
    assert gateway.near.is_closed
    assert gateway.guard.turned_away == {"tls-required": 1}


def test_without_usable_certificates_a_client_is_let_go(secure_gateway):
    gateway = secure_gateway(tls_certificate="/nowhere")
    gateway.near.incoming.append(FLAGS + STARTTLS)
    gateway.turn()
    assert gateway.near.is_closed
    assert gateway.guard.turned_away == {"tls": 1}


@pytest.mark.parametrize("name", ["mine@\x1b[31mred\nlevel=error\x07", "no\x1b]0;\u202e\x07", "n" * 4000])
def test_what_a_stranger_asks_for_reaches_the_log_printable_and_bounded(secure_gateway, name):
    gateway = secure_gateway("host-b").secure()
    with capture_logs() as lines:
        ((_, said),) = gateway.ask(go(name))[0]
    (line,) = [line for line in lines if line["event"] == "client-refused"]
    for text in (line["reason"], line["peer"], said.decode()):
        assert text.isprintable()
        assert len(text) < 500


def test_a_client_with_extended_headers_gets_no_export_that_has_lost_them(tmp_path, monkeypatch):
    gateway = Gateway(tmp_path, monkeypatch)
    monkeypatch.setattr(gateway.exports, "has_extended", lambda _client: True)
    gateway.say(FLAGS, p.option(p.Opt.EXTENDED_HEADERS), p.option(p.Opt.GO, p.go_data("file")))
    found, _ = gateway.heard()
    assert [kind for _, kind, _ in found] == [p.Rep.ACK, p.Rep.ERR_UNKNOWN]
    assert b"connect again" in found[1][2]
    gateway.exports.volumes["up"].extended.has = True
    gateway.say(p.option(p.Opt.GO, p.go_data("up")))
    gateway.rig.loop.turn()
    gateway.rig.loop.handlers[gateway.far.fileno()](OUT)
    gateway.rig.deliver(gateway.far, p.greeting() + p.option_reply(p.Opt.EXTENDED_HEADERS, p.Rep.ERR_UNSUP))
    found, _ = gateway.heard()
    assert [kind for _, kind, _ in found] == [p.Rep.ERR_UNKNOWN]
    assert not gateway.exports.volumes["up"].extended.has, "it is asked again before others are offered any"


def test_a_client_that_a_reload_refuses_while_its_upstream_is_asked_is_not_let_in(tmp_path, monkeypatch):
    gateway = Gateway(tmp_path, monkeypatch)
    gateway.talk._guard = guard_of(ListenerSecurity(plain_networks=("10.0.0.0/8",)), gateway.rig.loop)
    gateway.say(FLAGS, go("up"))
    gateway.rig.loop.fire(0)
    up = gateway.exports.volumes["up"]
    up.export = up.export.model_copy(update={"allow_networks": ("11.0.0.0/8",)})
    gateway.upstream_answers()
    assert gateway.near.is_closed
    assert gateway.heard() == ([], b""), "not even that there is such a volume"
    assert up.sessions == set()
    assert gateway.talk._guard.turned_away == {"not-allowed": 1}
    assert gateway.over == [gateway.talk]
    gateway.exports.close()


def test_a_session_knows_its_client_as_the_negotiation_did(secure_gateway):
    gateway = secure_gateway().secure()
    gateway.ask(go("mine"))
    ((session,),) = [stream.sessions for stream in gateway.rig.cuts.table.streams]
    assert session.identity.names[0] == "host-a.example"
    assert session.identity.is_secure
    assert session.identity.certificate
    assert session.export.volume == "mine"
    config = dataclasses.replace(
        plane_config(
            {"volume": "mine", "allow_names": ["*.example"], "backend": "b", "file": str(gateway.path)},
        ),
        client_rule="tls-name",
    )
    gateway.exports.apply(config)
    gateway.guard.end_refused([session])
    assert not session.is_closed
    config.exports[0] = config.exports[0].model_copy(update={"allow_names": ("*.elsewhere",)})
    gateway.exports.apply(config)
    gateway.guard.end_refused([session])
    assert session.is_closed
    assert gateway.guard.turned_away == {"not-allowed": 1}
