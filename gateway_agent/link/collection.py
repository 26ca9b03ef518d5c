"""One collection: ask every source, wait a little, take what came. Pure; time comes as an argument.

    idle ──begin──► asking ──all answered, or 200 ms──► gather ──(core spools)──► next_round ──► idle
                       ▲                                                              │
                       └───── some source holds more than one finished sample ────────┘

A source that does not answer in time is *left out*: the others' counts go into this cut. It is not waited for
again until it has answered, so a stalled plane costs one poll 200 ms and the later ones nothing. Its late
answer stays with the source and is taken by the next collection, which then asks it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway_agent.link.errors import SourceReadFailed
from gateway_agent.sources.base import StatisticsSource
from gateway_agent.sources.sample import Sample

DEADLINE_NS: Final = (
    200_000_000  # a fifth of the default interval; a healthy plane answers in a few milliseconds
)
MAX_ROUNDS: Final = 72  # a plane keeps at most 64 finished cuts; the deadline bounds the time in any case


class CollectionRound:
    """State: whether a collection runs, its deadline, and whom this round waits for."""

    def __init__(self, sources: Sequence[StatisticsSource]) -> None:
        self._sources = sources
        self._waiting: list[StatisticsSource] = []
        self._again: list[StatisticsSource] = []
        self._rounds = 0
        self.busy = False
        self.deadline_ns = 0
        self.failures: list[SourceReadFailed] = []

    def begin(self, now_ns: int) -> None:
        """Ask all sources that can be asked."""
        assert not self.busy  # the core begins one only when none runs
        self.busy = True
        self.deadline_ns = now_ns + DEADLINE_NS
        self._rounds = 0
        self.failures = []
        # Late answers of a former collection are taken first; their sources hold newer counts behind them.
        self._again = [source for source in self._sources if source.sample is not None]
        self._ask(self._sources)

    def _ask(self, sources: Sequence[StatisticsSource]) -> None:
        self._waiting = []
        self._rounds += 1
        for source in sources:
            if not source.can_be_asked or source.awaits_answer:
                continue
            try:
                source.ask()
            except SourceReadFailed as exc:
                self.failures.append(exc)
            if source.awaits_answer:
                self._waiting.append(source)

    def gather(self, now_ns: int) -> list[Sample] | None:
        """The samples at hand, or None while somebody is still waited for."""
        if now_ns < self.deadline_ns and any(source.awaits_answer for source in self._waiting):
            return None
        return [source.sample for source in self._sources if source.sample is not None]

    def next_round(self, now_ns: int, taken: Sequence[Sample]) -> None:
        """The samples gathered were dealt with; ask again where there is more, else end the collection."""
        more = {sample.source for sample in taken if sample.more}
        answered_nothing = [source for source in self._waiting if not source.awaits_answer]
        repeated = {source.name for source in answered_nothing} - {sample.source for sample in taken}
        names = more | repeated | {source.name for source in self._again}
        self._again = []
        again = [source for source in self._sources if source.name in names and source.sample is None]
        if again and now_ns < self.deadline_ns and self._rounds < MAX_ROUNDS:
            self._ask(again)
            if self._waiting or any(source.sample is not None for source in again):
                return
        self.busy = False

    def overdue(self) -> list[str]:
        """Names of the sources that have not answered, after the collection has ended."""
        return [source.name for source in self._sources if source.awaits_answer]
