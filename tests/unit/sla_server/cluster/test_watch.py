"""Who ends when nodes that started together differ, and a store that is turned off is reported once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from pmdaemon.pki.authority import Authority
from pmdaemon.runtime.clock import FakeClock
from sla_server.cluster import essentials, membership
from sla_server.cluster.admin import Admin, NodeRow
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import EssentialsDiffer
from sla_server.cluster.membership import Membership
from sla_server.cluster.watch import ANSWER_S, CERTIFICATE_S, CertificateWatch, NodeWatch, outvoted

A, B = {"replicas": "3"}, {"replicas": "5"}


@pytest.mark.parametrize(
    ("found", "ends"),
    [
        ({"n1": A, "n2": A, "n3": A}, {}),
        ({"n1": B, "n2": A, "n3": A}, {"n1": "n2"}),
        ({"n1": B, "n2": A}, {}),  # the third will say who is right
        ({"n1": A, "n3": A}, {}),
        ({"n1": A, "n2": B, "n3": {"replicas": "1"}}, {"n2": "n1", "n3": "n1"}),
        ({"n1": {"name": "SLA"}, "n2": {"name": "sla"}, "n3": {"name": "sla"}}, {}),
    ],
)
def test_who_differs_from_most_ends(found: dict[str, dict[str, str]], ends: dict[str, str]) -> None:
    assert {name: other for name in found if (other := outvoted(name, found, 3))} == ends


def _row(name: str, config: ClusterConfig) -> NodeRow:
    return NodeRow(name, "", "2.15.1", 0, 3, "n1", (), 0, 0, essentials.of(config))


def test_the_node_that_differs_ends_and_the_others_go_on() -> None:
    peers = [{"name": name, "listen": "127.0.0.1:1", "routes": "127.0.0.1:2"} for name in ("n2", "n3")]
    config = ClusterConfig.model_validate({"node": "n1", "replicas": 5, "peers": peers})
    usual = ClusterConfig(node="n2")
    events: list[str] = []
    watch = NodeWatch(config, cast(Membership, None), lambda kind, _severity, _text: events.append(kind))
    rows = [_row("n1", config), _row("n2", usual)]
    watch.judge(rows)
    with pytest.raises(EssentialsDiffer, match="those of n2: replicas is 5 here and 3 there"):
        watch.judge([*rows, _row("n3", usual)])
    watch.judge([_row("n1", usual), _row("n2", usual), _row("n3", config)])
    assert events == []


def test_a_store_that_is_turned_off_is_reported_once() -> None:
    config = ClusterConfig(node="n1")
    events: list[tuple[str, str]] = []
    watch = NodeWatch(
        config, cast(Membership, None), lambda kind, severity, _: events.append((kind, severity))
    )
    on = _row("n1", config)
    off = replace(on, is_storing=False)
    for row in (on, off, off, on, off):
        watch.judge([row])
    assert events == [("cluster-store-off", "critical")] * 2


def test_an_error_from_the_inside_of_the_library_does_not_end_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    async def nodes(_admin: Admin, limit_s: float) -> tuple[NodeRow, ...]:
        asked.append(limit_s)
        raise AttributeError("'NoneType' object has no attribute 'write'")

    monkeypatch.setattr(Admin, "nodes", nodes)
    NodeWatch(ClusterConfig(node="n1"), cast(Membership, None), lambda *_: None).check()
    assert asked == [ANSWER_S]


DAY_US = 86_400_000_000
MADE_US = 1_800_000_000_000_000


def _certificate(tmp_path: Path, lifetime_s: float) -> membership.Membership:
    config = ClusterConfig.model_validate({"node": "n1", "tls": {"enabled": True, "lifetime_s": lifetime_s}})
    authority = Authority(tmp_path / "ca", clock=FakeClock(unix_us=MADE_US))
    authority.init()
    membership.init(config, tmp_path / "n1", authority)
    return membership.load(config, tmp_path / "n1")


@pytest.mark.parametrize(("lifetime_days", "first_day"), [(365, 335), (9, 6)])
def test_a_certificate_that_ends_is_reported_once_a_day(
    tmp_path: Path, lifetime_days: int, first_day: int
) -> None:
    clock = FakeClock(unix_us=MADE_US)
    said: list[tuple[int, str, str]] = []
    watch = CertificateWatch(
        "n1",
        _certificate(tmp_path, lifetime_days * 86_400.0).tls,
        clock,
        lambda kind, severity, text: said.append(((clock.unix_us() - MADE_US) // DAY_US, severity, text)),
    )
    for _ in range(lifetime_days + 2):
        watch.check()
        watch.check()
        clock.advance(CERTIFICATE_S)
    expected = [(day, "warning") for day in range(first_day, lifetime_days)]
    expected += [(day, "critical") for day in (lifetime_days, lifetime_days + 1)]
    assert [each[:2] for each in said] == expected
    assert "sla cluster invite n1 FILE" in said[0][2]
    assert "has ended" in said[-1][2]


def test_a_node_without_tls_has_no_certificate_that_ends() -> None:
    said: list[str] = []
    CertificateWatch("n1", None, FakeClock(unix_us=MADE_US), lambda kind, *_: said.append(kind)).check()
    assert said == []
