"""The answer to a POLL: cuts in order, the newest for judging, and the REPLY that closes it.

Limit: ``BACKLOG_BYTES`` of cuts a reply, but always one, so that a backlog of large cuts drains too. Paced by
the polls: the server asks for the next part with its next poll. A poll that begins behind all cuts asks for
the newest alone.
"""

from __future__ import annotations

from typing import Final

from gateway_agent.link.spool import Spool
from pmdaemon.wire.messages.agent import Poll, Reply
from pmdaemon.wire.session import AgentSession

BACKLOG_BYTES: Final = 256 << 10


def answer(session: AgentSession, spool: Spool, poll: Poll, wall_us: int) -> int:
    """Queue the answer to one poll; returns the number of cuts in order.

    Args:
        session: where the frames go.
        spool: where the cuts are.
        poll: what is answered.
        wall_us: this host's wall clock now.

    Raises:
        GatewayError: a cut cannot be read.
    """
    sent: list[tuple[int, int]] = []
    size_bytes = 0
    is_cut_short = False
    for item in spool.read_from(poll.start):
        if sent and size_bytes + len(item.raw) > BACKLOG_BYTES:
            is_cut_short = True
            break
        session.send_cut(item.raw, live=False)
        sent.append((item.epoch, item.seq))
        size_bytes += len(item.raw)
    newest = spool.newest()
    if newest is not None and (is_cut_short or _begins_behind(poll.start, (newest.epoch, newest.seq))):
        session.send_cut(newest.raw, live=True)
    session.send(
        Reply(
            poll=poll.poll,
            sent_ns=poll.sent_ns,
            wall_us=wall_us,
            cuts=len(sent),
            first=sent[0] if sent else None,
            last=sent[-1] if sent else None,
            dropped=spool.dropped,
        )
    )
    return len(sent)


def _begins_behind(start: tuple[int, int] | None, newest: tuple[int, int]) -> bool:
    """Whether the poll asks from behind the cut that follows: for none in order, but for the newest."""
    return start is not None and start[0] == newest[0] and start[1] > newest[1] + 1
