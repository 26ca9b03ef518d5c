"""``gateway-agent status``: what it finds, and that it fits a terminal."""

import os
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from gateway_agent import status
from gateway_agent.cli import cli
from gateway_agent.errors import AgentNotRunning, ReloadFailed
from gateway_agent.link import state_files
from pmdaemon.errors import ConfigError
from pmdaemon.wire.messages.plane_report import PlaneReport

NOW_US = 1_800_000_000_000_000
STREAM = {
    "client": "host-a",
    "connections": 2,
    "reads_per_s": 1_234.0,
    "writes_per_s": 66.0,
    "ios_per_s": 1_300.0,
    "bytes_per_s": 5.3e6,
    "errors_per_s": 0.0,
    "latency_us": 1_250.0,
    "delay_us": 300.0,
    "inflight": 7,
    "held": 3,
    "oldest_s": 0.0123,
}


def volume(name, *streams, **more):
    facts = {"volume": name, "backend": "array-1", "storage": "/x", "read_only": False, "size_bytes": 4096}
    return facts | {"caps": {}, "client_caps": {}, "streams": list(streams)} | more


def found(*volumes, **more):
    agent = {
        "gateway_id": "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001",
        "name": "gw-a",
        "pid": 4711,
        "since_unix_us": NOW_US - 90_061_000_000,
        "children": {"nbd-0": 4712, "link": 4713},
        "restarts": {"nbd-0": 0, "link": 2},
        "reload": {"state": "none", "changes": [], "needs_restart": [], "text": ""},
    }
    server = {"address": "10.0.0.5:7411", "tls": True, "state": "polling"}
    server |= {"since_unix_us": NOW_US - 5_000_000, "polled_unix_us": NOW_US - 400_000}
    spool = {"cuts": 12, "bytes": 1 << 20, "limit_bytes": 64 << 20, "dropped": 0}
    link = {"pid": 4713, "at_unix_us": NOW_US, "planes": {}, "server": server, "spool": spool}
    plane = {"listening": ["tcp:127.0.0.1:10809"], "problems": [], "leaving": {}, "volumes": list(volumes)}
    plane["caps"] = {"generation": 7, "lease_left_s": 23.4}
    return {"agent": agent, "link": link, "planes": {"nbd-0": plane}} | more


def shown(what):
    planes = {
        name: status.PlaneProblem(**said) if "problem" in said else PlaneReport.parse(said, name)
        for name, said in what["planes"].items()
    }
    lines = list(status.lines(what | {"planes": planes}, NOW_US))
    assert max(map(len, lines)) <= 80
    return lines


def test_volumes_clients_caps_and_the_server_are_shown():
    busy = volume("vol-17", STREAM, caps={"ops_per_s": 500.0, "bytes_per_s": 2e7})
    busy["client_caps"] = {"host-a": {"cost_per_s": 300.0}}
    lines = shown(found(busy, volume("vol-18", read_only=True)))
    assert lines[0] == "agent    gw-a  pid 4711, up 1d 1h"
    assert "server   10.0.0.5:7411 (TLS)  polled 0s ago" in lines
    assert "spool    12 cuts, 2% of its room; 0 dropped in its life" in lines
    assert "nbd-0   4712        0 tcp:127.0.0.1:10809" in lines
    assert "vol-17      array-1       2  1,234      66  5.3   1.2ms 300us    10 12.3ms" in lines
    assert "vol-18 (ro) array-1       0      0       0  0.0       -     -     0      -" in lines
    assert "vol-17 host-a    2  1,234      66  5.3   1.2ms 300us    10 12.3ms" in lines
    assert "vol-17                 500 20.0             - 23 s, generation 7" in lines
    assert "vol-17/host-a            -    -           300 23 s, generation 7" in lines


def test_requests_that_fail_are_said_and_how_long_a_cap_may_be_exceeded():
    """Storage that fails at once looks fast, and a cap with a burst looks as if it did not hold."""
    failing = STREAM | {"client": "host-b", "errors_per_s": 1_234.5}
    busy = volume("vol-17", STREAM, failing, caps={"ops_per_s": 500.0, "burst_s": 30.0})
    lines = shown(found(busy))
    assert [line for line in lines if "error" in line] == [
        "  host-b of vol-17: 1,234.5 requests a second end with an error"
    ]
    assert "vol-17          500    -             - 23 s, generation 7, burst 30.0s" in lines


def test_storage_that_has_not_answered_is_named():
    """Else a volume without storage looks like one that is idle."""
    away = volume("vol-18", size_bytes=None, storage="nbd://127.0.0.1:10900/")
    text = " ".join(" ".join(shown(found(volume("vol-17"), away))).split())
    assert "vol-18: its storage nbd://127.0.0.1:10900/ did not answer when it was last asked." in text
    assert "vol-17: its storage" not in text


