"""``sla simulate`` from the command line, without a server."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.simulate import GREEDY, QUICK, run


def test_a_directory_that_is_not_there_is_a_wrong_command_line(tmp_path):
    done = run("--slas", tmp_path / "nowhere")
    assert (done.exit_code, "does not exist" in done.stderr) == (2, True)


def test_three_modes_as_tables_of_80_columns(slas):
    done = run("--slas", slas, *QUICK, *GREEDY)
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = re.findall(r"^gold/latency +(\w+) +p95 12.0ms +(\S+) +(\d+) +12 +(\S+)", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["off", "observe", "enforce"]
    assert [row[2:] for row in rows[:2]] == [(rows[0][2], "0.0%")] * 2
    assert int(rows[2][2]) < int(rows[0][2])
    assert "device disk: 1 server, read 2 ms at 4 KiB" in done.stdout
    assert "simulated in" in done.stderr


def test_forms_files_and_a_single_mode(slas, tmp_path):
    base = ("--slas", slas, *QUICK, "--mode", "enforce", "--seed", "3")
    tree = json.loads(run(*base, "-o", "json").stdout)
    assert [mode["mode"] for mode in tree["modes"]] == ["enforce"]
    assert (tree["seed"], tree["modes"][0]["volumes"][0]["kept_ratio"]) == (3, None)
    assert run(*base, "-o", "csv").stdout.startswith("mode,what,name,ios,")
    page = tmp_path / "page.html"
    done = run(*base, "-o", "html", page)
    assert done.stdout == ""
    assert f"written to {page}" in done.stderr
    assert page.read_text().startswith("<!doctype html>")


def test_a_trace_its_placement_device_and_policy(slas, tmp_path):
    (tmp_path / "io.csv").write_text(
        "time,volume,client,kind,bytes\n"
        + "".join(f"{n / 100},gold,c,{'write' if n % 2 else 'read'},4096\n" for n in range(300))
    )
    (slas / "simulation.yaml").write_text("streams: {gold: {backend: fast, gateway: g-9}}\n")
    (tmp_path / "device.toml").write_text("servers = 2\nspread = 0\nread = [{kib = 4, ms = 1}]\n")
    (tmp_path / "policy.json").write_text('[{"volume": "gold", "hour_of_week": 9, "cost_per_s": 53.125}]')
    base = (
        "--slas",
        slas,
        "--trace",
        tmp_path / "io.csv",
        "--device",
        tmp_path / "device.toml",
        "-o",
        "json",
    )
    tree = json.loads(run(*base, "--servers", 3).stdout)
    assert (tree["loads"], tree["seconds"], tree["devices"]["fast"]["servers"]) == ("io.csv", 3.0, 3)
    assert tree["modes"][0]["agreements"][0]["latency_ms"] == pytest.approx(1.0)
    policy = ("--policy", tmp_path / "policy.json", "--mode", "enforce", "--stretch", "2")
    for hour, caps in (("9", 1), ("8", 0)):
        tree = json.loads(run(*base, *policy, "--hour", hour).stdout)
        assert len(tree["modes"][0]["volumes"][0]["caps"]) == caps, "not below its floor of 60 IOPS"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ((), 2, "--slas DIR is needed"),
        (("--slas", "SLAS"), 2, "there is no load"),
        (("--slas", "SLAS", "--load", "volume=v"), 65, "give either iops"),
        (
            ("--slas", "SLAS", "--load", "volume=v,iops=1", "--load", "volume=v,iops=1,backend=b"),
            65,
            "volume v at gateway gateway-1: is on two backends, disk and b",
        ),
        (
            ("--slas", "SLAS", "--load", "volume=v,iops=1000", "--duration", "10h"),
            65,
            "36,000,000 I/Os are more",
        ),
        (("--slas", "SLAS", "--load", "volume=v,iops=1", "--duration", "soon"), 2, "is not a duration"),
        (("--stored", "24h", "--load", "volume=v,iops=1"), 2, "--load does not go with --stored"),
        (("--slas", "SLAS", "--load", "volume=v,iops=1", "--duration", "8d"), 2, "8d is longer than 7 days"),
        (("--stored", "24h", "--fault", "kind=hangs,from_s=1"), 2, "--fault does not go with --stored"),
        (
            ("--slas", "SLAS", "--load", "volume=v,iops=1", "--fault", "kind=hangs,from_s=1,backend=b"),
            65,
            "fault of backend b from 1 s: no volume is on it",
        ),
    ],
)
def test_mistakes_are_named(slas, arguments, status, text):
    done = run(*(str(slas) if each == "SLAS" else each for each in arguments))
    assert done.exit_code == status
    assert done.stderr.startswith("sla: ")
    assert text in done.stderr


SECTORS = "".join(f"{n * 10_000_000} 4 {n} 8 1\n" for n in range(300))


def test_a_trace_without_clients_is_refused_for_an_agreement_about_clients_until_it_is_said_whose_it_is(
    slas, tmp_path
):
    text = (
        (slas / "gold.yaml")
        .read_text()
        .replace("volumes: [gold]", "clients: [host-a, host-b], volumes: [dev-4]")
    )
    (slas / "gold.yaml").write_text(text)
    trace = tmp_path / "io.txt"
    trace.write_text(SECTORS)
    base = ("--slas", slas, "--trace", trace, "--mode", "off", "-o", "json")
    done = run(*base)
    assert (done.exit_code, done.stdout) == (65, "")
    assert "agreement gold is about the clients host-a, host-b, and the trace names none" in done.stderr
    assert "streams: {dev-4: {client: NAME}} in simulation.yaml" in " ".join(done.stderr.split())
    (slas / "simulation.yaml").write_text("streams: {dev-4: {client: host-b}}\n")
    (mode,) = json.loads(run(*base).stdout)["modes"]
    assert mode["agreements"][0]["ios"] == 300
    assert [(each["volume"], each["client"]) for each in mode["clients"]] == [("dev-4", "host-b")]


def test_clients_of_a_divided_volume_are_rows_of_the_tables(slas):
    text = (slas / "gold.yaml").read_text().replace("volumes: [gold]", "clients: [db-1], volumes: [gold]")
    (slas / "gold.yaml").write_text(text)
    loads = (
        "--load",
        "volume=gold,client=db-1,iops=60",
        "--load",
        "volume=gold,client=job,depth=16,from_s=2",
    )
    base = ("--slas", slas, "--duration", "12s", *loads)
    table = run(*base).stdout
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(r"^gold/job +best-effort +enforce", table, re.MULTILINE)
    assert "observe would have begun to slow down gold/job for gold/latency once" in table
    rows = [line.split(",")[:3] for line in run(*base, "--mode", "off", "-o", "csv").stdout.splitlines()]
    assert ["off", "client", "gold/job"] in rows
    assert "gold/job" in run(*base, "--mode", "off", "-o", "html").stdout


def test_storage_that_hangs_is_said_and_its_slices_are_bad(slas):
    done = run("--slas", slas, *QUICK, "--fault", "kind=hangs,from_s=3", "--mode", "enforce", "-o", "json")
    tree = json.loads(done.stdout)
    (mode,) = tree["modes"]
    assert mode["events"] == {"storage-fault": 1, "violation-opened": 1}
    assert mode["agreements"][0]["slices"] == {"bad": 2}
    assert mode["agreements"][0]["bad_s"] >= 8
    assert [volume["caps"] for volume in mode["volumes"]] == [[]]
    assert tree["faults"] == [{"backend": "disk", "kind": "hangs", "from_s": 3.0, "until_s": None}]
    done = run("--slas", slas, *QUICK, "--fault", "kind=fails,from_s=3", "--mode", "enforce")
    assert "backend disk fails from 3 s until the end" in done.stdout
    assert "event storage-fault, once" in done.stdout
