"""Metrics of other parts are added while they are fresh."""

from __future__ import annotations

import os
from pathlib import Path

from flask.testing import FlaskClient

from sla_server.api.meters import FRESH_S
from sla_server.api.parts import Parts


def test_fresh_files_are_added_and_old_ones_only_dated(
    web: FlaskClient, parts: Parts, tmp_path: Path
) -> None:
    assert "sla_metrics_age_seconds" not in web.get("/api/v1/metrics").text
    parts.meters.folder = tmp_path
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


def test_a_folder_that_is_not_there_is_no_error(web: FlaskClient, parts: Parts, tmp_path: Path) -> None:
    parts.meters.folder = tmp_path / "none"
    assert web.get("/api/v1/metrics").status_code == 200
