"""The upstream connections of one session, and which of them gets which requests.

    what the client sent   ██ run ██████|██ run ███|████ run ██|██ run ...    each run goes whole to one
    connections              1            2          3           1              connection, in turn

There is one connection, or with ``upstream_connections`` up to so many, where the upstream has
CAN_MULTI_CONN. By that flag its connections have no cache of their own: a flush on one of them covers what
was acknowledged on all, and so does a read see it. NBD leaves the order of requests under way to the server,
so nothing else depends on the connection by which a request came.

A run is what is sent without a change of the connection: requests that move ``RUN_BYTES`` or a little more,
or all that are here. Bytes within a request never change the connection, so a payload may arrive in pieces.
A connection that takes nothing of a run leaves it to the next one. One that has said nothing for ``STUCK_NS``
though it was given a run gets none while another has: if it hangs, the others go on with all that follows.

Positions are those of ``buffers.RequestBuffer``. No I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway_agent.nbd.buffers import END, LENGTH, Request
from gateway_agent.nbd.loop import EventLoop, OnFailure
from gateway_agent.nbd.replies import AskedRequests, Replies
from gateway_agent.nbd.upstream import Upstream

RUN_BYTES: Final = 256 << 10  # two requests of 128 KiB, 64 of 4 KiB: each run is a send of its own
STUCK_NS: Final = 10**9
_MOST_RUNS: Final = 256  # remembered, before it is looked which of them are answered


@dataclass(eq=False, slots=True)
class UsedUpstream:
    """A connection that a session uses.

    Attributes:
        upstream: the connection.
        reader: of its replies.
        partial_header: first bytes of a reply of which the rest has not come.
        mask: what the loop watches it for; 0: it does not.
        waits: it has something to read, but a reply of another connection comes first.
        is_large: its replies have large payloads now, which go by a pipe.
        asked_ns: when it was given a run, having said nothing since; None: it has, or was given none.
    """

    upstream: Upstream
    reader: Replies
    partial_header: bytes = b""
    mask: int = 0
    waits: bool = False
    is_large: bool = False
    asked_ns: int | None = None

    def watch(
        self, loop: EventLoop, mask: int, handler: Callable[[int], None], on_failure: OnFailure
    ) -> None:
        """Watch it for another mask; with 0 not at all, or its hang-up would be reported again and again."""
        fd = self.upstream.sock.fileno()
        before, self.mask = self.mask, mask
        if not before:
            loop.watch(fd, mask, handler, on_failure)
        elif mask:
            loop.want(fd, mask)
        else:
            loop.forget(fd)


def next_in_turn(used: Sequence[UsedUpstream], before: UsedUpstream, now_ns: int) -> UsedUpstream:
    """Which connection gets the run behind one of ``before``, and is noted to have it."""
    place = used.index(before) + 1
    order = [*used[place:], *used[:place]]
    fit = (each for each in order if each.asked_ns is None or now_ns - each.asked_ns < STUCK_NS)
    found = next(fit, order[0])
    if found.asked_ns is None:
        found.asked_ns = now_ns
    return found


class RequestRuns:
    """Runs, and what is not in one yet; see the module docstring.

    Attributes:
        end_pos: where the newest run ends.

    Args:
        first: gets everything before the first run.
        sent_pos: up to here all was sent.
    """

    def __init__(self, first: UsedUpstream, sent_pos: int) -> None:
        self.end_pos = sent_pos
        self._unsent: deque[Request] = deque()
        self._starts = [-1]
        self._users = [first]
        self._most = _MOST_RUNS

    def admitted(self, request: Request) -> None:
        """It is to be sent behind those before it."""
        self._unsent.append(request)

    def begin(self, user: UsedUpstream, sent_pos: int, asked: AskedRequests) -> None:
        """``user`` gets what comes next."""
        if len(self._starts) > self._most:
            self._forget_answered(asked)
        self._starts.append(sent_pos)
        self._users.append(user)
        moved_bytes = 0
        while self._unsent and moved_bytes < RUN_BYTES:
            request = self._unsent.popleft()
            moved_bytes += request[LENGTH]
            self.end_pos = request[END]

    def _forget_answered(self, asked: AskedRequests) -> None:
        """Keep one run for each request that has no answer: one that waits for ever keeps no others.

        They are in the order in which they were sent; so each has a place of its own before its end.
        """
        sent = [request for request in asked.values() if request[END] <= self.end_pos]
        kept = [(request[END] - 1, self.user_of(request)) for request in sent]
        self._starts, self._users = [start for start, _ in kept], [user for _, user in kept]
        self._most = max(_MOST_RUNS, 2 * len(kept))

    def is_untouched(self, sent_pos: int) -> bool:
        """Whether nothing of the newest run was sent."""
        return self._starts[-1] == sent_pos

    def give(self, user: UsedUpstream, sent_pos: int) -> None:
        """What is left of the newest run, whole requests, is another connection's."""
        if self.is_untouched(sent_pos):
            self._users[-1] = user
        else:
            self._starts.append(sent_pos)
            self._users.append(user)

    def user_of(self, request: Request) -> UsedUpstream:
        """The connection of a request that was sent, at least in part."""
        return self._users[bisect_left(self._starts, request[END]) - 1]
