"""The storage resource manager as ``services`` sees it: readings and findings in, rows out.

    gateways (GATEWAY_SPACE) ─┐
    the server's own sources ─┼─► ``StoragePools`` ──► rows, events
    ``sv-space`` (forecasts) ─┘        └─► ``StorageActions`` ──► commands to ``sv-space``; refusals

Owner: the main loop of ``services``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pmdaemon.space.watcher import SourceBack, SourceFailed, SpaceOutcome
from pmdaemon.wire.messages.space import Space
from sla_server.agreements.document import Agreement
from sla_server.agreements.errors import DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.agreements.selectors import matches
from sla_server.agreements.volume_labels import LabelBook
from sla_server.rows import Rows
from sla_server.services.rows import event_row
from sla_server.storage_resources.actions import CommandDone, CommandOrder, StorageActions, refused
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.failed_sources import FailedSources
from sla_server.storage_resources.pools import (
    SERVER,
    STALE_US,
    PoolForecast,
    PoolKey,
    PoolState,
    StoragePools,
    StoredPools,
)

NAMED: Final = 3
MINUTE_US: Final = 60_000_000


@dataclass(frozen=True, slots=True)
class ServedVolumes:
    """Volumes that gateways show, approved ones alone.

    What a gateway says of a pool is believed for the volumes that it serves: with a pool on the backend of
    another one it could block the agreements there. Sources of the server are an operator's.

    Attributes:
        on: backend to its volumes.
        of: gateway to its volumes, of those that are announced.
    """

    on: Mapping[str, Collection[str]] = field(default_factory=dict)
    of: Mapping[str, Collection[str]] = field(default_factory=dict)

    def is_bound(self, owner: str, backend: str) -> bool:
        """Whether a pool of this owner may be one of the backend."""
        on = self.on.get(backend, ())
        return owner == SERVER or any(volume in on for volume in self.of.get(owner, ()))

    def is_anothers(self, owner: str, backend: str) -> bool:
        """Whether a gateway that is announced names a backend on which others alone serve volumes."""
        return owner in self.of and bool(self.on.get(backend)) and not self.is_bound(owner, backend)

    def lying_in(self, state: PoolState) -> set[str]:
        """Volumes that lie in a pool: those that its reading names, and those on its backend."""
        owner, backend = state.row["owner"], state.row["backend"]
        named = {row["volume"] for row in state.volumes.values() if row["volume"]}
        if owner != SERVER:
            named.intersection_update(self.of.get(owner, ()))
        return named.union(self.on.get(backend, ()) if self.is_bound(owner, backend) else ())


class StorageManager:
    """See the module.

    Args:
        config: ``[storage]``.
        stored: what SQL has.
        found: what the threads have found since the last call.
        order: has a command run.
        failed: sources of the server of which people know that they fail.
        sources: names of all that the server reads itself; None: not known, none has ended.
    """

    def __init__(
        self,
        config: StorageConfig,
        stored: StoredPools,
        found: Callable[[], Iterable[PoolForecast | CommandDone | SpaceOutcome]] = tuple,
        order: Callable[[CommandOrder], None] = lambda _order: None,
        failed: FailedSources | None = None,
        sources: Collection[str] | None = None,
    ) -> None:
        self._pools = StoragePools(config, stored)
        self._actions = StorageActions(config, stored.actions)
        self._found = found
        self._order = order
        self._failed = failed or FailedSources()
        self._sources = sources
        self._unread_us = -STALE_US
        self._watched_us = 0

    def read(self, owner: str, owner_name: str, space: Space, served: ServedVolumes, now_us: int) -> Rows:
        """A reading of a gateway's pool; what is to be recorded."""
        rows = self._pools.add(owner, owner_name, space, now_us)
        if served.is_anothers(owner, space.backend):
            rows += self._pools.refuse_claim(PoolKey(owner, space.pool), now_us)
        return rows

    def tick(self, now_us: int) -> Rows:
        """Findings of the threads, and actions that are due; what is to be recorded."""
        self._failed.raised()  # those of the tick before
        rows = self._end_unread(now_us)
        for found in self._found():
            match found:
                case Space():
                    rows += self._source_back(found.pool, now_us)
                    rows += self._pools.add(SERVER, SERVER, found, now_us)
                case PoolForecast():
                    rows += self._pools.add_forecast(found, now_us)
                case CommandDone():
                    rows += self._actions.done(found, now_us)
                case SourceFailed():
                    self._failed.add(found.source)
                    text = f"the space of {SERVER}/{found.source} cannot be read: {found.problem}"
                    rows.append(_source_event("space-source-failed", "warning", found.source, text, now_us))
                case SourceBack():
                    rows += self._source_back(found.source, now_us)
        made, orders = self._actions.due(self._pools.states(), now_us)
        for order in orders:
            self._order(order)
        return rows + made

    def _source_back(self, source: str, now_us: int, words: str = "can be read again") -> Rows:
        """The end of a failure: also of one that was reported by the process before."""
        if not self._failed.end(source):
            return []
        text = f"the space of {SERVER}/{source} {words}"
        return [_source_event("space-source-back", "info", source, text, now_us)]

    def _end_unread(self, now_us: int) -> Rows:
        """What is not read any more has no end of its own; looked for each minute.

        Of gateways only while the server was there to hear: after a start, a pause of this machine or a step
        of its clock they need time to say that all is as it was.
        """
        rows: Rows = []
        if 0 <= now_us - self._unread_us < MINUTE_US:
            return rows
        if not 0 <= now_us - self._unread_us < STALE_US:
            self._watched_us = now_us
        self._unread_us = now_us
        if self._sources is not None:
            for source in sorted(set(self._failed.names) - set(self._sources)):
                rows += self._source_back(source, now_us, "is not read any more")
        has_watched = now_us - self._watched_us >= STALE_US
        return rows + self._pools.end_unread(now_us, self._sources, has_watched=has_watched)

    def refusals(
        self,
        documents: Sequence[Loaded],
        in_force: Collection[str],
        served: ServedVolumes,
        labels: LabelBook,
        now_us: int,
    ) -> tuple[list[DocumentProblem], Rows]:
        """Why new agreements among these are refused, and what is to be recorded of that.

        Args:
            documents: to be applied.
            in_force: names of agreements, of which a change is never refused.
            served: which volumes gateways show; a pool is believed of no others.
            labels: by which agreements choose volumes.
            now_us: wall clock.
        """
        full = self._actions.full_pools(self._pools.states(), now_us)
        new = [
            (document, labels.in_scope(document.spec.scope), loaded.line)
            for loaded in (documents if full else ())
            if isinstance(document := loaded.document, Agreement) and document.name not in in_force
        ]
        problems: list[DocumentProblem] = []
        rows: Rows = []
        for state in full:
            found = [*filter(None, (_refusal(*each, state, served) for each in new))]
            problems += found
            if found:  # one row of all, however many they are
                what = _listed([f"agreement {each.document}" for each in found])
                rows += refused(state, what, found[0].problem, now_us)
        return sorted(problems, key=lambda each: each.line), rows


def _refusal(
    agreement: Agreement, selectors: Collection[str], line: int, state: PoolState, served: ServedVolumes
) -> DocumentProblem | None:
    asked = sorted(volume for volume in served.lying_in(state) if matches(volume, selectors))
    if not asked:
        return None
    named = _listed(asked)
    size = state.row["size_bytes"]
    share = state.row["used_bytes"] / size if size else 1.0
    return DocumentProblem(
        line,
        "spec.scope.volumes",
        f"pool {state.name}, which {named} lie in, is {share:.0%} full and takes no new agreements "
        f"(refuse_agreements in [storage])",
        f"Make room in it (sla describe pool {state.name}), or name other volumes",
        agreement.name,
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _source_event(
    kind: str, severity: str, source: str, text: str, now_us: int
) -> tuple[str, dict[str, object]]:
    return event_row(kind, severity, "pool", f"{SERVER}/{source}", text, now_us, {"subject": source})
