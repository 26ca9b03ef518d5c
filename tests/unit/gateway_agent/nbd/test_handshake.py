import itertools
from dataclasses import replace

import pytest

from gateway_agent.errors import NbdProtocolError, UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.handshake import (
    CLIENT_TABLE,
    SERVER_TABLE,
    ClientHandshake,
    Close,
    Event,
    HandshakeState,
    Open,
    Send,
    ServerHandshake,
    StartTls,
    Transmit,
)

FACTS = p.ExportFacts(1 << 30, p.TX_HAS_FLAGS | p.TX_SEND_FLUSH)
FLAGS = p.CLIENT_FLAGS.pack(p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES)
OLD_FLAGS = p.CLIENT_FLAGS.pack(p.FLAG_FIXED_NEWSTYLE)
GO = p.option(p.Opt.GO, p.go_data("vol-1"))


def sent(actions):
    return b"".join(action.data for action in actions if isinstance(action, Send))


def option_replies(raw):
    found = []
    while raw:
        magic, opt, kind, length = p.OPTION_REPLY.unpack_from(raw)
        assert magic == p.OPTION_REPLY_MAGIC
        found.append((opt, kind, raw[20 : 20 + length]))
        raw = raw[20 + length :]
    return found


def server(*said):
    machine = ServerHandshake(["vol-1", "vol-2"], "client test")
    actions = machine.feed(b"".join((FLAGS, *said)))
    return machine, actions


@pytest.mark.parametrize("table", [SERVER_TABLE, CLIENT_TABLE])
@pytest.mark.parametrize(("state", "event"), list(itertools.product(HandshakeState, Event)))
def test_every_pair_moves_as_the_table_says_or_is_refused(table, state, event):
    machine = ServerHandshake([], "client test") if table is SERVER_TABLE else ClientHandshake("x", "up")
    machine.state = state
    if (state, event) in table:
        machine._move(event)
        assert machine.state is table[state, event]
    else:
        with pytest.raises(NbdProtocolError, match="while"):
            machine._move(event)
        assert machine.state is state


def test_the_tables_reach_every_state_of_their_side_and_nothing_leaves_the_end():
    assert {state for state, _ in SERVER_TABLE} == {
        HandshakeState.FLAGS,
        HandshakeState.OPTIONS,
        HandshakeState.BACKEND,
        HandshakeState.TLS,
    }
    assert {state for state, _ in CLIENT_TABLE} == {
        HandshakeState.GREETING,
        HandshakeState.ASKED,
        HandshakeState.TLS,
        HandshakeState.GO,
        HandshakeState.NAME,
    }
    assert HandshakeState.TRANSMISSION in SERVER_TABLE.values()
    assert set(CLIENT_TABLE.values()) == {
        HandshakeState.ASKED,
        HandshakeState.TLS,
        HandshakeState.GO,
        HandshakeState.NAME,
        HandshakeState.READY,
    }


def test_go_opens_the_backend_and_ends_in_transmission():
    machine, actions = server(p.option(p.Opt.GO, p.go_data("vol-1", (p.Info.BLOCK_SIZE,))))
    assert Open("vol-1") in actions
    assert machine.keeps_backend
    actions = machine.opened(FACTS)
    assert option_replies(sent(actions)) == [
        (p.Opt.GO, p.Rep.INFO, p.info_export(FACTS)),
        (p.Opt.GO, p.Rep.INFO, p.info_block_size(FACTS.blocks)),
        (p.Opt.GO, p.Rep.ACK, b""),
    ]
    assert actions[-1] == Transmit(b"")
    assert machine.state is HandshakeState.TRANSMISSION


def test_bytes_behind_go_belong_to_transmission():
    early = p.request(p.Cmd.READ, 1, 0, 512)
    machine, _ = server(GO, early)
    assert machine.opened(FACTS)[-1] == Transmit(early)


def test_info_answers_and_goes_on_with_what_was_pipelined():
    machine, _ = server(p.option(p.Opt.INFO, p.go_data("vol-1")), p.option(p.Opt.LIST))
    assert not machine.keeps_backend
    found = option_replies(sent(machine.opened(FACTS)))
    assert [(opt, kind) for opt, kind, _ in found] == [
        (p.Opt.INFO, p.Rep.INFO),
        (p.Opt.INFO, p.Rep.ACK),
        (p.Opt.LIST, p.Rep.SERVER),
        (p.Opt.LIST, p.Rep.SERVER),
        (p.Opt.LIST, p.Rep.ACK),
    ]
    assert machine.state is HandshakeState.OPTIONS


def test_a_refused_go_carries_the_reason_and_the_client_may_go_on():
    machine, _ = server(GO)
    found = option_replies(sent(machine.refused(p.Rep.ERR_UNKNOWN, "storage is down")))
    assert found == [(p.Opt.GO, p.Rep.ERR_UNKNOWN, b"storage is down")]
    assert Open("vol-1") in machine.feed(GO)


