"""Figures under metric names: declared with a sentence, the same inside and outside."""

import re
from pathlib import Path

from pmdaemon.mailbox import attach, describe
from pmdaemon.mailbox.figures import METRICS, PUBLISHED
from tests.support.mailbox import make_mesh


def test_each_figure_has_a_name_of_prometheus_and_a_sentence() -> None:
    assert METRICS.keys() == PUBLISHED.keys()
    for name, sentence in METRICS.values():
        assert re.fullmatch(r"sla_mailbox_[a-z_]+", name)
        assert sentence.endswith(".")
    assert len({name for name, _ in METRICS.values()}) == len(METRICS)


def test_a_mailbox_and_its_dump_tell_the_same(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=1024)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", [b"x" * 28] * 8)
        assert len(b.take(3)) == 3
        assert b.prepare_sleep() is False
        assert a.prepare_sleep()
        mine, theirs = a.metrics(), b.metrics()
    told = describe(path)["metrics"]
    assert mine['sla_mailbox_posts_total{participant="a"}'] == 8
    assert mine['sla_mailbox_posted_bytes_total{participant="a"}'] == 8 * 28
    assert mine['sla_mailbox_ring_fill_ratio{participant="a",recipient="b"}'] == 0.25
    assert theirs['sla_mailbox_takes_total{participant="b"}'] == 3
    assert theirs['sla_mailbox_resets_total{participant="b",cause="idle"}'] == 0
    assert told['sla_mailbox_resets_total{participant="b"}'] == 0
    for metrics in (mine, theirs):
        for name, value in metrics.items():
            if "cause=" not in name:
                assert told[name] == value


def test_figures_may_be_asked_for_while_the_batch_in_hand_changes(path: Path) -> None:
    """Another thread asks (of a pair: the main thread, once a second); each load lets the taker go on."""
    make_mesh(path, "a", "b", slots=64, ring_bytes=1 << 12)
    with attach(path, "a") as a, attach(path, "b") as b:
        real = b._hand._words

        class Turns:
            def __getitem__(self, word: int) -> int:
                b._hand._words = real  # the taker's own loads give no turn
                for _ in range(5):
                    a.post("b", b"x")
                b.take(3)
                b._hand._words = self  # type: ignore[assignment]
                return real[word]

        for _ in range(10):
            a.post("b", b"x")
        b.take()
        b._hand._words = Turns()  # type: ignore[assignment]
        assert b.stats()["in_hand"] == 10  # as it was when the question came
        b._hand._words = real
