"""Every figure that a view of the page shows is had on the command line, too, by ``-o json``.

What views ask of the API is read from their scripts, so a view that asks for something new is missed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dashboard
from sla_server.api.route import PREFIX
from tests.support import api
from tests.support.cli import Terminal

SCRIPTS = Path(dashboard.__file__).parent / "static"
HOUR_US = 3_600_000_000
SINCE = "2027-01-15 05:00"
"""Before the present of the rig, which is 2027-01-15 08:00 UTC."""
FIGURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "/promises": ("/promises?limit=50", ("get promises",)),
    "/slas/*": ("/slas/erp-gold", ("describe sla erp-gold",)),
    "/slas/*/hours": (
        "/slas/erp-gold/hours",
        ("get periods erp-gold/latency --limit 1", "get hours erp-gold --limit 1000"),
    ),
    "/slas/*/periods": ("/slas/erp-gold/periods?objective=latency", ("get periods erp-gold/latency",)),
    "/slas/*/slices": ("/slas/erp-gold/slices?objective=latency", ("get slices erp-gold/latency",)),
    "/slas/*/versions": ("/slas/erp-gold/versions", ("history erp-gold",)),
    "/maintenance": ("/maintenance", ("get maintenance",)),
    "/episodes": ("/episodes?name=erp-gold&limit=20", ("get episodes erp-gold",)),
    "/throttles": ("/throttles?limit=100", ("get throttles",)),
    "/decisions": ("/decisions", ("get decisions",)),
    "/volumes": ("/volumes?sort=busiest&limit=50", ("get volumes",)),
    "/volumes/*": ("/volumes/batch", ("describe volume batch",)),
    "/volumes/*/history": ("/volumes/batch/history", ("get rates batch",)),
    "/volumes/*/clients": ("/volumes/batch/clients?limit=25", ("get clients batch",)),
    "/backends": ("/backends", ("get backends",)),
    "/backends/*": ("/backends/disk-0", ("describe backend disk-0",)),
    "/backends/*/history": ("/backends/disk-0/history", ("get loads disk-0",)),
    "/gateways": ("/gateways", ("get gateways",)),
    "/pools": ("/pools", ("get pools",)),
    "/pools/*/*": ("/pools/gateway-a/data", ("describe pool gateway-a/data",)),
    "/policies": ("/policies?limit=50", ("get policies",)),
    "/policies/*": ("/policies/3", ("policy show 3",)),
    "/policies/*/volumes": ("/policies/3/volumes?limit=20", ("policy show 3",)),
    "/policies/*/volumes/*": ("/policies/3/volumes/batch", ("policy explain batch --version 3",)),
    "/policies/*/harms": ("/policies/3/harms?limit=1000", ("policy show 3",)),
    "/policies/*/diff/*": ("/policies/3/diff/2", ("policy diff 3 2",)),
    "/inbox": ("/inbox?limit=25", ("get events --severity info,warning,critical --limit 100",)),
    "/events/*": ("/events/e0001", ("describe event e0001",)),
    "/recipients": ("/recipients", ("get recipients",)),
    "/silences": ("/silences", ("get silences",)),
    "/jobs": ("/jobs?limit=50", ("get jobs",)),
    "/processes": ("/processes", ("get processes",)),
    "/nodes": ("/nodes", ("get nodes",)),
    "/audit": ("/audit?limit=50", ("audit list",)),
    "/approvals": ("/approvals", ("approvals list",)),
    "/users": ("/users", ("user list",)),
    "/tokens": ("/tokens", ("token list",)),
    "/sessions": ("/sessions", ("user sessions",)),
    "/mode": ("/mode", ("mode",)),
    "/why/*": ("/why/batch?kind=volume", ("why batch",)),
    "/live/trend": ("/live/trend", ("get trend",)),
    "/live": (
        "/live",
        (
            "top --once",
            "get slas",
            "get volumes",
            "get throttles",
            "get gateways",
            "get backends",
            "get processes",
        ),
    ),
}
"""What views ask, with * for names -> an address of it, and commands whose output together has all of it."""
NO_FIGURES = {
    "/session": "who one is",
    "/slas/*/admission": "asked while one writes a document: sla admit",
}
OF_PAGING = {"next", "count", "offset", "before", "cursor", "server", "from_us", "to_us"}
"""Keys of answers that say how to go on, of what range they are, and how old the live view is."""
OF_ROWS = {"states", "counts", "budgets"}
"""Keys of answers that count their own rows."""
KEYS_ONLY = {"/live"}
"""Where the rig's live view and its rows of SQL are of other things: every key is had, not every value."""


def asked_by_views() -> set[str]:
    """Paths of the API that are read in the scripts, with * for what is filled in."""
    found = set()
    for script in SCRIPTS.rglob("*.js"):
        text = script.read_text()
        base = {
            match[1]: match[2] for match in re.finditer(r"(?:const |page\.|let )?(base) = `([^`]*)`", text)
        }
        for match in re.finditer(
            r"""(?:read|call\("GET", |path: )\(?([`"])(/[^`"?]*|\$\{(?:page\.)?base\}[^`"?]*)""", text
        ):
            path = (
                match[2]
                .replace("${page.base}", base.get("base", ""))
                .replace("${base}", base.get("base", ""))
            )
            path = path.replace("${name.split(", "*/*")  # OWNER/POOL
            found.add(re.sub(r"\$\{.*?\}(?=/|$)", "*", path).rstrip("/"))
    return found


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value with the key that it is under."""
    if isinstance(value, dict):
        for name, each in value.items():
            if key == "by_volume":
                yield from leaves(name, "volumes")
            if name not in OF_PAGING | OF_ROWS:
                yield from leaves(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, key)
    elif value is not None and value != "":
        yield key, value


def test_every_path_that_views_read_is_looked_at() -> None:
    asked = asked_by_views()
    assert len(asked) > 25, "the scripts are read"
    assert asked - set(FIGURES) - set(NO_FIGURES) == set()


@pytest.mark.parametrize("path", sorted(FIGURES))
def test_what_a_view_shows_is_in_the_output_of_commands(
    sla: Terminal, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, commands = FIGURES[path]
    (policy,) = sla.source.policies()
    monkeypatch.setattr(sla.source, "policy", lambda version: {**policy, "version": version})
    sla.context.live.put(api.snapshot())
    web = dashboard.create_app(sla.context).test_client()
    answer = web.get(
        PREFIX + address, base_url="http://127.0.0.1:8411", headers={"Authorization": f"Bearer {api.TOKEN}"}
    )
    assert answer.status_code == 200, answer.text
    shown = set(leaves(answer.json))
    assert shown, f"{address} shows something here"
    said: set[tuple[str, Any]] = set()
    for command in commands:
        result = sla(*command.split(), "-o", "json")
        assert result.exit_code == 0, f"sla {command}: {result.output}"
        said |= set(leaves(json.loads(result.stdout)))
    if path in KEYS_ONLY:
        shown, said = ({(key, "") for key, _value in each} for each in (shown, said))
    missing = sorted(f"{key}: {value}" for key, value in shown - said)
    assert missing == [], f"`sla {' and '.join(commands)}` lack what {address} has"
