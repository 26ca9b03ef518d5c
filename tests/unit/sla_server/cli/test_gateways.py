"""``sla gateways``: add, remove, list."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cli import Terminal


def test_add_and_remove(sla: Terminal) -> None:
    done = sla("gateways", "add", "10.0.0.9:7412", "--name", "host-9")
    assert done.exit_code == 0
    assert "sla gateways list" in done.output
    assert "only if the server has enabled = true in [pmdaemon.tls]" in done.stderr
    assert sla("gateways", "add", "127.0.0.1:7412", "--name", "own").stderr == ""
    del sla.mailbox.posted[-1]
    done = sla("gateways", "remove", "10.0.0.5:7412")
    assert done.output == "10.0.0.5:7412: not dialled any more\n"
    assert sla.asked == [
        ("gateway_list", {"address": "10.0.0.9:7412", "name": "host-9", "is_listed": True}),
        ("gateway_list", {"address": "10.0.0.5:7412", "name": "host-5", "is_listed": False}),
    ]


def test_an_address_in_brackets(sla: Terminal) -> None:
    sla("gateways", "add", "[fd00::5]:7412", "--name", "host-9")
    assert sla.asked[0][1]["address"] == "[fd00::5]:7412"


def test_a_wrong_address_is_told_in_the_words_of_the_server(sla: Terminal) -> None:
    errors = [
        {"line": 0, "field": "", "problem": "address: 'host' is not an IP address", "fix": "Correct it"}
    ]
    sla.mailbox.answer = lambda _header: (False, 422, {"errors": errors})
    done = sla("gateways", "add", "host:1", "--name", "x")
    assert done.exit_code == 1
    assert "not an IP address" in done.stderr


def test_remove_what_is_not_listed(sla: Terminal) -> None:
    done = sla("gateways", "remove", "10.1.1.1:1")
    assert done.exit_code == 1
    assert "no gateway is listed" in done.stderr
    assert sla.asked == []


def test_list_says_what_is_wrong(sla: Terminal, tmp_path: Path) -> None:
    told = [
        {
            "address": "10.0.0.4:1",
            "name": "own",
            "source": "configuration",
            "state": "connected",
            "reason": "",
        },
        {"address": "10.0.0.5:7412", "name": "host-5", "source": "list", "state": "connected", "reason": ""},
        {
            "address": "10.0.0.6:7412",
            "name": "host-6",
            "source": "list",
            "state": "waiting",
            "reason": "revoked: ...",
        },
    ]
    (tmp_path / "dialled.json").write_text(json.dumps(told))
    sla.context.metrics.folder = tmp_path
    lines = sla("gateways", "list").output.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[2] for line in lines if line.strip().startswith("10.")] == [
        "connected",
        "connected",
        "waiting",
    ]
    text = " ".join(" ".join(lines).split())
    assert "listed in the server's file" in text
    assert "revoked" in text
    assert "calls itself gateway-a" in text
    assert len(json.loads(sla("gateways", "list", "-o", "json").output)) == 3
