"""The daemon's figures as text: every line declared, labels, whole files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from pmdaemon.poller import metrics
from pmdaemon.poller.channel import PairReport
from pmdaemon.poller.pair_manager import PairManager


class FakeChild:
    def __init__(self, index: int, **figures: float) -> None:
        self.index = index
        self.is_running = True
        self.restarts = index
        self.last = PairReport(metrics=figures)


class FakeTraffic:
    needed, moves, passed_on, lost = 3, 64, 12, 0

    def __init__(self, *children: FakeChild) -> None:
        self.children = children


def families(*children: FakeChild) -> dict[str, Any]:
    text = metrics.text(cast(PairManager, FakeTraffic(*children)), 5)
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_figures_of_all_pairs_and_of_the_parent() -> None:
    found = families(FakeChild(0, polls=10.0, t_ptmax_us=55.5, undeclared=1.0), FakeChild(1, polls=7.0))
    polls = found["sla_pmdaemon_polls"]
    assert polls.type == "counter"
    assert {sample.labels["pair"]: sample.value for sample in polls.samples} == {"0": 10.0, "1": 7.0}
    assert found["sla_pmdaemon_t_ptmax_us"].samples[0].value == 55.5
    assert found["sla_pmdaemon_pairs"].samples[0].value == 2
    assert found["sla_pmdaemon_shards_moved"].samples[0].value == 64
    assert found["sla_pmdaemon_refused_connections"].samples[0].value == 5
    assert [sample.value for sample in found["sla_pmdaemon_late_replies"].samples] == [0, 0], "none so far"
    assert not any("undeclared" in name for name in found)
    assert all(family.documentation.endswith(".") for family in found.values())


def test_refusals_have_their_code_as_a_label() -> None:
    found = families(FakeChild(0, refusal_token_used=2.0, refusal_not_tls=1.0), FakeChild(1))
    refusals = found["sla_pmdaemon_refusals"]
    assert {sample.labels["code"]: sample.value for sample in refusals.samples} == {
        "token-used": 2,
        "not-tls": 1,
    }
    assert {sample.labels["pair"] for sample in refusals.samples} == {"0"}


def test_every_declared_figure_has_one_name_and_a_sentence() -> None:
    names = [item.name for item in (*metrics.PAIR, *metrics.PARENT)]
    assert len(set(names)) == len(names)
    for item in (*metrics.PAIR, *metrics.PARENT):
        assert item.about[0].isupper()
        assert item.about.endswith(".")
        assert item.name.endswith("_total") == (item.type == "counter")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "pmdaemon.prom"
    metrics.write(path, "a 1\n")
    metrics.write(path, "a 2\n")
    assert path.read_text() == "a 2\n"
    assert [item.name for item in path.parent.iterdir()] == ["pmdaemon.prom"]