def test_a_file_that_is_not_there_is_no_address_that_does_not_answer():
    away = volume("vol-18", size_bytes=None, storage="/srv/images/vol-18.img")
    text = " ".join(" ".join(shown(found(away))).split())
    assert "vol-18: its storage /srv/images/vol-18.img could not be opened when last tried. Check" in text
    assert "address" not in text


def test_groups_of_the_server_and_of_the_file_are_shown_once_each():
    groups = {"group": {"group": "night", "caps": {"ops_per_s": 90.0}}}
    groups["configured_group"] = {"group": "night", "caps": {"bytes_per_s": 5e7}}
    lines = shown(found(volume("vol-17", **groups), volume("vol-18", **groups)))
    assert [line.split() for line in lines if line.startswith("group")] == [
        ["group", "night", "90", "-", "-", "23", "s,", "generation", "7"],
        ["group", "night", "-", "50.0", "-", "configured"],
    ]


def test_a_cap_of_a_whole_client_is_shown_once():
    what = found(volume("vol-17"), volume("vol-18"))
    what["planes"]["nbd-0"]["whole_clients"] = {"host-a": {"ops_per_s": 90.0, "burst_s": 2.0}}
    lines = [line.split() for line in shown(what) if line.startswith("client host-a")]
    assert lines == [["client", "host-a", "90", "-", "-", "23", "s,", "generation", "7,", "burst", "2.0s"]]


def test_long_names_are_broken_and_numbers_never():
    name = "volume-of-a-customer-with-a-long-name-" * 3
    stream = STREAM | {"client": "client-" * 18, "reads_per_s": 123_456_789.0}
    lines = shown(found(volume(name, stream, backend="backend-" * 16, caps={"ops_per_s": 1e6})))
    assert sum("123,456,789" in line for line in lines) == 2
    assert name in "".join(line.split(" ")[0] for line in lines)


def test_what_does_not_answer_is_said_and_the_rest_is_shown():
    what = found(volume("vol-17"))
    what["planes"]["nbd-1"] = {"plane": "nbd-1", "problem": "does not answer: timed out"}
    what["agent"]["children"] = {"nbd-0": 1, "nbd-1": 2, "nbd-2": None, "link": None}
    lines = shown(what)
    assert any(line.endswith("does not answer: timed out") for line in lines)
    assert any(line.startswith("nbd-2") and line.endswith("does not run") for line in lines)
    assert "server   the link does not run; planes go on, and keep their counts" in lines


def test_a_session_that_is_not_there_says_since_when():
    what = found()
    what["link"]["server"] |= {"state": "closed", "tls": False}
    assert "server   10.0.0.5:7411  not connected for 5s" in shown(what)


def test_the_newest_reload_is_shown_with_what_it_changed_and_did_not():
    record = {
        "number": 3,
        "at_unix_us": NOW_US - 61_000_000,
        "cause": "SIGHUP",
        "state": "incomplete",
        "text": "nbd-0: tcp:127.0.0.1:1: cannot listen: Address already in use. Choose another address " * 2,
        "changes": ["exports added: vol-9"],
        "needs_restart": ["name", "state_dir"],
    }
    lines = shown(found() | {"agent": found()["agent"] | {"reload": record}})
    at = lines.index("reload   incomplete 1m 1s ago (SIGHUP)")
    assert lines[at + 1] == "         exports added: vol-9"
    assert "         needs a restart of the agent: name, state_dir" in lines


def test_what_is_beside_the_path_is_shown_with_what_is_wrong():
    what = found()
    limits = {"read_iops": 75, "write_iops": 25, "read_bps": None, "write_bps": None}
    pressure = {"some_10s": 1.5, "some_60s": 0.25, "full_10s": 0.0, "full_60s": 0.0, "some_total_us": 7}
    group = {"volume": "cgroup:gw-a:nightly", "group": "/sys/fs/cgroup/system.slice/backup.service"}
    what["link"]["cgroups"] = [group | {"problem": "", "limits": limits, "pressure": pressure}]
    drive = {"volume": "qemu:gw-a:root", "drive": "disk0", "group": "", "problem": ""}
    drive |= {"is_there": True, "limits": {"iops": 500, "bytes_per_s": 2_500_000}}
    gone = {"volume": "throttle-group:gw-a:scratch", "drive": "", "group": "tg0", "is_there": False}
    gone |= {"limits": {}, "problem": "throttle group tg0: it is not there now"}
    monitor = {"socket": "/run/vm-1.qmp", "is_connected": False, "problem": "no QEMU process listens there"}
    what["link"]["qemu"] = {"qemu:vm-1": monitor | {"volumes": [drive, gone]}}
    what["link"]["pressure"] = pressure
    lines = shown(what)
    assert "I/O      tasks waited for it 1.5% of the last 10 s, 0.2% of the last 60 s" in lines
    assert "cgroup:gw-a:nightly         backup.service        75+25    -   1.5%" in lines
    assert "qemu:gw-a:root              drive disk0             500  2.5      -" in lines
    assert "throttle-group:gw-a:scratch not there                 -    -      -" in lines
    assert "         throttle-group:gw-a:scratch: throttle group tg0: it is not there now" in lines
    assert "         qemu:vm-1 (/run/vm-1.qmp): no QEMU process listens there" in lines