@pytest.mark.parametrize(("flags", "padding"), [(FLAGS, 0), (OLD_FLAGS, 124)])
def test_export_name_has_the_old_reply(flags, padding):
    machine = ServerHandshake(["vol-1"], "client test")
    assert Open("vol-1") in machine.feed(flags + p.option(p.Opt.EXPORT_NAME, b"vol-1"))
    assert len(sent(machine.opened(FACTS))) == 10 + padding


def test_a_refused_export_name_closes():
    machine, _ = server(p.option(p.Opt.EXPORT_NAME, b"nope"))
    assert machine.refused(p.Rep.ERR_UNKNOWN, "no such volume") == [Close("no such volume")]
    assert machine.state is HandshakeState.CLOSED


@pytest.mark.parametrize("opt", [p.Opt.STRUCTURED_REPLY, p.Opt.STARTTLS, 77])
def test_what_we_do_not_do_is_refused_and_harmless(opt):
    _machine, actions = server(p.option(opt, b"abc"), GO)
    assert option_replies(sent(actions))[0][:2] == (opt, p.Rep.ERR_UNSUP)
    assert Open("vol-1") in actions


def test_abort_is_acknowledged_then_closed():
    _machine, actions = server(p.option(p.Opt.ABORT))
    assert option_replies(sent(actions)) == [(p.Opt.ABORT, p.Rep.ACK, b"")]
    assert isinstance(actions[-1], Close)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\7abc\0\0",
        p.go_data("v")[:-1],
        p.go_data("v") + b"\0",
        b"\xff\xff\xff\xff\0\0",
        b"\0\0\0\1\xff\0\0",
    ],
)
def test_a_malformed_go_is_invalid_but_not_fatal(data):
    machine, actions = server(p.option(p.Opt.GO, data))
    assert option_replies(sent(actions))[0][1] == p.Rep.ERR_INVALID
    assert machine.state is HandshakeState.OPTIONS


@pytest.mark.parametrize(
    "said",
    [
        p.CLIENT_FLAGS.pack(0),
        p.CLIENT_FLAGS.pack(8 | p.FLAG_FIXED_NEWSTYLE),
        FLAGS + bytes(16),
        FLAGS + p.OPTION.pack(p.IHAVEOPT, p.Opt.GO, p.MAX_OPTION_BYTES + 1),
        FLAGS + p.option(p.Opt.EXPORT_NAME, b"\xff"),
    ],
)
def test_a_client_that_breaks_the_protocol_is_disconnected(said):
    with pytest.raises(NbdProtocolError):
        ServerHandshake([], "client test").feed(said)


def test_negotiation_in_single_bytes_is_the_same():
    machine = ServerHandshake(["vol-1", "vol-2"], "client test")
    actions = []
    for byte in FLAGS + p.option(p.Opt.LIST) + GO:
        actions += machine.feed(bytes([byte]))
    _, whole = server(p.option(p.Opt.LIST), GO)
    assert sent(actions) == sent(whole)
    assert actions[-1] == Open("vol-1")


def test_both_sides_understand_each_other():
    near, far = ClientHandshake("vol-1", "up"), ServerHandshake(["vol-1"], "client test")
    actions = far.feed(near.feed(far.greeting()))
    assert Open("vol-1") in actions
    near.feed(sent(far.opened(FACTS)))
    assert near.state is HandshakeState.READY
    assert near.facts == FACTS
    assert near.left_over == b""


def test_an_upstream_without_go_is_asked_by_export_name():
    near = ClientHandshake("vol-1", "up")
    near.feed(p.GREETING.pack(p.NBDMAGIC, p.IHAVEOPT, p.FLAG_FIXED_NEWSTYLE))
    asked = near.feed(p.option_reply(p.Opt.GO, p.Rep.ERR_UNSUP))
    assert asked == p.option(p.Opt.EXPORT_NAME, b"vol-1")
    near.feed(p.EXPORT_NAME_REPLY.pack(4096, 1) + bytes(124))
    assert near.facts == p.ExportFacts(4096, 1)
    assert near.state is HandshakeState.READY


def test_only_the_facts_are_asked_for_by_info_which_is_ended_by_abort():
    near = ClientHandshake("vol-1", "up", will_transmit=False)
    asked = near.feed(p.greeting())
    assert asked.endswith(p.option(p.Opt.INFO, p.go_data("vol-1")))
    near.feed(
        p.option_reply(p.Opt.INFO, p.Rep.INFO, p.info_export(FACTS)) + p.option_reply(p.Opt.INFO, p.Rep.ACK)
    )
    assert (near.state, near.facts, near.farewell) == (HandshakeState.READY, FACTS, p.option(p.Opt.ABORT))
    near = ClientHandshake("vol-1", "up", will_transmit=False)
    near.feed(p.greeting() + p.option_reply(p.Opt.INFO, p.Rep.ERR_UNSUP))
    near.feed(p.EXPORT_NAME_REPLY.pack(4096, 1))
    assert (near.state, near.farewell) == (HandshakeState.READY, p.request(p.Cmd.DISC, 0, 0, 0))


