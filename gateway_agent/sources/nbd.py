"""Statistics of one NBD data plane, collected over its control socket.

The plane keeps its last DP_CUT and repeats the same bytes until a DP_COLLECT says ``got`` = its id. So:

- ``got`` moves only in ``spooled``, never on receipt;
- one question is open at a time, and every question gets exactly one answer, in order;
- an answer whose id is ``got`` is a repetition of what is spooled already and is dropped (it happens when a
  slow plane answers an old question after its cut was taken from an even older one).

Ids begin at the wall clock of the plane's start, so none of a plane's former life is taken for one of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway_agent.sources.sample import Sample, from_dp_cut
from pmdaemon.wire import frame
from pmdaemon.wire.messages.planes import DpCollect


class NbdSource:
    """See ``StatisticsSource``.

    ``plane`` as in ``Sample``.

    State: the open question, the unspooled sample, the id of the last spooled DP_CUT.
    """

    def __init__(self, name: str, send: Callable[[bytes], None], got: int, plane: str = "") -> None:
        self.name = name
        self._plane = plane
        self._send = send
        self._got = got
        self.can_be_asked = False
        self.awaits_answer = False
        self.sample: Sample | None = None
        self.questions = 0
        self.answers = 0
        self._exports: list[dict[str, Any]] = []

    @property
    def mark(self) -> int:
        """Id of the last DP_CUT that is in the spool; 0 for none."""
        return self._got

    def connected(self) -> None:
        """A new control connection: whatever was asked on the old one will not be answered."""
        self._forget_connection()
        self.questions = self.answers = 0

    def disconnected(self) -> None:
        """The control connection is gone. An unspooled sample goes too: a living plane repeats it."""
        self._forget_connection()

    def _forget_connection(self) -> None:
        self.can_be_asked = self.awaits_answer = False
        self.sample = None

    def introduced(self, exports: list[dict[str, Any]]) -> bool:
        """The plane has introduced itself; returns whether its exports differ from those known."""
        self.can_be_asked = True
        changed = exports != self._exports
        self._exports = exports
        return changed

    def ask(self) -> None:
        """See ``StatisticsSource``: sends DP_COLLECT."""
        if not self.can_be_asked or self.awaits_answer or self.sample is not None:
            return
        self.awaits_answer = True
        self.questions += 1
        self._send(DpCollect(self._got).encode())

    def answered(self, received: frame.Frame) -> None:
        """A DP_CUT arrived.

        Raises:
            BadCut: its columns do not fit its header.
        """
        sample = from_dp_cut(self.name, received, self._plane)
        self.awaits_answer = False
        self.answers += 1
        if sample.mark != self._got:
            self.sample = sample

    def spooled(self) -> None:
        """See ``StatisticsSource``: the next DP_COLLECT will say so."""
        if self.sample is not None:
            self._got = self.sample.mark
            self.sample = None

    def exports(self) -> list[dict[str, Any]]:
        """See ``StatisticsSource``: as in the plane's last DP_HELLO, also while it is gone."""
        return self._exports
