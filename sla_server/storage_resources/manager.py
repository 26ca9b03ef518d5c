"""The storage resource manager as ``services`` sees it: readings and findings in, rows out.

    gateways (GATEWAY_SPACE) ─┐
    the server's own sources ─┼─► ``StoragePools`` ──► rows, events
    ``sv-space`` (forecasts) ─┘        └─► ``StorageActions`` ──► commands to ``sv-space``; refusals

Owner: the main loop of ``services``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from pmdaemon.space.watcher import SourceBack, SourceFailed, SpaceOutcome
from pmdaemon.wire.messages.space import Space
from sla_server.agreements.document import Agreement
from sla_server.agreements.errors import DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.agreements.selectors import matches
from sla_server.rows import Rows
from sla_server.services.rows import event_row
from sla_server.storage_resources.actions import CommandDone, CommandOrder, StorageActions
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.pools import SERVER, PoolForecast, PoolState, StoragePools, StoredPools

NAMED: Final = 3


class StorageManager:
    """See the module.

    Args:
        config: ``[storage]``.
        stored: what SQL has.
        found: what the threads have found since the last call.
        order: has a command run.
    """

    def __init__(
        self,
        config: StorageConfig,
        stored: StoredPools,
        found: Callable[[], Iterable[PoolForecast | CommandDone | SpaceOutcome]] = tuple,
        order: Callable[[CommandOrder], None] = lambda _order: None,
    ) -> None:
        self._pools = StoragePools(config, stored)
        self._actions = StorageActions(config, stored.actions)
        self._found = found
        self._order = order

    def read(self, owner: str, owner_name: str, space: Space, now_us: int) -> Rows:
        """A reading of a gateway's pool; what is to be recorded."""
        return self._pools.add(owner, owner_name, space, now_us)

    def tick(self, now_us: int) -> Rows:
        """Findings of the threads, and actions that are due; what is to be recorded."""
        rows: Rows = []
        for found in self._found():
            match found:
                case Space():
                    rows += self._pools.add(SERVER, SERVER, found, now_us)
                case PoolForecast():
                    rows += self._pools.add_forecast(found, now_us)
                case CommandDone():
                    rows += self._actions.done(found, now_us)
                case SourceFailed():
                    text = f"the space of {SERVER}/{found.source} cannot be read: {found.problem}"
                    rows.append(_source_event("space-source-failed", "warning", found.source, text, now_us))
                case SourceBack():
                    text = f"the space of {SERVER}/{found.source} can be read again"
                    rows.append(_source_event("space-source-back", "info", found.source, text, now_us))
        made, orders = self._actions.due(self._pools.states(), now_us)
        for order in orders:
            self._order(order)
        return rows + made

    def refusals(
        self,
        documents: Sequence[Loaded],
        in_force: Collection[str],
        volumes_on: Mapping[str, Collection[str]],
        now_us: int,
    ) -> list[DocumentProblem]:
        """Why new agreements among these are refused; none for changes of those in force.

        Args:
            documents: to be applied.
            in_force: names of agreements.
            volumes_on: backend to the volumes that gateways show on it.
            now_us: wall clock.
        """
        full = self._actions.full_pools(self._pools.states(), now_us)
        problems = []
        for loaded in documents if full else ():
            document = loaded.document
            if isinstance(document, Agreement) and document.name not in in_force:
                problems += [
                    problem
                    for state in full
                    if (problem := _refusal(document, loaded.line, state, volumes_on))
                ]
        return problems


def _refusal(
    agreement: Agreement, line: int, state: PoolState, volumes_on: Mapping[str, Collection[str]]
) -> DocumentProblem | None:
    held = {row["volume"] for row in state.volumes.values() if row["volume"]}
    held |= set(volumes_on.get(state.row["backend"], ()))
    asked = sorted(volume for volume in held if matches(volume, agreement.spec.scope.volumes))
    if not asked:
        return None
    named = ", ".join(asked[:NAMED]) + (f" and {len(asked) - NAMED} more" if len(asked) > NAMED else "")
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


def _source_event(
    kind: str, severity: str, source: str, text: str, now_us: int
) -> tuple[str, dict[str, object]]:
    return event_row(kind, severity, "pool", f"{SERVER}/{source}", text, now_us, {"subject": source})
