"""Space from an agent and from the server itself, through the whole product, to SQL, events and people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stage import Agent, Stage

SERVER_TOML = """
[storage]
warn_ratio = 0.000000001
critical_ratio = 0.9999999
record_s = 1
refuse_agreements = "warn"

[[storage.command]]
name = "make-room"
argv = ["/bin/sh", "-c", "echo $SLA_POOL is $SLA_LEVEL"]
pools = "gateway-a/*"
at = "warn"
dry_run = false

[space]
interval_s = 1

[[space.source]]
name = "own"
kind = "path"
path = "/"
"""
AGENT_TOML = """
[space]
interval_s = 1

[[space.source]]
name = "images"
kind = "loop"
path = "{folder}"
backend = "disk-1"

[[space.source]]
name = "missing"
kind = "path"
path = "{folder}/not-there"
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "erp.img").write_bytes(bytes(1 << 20))
    (folder / "old.img").write_bytes(bytes(1 << 16))
    with Stage(tmp_path / "stage", extra_toml=SERVER_TOML) as running:
        running.start_server()
        toml = AGENT_TOML.format(folder=folder)
        # Tables come last in an agent's file: [[plane]] follows this text.
        running.start_agent(Agent("gateway-a", {"erp-db": str(folder / "erp.img")}, extra_toml=toml))
        running.wait(running.gateways_up, "the gateway")
        yield running


def pools(stage: Stage) -> dict[str, Any]:
    return {row["name"]: row for row in stage.get("pools")["items"]}


def events(stage: Stage) -> list[tuple[str, str]]:
    return [(row["kind"], row["subject"]) for row in stage.get("events?limit=200")["items"]]


def test_pools_of_gateway_and_server_reach_sql_events_commands_and_refusals(stage: Stage) -> None:
    stage.wait(lambda: {"gateway-a/images", "server/own"} <= pools(stage).keys(), "both pools")
    stage.wait(lambda: pools(stage)["gateway-a/images"]["level"] == "warn", "the level")
    row = pools(stage)["gateway-a/images"]
    assert (row["kind"], row["backend"]) == ("loop", "disk-1")
    assert 0 < row["used_bytes"] <= row["size_bytes"]
    one = stage.get("pools/gateway-a/images")
    assert [(each["name"], each["volume"]) for each in one["volumes"]] == [
        ("erp.img", "erp-db"),
        ("old.img", ""),
    ]
    assert len(one["days"]) in (1, 2), "midnight may come"
    wanted = {
        ("space-low", "gateway-a/images"),
        ("space-low", "server/own"),
        ("space-source-failed", "gateway-a"),
    }
    stage.wait(lambda: wanted <= set(events(stage)), "the events")

    def actions() -> list[Any]:
        found: list[Any] = stage.get("pools/gateway-a/images")["actions"]
        return found

    stage.wait(lambda: [each for each in actions() if each["state"] != "started"], "the command")
    (action,) = actions()
    assert (action["action"], action["state"]) == ("make-room", "done")
    assert "It said: gateway-a/images is warn" in action["text"]

    listed = stage.sla("get", "pools").stdout
    assert "gateway-a/images" in listed
    assert "server/own" in listed
    said = json.loads(stage.sla("describe", "pool", "gateway-a/images", "-o", "json").stdout)
    assert said["volume_count"] == 2

    refused = stage.sla("apply", "-f", str(stage.folder / "agreements.yaml"), check=False)
    assert refused.returncode != 0
    assert "takes no new agreements" in " ".join((refused.stdout + refused.stderr).split())
    stage.wait(lambda: "refused" in {each["state"] for each in actions()}, "the refusal, recorded")
    (one,) = [each for each in actions() if each["state"] == "refused"]
    assert "takes no new agreements" in one["text"]


def test_a_restart_of_services_repeats_no_event(stage: Stage) -> None:
    low = ("space-low", "gateway-a/images")
    stage.wait(lambda: low in events(stage), "the event")
    stage.kill("sla_server.process services")
    stage.wait(lambda: events(stage).count(("services-started", "services")) == 2, "services again")
    before = pools(stage)["gateway-a/images"]["read_us"]
    (Path(stage.folder).parent / "images" / "new.img").write_bytes(bytes(1 << 16))
    names = lambda: [each["name"] for each in stage.get("pools/gateway-a/images")["volumes"]]  # noqa: E731
    stage.wait(
        lambda: "new.img" in names() or pools(stage)["gateway-a/images"]["read_us"] > before, "a reading"
    )
    assert events(stage).count(low) == 1
