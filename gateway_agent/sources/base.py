"""What the link asks of a source of statistics.

A source is asked, answers in its own time, and keeps its answer until ``spooled`` is called; only then does
it begin the next sample. That one rule is what makes a killed link lose nothing and double nothing.

    ask ──► (answer arrives: at once for ``host``, over the control socket for ``nbd``) ──► sample ──► spooled
"""

from __future__ import annotations

from typing import Any, Protocol

from gateway_agent.sources.sample import Sample


class StatisticsSource(Protocol):
    """One source of statistics. Thread: the link's loop only."""

    @property
    def name(self) -> str:
        """Unique within the agent: the plane's name, or ``host``."""

    @property
    def can_be_asked(self) -> bool:
        """Whether ``ask`` makes sense now (a plane must be connected and must have said hello)."""

    @property
    def awaits_answer(self) -> bool:
        """Whether an earlier question is still open."""

    @property
    def sample(self) -> Sample | None:
        """The answer that is not spooled yet, if there is one."""

    def ask(self) -> None:
        """Ask for everything since the last spooled sample; does nothing while a question or sample is open.

        Raises:
            SourceReadFailed: not readable now; ask again later.
        """

    def spooled(self) -> None:
        """The current sample is safe in the spool: forget it and count on from its end."""

    def exports(self) -> list[dict[str, Any]]:
        """What REGISTER says of this source: ``{volume, backend, size_bytes, read_only, source}`` each."""
