"""Figures of the mailbox in the exposition of metrics, and those that other parts have written."""

from __future__ import annotations

import os
from pathlib import Path

from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from pmdaemon.mailbox import Layout, Route, attach, create_segment
from pmdaemon.mailbox.inspect import FILL_METRIC, METRICS
from pmdaemon.runtime.clock import FakeClock
from sla_server.api.context import AppContext
from sla_server.api.live_view import LiveView
from sla_server.api.metrics import FRESH_S, MailboxCollector, Metrics
from sla_server.api.operations import Operations
from tests.support.api import snapshot


def test_the_mailbox_of_this_part_is_reported_with_names_labels_and_sentences(tmp_path: Path) -> None:
    create_segment(tmp_path / "app.mbx", Layout(("a", "b"), (Route("a", "b", 1024),), 8))
    clock = FakeClock()
    operations = Operations(lambda _message: None, clock, wait_s=1.0)
    live = LiveView(clock, streams_max=1, stale_after_s=1.0)
    with attach(tmp_path / "app.mbx", "a") as mailbox:
        mailbox.post("b", bytes(512))
        text = Metrics(live, operations, MailboxCollector(mailbox.name, mailbox.stats)).text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, sentence in (*METRICS.values(), FILL_METRIC):
        family = families[name.removesuffix("_total")]
        assert family.documentation == sentence
        assert (family.type == "counter") == name.endswith("_total")
    (posts,) = families["sla_mailbox_posts"].samples
    assert (posts.labels, posts.value) == ({"participant": "a"}, 1)
    (fill,) = families["sla_mailbox_ring_fill_ratio"].samples
    assert (fill.labels, fill.value) == ({"participant": "a", "recipient": "b"}, 0.5)
    assert {sample.labels["cause"] for sample in families["sla_mailbox_resets"].samples} >= {"idle", "scans"}


def test_metrics_of_the_api_have_those_of_its_mailbox(web: FlaskClient) -> None:
    assert 'sla_mailbox_posts_total{participant="appserver"} 0.0' in web.get("/api/v1/metrics").text


def test_fresh_files_are_added_and_old_ones_only_dated(
    web: FlaskClient, context: AppContext, tmp_path: Path
) -> None:
    assert "sla_metrics_age_seconds" not in web.get("/api/v1/metrics").text
    context.metrics.folder = tmp_path
    path = tmp_path / "pmdaemon.prom"
    path.write_text("sla_pmdaemon_pairs 2\n")
    (tmp_path / ".pmdaemon.prom.77").write_text("half a fi")
    text = web.get("/api/v1/metrics").text
    assert "\nsla_pmdaemon_pairs 2\n" in text
    assert 'sla_metrics_age_seconds{part="pmdaemon"} 0' in text
    assert "half a fi" not in text
    now_s = path.stat().st_mtime
    os.utime(path, (now_s, now_s - FRESH_S - 5))
    text = web.get("/api/v1/metrics").text
    assert "sla_pmdaemon_pairs" not in text
    assert 'sla_metrics_age_seconds{part="pmdaemon"} 2' in text


def test_a_folder_that_is_not_there_is_no_error(
    web: FlaskClient, context: AppContext, tmp_path: Path
) -> None:
    context.metrics.folder = tmp_path / "none"
    assert web.get("/api/v1/metrics").status_code == 200


def test_the_figures_of_feed_forward_are_metrics_while_the_view_is_fresh(
    web: FlaskClient, context: AppContext, clock: FakeClock
) -> None:
    assert "sla_feed_forward" not in web.get("/api/v1/metrics").text
    context.live.put({**snapshot(), "feed_forward": {"recurring": 2, "bad_ahead": 7, "odd": 1, "off": None}})
    text = web.get("/api/v1/metrics").text
    assert "\nsla_feed_forward_recurring 2.0\n" in text
    assert "\nsla_feed_forward_bad_ahead_total 7.0\n" in text
    assert "odd" not in text
    assert "sla_feed_forward_off" not in text
    context.live.put({**snapshot(), "feed_forward": "nothing"})
    assert "sla_feed_forward" not in web.get("/api/v1/metrics").text
