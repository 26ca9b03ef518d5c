"""``sla volumes`` in words."""

from __future__ import annotations

import json

import pytest

from tests.support.cli import Terminal

APPROVED = {"volume": "erp-db", "gateway": "evil-gw", "gateway_id": "g-9", "backend": "disk-0"}


def test_list_shows_who_has_what(sla: Terminal) -> None:
    lines = sla("volumes", "list").output.splitlines()
    assert [line.split()[:4] for line in lines if line.startswith(("batch", "erp-db"))] == [
        ["batch", "gateway-a", "moved", "disk-0,"],
        ["batch", "gateway-b", "approved", "disk-0"],
        ["erp-db", "gateway-a", "approved", "disk-0"],
        ["erp-db", "evil-gw", "pending", "disk-0"],
    ]
    assert max(map(len, lines)) <= 80


def test_pending_says_what_to_do(sla: Terminal) -> None:
    lines = sla("volumes", "pending").output.splitlines()
    [row] = [line for line in lines if line.startswith("erp-db")]
    assert (row.split()[1:4], row.split()[-1]) == (["evil-gw", "disk-0", "gateway-a"], "1,204")
    assert lines[-1].startswith("On purpose: sla volumes approve VOLUME --gateway GATEWAY")
    assert max(map(len, lines)) <= 80
    assert [row["name"] for row in json.loads(sla("volumes", "pending", "-o", "json").output)] == [
        "gateway-a", "evil-gw",
    ]  # fmt: skip


def test_pages_are_joined(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sla_server.cli.volumes.PAGE", 1)
    assert len(json.loads(sla("volumes", "list", "-o", "json").output)) == 4
    asked = [entry for entry in sla.source.asked if entry[0] == "volume_owners"]
    assert [entry[2] for entry in asked] == [(), ("batch", "g-1"), ("batch", "g-2"), ("erp-db", "g-1")]


@pytest.mark.parametrize(
    ("command", "text"), [("list", "No gateway has shown"), ("pending", "No volume waits")]
)
def test_nothing_says_so(sla: Terminal, monkeypatch: pytest.MonkeyPatch, command: str, text: str) -> None:
    monkeypatch.setattr(sla.source, "volume_owners", lambda **_: [])
    assert sla("volumes", command).output.startswith(text)


def test_approve_and_revoke(sla: Terminal) -> None:
    owners = ["evil-gw", "gateway-a"]
    sla.mailbox.answer = lambda _header: (True, 200, {"approved": [{**APPROVED, "owners": owners}]})
    done = sla("volumes", "approve", "erp-db", "--gateway", "evil-gw", "--gateway", "gateway-a")
    assert done.output == "erp-db: approved for evil-gw on disk-0; it belongs to evil-gw, gateway-a\n"
    sla.mailbox.answer = lambda _header: (True, 200, {"revoked": [{**APPROVED, "owners": []}]})
    done = sla("volumes", "revoke", "erp-db")
    assert done.output == "erp-db: revoked for evil-gw; it belongs to no gateway now\n"
    assert sla.asked == [
        ("volumes_approve", {"volumes": ["erp-db"], "gateways": ["evil-gw", "gateway-a"]}),
        ("volumes_revoke", {"volumes": ["erp-db"], "gateways": []}),
    ]


def test_a_refusal_is_said(sla: Terminal) -> None:
    errors = [{"line": 0, "field": "", "problem": "volume erp-db is shown by 2 gateways",
               "fix": "Say which is meant, one or several: --gateway a, --gateway b"}]  # fmt: skip
    sla.mailbox.answer = lambda _header: (False, 409, {"errors": errors})
    done = sla("volumes", "approve", "erp-db")
    assert done.exit_code == 1
    assert "--gateway a, --gateway b" in done.stderr


def test_a_volume_of_several_gateways_is_said_so_where_volumes_are_listed(sla: Terminal) -> None:
    lines = sla("get", "volumes").output.splitlines()
    assert lines[-1] == "batch belongs to 2 gateways: gateway-a, gateway-b"
    owners = {row["volume"]: row["owners"] for row in json.loads(sla("get", "volumes", "-o", "json").output)}
    assert owners == {"erp-db": ["gateway-a"], "batch": ["gateway-a", "gateway-b"]}


def test_labels_of_a_volume_are_a_document_of_its_name(sla: Terminal) -> None:
    assert sla("volumes", "label", "batch", "tier=gold", "env-").exit_code == 0
    operation, asked = sla.asked[-1]
    assert operation == "apply"
    document = json.loads(asked["documents"])
    assert (document["kind"], document["metadata"]["name"]) == ("VolumeLabels", "batch")
    assert document["spec"] == {"volumes": ["batch"], "labels": {"tier": "gold", "env": None}}
    count = len(sla.asked)
    unknown = sla("volumes", "label", "betch", "tier=gold")
    assert (unknown.exit_code, len(sla.asked)) == (1, count), (
        "nothing is applied for a volume that is not there"
    )
    wrong = sla("volumes", "label", "batch", "a b=c")
    assert (wrong.exit_code, "write KEY=VALUE, or KEY- to take it away" in wrong.stderr) == (2, True)


def test_volumes_are_listed_by_label(sla: Terminal) -> None:
    [row] = sla.source.documents("VolumeLabels")
    row["spec"]["spec"] = {"volumes": ["erp-*"], "labels": {"tier": "gold"}}
    sla.source.labels = [row]
    found = json.loads(sla("get", "volumes", "-l", "tier in (gold, silver)", "-o", "json").output)
    assert [(each["volume"], each["labels"]) for each in found] == [("erp-db", {"tier": "gold"})]
    others = json.loads(sla("get", "volumes", "-l", "!tier", "-o", "json").output)
    assert [each["volume"] for each in others] == ["batch"]
    assert sla("get", "volumes", "-l", "tier=lead").output.startswith("No volume has the labels tier=lead.")
