"""What is said below a table of ``sla get``: of which time its figures are, and what no column has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Final

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting
from sla_server.cli.tables import OF_PERIOD, objective_of
from sla_server.rows import Row

OF_WHEN: Final = "Of this period so far. What is measured now: sla top, sla get promises"
MOST_REASONS: Final = 10


def notes_of(kind: str, rows: Sequence[Row], order: str | None = None) -> Iterator[str]:
    """Lines below the table of these rows; ``order``: by which the server has sorted them."""
    if kind == "slas" or (kind == "promises" and order in OF_PERIOD):
        yield OF_WHEN
    if kind == "slas":
        yield from _reasons(rows)
    if kind == "volumes":
        yield from _shared(rows)
    if kind == "nodes":
        yield from _given_up(rows)


def _given_up(rows: Sequence[Row]) -> Iterator[str]:
    """Why a server that stands by gave its lease up."""
    for row in rows:
        if row.get("why"):
            said = printable_lines(f"The server of {row['name']} gave the lease up, as it {row['why']}")
            yield from wrap(said, formatting.WIDTH, subsequent_indent="  ")


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why there is no data, or nothing is promised, of the first objectives of which that is known."""
    known = (row for row in rows if row.get("reason") and row.get("state") in ("excluded", "no-data"))
    found = [(objective_of(row), str(row["reason"])) for row in known]
    for name, reason in found[:MOST_REASONS]:
        yield from wrap(printable_lines(f"{name}: {reason}"), formatting.WIDTH, subsequent_indent="  ")
    if len(found) > MOST_REASONS:
        yield f"and {len(found) - MOST_REASONS:,} more with a reason: -o json has them"


def _shared(rows: Sequence[Row]) -> Iterator[str]:
    """Volumes that belong to several gateways, the first of them."""
    found = [(str(row.get("volume")), row["owners"]) for row in rows if len(row.get("owners") or ()) > 1]
    for volume, owners in found[:MOST_REASONS]:
        said = printable_lines(f"{volume} belongs to {len(owners)} gateways: {', '.join(owners)}")
        yield from wrap(said, formatting.WIDTH, subsequent_indent="  ")
    if len(found) > MOST_REASONS:
        yield f"and {len(found) - MOST_REASONS:,} more that belong to several: sla volumes list"