def test_connections_to_what_has_gone_are_named():
    what = found(volume("vol-17"))
    what["planes"]["nbd-0"]["leaving"] = {"vol-16": 2}
    assert shown(what)[-1] == "leaving  vol-16: 2 connections use what was removed or replaced"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0us"), (0.0009, "900us"), (0.0123, "12.3ms"), (0.5, "500ms"), (2.04, "2.0s"), (3_700, "1h 1m")],
)
def test_times_are_in_the_unit_of_people(value, text):
    assert status.seconds(value) == text


# -- finding out


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "r").mkdir(mode=0o700)
    (tmp_path / "agent.toml").write_text(f'name = "gw-a"\nruntime_dir = "{tmp_path}/r"\n')  # nothing to do
    return tmp_path


@contextmanager
def running(folder, **said):
    lock = state_files.lock_directory(folder / "r")
    state_files.write_json(folder / "r" / "agent.json", said, synced=False)
    try:
        yield
    finally:
        os.close(lock)


def test_an_agent_that_does_not_run_is_said(folder):
    state_files.write_json(folder / "r" / "agent.json", {"pid": 1}, synced=False)
    done = CliRunner().invoke(cli, ["status", "--config", str(folder / "agent.toml")])
    assert done.exit_code == AgentNotRunning.exit_status
    assert "no process holds its lock. Start it: gateway-agent run --config FILE" in done.output


def test_an_agent_that_never_ran_is_said_without_a_word_of_disks(folder):
    (folder / "r").rmdir()
    done = CliRunner().invoke(cli, ["status", "--config", str(folder / "agent.toml")])
    assert done.exit_code == AgentNotRunning.exit_status
    assert "there is no such directory. Start it: gateway-agent run --config FILE" in done.output


def test_a_file_with_a_mistake_does_not_hide_the_status(folder):
    assert status.runtime_dir_of(folder / "agent.toml") == folder / "r"
    with running(folder, children={"nbd-0": 7, "link": None}, pid=5):
        what = status.gather(folder / "r")
    assert what["planes"]["nbd-0"].problem == "does not answer: No such file or directory"


@pytest.mark.parametrize("mistake", ["[[export]\n", "colour = \n", "x = " + "9" * 5000 + "\n"])
def test_an_agent_is_found_by_the_lines_that_can_be_read_of_a_file_that_is_no_toml(folder, mistake):
    path = folder / "agent.toml"
    path.write_text(f'{mistake}name = "gw-a"\nruntime_dir = "{folder}/r"\nstate_dir = "{folder}/s"\n')
    with running(folder, config=str(path)):
        assert status.runtime_dir_of(path) == folder / "r"
    with running(folder, config=str(folder / "other.toml")), pytest.raises(ConfigError, match="Correct it"):
        status.runtime_dir_of(path)
    with pytest.raises(ConfigError, match="could not be found"):
        status.runtime_dir_of(path)


def test_an_agent_is_found_where_it_was_started_though_the_file_names_another_place(folder):
    path, state = folder / "agent.toml", folder / "s"
    state.mkdir()
    identity = state_files.gateway_id(state)
    state_files.write_json(state / state_files.PLACE, {"runtime_dir": f"{folder}/r"}, synced=False)
    path.write_text(f'name = "gw-a"\nruntime_dir = "{folder}/r2"\nstate_dir = "{state}"\n')
    assert status.runtime_dir_of(path) == folder / "r2", "it does not run"
    with running(folder, gateway_id=identity):
        assert status.runtime_dir_of(path) == folder / "r"
    with running(folder, gateway_id="of another agent"):
        assert status.runtime_dir_of(path) == folder / "r2"


def test_an_agent_of_before_is_not_sent_a_signal_that_would_end_it(folder):
    with (
        running(folder, children={}, pid=os.getpid()),
        pytest.raises(ReloadFailed, match="without reload"),
    ):
        status.reload(folder / "r")


def test_files_of_another_release_are_a_plain_error(folder):
    with running(folder, pid=5):
        done = CliRunner().invoke(cli, ["status", "--config", str(folder / "agent.toml")])
    assert done.exit_code == ReloadFailed.exit_status
    assert "Restart the agent" in done.output


def test_why_a_part_ended_is_shown_until_it_starts_again():
    text = (
        "[[plane]] nbd-1 listen tcp:127.0.0.1:1: cannot listen: Address already in use by process 7 (nbdkit)"
    )
    what = found(volume("vol-17"), failures={"nbd-1": text, "gone": "an older plane"})
    what["agent"]["children"] = {"nbd-0": 1, "nbd-1": None, "link": 2}
    lines = shown(what)
    at = next(number for number, line in enumerate(lines) if line.startswith("         nbd-1 ended:"))
    assert text in " ".join(line.strip() for line in lines[at : at + 3])
    assert not any("older plane" in line for line in lines)
