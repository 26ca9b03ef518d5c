"""The pair process: which processor it gets."""

from __future__ import annotations

import errno
import os

import pytest
import structlog

from pmdaemon.poller.pair import cpu_for, pin


@pytest.mark.parametrize(
    ("pair", "pairs", "setting", "allowed", "cpu"),
    [
        (0, 4, "auto", {0, 1, 2, 3}, 0),
        (3, 4, "auto", {0, 1, 2, 3}, 3),
        (1, 4, "auto", {9, 4, 17, 6}, 6),  # a container's cpuset need not begin at 0
        (5, 8, "auto", {4, 6, 9, 17}, 6),  # more pairs than processors: in turn
        (0, 4, "auto", {0, 1}, None),
        (0, 1, "auto", {0, 1, 2, 3}, None),  # one pair alone is free to go where there is room
        (1, 2, "on", {2, 3}, 3),
        (0, 1, "on", {7}, 7),
        (1, 4, "off", {0, 1, 2, 3}, None),
        (1, 4, "on", set(), None),
    ],
)
def test_which_processor(pair: int, pairs: int, setting: str, allowed: set[int], cpu: int | None) -> None:
    assert cpu_for(pair, pairs, setting, allowed) == cpu  # type: ignore[arg-type]


def test_pairs_beside_each_other_get_different_ones() -> None:
    assert len({cpu_for(pair, 6, "auto", range(6)) for pair in range(6)}) == 6


def test_only_what_is_allowed_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append((pid, cpus)))
    assert pin(1, 2, "on") == 8
    assert asked == [(0, {8})]
    assert pin(1, 2, "auto") is None
    assert len(asked) == 1


def test_where_it_is_forbidden_the_pair_runs_unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _cpus: set[int]) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with structlog.testing.capture_logs() as lines:
        assert pin(0, 1, "on") is None
    assert [(line["event"], line["error"]) for line in lines] == [("not-pinned", "Operation not permitted")]
