"""The systemd units: what the parents promise about stopping and starting must hold under systemd, too."""

from __future__ import annotations

from configparser import ConfigParser

import pytest

from tests.support.paths import ROOT

UNITS = ROOT / "deploy" / "systemd"
START_LIMIT_BURST, START_LIMIT_S = 5, 10  # systemd's defaults; beyond them a unit stays down


def service(name: str) -> dict[str, str]:
    parser = ConfigParser(interpolation=None, strict=False)
    parser.read(UNITS / f"{name}.service")
    return {key.lower(): value for key, value in parser["Service"].items()}


@pytest.mark.parametrize("name", ["gateway-agent", "sla-server", "sla-relay"])
def test_the_parent_alone_is_told_to_stop(name: str) -> None:
    assert service(name)["killmode"] == "mixed", "else every child gets SIGTERM at once, in no order"


@pytest.mark.parametrize("name", ["gateway-agent", "sla-server", "sla-relay"])
def test_what_fails_at_boot_is_tried_for_ever(name: str) -> None:
    found = service(name)
    assert found["restart"] == "on-failure"
    assert float(found["restartsec"]) * (START_LIMIT_BURST - 1) > START_LIMIT_S


def test_a_missing_export_file_costs_its_export_and_not_the_agent() -> None:
    assert "execstartpre" not in service("gateway-agent"), "--check-config looks at the files"


@pytest.mark.parametrize("name", ["gateway-agent", "sla-server", "sla-relay"])
def test_nobody_else_reads_what_they_keep(name: str) -> None:
    found = service(name)
    modes = {found["statedirectorymode"], found["runtimedirectorymode"]}
    assert modes == {"0700"}, "the default is 0755: database and statistics would be anybody's to read"


def test_each_service_has_a_user_of_its_own() -> None:
    names = ("sla-server", "sla-policy", "sla-relay", "gateway-agent")
    users = {service(name)["user"] for name in names}
    assert users == {"sla", "sla-policy", "sla-relay", "sla-agent"}
    assert all(service(name)["group"] == service(name)["user"] for name in names)


def test_the_policy_job_sees_of_the_server_its_parquet_files_alone() -> None:
    text = (UNITS / "sla-policy.service").read_text()
    named = [
        line for line in text.splitlines() if "sla-server" in line and not line.startswith(("#", "After="))
    ]
    assert named == ["BindReadOnlyPaths=-/var/lib/sla-server/parquet:/var/lib/sla-policy/parquet"]
    assert service("sla-policy")["supplementarygroups"] == "sla", "server.toml is readable by that group"


def test_systemd_watches_the_supervisor_and_never_the_parent_of_data_planes() -> None:
    assert float(service("sla-server")["watchdogsec"]) >= 120, "it stops five parts, 10 s each at most"
    assert "watchdogsec" not in service("gateway-agent"), "application I/O would end with a parent that hangs"
