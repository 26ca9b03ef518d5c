import itertools
from dataclasses import replace

import pytest

from gateway_agent.errors import NbdProtocolError, UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.handshake import HandshakeEvent, HandshakeState, Open, Send, ServerHandshake
from gateway_agent.nbd.upstream_handshake import CLIENT_TABLE, Agreed, ClientHandshake

FACTS = p.ExportFacts(1 << 30, p.TX_HAS_FLAGS | p.TX_SEND_FLUSH)
FLAGS = p.CLIENT_FLAGS.pack(p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES)
STARTTLS = p.option(p.Opt.STARTTLS)


def sent(actions):
    return b"".join(action.data for action in actions if isinstance(action, Send))


@pytest.mark.parametrize(("state", "event"), list(itertools.product(HandshakeState, HandshakeEvent)))
def test_every_pair_moves_as_the_table_says_or_is_refused(state, event):
    machine = ClientHandshake("x", "up")
    machine.state = state
    if (state, event) in CLIENT_TABLE:
        machine._move(event)
        assert machine.state is CLIENT_TABLE[state, event]
    else:
        with pytest.raises(NbdProtocolError, match="while"):
            machine._move(event)
        assert machine.state is state


def test_the_table_reaches_every_state_of_its_side_and_nothing_leaves_the_end():
    assert {state for state, _ in CLIENT_TABLE} == {
        HandshakeState.GREETING,
        HandshakeState.ASKED,
        HandshakeState.TLS,
        HandshakeState.EXTENDED,
        HandshakeState.STRUCTURED,
        HandshakeState.CONTEXT,
        HandshakeState.GO,
        HandshakeState.NAME,
    }
    assert set(CLIENT_TABLE.values()) == {
        HandshakeState.ASKED,
        HandshakeState.TLS,
        HandshakeState.EXTENDED,
        HandshakeState.STRUCTURED,
        HandshakeState.CONTEXT,
        HandshakeState.GO,
        HandshakeState.NAME,
        HandshakeState.READY,
    }


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


CHUNKS, CHUNKS_AND_STATUS = p.ReplyMode(structured=True), p.ReplyMode(structured=True, allocation=True)
GO = p.option(p.Opt.GO, p.go_data("v"))
SET = p.option(p.Opt.SET_META_CONTEXT, p.meta_context_data("v", [p.ALLOCATION]))
ACK_CHUNKS = p.option_reply(p.Opt.STRUCTURED_REPLY, p.Rep.ACK)


def context(context_id, name=p.ALLOCATION):
    return p.option_reply(p.Opt.SET_META_CONTEXT, p.Rep.META_CONTEXT, p.meta_context(context_id, name))


ACK_CONTEXT = p.option_reply(p.Opt.SET_META_CONTEXT, p.Rep.ACK)


@pytest.mark.parametrize("error", [p.Rep.ERR_UNSUP, p.Rep.ERR_POLICY, p.Rep.ERR_INVALID])
def test_an_upstream_that_has_no_chunks_goes_on_without(error):
    near = ClientHandshake("v", "up", mode=CHUNKS_AND_STATUS)
    assert near.feed(p.greeting()) == FLAGS + p.option(p.Opt.STRUCTURED_REPLY)
    assert near.feed(p.option_reply(p.Opt.STRUCTURED_REPLY, error, b"no")) == GO
    offered = replace(FACTS, flags=FACTS.flags | p.TX_SEND_DF)
    near.feed(
        p.option_reply(p.Opt.GO, p.Rep.INFO, p.info_export(offered)) + p.option_reply(p.Opt.GO, p.Rep.ACK)
    )
    assert (near.state, near.agreed, near.facts) == (HandshakeState.READY, Agreed(), FACTS), (
        "no DF without chunks"
    )


