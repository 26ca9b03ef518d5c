"""The copy of a report for the customer's own account: the whole of it but names of others.

Neighbours become ``neighbour 1`` and so on, the same one everywhere in a report; people of the provider are
the provider. Figures stay, so what the promise cost others can be read. The digest in the chain is that of
the whole document: a copy cannot be checked by itself, but it names the digest that the provider's has. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sla_server.explanation.words import listed
from sla_server.reports.document import (
    IssuedReport,
    ReportContent,
    ReportedEpisode,
    RevisedField,
)
from sla_server.rows import Row

PROVIDER: Final = "the provider"
ABOUT_OTHERS: Final = ("throttling", "episodes", "maintenance", "versions", "issued_by")
"""Parts of a report, and of its row, in which a difference may name them."""
NOT_SHOWN: Final = "what is issued and what is stored differ; the values name others"


class _Names:
    """Neighbours in the order in which they are met."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, names: Iterable[str]) -> list[str]:
        return [self._known.setdefault(name, f"neighbour {len(self._known) + 1}") for name in names]


def content_for_customer(content: ReportContent) -> ReportContent:
    """The copy of what a report says."""
    names, staff = _Names(), content.agreement.provider or PROVIDER
    throttling = content.throttling
    others = [
        each.model_copy(update={"volume": names.of([each.volume])[0], "least_cost_per_s": None})
        for each in throttling.others
    ]
    return content.model_copy(
        update={
            "throttling": throttling.model_copy(update={"others": others}),
            "episodes": [_episode(each, names) for each in content.episodes],
            "maintenance": [each.model_copy(update={"author": None}) for each in content.maintenance],
            "versions": [each.model_copy(update={"applied_by": staff}) for each in content.versions],
        }
    )


def _episode(episode: ReportedEpisode, names: _Names) -> ReportedEpisode:
    volumes, text = names.of(episode.volumes), episode.cause_text
    if episode.cause == "neighbours":
        text = f"{text.partition(': ')[0]}: {listed(volumes)}"
    return episode.model_copy(update={"volumes": volumes, "cause_text": text})


def report_for_customer(report: IssuedReport) -> IssuedReport:
    """The copy of an issued report; what a revision changed about others is left out."""
    return report.model_copy(
        update={
            "issued_by": report.content.agreement.provider or PROVIDER,
            "revised": [each for each in report.revised if not _names_others(each)],
            "content": content_for_customer(report.content),
        }
    )


def _names_others(changed: RevisedField) -> bool:
    return _part(changed.field) in ABOUT_OTHERS


def _part(field: str) -> str:
    return field.partition(".")[0].partition("[")[0]


def verification_for_customer(found: Row) -> Row:
    """What a check found, without values that name others."""
    findings: list[dict[str, Any]] = [
        {**each, "text": NOT_SHOWN} if _part(each["where"]) in ABOUT_OTHERS else each
        for each in found["findings"]
    ]
    return {**found, "findings": findings}


def labels_of(row: Row, body: Row | None = None) -> dict[str, str] | None:
    """Of the agreement when the report was issued; None: nothing that this release can read says so.

    Args:
        row: of ``reports``; its summary has them since release 0.1.0.
        body: decoded, for a row that an earlier one wrote.
    """
    labels = (row.get("summary") or {}).get("labels")
    if labels is None and isinstance(body, dict):
        content = body.get("content")
        agreement = content.get("agreement") if isinstance(content, dict) else None
        labels = agreement.get("labels") if isinstance(agreement, dict) else None
    return labels if isinstance(labels, dict) else None
