import itertools

import pytest

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.handshake import (
    SERVER_TABLE,
    Close,
    HandshakeEvent,
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


@pytest.mark.parametrize(("state", "event"), list(itertools.product(HandshakeState, HandshakeEvent)))
def test_every_pair_moves_as_the_table_says_or_is_refused(state, event):
    machine = ServerHandshake([], "client test")
    machine.state = state
    if (state, event) in SERVER_TABLE:
        machine._move(event)
        assert machine.state is SERVER_TABLE[state, event]
    else:
        with pytest.raises(NbdProtocolError, match="while"):
            machine._move(event)
        assert machine.state is state


def test_the_table_reaches_every_state_of_its_side_and_nothing_leaves_the_end():
    assert {state for state, _ in SERVER_TABLE} == {
        HandshakeState.FLAGS,
        HandshakeState.OPTIONS,
        HandshakeState.BACKEND,
        HandshakeState.TLS,
    }
    assert HandshakeState.TRANSMISSION in SERVER_TABLE.values()


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


@pytest.mark.parametrize("opt", [p.Opt.STARTTLS, 77])
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
        FLAGS + p.OPTION.pack(p.IHAVEOPT, p.Opt.EXPORT_NAME, p.MAX_OPTION_BYTES + 1),
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


STRUCTURED = p.option(p.Opt.STRUCTURED_REPLY)


def contexts(opt, name="vol-1", queries=(p.ALLOCATION,)):
    return p.option(opt, p.meta_context_data(name, queries))


def select(*said):
    return contexts(p.Opt.SET_META_CONTEXT, *said)


def opened_mode(*said):
    """How replies are wanted by a client that says this, and then GO."""
    _, actions = server(*said, GO)
    (opened,) = [action for action in actions if isinstance(action, Open)]
    return opened.mode


def test_structured_replies_and_the_context_are_agreed_and_go_with_the_export():
    machine, actions = server(STRUCTURED, select(), GO)
    assert option_replies(sent(actions)) == [
        (p.Opt.STRUCTURED_REPLY, p.Rep.ACK, b""),
        (p.Opt.SET_META_CONTEXT, p.Rep.META_CONTEXT, p.meta_context(p.ALLOCATION_ID, p.ALLOCATION)),
        (p.Opt.SET_META_CONTEXT, p.Rep.ACK, b""),
    ]
    assert actions[-1] == Open("vol-1", p.ReplyMode(structured=True, allocation=True))
    machine.refused(p.Rep.ERR_UNKNOWN, "not now")
    assert machine.feed(GO)[-1].mode.allocation, "a refused GO takes nothing back"


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ([], p.SIMPLE_REPLIES),
        ([STRUCTURED], p.ReplyMode(structured=True)),
        ([p.option(p.Opt.STRUCTURED_REPLY, b"x")], p.SIMPLE_REPLIES),
        ([select(), STRUCTURED], p.ReplyMode(structured=True)),
        ([STRUCTURED, select("vol-2")], p.ReplyMode(structured=True)),
        ([STRUCTURED, select(), select("vol-2")], p.ReplyMode(structured=True)),
        ([STRUCTURED, select(), select("vol-1", ())], p.ReplyMode(structured=True)),
        ([STRUCTURED, select(), select("vol-1", ("base:",))], p.ReplyMode(structured=True)),
        ([STRUCTURED, select(), select("vol-1", ("qemu:dirty-bitmap:b", "base:no", "no colon"))],
         p.ReplyMode(structured=True)),
        ([STRUCTURED, select(), p.option(p.Opt.SET_META_CONTEXT, b"bad")], p.ReplyMode(structured=True)),
        ([STRUCTURED, select(), p.option(p.Opt.SET_META_CONTEXT, bytes(p.MAX_OPTION_BYTES + 1))],
         p.ReplyMode(structured=True)),
        ([STRUCTURED, select("vol-2"), select("vol-1", ("x-y:", p.ALLOCATION, p.ALLOCATION))],
         p.ReplyMode(structured=True, allocation=True)),
        ([STRUCTURED, select(), contexts(p.Opt.LIST_META_CONTEXT, "vol-2", ())],
         p.ReplyMode(structured=True, allocation=True)),
    ],
)  # fmt: skip
def test_the_last_selection_for_the_export_that_is_opened_holds(said, mode):
    assert opened_mode(*said) == mode


def test_a_context_that_is_selected_twice_in_one_option_is_told_once():
    _, actions = server(STRUCTURED, select("vol-1", (p.ALLOCATION, p.ALLOCATION)))
    assert [kind for _, kind, _ in option_replies(sent(actions))[1:]] == [p.Rep.META_CONTEXT, p.Rep.ACK]