def test_an_upstream_that_insists_on_its_block_sizes_is_asked_for_them():
    near = ClientHandshake("vol-1", "up")
    near.feed(p.greeting())
    insists = p.option_reply(p.Opt.GO, p.Rep.ERR_BLOCK_SIZE_REQD, b"ask me")
    assert near.feed(insists) == p.option(p.Opt.GO, p.go_data("vol-1", (p.Info.BLOCK_SIZE,)))
    sizes = p.BlockSizes(4096, 65536, 1 << 20)
    for info in (p.info_block_size(sizes), p.info_export(FACTS), b"\0\1name", b""):
        near.feed(p.option_reply(p.Opt.GO, p.Rep.INFO, info))
    near.feed(p.option_reply(p.Opt.GO, p.Rep.ACK))
    assert near.facts == replace(FACTS, blocks=sizes)
    near = ClientHandshake("vol-1", "up", wants_block_size=True)
    near.feed(p.greeting())
    with pytest.raises(UpstreamError, match="ask me"):
        near.feed(insists)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ((1, 1, 0xFFFFFFFF), (1, 1, 32 << 20)),
        ((512, 4096, 1 << 20), (512, 4096, 1 << 20)),
        ((65536, 64 << 20, 64 << 20), (65536, 32 << 20, 32 << 20)),
        ((4096, 4096, 10_000), (4096, 4096, 8192)),
        ((512, 1 << 20, 4096), (512, 1 << 20, 4096)),  # allowed for an export below what is preferred
    ],
)
def test_block_sizes_are_merged_with_our_own_limit(told, kept):
    assert p.parse_block_size(p.info_block_size(p.BlockSizes(*told))) == p.BlockSizes(*kept)


def test_an_upstream_that_refuses_says_why():
    near = ClientHandshake("vol-9", "up")
    near.feed(p.greeting())
    with pytest.raises(UpstreamError, match="no such thing"):
        near.feed(p.option_reply(p.Opt.GO, p.Rep.ERR_UNKNOWN, b"no such thing"))


@pytest.mark.parametrize(
    "said",
    [
        bytes(18),
        p.GREETING.pack(p.NBDMAGIC, p.IHAVEOPT, 0),
        p.greeting() + p.option_reply(p.Opt.LIST, p.Rep.ACK),
        p.greeting() + p.option_reply(p.Opt.GO, p.Rep.ACK),
        p.greeting() + p.option_reply(p.Opt.GO, 99),
        p.greeting() + p.OPTION_REPLY.pack(p.OPTION_REPLY_MAGIC, p.Opt.GO, p.Rep.INFO, 1 << 20),
        p.greeting() + p.option_reply(p.Opt.GO, p.Rep.INFO, b"\0\3" + bytes(11)),
        *(
            p.greeting() + p.option_reply(p.Opt.GO, p.Rep.INFO, p.info_block_size(p.BlockSizes(*sizes)))
            for sizes in ((0, 1, 1), (1, 0, 1), (3, 4, 8), (2, 6, 8), (8, 4, 16), (8, 8, 4), (1 << 17,) * 3)
        ),
    ],
)
def test_an_upstream_that_breaks_the_protocol_is_refused(said):
    with pytest.raises(NbdProtocolError):
        ClientHandshake("v", "up").feed(said)


STARTTLS = p.option(p.Opt.STARTTLS)


def tls_server(tls, *said):
    machine = ServerHandshake(["vol-1"], "client test", tls)
    return machine, machine.feed(b"".join((FLAGS, *said)))


@pytest.mark.parametrize("opt", [p.Opt.GO, p.Opt.INFO, p.Opt.LIST, p.Opt.STRUCTURED_REPLY, 77])
def test_where_tls_is_required_every_other_option_is_refused_until_it_is_there(opt):
    said = p.option(opt, p.go_data("vol-1") if opt in (p.Opt.GO, p.Opt.INFO) else b"")
    machine, actions = tls_server("require", said, said)
    assert [item[:2] for item in option_replies(sent(actions))] == [(opt, p.Rep.ERR_TLS_REQD)] * 2
    assert not any(isinstance(action, Open) for action in actions)
    assert machine.lacked_tls
    actions = machine.feed(STARTTLS)
    assert option_replies(sent(actions)) == [(p.Opt.STARTTLS, p.Rep.ACK, b"")]
    assert actions[-1] == StartTls()
    machine.exports = ["vol-2", "vol-3"]
    machine.secured()
    (first, second, last) = option_replies(sent(machine.feed(p.option(p.Opt.LIST))))
    assert (first[2][4:], second[2][4:], last[1]) == (b"vol-2", b"vol-3", p.Rep.ACK)
    assert Open("vol-2") in machine.feed(p.option(p.Opt.GO, p.go_data("vol-2")))


