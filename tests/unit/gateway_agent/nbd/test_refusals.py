"""Which requests are refused, with which error of the protocol, and in which words."""

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.protocol import Cmd
from gateway_agent.nbd.refusals import refusal
from tests.support.nbd import MIB

ALL = p.TX_PASSED_ON & ~p.TX_READ_ONLY
BOTH = p.ReplyMode(structured=True, allocation=True)
BLOCKS = p.BlockSizes(512, 4096, 64 << 10)


def asked(command, offset=0, length=512, flags=0, offered=ALL, mode=BOTH, blocks=BLOCKS):
    request = (0, 1, command, length, offset, flags, 28)
    return refusal(request, p.ExportFacts(MIB, offered, blocks), mode)


@pytest.mark.parametrize("command", [each for each in Cmd if each not in (Cmd.DISC, Cmd.FLUSH)])
def test_what_fits_is_served(command):
    for offset, length in ((0, 512), (MIB - 512, 512), (0, 64 << 10)):
        assert asked(command, offset, length) is None
        assert asked(command, offset, length, p.CMD_FLAG_FUA) is None, "valid for all commands"
    assert asked(Cmd.FLUSH, 0, 0) is None


@pytest.mark.parametrize(
    ("request_parts", "error", "words"),
    [
        ((Cmd.READ, MIB, 512), p.EINVAL, "512 bytes at 1048576 go beyond the end at 1048576"),
        ((Cmd.READ, (1 << 64) - 512, 512), p.EINVAL, "beyond the end"),
        ((Cmd.TRIM, MIB - 512, 1024), p.EINVAL, "beyond the end"),
        ((Cmd.CACHE, MIB - 512, 1024), p.EINVAL, "beyond the end"),
        ((Cmd.BLOCK_STATUS, MIB - 512, 1024), p.EINVAL, "beyond the end"),
        ((Cmd.WRITE, MIB - 512, 1024), p.ENOSPC, "beyond the end"),
        ((Cmd.WRITE_ZEROES, MIB - 512, 1024), p.ENOSPC, "beyond the end"),
        ((Cmd.READ, 1, 512), p.EINVAL, "not multiples of the minimum block of 512"),
        ((Cmd.CACHE, 0, 513), p.EINVAL, "not multiples"),
        ((Cmd.READ, 0, 128 << 10), p.EINVAL, "above the maximum of 65536; divide the request"),
        ((Cmd.WRITE, 0, 128 << 10), p.EINVAL, "above the maximum"),
        ((Cmd.READ, 0, 128 << 10, p.CMD_FLAG_DF), p.EOVERFLOW, "above the maximum"),
        ((Cmd.BLOCK_STATUS, 0, 0), p.EINVAL, "one byte at least"),
        ((Cmd.FLUSH, 0, 512), p.EINVAL, "a flush has offset 0, length 512; both are 0"),
        ((Cmd.FLUSH, 512, 0), p.EINVAL, "a flush has offset 512"),
        ((8, 0, 0), p.EINVAL, "command 8 is not offered"),
        ((65535, 0, 0), p.EINVAL, "command 65535"),
        ((Cmd.READ, 0, 512, 1 << 15), p.EINVAL, "flags 0x8000 are not offered for command 0"),
        ((Cmd.READ, 0, 512, p.CMD_FLAG_REQ_ONE), p.EINVAL, "flags 0x8"),
        ((Cmd.READ, 0, 512, p.CMD_FLAG_NO_HOLE), p.EINVAL, "flags 0x2"),
        ((Cmd.WRITE, 0, 512, p.CMD_FLAG_DF), p.EINVAL, "flags 0x4"),
        ((Cmd.TRIM, 0, 512, p.CMD_FLAG_FAST_ZERO), p.EINVAL, "flags 0x10"),
        ((Cmd.BLOCK_STATUS, 0, 512, p.CMD_FLAG_DF), p.EINVAL, "flags 0x4"),
        ((Cmd.CACHE, 0, 512, p.CMD_FLAG_REQ_ONE), p.EINVAL, "flags 0x8"),
    ],
)
def test_what_does_not_is_refused_with_the_protocols_error(request_parts, error, words):
    told, text = asked(*request_parts)
    assert told == error
    assert words in text


@pytest.mark.parametrize(
    ("command", "flag", "offer"),
    [
        (Cmd.TRIM, 0, p.TX_SEND_TRIM),
        (Cmd.WRITE_ZEROES, 0, p.TX_SEND_WRITE_ZEROES),
        (Cmd.CACHE, 0, p.TX_SEND_CACHE),
        (Cmd.READ, p.CMD_FLAG_DF, p.TX_SEND_DF),
        (Cmd.WRITE, p.CMD_FLAG_FUA, p.TX_SEND_FUA),
        (Cmd.WRITE_ZEROES, p.CMD_FLAG_FAST_ZERO, p.TX_SEND_FAST_ZERO),
    ],
)
def test_what_was_not_offered_reaches_no_storage(command, flag, offer):
    assert asked(command, 0, 512, flag) is None
    assert asked(command, 0, 512, flag, offered=ALL & ~offer)[0] == p.EINVAL


def test_a_read_only_export_may_be_looked_at():
    offered = ALL & ~p.TX_CHANGES | p.TX_READ_ONLY
    for command in (Cmd.WRITE, Cmd.TRIM, Cmd.WRITE_ZEROES):
        assert asked(command, offered=offered) == (p.EPERM, "this export is read-only")
    for command in (Cmd.READ, Cmd.CACHE, Cmd.BLOCK_STATUS):
        assert asked(command, offered=offered) is None


@pytest.mark.parametrize("mode", [p.SIMPLE_REPLIES, p.ReplyMode(structured=True)])
def test_block_status_needs_its_context(mode):
    assert asked(Cmd.BLOCK_STATUS, flags=p.CMD_FLAG_REQ_ONE) is None
    assert asked(Cmd.BLOCK_STATUS, mode=mode) == (
        p.EINVAL,
        "block status needs the context base:allocation, selected for this export",
    )


def test_the_largest_requests():
    facts = p.ExportFacts(16 << 40, ALL)
    for offset, length, is_served in (
        ((16 << 40) - (32 << 20), 32 << 20, True),
        ((16 << 40) - (32 << 20) + 1, 32 << 20, False),
        (0, (32 << 20) + 1, False),
    ):
        found = refusal((0, 1, Cmd.READ, length, offset, 0, 28), facts, BOTH)
        assert (found is None) == is_served
    whole = (0, 1, Cmd.BLOCK_STATUS, (1 << 32) - 1, (16 << 40) - (1 << 32), 0, 28)
    assert refusal(whole, facts, BOTH) is None