def test_chunks_alone_are_asked_for_when_the_client_wants_no_block_status():
    near = ClientHandshake("v", "up", mode=CHUNKS)
    near.feed(p.greeting())
    assert near.feed(ACK_CHUNKS) == GO
    assert near.agreed == Agreed(structured=True)
    offered = replace(FACTS, flags=FACTS.flags | p.TX_SEND_DF)
    near.feed(p.option_reply(p.Opt.GO, p.Rep.INFO, p.info_export(offered)))
    assert near.facts == offered


@pytest.mark.parametrize(
    ("answer", "context_id"),
    [
        (context(7) + ACK_CONTEXT, 7),
        (context(3, "qemu:dirty-bitmap:x") + context(0) + ACK_CONTEXT, 0),
        (context(3, "qemu:dirty-bitmap:x") + ACK_CONTEXT, None),
        (ACK_CONTEXT, None),
        (p.option_reply(p.Opt.SET_META_CONTEXT, p.Rep.ERR_UNSUP), None),
        (context(7) + p.option_reply(p.Opt.SET_META_CONTEXT, p.Rep.ERR_TOO_BIG), None),
    ],
)
def test_the_context_is_what_the_upstream_calls_it_or_there_is_none(answer, context_id):
    near = ClientHandshake("v", "up", mode=CHUNKS_AND_STATUS)
    near.feed(p.greeting())
    assert near.feed(ACK_CHUNKS) == SET
    assert near.feed(answer) == GO
    assert near.agreed == Agreed(structured=True, context_id=context_id)


def test_chunks_are_asked_for_behind_tls_only():
    near = ClientHandshake("v", "up", wants_tls=True, mode=CHUNKS)
    assert near.feed(p.greeting()) == FLAGS + STARTTLS
    near.feed(p.option_reply(p.Opt.STARTTLS, p.Rep.ACK))
    assert near.secured() == p.option(p.Opt.STRUCTURED_REPLY)
    assert near.feed(ACK_CHUNKS) == GO


@pytest.mark.parametrize(
    "said",
    [
        p.option_reply(p.Opt.STRUCTURED_REPLY, p.Rep.ACK, b"x"),
        p.option_reply(p.Opt.STRUCTURED_REPLY, p.Rep.INFO),
        p.option_reply(p.Opt.GO, p.Rep.ACK),
        ACK_CHUNKS + p.option_reply(p.Opt.SET_META_CONTEXT, p.Rep.META_CONTEXT, b"\0\0\0\1"),
        ACK_CHUNKS + p.option_reply(p.Opt.SET_META_CONTEXT, p.Rep.SERVER, b"\0\0\0\1x"),
    ],
)
def test_an_upstream_that_answers_these_options_wrongly_is_refused(said):
    near = ClientHandshake("v", "up", mode=CHUNKS_AND_STATUS)
    near.feed(p.greeting())
    with pytest.raises(NbdProtocolError):
        near.feed(said)


def test_both_sides_understand_each_other_in_chunks():
    near, far = (
        ClientHandshake("vol-1", "up", mode=CHUNKS_AND_STATUS),
        ServerHandshake(["vol-1"], "client test"),
    )
    said = near.feed(far.greeting())
    for _ in range(2):
        said = near.feed(sent(far.feed(said)))
    assert Open("vol-1", CHUNKS_AND_STATUS) in far.feed(said)
    near.feed(sent(far.opened(FACTS)))
    assert (near.state, near.agreed) == (HandshakeState.READY, Agreed(True, p.ALLOCATION_ID))


@pytest.mark.parametrize("size_bytes", [1 << 63, (1 << 64) - 512])
def test_an_export_whose_size_exceeds_63_bits_is_refused(size_bytes):
    """REGISTER has no room for it: the server would refuse the gateway, with all of its volumes."""
    near, far = ClientHandshake("vol-1", "up"), ServerHandshake(["vol-1"], "client test")
    far.feed(near.feed(far.greeting()))
    with pytest.raises(NbdProtocolError, match="63 bits"):
        near.feed(sent(far.opened(replace(FACTS, size_bytes=size_bytes))))
