"""A report's sums beside those that the job ``report-inputs`` made of the same slices.

Whoever trusts a report trusts its sums. A report adds up the slices that it has read, one agreement at a
time; the job adds up those of the whole fleet in Spark, from another reading. Before a report is issued both
must be the same: how many slices of each version, state and length its period has. Sums that the job made
before some of the slices were judged say nothing, and a period that it did not add up has none: the report
is issued on its own then. Where they differ SQL counts once more (``slice_sums``), and a report that is alone
with its sums is refused.

Preliminary reports are not compared: their slices are still being judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from sla_server.db.queries.job_results import table_of
from sla_server.reports.accounts import GROUP, grouped, starting_within
from sla_server.reports.errors import SumsDiffer
from sla_server.rows import Row

if TYPE_CHECKING:  # rows come in; who reads them is the caller's affair
    from sla_server.db.queries.reader import SqlReader
    from sla_server.reports.inputs import ReportInputs

log = structlog.get_logger("report-job")
SUMS_JOB: Final = "report-inputs"
"""Of the job that makes the sums: its kind, and that of what it stores."""
Key = tuple[str, str, str]
Kinds = Mapping[tuple[Any, ...], int]


@dataclass
class SumsCheck:
    """Compares one report after the other.

    Attributes:
        made_us: when the sums were made, us; 0: there are none.
        of_period: (agreement, objective, period) to how many slices it has of each kind.
        compared, outdated, without: reports whose sums are those of the job, that have slices which were
            judged since, and whose period the job did not add up.
    """

    made_us: int = 0
    of_period: Mapping[Key, Kinds] = field(default_factory=dict)
    compared: int = 0
    outdated: int = 0
    without: int = 0

    @classmethod
    def of(cls, reader: SqlReader) -> SumsCheck:
        """With what is stored; sums that cannot be read, of another release, are none.

        Raises:
            DatabaseUnavailable: retryable.
        """
        found = reader.results.whole(SUMS_JOB)
        if found is None:
            return cls()
        sums: dict[Key, dict[tuple[Any, ...], int]] = {}
        try:
            for row in table_of(found[1]).to_pylist():
                key = row["name"], row["objective"], row["period"]
                sums.setdefault(key, {})[_kind(row)] = row["n"]
        except (KeyError, ValueError) as exc:  # pyarrow's are ValueErrors
            log.warning("sums-not-read", job=SUMS_JOB, problem=repr(exc))
            return cls()
        return cls(found[0].end_us, sums)

    def check(self, inputs: ReportInputs, reader: SqlReader) -> None:
        """Compare a report that is about to be issued.

        Raises:
            SumsDiffer: its sums are neither those of the job nor those that SQL counts.
            DatabaseUnavailable: retryable.
        """
        period = inputs.period
        keys = [(inputs.name, objective, period.text) for objective in inputs.slices]
        if self.made_us < period.to_us or not any(key in self.of_period for key in keys):
            self.without += 1
            return
        is_outdated = False
        for key, (objective, rows) in zip(keys, inputs.slices.items(), strict=True):
            own = _counted(grouped(starting_within(rows, *period.bounds)))
            if own != self.of_period.get(key, {}):
                self._count_again(inputs, objective, own, reader)
                is_outdated = True
        self.outdated += is_outdated
        self.compared += not is_outdated

    @staticmethod
    def _count_again(inputs: ReportInputs, objective: str, own: Kinds, reader: SqlReader) -> None:
        """See that the report has what SQL has; slices that were judged since it was read excuse it."""
        name, span = inputs.name, (inputs.period.from_us, inputs.period.to_us)
        now = _counted(reader.slice_sums(name, objective, *span))
        if own != now and not reader.reports.revised_after(name, objective, *span, inputs.as_of_us):
            raise SumsDiffer(name, objective, inputs.period.text, sum(own.values()), sum(now.values()))

    @property
    def words(self) -> str:
        """For the list of jobs; "" where there is nothing to compare with."""
        if not self.made_us:
            return ""
        parts = (
            (self.compared, "with the sums of report-inputs"),
            (self.outdated, "with slices judged since those were made"),
            (self.without, "of periods without them"),
        )
        return ", ".join(f"{number} {text}" for number, text in parts if number)

    def as_dict(self) -> dict[str, int]:
        """For programs."""
        return {"compared": self.compared, "outdated": self.outdated, "without": self.without}


def _kind(row: Row) -> tuple[Any, ...]:
    return tuple(
        row[name] if name in ("version", "state", "length_us") else bool(row[name]) for name in GROUP
    )


def _counted(rows: Iterable[Row]) -> Kinds:
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        found[_kind(row)] += row["n"]
    return dict(found)
