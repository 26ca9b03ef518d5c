"""``sla cluster mirror promote``: how often it waits for a primary that may be lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sla_server.cli import cluster_mirror
from sla_server.cluster import mirror_place
from sla_server.cluster.messages import mirror_promotion
from sla_server.cluster.messages.catalogue import Destination
from sla_server.cluster.messages.mirror_promotion import Promotion, Stage

LOST = Promotion(Destination("orders", replicas=1), "SLA_orders_mn3", "n3", Stage.LOST, 25, 120, None)
INFO = {"cluster": {"leader": "n3"}, "state": {"messages": 25}}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plans and promotions, as they are made; no node is asked."""
    made: list[str] = []

    @contextlib.asynccontextmanager
    async def opened(*_args: object) -> AsyncIterator[tuple[None, None]]:
        yield None, None

    async def plan(*_args: object) -> Promotion:
        made.append("plan")
        return LOST

    async def promote(
        _link: object, _catalogue: object, found: Promotion, _say: Callable[[str], None]
    ) -> dict[str, Any]:
        assert found is LOST
        made.append("promote")
        return INFO

    def ask(question: Callable[[None], Coroutine[Any, Any, Any]]) -> object:
        return asyncio.run(question(None))

    # A cluster of real nodes does the same in tests/integration; how often each step is done is seen here.
    monkeypatch.setattr(cluster_mirror, "resolved", lambda: (None, None, Path()))
    monkeypatch.setattr(cluster_mirror, "copies", lambda _config: 3)
    monkeypatch.setattr(cluster_mirror, "ask", ask)
    monkeypatch.setattr(mirror_place, "opened", opened)
    monkeypatch.setattr(mirror_promotion, "plan", plan)
    monkeypatch.setattr(mirror_promotion, "promote", promote)
    return made


@pytest.mark.parametrize(
    ("words", "answer", "expected"),
    [
        (["--yes"], "", ["plan", "promote"]),
        ([], "y\n", ["plan", "plan", "promote"]),
        ([], "n\n", ["plan"]),
    ],
    ids=["nothing is asked", "yes", "no"],
)
def test_it_is_planned_again_only_after_a_question(
    steps: list[str], words: list[str], answer: str, expected: list[str]
) -> None:
    """Each time takes 15 s with a primary that is lost, and the destination waits."""
    result = CliRunner().invoke(cluster_mirror.promote, ["orders", "--node", "n3", *words], input=answer)
    assert steps == expected
    assert (result.exit_code == 0) is ("promote" in expected)
    assert "mirror SLA_orders_mn3 on n3 has 25 messages, up to 120" in result.output
    assert ("orders is served by n3, with 25 messages" in result.output) is ("promote" in expected)
