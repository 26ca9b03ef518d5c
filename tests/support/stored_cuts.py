"""How far the database of a stage is: the cuts of each gateway in SQL."""

from __future__ import annotations

import contextlib
from collections import Counter

from sla_server.db.config import DatabaseConfig
from sla_server.db.queries.reader import open_reader
from tests.support.stage import LIMIT_S, Stage


def stored_cuts(stage: Stage) -> Counter[str]:
    """How many cuts of each gateway SQL has, of all its epochs."""
    found: Counter[str] = Counter()
    with contextlib.closing(open_reader(DatabaseConfig(), stage.folder / "data")) as reader:
        for gateway_id, _epoch, seq in reader.watermarks():
            found[gateway_id] += seq
    return found


def wait_for_more_cuts(
    stage: Stage, cuts: int, since: Counter[str] | None = None, limit_s: float = LIMIT_S
) -> None:
    """Wait until SQL has so many more cuts of every gateway; what was sent before them is stored by then."""
    before = since if since is not None else stored_cuts(stage)

    def has_more() -> bool:
        now = stored_cuts(stage)
        if len(now) < len(stage.agents):
            return False
        return all(now[gateway] >= before[gateway] + cuts for gateway in now)

    stage.wait(has_more, f"{cuts} more cuts of each gateway in SQL", limit_s=limit_s)
