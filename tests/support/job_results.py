"""Results of jobs in memory, as ``db.job_results.JobResults`` keeps them in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sla_server.db.job_results import ResultHead


@dataclass
class ResultsInMemory:
    """Attributes: made_us: when whatever is stored next is made."""

    made_us: int = 1
    _found: dict[str, tuple[ResultHead, list[bytes]]] = field(default_factory=dict)

    def replace(self, kind: str, end_us: int, basis: str, parts: Sequence[tuple[bytes, int]]) -> None:
        head = ResultHead(kind, end_us, self.made_us, basis, sum(rows for _, rows in parts))
        self._found[kind] = head, [body for body, _ in parts]

    def head(self, kind: str) -> ResultHead | None:
        return self._found[kind][0] if kind in self._found else None

    def bodies(self, kind: str) -> list[bytes]:
        return self._found[kind][1]

    def whole(self, kind: str) -> tuple[ResultHead, list[bytes]] | None:
        return self._found.get(kind)