@pytest.mark.parametrize(
    ("queries", "is_found"),
    [((), True), (("base:",), True), ((p.ALLOCATION,), True), (("x-y:", "base:"), True),
     (("base:alloc",), False), (("qemu:",), False), (("",), False)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["vol-1", "", "no such volume"])
def test_contexts_are_listed_as_asked_for_whatever_the_export(queries, is_found, name):
    _, actions = server(STRUCTURED, contexts(p.Opt.LIST_META_CONTEXT, name, queries))
    found = option_replies(sent(actions))[1:]
    opt, told = p.Opt.LIST_META_CONTEXT, p.meta_context(0, p.ALLOCATION)
    assert found == [*([(opt, p.Rep.META_CONTEXT, told)] if is_found else []), (opt, p.Rep.ACK, b"")]


@pytest.mark.parametrize("opt", [p.Opt.LIST_META_CONTEXT, p.Opt.SET_META_CONTEXT])
def test_contexts_need_structured_replies_first(opt):
    _, actions = server(contexts(opt))
    assert [item[:2] for item in option_replies(sent(actions))] == [(opt, p.Rep.ERR_INVALID)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\5vol-1",
        b"\0\0\0\5vol-1\0\0\0\1",
        b"\0\0\0\5vol-1\0\0\0\0x",
        b"\0\0\0\1v\0\0\0\1\0\0\0\5base",
        b"\0\0\0\1v\0\0\0\1\0\0\0\1\xff",
        b"\xff\xff\xff\xffv\0\0\0\0",
        p.meta_context_data("v", ("base:" + "x" * 4096,)),
        p.meta_context_data("v", (p.ALLOCATION,)) + b"\0",
        p.meta_context_data("v" * 4097, ()),
    ],
)
def test_malformed_contexts_are_invalid_and_harmless(data):
    machine, actions = server(STRUCTURED, p.option(p.Opt.SET_META_CONTEXT, data), GO)
    assert option_replies(sent(actions))[1][:2] == (p.Opt.SET_META_CONTEXT, p.Rep.ERR_INVALID)
    assert machine.state is HandshakeState.BACKEND


@pytest.mark.parametrize("opt", [p.Opt.LIST, p.Opt.GO, p.Opt.LIST_META_CONTEXT, p.Opt.STARTTLS, 77])
@pytest.mark.parametrize("piece", [977, 1 << 20])
def test_an_option_that_is_too_long_is_answered_and_dropped(opt, piece):
    machine = ServerHandshake(["vol-1"], "client test")
    said = FLAGS + p.option(opt, b"\x49" * (p.MAX_OPTION_BYTES + 1)) + GO
    actions = []
    for start in range(0, len(said), piece):
        actions += machine.feed(said[start : start + piece])
        assert len(machine._input) <= p.MAX_OPTION_BYTES
    assert [item[:2] for item in option_replies(sent(actions))] == [(opt, p.Rep.ERR_TOO_BIG)]
    assert actions[-1] == Open("vol-1")


def test_what_is_too_long_needs_tls_first_too_where_it_is_required():
    _, actions = tls_server("require", p.option(p.Opt.LIST, bytes(p.MAX_OPTION_BYTES + 1)), STARTTLS)
    assert [item[1] for item in option_replies(sent(actions))] == [p.Rep.ERR_TLS_REQD, p.Rep.ACK]


def test_name_and_description_are_said_to_a_client_that_asks():
    texts = {p.Info.NAME: "vol-1", p.Info.DESCRIPTION: "volume vol-1 on backend b"}
    for wanted in ((), (p.Info.NAME,), (p.Info.DESCRIPTION, p.Info.NAME, p.Info.BLOCK_SIZE, 999)):
        machine, _ = server(p.option(p.Opt.INFO, p.go_data("", wanted)))
        said = [item[2] for item in option_replies(sent(machine.opened(FACTS, texts)))[1:-1]]
        expected = [p.info_text(kind, text) for kind, text in texts.items() if kind in wanted]
        expected += [p.info_block_size(FACTS.blocks)] if p.Info.BLOCK_SIZE in wanted else []
        assert said == expected


def test_what_was_agreed_before_tls_is_agreed_again_or_does_not_hold():
    machine, _ = tls_server("offer", STRUCTURED, select())
    machine.feed(STARTTLS)
    machine.secured()
    actions = machine.feed(select() + GO)
    assert option_replies(sent(actions))[0][1] == p.Rep.ERR_INVALID
    assert actions[-1] == Open("vol-1")
    machine.refused(p.Rep.ERR_UNKNOWN, "no")
    assert machine.feed(STRUCTURED + select() + GO)[-1].mode == p.ReplyMode(structured=True, allocation=True)
