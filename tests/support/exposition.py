"""Everything that the metrics endpoint can expose, with the files of all other parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import dashboard
from pmdaemon.poller import metrics as poller_metrics
from pmdaemon.poller.channel_messages import PairReport
from sla_server.events.metrics import render
from tests.support import api


class _FakeChild:
    index, is_running, restarts = 0, True, 0
    last = PairReport(metrics={"polls": 10.0, "refusal_not_tls": 1.0})


class _FakePairManager:
    needed, moves, passed_on, lost = 3, 64, 12, 0
    children = (_FakeChild(),)


class _Source(api.FakeSource):
    """The process of the tests is one that the kernel knows."""

    def processes(self) -> list[dict[str, Any]]:
        return [{**row, "pid": os.getpid()} for row in super().processes()]


def whole_snapshot() -> dict[str, Any]:
    """A live view in which every figure has a value."""
    view = api.snapshot()
    judged = {"target": 0.99, "burn_1h": 2.5, "alerts": ["fast"], "good_s": 600, "bad_s": 60, "stall_us": 0}
    view["slas"] = [{**row, **judged, "metric": "latency"} for row in view["slas"]]
    rates = {"ops_per_s": 50.0, "bytes_per_s": 1e6, "client": "10.0.0.9", "mean_hold_us": 900}
    view["throttles"] = [{**row, **rates} for row in view["throttles"]]
    caps = {"cap_ops_per_s": 50.0, "cap_bytes_per_s": 1e6, "cap_cost_per_s": 90.0}
    view["volumes"] = [{**row, **caps} for row in view["volumes"]]
    pressure = {"fullness": {"queue": 0.25}, "refused": {}}
    view["processes"] = [{**row, "pressure": pressure} for row in view["processes"]]
    more = {"dropped_cuts": 0, "starved_ratio": 0.0, "io_waited_ratio": 0.1}
    view["gateways"] = [{**row, **more} for row in view["gateways"]]
    totals = {"slas": {"ok": 3}, "volumes": 2, "throttles": 1, "backends": 1, "gateways": {"up": 2}}
    problem = {"process": "dbmanager", "what": "queue", "since_us": 1, "reason": "full"}
    return {**view, "totals": totals, "problems": [problem], "feed_forward": {"watched": 1, "came": 2}}


def exposed(folder: Path) -> str:
    """What the endpoint answers."""
    poller = poller_metrics.text(cast(Any, _FakePairManager()), 5)
    (folder / "pmdaemon.prom").write_text(poller)
    recipient = {"name": "mail", "waiting": 3, "attempt": 2, "confirmed": 40, "dead_letters": 1}
    (folder / "delivery.prom").write_text(render([recipient], {"a": 0.25}, {"b": 0.5}, {"accepted": 7}))
    mailbox = api.AnsweringMailbox()
    try:
        context = api.make_context(mailbox, source=_Source())
        context.metrics.folder = folder
        context.live.put(whole_snapshot())
        web = dashboard.create_app(context).test_client()
        web.get("/api/v1/totals", base_url="http://127.0.0.1:8411")
        return web.get("/api/v1/metrics", base_url="http://127.0.0.1:8411").text
    finally:
        mailbox.close()
