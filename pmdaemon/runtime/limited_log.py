"""Log lines that come by the thousand when something happens to a whole fleet at once.

Thread: belongs to one; another one makes its own.
"""

from __future__ import annotations

from typing import Any, Final

import structlog

LINES_A_SECOND: Final = 10


class LimitedLog:
    """Lines, at most ``LINES_A_SECOND``; what was left out is counted by a line of a later second."""

    def __init__(self, name: str) -> None:
        self._log = structlog.get_logger(name)
        self._window_s = -1
        self._written = 0
        self._left_out = 0

    def warning(self, now_ns: int, event: str, **values: Any) -> None:
        """One line, or none."""
        if self._has_room(now_ns):
            self._log.warning(event, **values)

    def info(self, now_ns: int, event: str, **values: Any) -> None:
        """One line, or none."""
        if self._has_room(now_ns):
            self._log.info(event, **values)

    def _has_room(self, now_ns: int) -> bool:
        if now_ns // 10**9 != self._window_s:
            if self._left_out:
                self._log.warning("more-like-these", left_out=self._left_out)
            self._window_s, self._written, self._left_out = now_ns // 10**9, 0, 0
        if self._written >= LINES_A_SECOND:
            self._left_out += 1
            return False
        self._written += 1
        return True
