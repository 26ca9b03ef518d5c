"""How long a client leaves its answers untaken, which is no latency of its I/O (see ``session``)."""

from __future__ import annotations


class ClientPause:
    """How long the answers of one connection have waited for its client to take them, since the last cut."""

    __slots__ = ("_before_ns", "_since_ns")

    def __init__(self) -> None:
        self._before_ns = 0
        self._since_ns: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether answers wait now."""
        return self._since_ns is not None

    def begin(self, now_ns: int) -> None:
        """Answers wait."""
        if self._since_ns is None:
            self._since_ns = now_ns

    def end(self, now_ns: int) -> None:
        """The client has taken all of them."""
        self._before_ns, self._since_ns = self.total_ns(now_ns), None

    def cut_ended(self, now_ns: int) -> None:
        """Count from 0 again."""
        self._before_ns = 0
        if self._since_ns is not None:
            self._since_ns = now_ns

    def total_ns(self, now_ns: int) -> int:
        """Until now."""
        return self._before_ns + (max(now_ns - self._since_ns, 0) if self._since_ns is not None else 0)
