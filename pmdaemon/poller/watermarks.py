"""What dbmanager has on disk, by gateway and epoch.

WATERMARKS opens an *incarnation* of dbmanager: what it names is durable, everything else that was on its way
is in doubt and must be asked for again. Further WATERMARKS and DURABLE of the same incarnation only advance.
A notice of another incarnation than the open one is a leftover in the mailbox and is ignored.

While a gateway's record holds an epoch, its high water is there (``poller.registry``), and here is what it
was when the record began: a notice comes for each poll, and would else be entered twice.

Thread: guarded by the registry's lock.

Source: docs/formats/messages.md (WATERMARKS, DURABLE); DESIGN.md 4.
"""

from __future__ import annotations

from pmdaemon.wire.messages.server import HighWaters


class Watermarks:
    """High water per (gateway, epoch). ``incarnation`` is None until the first WATERMARKS."""

    def __init__(self) -> None:
        self.incarnation: int | None = None
        self._high: dict[str, dict[int, int]] = {}

    def open(self, incarnation: int, notice: HighWaters) -> bool:
        """Take a WATERMARKS; True if it opens another incarnation, so that everybody must rewind."""
        is_new = incarnation != self.incarnation
        if is_new:
            self.incarnation = incarnation
            self._high.clear()
        self._raise(notice)
        return is_new

    def learn(self, notice: HighWaters) -> None:
        """Take what is durable of the open incarnation: rows that no record holds, or held until now."""
        self._raise(notice)

    def of(self, gateway_id: str) -> dict[int, int]:
        """Epoch to high water of one gateway (a copy)."""
        return dict(self._high.get(gateway_id, {}))

    def _raise(self, notice: HighWaters) -> None:
        known = self._high.get
        for gateway_id, epoch, seq in notice:
            epochs = known(gateway_id)
            if epochs is None:
                self._high[gateway_id] = {epoch: seq}
            elif seq > epochs.get(epoch, 0):
                epochs[epoch] = seq
