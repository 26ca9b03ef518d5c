"""What is read before anything runs, and how mistakes in it are worded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sla_server.simulate.errors import SimulationError
from sla_server.simulate.setup import (
    check_faults,
    parse_fault,
    parse_load,
    read_device,
    read_directory,
    read_policy,
)
from tests.support.agreements import calendar_text
from tests.support.simulate import AGREEMENT


def directory(path: Path, **files: str) -> Path:
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_agreements_and_setup_of_a_directory(tmp_path: Path):
    setup = """\
devices: {disk: {servers: 4, read: [{kib: 4, ms: 1}]}}
loads: [{volume: gold, iops: 80}, {volume: big, depth: 32, gateway: g2}]
streams: {dev-1: {backend: other}}
"""
    folder = read_directory(directory(tmp_path, gold__yaml=AGREEMENT, simulation__yaml=setup))
    contract, found = folder.contract(("gold",)), folder.setup
    (promise,) = contract.promises
    assert (promise.key, promise.floor_iops, promise.slice_s) == (("gold", "latency"), 60, 30)
    assert contract.clauses["gold", "latency"].min_ios_per_slice == 10
    assert [load.volume for load in found.loads] == ["gold", "big"]
    assert found.devices["disk"].servers == 4
    assert found.streams["dev-1"].backend == "other"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"a__yaml": AGREEMENT.replace("95", "0.95")}, "Write 95"),
        ({"a__yaml": AGREEMENT, "b__yaml": AGREEMENT}, "agreement gold is in a.yaml, too"),
        ({}, "holds no agreement"),
        (
            {"a__yaml": AGREEMENT, "simulation__yaml": "loads: [{volume: v, depht: 3}]"},
            "loads.0.depht: no such",
        ),
        ({"a__yaml": AGREEMENT, "simulation__yaml": "loads: ["}, "is not YAML"),
        ({"a__yaml": AGREEMENT, "simulation__yaml": "loads: [{volume: v}]"}, "give either iops"),
    ],
)
def test_a_mistake_names_file_and_key(tmp_path: Path, files, problem):
    with pytest.raises(SimulationError, match=problem) as caught:
        read_directory(directory(tmp_path, **files))
    assert str(tmp_path) in str(caught.value)
    assert "(whole file)" not in str(caught.value)


def test_loads_of_the_command_line():
    assert parse_load("volume=v, depth=3,shape=square").period_s == 20
    with pytest.raises(SimulationError, match="'depth' is not key=value"):
        parse_load("volume=v,depth")
    with pytest.raises(SimulationError, match=r"iops: .* \(value: 'x'\)"):
        parse_load("volume=v,iops=x")


def test_devices_are_yaml_or_toml(tmp_path: Path):
    directory(
        tmp_path, d__toml="servers = 2\nread = [{kib = 4, ms = 1.5}]\n", d__yaml="servers: 2\n", e__toml="x"
    )
    assert read_device(tmp_path / "d.toml").read[0].ms == 1.5
    assert read_device(tmp_path / "d.yaml").servers == 2
    with pytest.raises(SimulationError, match="is not TOML"):
        read_device(tmp_path / "e.toml")


def test_a_policy_is_what_the_server_answers_or_a_bare_list(tmp_path: Path):
    rows = [{"version": 3, "volume": "v", "hour_of_week": 5, "cost_per_s": 100.0, "demand_p50": 1.0}]
    path = tmp_path / "p.json"
    for tree in (rows, {"caps": rows}, {"items": rows}):
        path.write_text(json.dumps(tree))
        assert read_policy(path) == ({5: {"v": 100.0}}, {})
    for text, problem in (
        ("{", "is not JSON"),
        ("[]", "no list"),
        ('{"items": [], "next": "v:5"}', "one page of several"),
        ('[{"volume": "v"}]', "hour_of_week: is req"),
    ):
        path.write_text(text)
        with pytest.raises(SimulationError, match=problem):
            read_policy(path)


def test_documents_of_other_kinds_are_skipped(tmp_path: Path):
    text = AGREEMENT + "---\n" + calendar_text()
    contract = read_directory(directory(tmp_path, all__yaml=text)).contract(())
    assert [promise.sla for promise in contract.promises] == ["gold"]


def test_modes_of_single_agreements_are_kept_and_said(tmp_path: Path):
    watched = AGREEMENT.replace("priority: gold", "priority: gold\n  control: observe")
    contract = read_directory(directory(tmp_path, a__yaml=watched)).contract(())
    assert contract.modes == {"gold": "observe"}
    assert contract.notes == ["control: observe of gold: for it control only logs in both modes."]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loads: [", "line 1: this is not YAML"),
        ("a: !!bool x", "a value does not fit the tag"),
        ("a: " + "9" * 5000, "a number has thousands of digits"),
        ("loads: [{volume: v, iops: 1, until_s: 1.0e+18}]", "at most 604,800 (value: 1e+18)"),
        ("loads: [{volume: v, iops: 1, shape: bursty, off_s: 1.0e-12}]", "at least 0.001"),
    ],
)
def test_a_wrong_setup_is_refused_and_never_runs_for_ever(tmp_path: Path, text: str, problem: str):
    with pytest.raises(SimulationError) as caught:
        read_directory(directory(tmp_path, a__yaml=AGREEMENT, simulation__yaml=text))
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "[1" + "0" * 5000 + "]", "nothing"])
def test_a_policy_that_is_no_json_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(SimulationError, match="is not JSON"):
        read_policy(path)


LABELS = """\
apiVersion: storage-sla/v1
kind: VolumeLabels
metadata: {name: tiers}
spec:
  volumes: ["db-*"]
  labels: {tier: gold}
"""


def test_agreements_choose_by_labels_among_the_volumes_that_are_simulated(tmp_path: Path):
    chosen = AGREEMENT.replace("{volumes: [gold]}", "{volume_labels: tier=gold}")
    folder = read_directory(directory(tmp_path, a__yaml=chosen, labels__yaml=LABELS))
    (promise,) = folder.contract(("db-1", "db-2", "batch")).promises
    assert promise.volumes == ("db-1", "db-2")
    with pytest.raises(SimulationError, match=r"by labels \(tier=gold\), which none has .*: batch"):
        folder.contract(("batch",))


def test_faults_of_the_file_and_of_the_command_line(tmp_path: Path):
    setup = "faults: [{backend: disk, kind: hangs, from_s: 3, until_s: 5}]"
    (found,) = read_directory(directory(tmp_path, a__yaml=AGREEMENT, simulation__yaml=setup)).setup.faults
    assert found == parse_fault("kind=hangs,from_s=3,until_s=5")
    assert found.text == "backend disk hangs from 3 s until 5 s"
    assert parse_fault("kind=fails,from_s=1").text == "backend disk fails from 1 s until the end"
    check_faults([found, parse_fault("kind=fails,from_s=5")], ["disk"])
    for text, problem in (
        ("kind=fails,from_s=4", "the one before has not ended"),
        ("kind=fails,from_s=9,backend=other", "no volume is on it"),
    ):
        with pytest.raises(SimulationError, match=problem):
            check_faults([found, parse_fault(text)], ["disk"])
    with pytest.raises(SimulationError, match="until_s 3 must be after from_s 3"):
        parse_fault("kind=hangs,from_s=3,until_s=3")
