"""Random and mutated bytes before every parser of NBD, both ways; ``make fuzz`` does it for minutes."""

import random
from collections.abc import Callable

import pytest

from gateway_agent.nbd import buffers, chunks, handshake, replies, upstream_handshake
from tests.fuzz.nbd_bytes import PARSERS, fuzz_parsers

CASES = 150


def test_no_bytes_bring_a_parser_to_what_it_must_not_do() -> None:
    fuzz_parsers(random.Random(1), CASES)


@pytest.mark.parametrize(
    "parser",
    [
        handshake.ServerHandshake,
        upstream_handshake.ClientHandshake,
        buffers.RequestBuffer,
        replies.ReplyReader,
        chunks.ChunkReader,
        replies.SimpleReplyTranslator,
    ],
)
def test_every_parser_is_among_them_and_a_fault_is_found(
    parser: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser that raises something else at its tenth call fails the run, which names the case."""
    assert len(PARSERS) == 7
    name = "received" if parser is buffers.RequestBuffer else "feed"
    feed: Callable[..., object] = getattr(parser, name)
    calls: list[int] = []

    def faulty(*given: object) -> object:
        calls.append(1)
        if len(calls) == 10:
            raise IndexError("a mistake of ours")
        return feed(*given)

    monkeypatch.setattr(parser, name, faulty)
    with pytest.raises(AssertionError, match=r"fuzz_\w+, case \d+, seed 0x"):
        fuzz_parsers(random.Random(3), CASES)