def test_where_tls_is_required_export_name_closes_and_abort_is_answered():
    machine, actions = tls_server("require", p.option(p.Opt.EXPORT_NAME, b"vol-1"))
    assert sent(actions) == b""
    assert isinstance(actions[-1], Close)
    assert machine.state is HandshakeState.CLOSED
    _, actions = tls_server("require", p.option(p.Opt.ABORT))
    assert option_replies(sent(actions)) == [(p.Opt.ABORT, p.Rep.ACK, b"")]


def test_offered_tls_is_the_clients_choice():
    _, actions = tls_server("offer", GO)
    assert Open("vol-1") in actions
    _, actions = tls_server("offer", p.option(p.Opt.LIST), STARTTLS)
    assert actions[-1] == StartTls()


@pytest.mark.parametrize("behind", [GO, b"x", b"\x16\x03\x01"])
def test_bytes_behind_starttls_end_the_connection_and_are_never_looked_at(behind):
    machine = ServerHandshake(["vol-1"], "client test", "offer")
    with pytest.raises(NbdProtocolError, match="behind STARTTLS"):
        machine.feed(FLAGS + STARTTLS + behind)


def test_starttls_with_data_or_a_second_time_is_invalid_and_harmless():
    machine, actions = tls_server("offer", p.option(p.Opt.STARTTLS, b"x"))
    assert option_replies(sent(actions))[0][:2] == (p.Opt.STARTTLS, p.Rep.ERR_INVALID)
    machine.feed(STARTTLS)
    machine.secured()
    actions = machine.feed(STARTTLS + GO)
    assert option_replies(sent(actions))[0][:2] == (p.Opt.STARTTLS, p.Rep.ERR_INVALID)
    assert Open("vol-1") in actions


def test_what_is_agreed_before_tls_about_an_export_does_not_hold_behind_it():
    machine, actions = tls_server("offer", p.option(p.Opt.INFO, p.go_data("vol-1", (p.Info.BLOCK_SIZE,))))
    assert Open("vol-1") in actions
    machine.opened(FACTS)
    machine.feed(STARTTLS)
    machine.secured()
    machine.feed(GO)
    assert not machine.wants_block_size


def asked_for_tls():
    near = ClientHandshake("vol-1", "up", wants_tls=True)
    assert near.feed(p.greeting()) == FLAGS + STARTTLS, "nothing else is said in the clear"
    return near


def test_both_sides_understand_each_other_behind_tls():
    near, far = asked_for_tls(), ServerHandshake([], "client test", "require")
    assert near.feed(sent(far.feed(FLAGS + STARTTLS))) == b""
    assert (near.state, far.state) == (HandshakeState.TLS, HandshakeState.TLS)
    far.secured()
    assert Open("vol-1") in far.feed(near.secured())
    near.feed(sent(far.opened(FACTS)))
    assert (near.state, near.facts) == (HandshakeState.READY, FACTS)


@pytest.mark.parametrize("kind", [p.Rep.ERR_UNSUP, p.Rep.ERR_POLICY])
def test_an_upstream_without_tls_is_refused_and_never_asked_in_the_clear(kind):
    with pytest.raises(UpstreamError, match="refused TLS: not today"):
        asked_for_tls().feed(p.option_reply(p.Opt.STARTTLS, kind, b"not today"))


@pytest.mark.parametrize(
    "said",
    [
        p.option_reply(p.Opt.STARTTLS, p.Rep.ACK) + b"x",
        p.option_reply(p.Opt.GO, p.Rep.ACK),
        bytes(20),
    ],
)
def test_what_an_upstream_says_before_tls_but_its_acknowledgement_is_a_fault(said):
    with pytest.raises(NbdProtocolError):
        asked_for_tls().feed(said)


@pytest.mark.parametrize("wants_tls", [False, True])
def test_what_an_upstream_says_of_its_refusal_is_printable_and_bounded(wants_tls):
    talk = ClientHandshake("far", "up", wants_tls=wants_tls)
    talk.feed(p.greeting())
    opt = p.Opt.STARTTLS if wants_tls else p.Opt.GO
    with pytest.raises(UpstreamError) as caught:
        talk.feed(p.option_reply(opt, p.Rep.ERR_POLICY, b"\x1b[31mno\n\x07\xff" * 500))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
