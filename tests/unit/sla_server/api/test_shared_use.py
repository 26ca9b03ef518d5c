"""The picture of who used a backend while a promise on it was at risk."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from flask.testing import FlaskClient

from dashboard.shared_use import lines_of
from sla_server.api.context import AppContext
from tests.support import api

SVG = "{http://www.w3.org/2000/svg}"


def decision(promise: str, **shares: float) -> dict[str, Any]:
    use = [{"volume": name.replace("_", "/"), "share_ratio": share} for name, share in shares.items()]
    return {"victim": promise, "figures": {"use": use}}


def test_shares_are_means_over_the_decisions_for_a_promise() -> None:
    rows = [
        decision("gold/latency", batch=0.9, db=0.1),
        decision("gold/latency", batch=0.5),
        decision("silver/latency", batch_host=0.4, batch_other=0.2),
        decision("", batch=1.0),
        {"victim": "gold/latency", "figures": None},
    ]
    found = [(line.source, line.target, round(line.weight, 3)) for line in lines_of(rows)]
    assert found == [
        ("batch", "gold/latency", 0.7),
        ("batch", "silver/latency", 0.6),
        ("db", "gold/latency", 0.05),
    ]


def test_it_is_drawn_by_the_server(web: FlaskClient, source: api.FakeSource) -> None:
    answer = web.get(f"/volumes/batch/shared-use.svg?from_us={api.NOW_US - 10**9}&to_us={api.NOW_US}")
    assert (answer.status_code, answer.mimetype) == (200, "image/svg+xml")
    svg = ET.fromstring(answer.text)
    titles = [node.text for node in svg.iterfind(f".//{SVG}path/{SVG}title")]
    assert titles[-1] == "batch had 87 % of the load when erp-gold/latency was at risk (1 decision)"
    assert len(titles) == 2
    assert all(node.get("stroke-dasharray") for node in svg.iterfind(f".//{SVG}path")), "a correlation"
    assert web.get("/volumes/batch/shared-use.svg?from_us=5&to_us=5").status_code == 400


def test_names_are_text_never_markup(
    web: FlaskClient, monkeypatch: pytest.MonkeyPatch, source: api.FakeSource
) -> None:
    row = {"victim": "<b>/latency", "figures": {"use": [{"volume": '"><script>', "share_ratio": 1.0}]}}
    monkeypatch.setattr(source, "decisions", lambda **_: [row])
    text = web.get("/volumes/batch/shared-use.svg").text
    assert "<script>" not in text
    assert "<b>" not in text
    ET.fromstring(text)


def test_who_sees_some_agreements_alone_does_not_see_neighbours(
    web: FlaskClient, context: AppContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context.scopes, "of", lambda _principal: object())
    answer = web.get("/volumes/batch/shared-use.svg")
    assert answer.status_code == 403
    assert "batch" not in answer.text
