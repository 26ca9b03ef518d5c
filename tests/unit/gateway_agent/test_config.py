"""The operator's file, what the children take of it, what the agent says of its children."""

import itertools
import json
import os
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from gateway_agent import agent
from gateway_agent.cli import cli
from gateway_agent.config import AgentConfig, load_agent, parse_server
from gateway_agent.errors import AlreadyRunning, StateFileBroken
from gateway_agent.link import state_files
from gateway_agent.nbd.sockets import collide, parse_listen
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.config import load
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire.rates import Rates

GOOD = """
name = "gw-a"
state_dir = "{dir}/state"
runtime_dir = "{dir}/run"
[[plane]]
name = "nbd-0"
listen = "unix:{dir}/nbd.sock"
[[export]]
volume = "vol-1"
backend = "b0"
upstream = "nbd+unix:///disk?socket={dir}/up.sock"
cost_write = 2.0
cap = {{ops_per_s = 100}}
[host]
enabled = true
backends = {{sda = "array-1"}}
"""


@pytest.fixture
def write(tmp_path):
    def made(text: str = GOOD, old: str = "", new: str = ""):
        path = tmp_path / "agent.toml"
        assert old in text
        path.write_text(text.format(dir=tmp_path).replace(old, new) if old else text.format(dir=tmp_path))
        return path

    return made


def test_children_read_a_copy_of_the_file_and_take_what_concerns_them(write, tmp_path):
    path = write()
    config = load(AgentConfig, path, environment={})
    (tmp_path / "run").mkdir()
    commands = agent.child_commands(config, path)
    path.write_text("half of an ed")
    copy = tmp_path / "run" / "running.toml"
    assert list(commands) == ["nbd-0", "link"]
    assert commands["nbd-0"][1:] == (
        "-m", "gateway_agent.nbd.plane", "--config", str(copy), "--plane", "nbd-0"
    )  # fmt: skip
    assert commands["link"][1:] == ("-m", "gateway_agent.link.main", "--config", str(copy))
    assert load_agent(copy) == config
    plane = config.plane_config("nbd-0")
    assert plane.control_socket == config.control_socket("nbd-0") == str(tmp_path / "run" / "nbd-0.sock")
    assert (plane.exports[0].cost_write, plane.exports[0].cap.ops_per_s) == (2.0, 100)
    assert config.host.backends == {"sda": "array-1"}


def test_a_file_that_children_cannot_read_as_the_parent_did_ends_the_start(write, tmp_path):
    path = write()
    config = load(AgentConfig, path, environment={})
    (tmp_path / "run").mkdir()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is not a regular file"):
        agent.child_commands(config, pipe)
    path.write_text(path.read_text().replace("gw-a", "gw-b"))
    with pytest.raises(ConfigError, match="was changed while the agent started"):
        agent.child_commands(config, path)


def test_only_the_parent_makes_an_identity(tmp_path):
    with pytest.raises(StateFileBroken):
        state_files.gateway_id(tmp_path, may_make=False)
    made = state_files.gateway_id(tmp_path)
    assert state_files.gateway_id(tmp_path, may_make=False) == made


def test_a_plane_that_the_file_does_not_have_and_no_file(write, tmp_path):
    path = write()
    assert load_agent(path).plane_config("nbd-0").client_rule == "address"
    with pytest.raises(ConfigError, match=r"nbd-1 is no \[\[plane\]\] of this file. It has: nbd-0"):
        load_agent(path).plane_config("nbd-1")
    with pytest.raises(ConfigError, match="existing file"):
        load_agent(tmp_path / "nope")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('name = "gw-a"', 'name = "a b"', "letters"),
        (
            'name = "gw-a"',
            'name = "gw-a"\nserver = "10.0.0.1:7411"',
            "gateway-agent enrol and set tls = true",
        ),
        ('name = "gw-a"', 'name = "gw-a"\nserver = "sla.example.org:7411"', "is not on this host"),
        ('name = "gw-a"', 'name = "gw-a"\nserver = "127.0.0.1"', "HOST:PORT"),
        ('name = "gw-a"', 'name = "gw-a"\nserver = "tcp:127.0.0.1:7411"', "HOST:PORT, without a scheme"),
        ('name = "gw-a"', 'name = "gw-a"\nserver = "http://127.0.0.1:7411"', "without a scheme"),
        ('name = "gw-a"', 'name = "gw-a"\nserver = "127.0.0.1:74110"', "a port from 1 to 65535"),
        ('backend = "b0"', 'backnd = "b0"', "backnd: no such key; did you mean backend"),
        ('listen = "unix', 'listen = "tcp:127.0.0.1:1081000"\n#', "the port at most 65535"),
        ('name = "gw-a"', 'name = "gw-a"\nspool_bytes = 10', "spool_bytes"),
        ('name = "gw-a"', 'name = "gw-a"\ncolour = "red"', "no such key"),
        ('backend = "b0"', 'backend = "b0"\nplane = "nbd-7"', "nbd-7"),
        (
            'backend = "b0"',
            'backend = "b0"\nfile = "/x"',
            "volume vol-1: set exactly one of upstream and file",
        ),
        ("nbd+unix:///disk", "nbd+nix:///disk", "export [^:]+: upstream: "),
        ('backend = "b0"', 'backend = "b 0"', "letters"),
        ('listen = "unix', 'listen = "tcp:10.0.0.1:10809"\n#', "10.0.0.1"),
        ('listen = "unix', 'listen = "tcp:0.0.0.0:1"\n#', "without TLS"),
        ('listen = "unix', 'listen = "tcp:storage.example:1"\n#', "without TLS"),
        ('listen = "unix', "listen = []\n#", "at least 1"),
        (
            "[[export]]",
            '[[plane]]\nname = "nbd-1"\nlisten = "unix:b"\n[[export]]\nplane = "nbd-0"',
            "at least 1",
        ),
        ("upstream =", "#", "exactly one of upstream and file"),
        ("cost_write = 2.0", "workers = 2", "workers"),
        ("cost_write = 2.0", "reconnect_s = 301", "reconnect_s: .*300"),
        ("upstream =", 'reconnect_s = 5\nfile = "/x"\n#', "vol-1: reconnect_s belongs to upstream mode"),
        ("cost_write = 2.0", "upstream_connections = 17", "upstream_connections: .*16"),
        (
            "upstream =",
            'upstream_connections = 2\nfile = "/x"\n#',
            "upstream_connections belongs to upstream mode",
        ),
        ("cost_write = 2.0", "cost_read = 0", "at least 0.001"),
        ("cost_write = 2.0", "speed = 9", "no such key"),
        ("ops_per_s = 100", "ops_per_s = -1", "at least 0.001"),
        ('name = "gw-a"', 'name = "gw-a"\nclient_rule = "magic"', "export-suffix"),
        ("array-1", "array 1", "array 1"),
        ("/run", "/" + "r" * 120, "shorten runtime_dir"),
        ('listen = "unix', 'listen = "tcp:10.0.0.1:1"\n#', r"plain_networks = \["),
        ('listen = "unix', 'tls = "require"\nlisten = "unix', r"plane\.0: .*needs tls_certificate"),
        ('listen = "unix', 'plain_networks = ["x"]\nlisten = "unix', "is no network"),
        (
            'upstream = "nbd',
            'upstream = "nbd://10.0.0.5/disk"\n#',
            r"vol-1: .*plain_networks = \[.10\.0\.0\.5",
        ),
        ('upstream = "nbd', 'upstream = "nbds://10.0.0.5/disk"\n#', "vol-1: nbds:// needs upstream_ca"),
        ("cost_write = 2.0", 'upstream_name = "x"', r"upstream_name belongs to TLS.*nbds://"),
        ("cost_write = 2.0", 'allow_networks = ["10.0.0.1/8"]', "allow_networks: .*is no network"),
        ("cost_write = 2.0", 'plain_networks = ["unix"]', "plain_networks: .*is no network"),
        ("cost_write = 2.0", 'allow_names = ["db-1"]', "vol-1: allow_names needs certificates of clients"),
        ("cost_write = 2.0", 'allow_names = [""]', "fits no certificate"),
        ('name = "gw-a"', 'name = "gw-a"\nclient_rule = "tls-name"', "needs certificates of clients"),
        (
            'listen = "unix',
            'socket_group = "kvm"\nlisten = "tcp:127.0.0.1:1"\n#',
            r"plane\.0: .*listen has none; add unix:PATH",
        ),
        ('/nbd.sock"', '/run/nbd.sock"\nsocket_group = "kvm"', "is in runtime_dir, which only the agent may"),
        ('/nbd.sock"', '/state/a/b"\nsocket_group = "kvm"', "is in state_dir, which only the agent may"),
    ],
)
def test_mistakes_are_named(write, old, new, problem):
    with pytest.raises(ConfigError, match=problem):
        load(AgentConfig, write(old=old, new=new), environment={})


def test_relative_directories_begin_where_the_agent_is_started(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(AgentConfig, write(GOOD.replace("{dir}/", "", 2)), environment={})
    assert (config.state_dir, config.runtime_dir) == (tmp_path / "state", tmp_path / "run")
    assert config.control_socket("nbd-0") == str(tmp_path / "run" / "nbd-0.sock")


@pytest.mark.parametrize("command", [[], ["run"], ["enrol"]])
def test_help_has_its_short_form(command):
    assert CliRunner().invoke(cli, [*command, "-h"]).stdout.startswith("Usage: ")


def test_the_list_of_commands_says_whole_sentences():
    said = CliRunner().invoke(cli, ["--help"], terminal_width=80).stdout
    assert "that an agent left which was killed." in " ".join(said.split())
    assert "..." not in said.partition("Commands:")[2]
    assert max(map(len, said.splitlines())) <= 80


def test_a_volume_has_one_plane(write):
    with pytest.raises(ConfigError, match="exported twice"):
        load(
            AgentConfig,
            write(GOOD + '[[export]]\nvolume = "vol-1"\nbackend = "b"\nfile = "/x"\n'),
            environment={},
        )


def test_an_agent_without_anything_to_do_is_refused(write):
    with pytest.raises(ConfigError, match="nothing to do"):
        load(AgentConfig, write('name = "gw-a"\n'), environment={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:7411", ("127.0.0.1", 7411)), ("[::1]:1", ("::1", 1)), ("localhost:7", ("127.0.0.1", 7))],
)
def test_addresses_of_this_host(text, expected):
    assert parse_server(text) == expected


def test_several_servers_are_each_checked(write):
    def loaded(line: str) -> AgentConfig:
        return load(AgentConfig, write(f"{line}\n{GOOD}"), environment={})

    assert loaded('server = ["127.0.0.1:1", "localhost:2"]').servers == ["127.0.0.1:1", "localhost:2"]
    assert loaded('server = "127.0.0.1:1"').servers == ["127.0.0.1:1"]
    with pytest.raises(ConfigError, match=r"'10\.1\.1\.1:7411' is not on this host"):
        loaded('server = ["127.0.0.1:7411", "10.1.1.1:7411"]')
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        loaded('server = ["127.0.0.1:7411", "nowhere"]')
    with pytest.raises(ConfigError, match="server"):
        loaded("server = []")


def test_show_config_can_be_read_again(write, tmp_path):
    result = CliRunner().invoke(cli, ["run", "--config", str(write()), "--show-config"])
    assert result.exit_code == 0
    again = tmp_path / "again.toml"
    again.write_text(result.output)
    assert load(AgentConfig, again, environment={}) == load(AgentConfig, write(), environment={})


def test_check_config_and_its_failure(write):
    result = CliRunner().invoke(cli, ["run", "--config", str(write()), "--check-config"])
    assert (result.exit_code, "1 data plane, 1 volume\n" in result.output) == (0, True)
    result = CliRunner().invoke(cli, ["run", "--config", str(write("name = 3\n")), "--check-config"])
    assert result.exit_code == ConfigError.exit_status
    assert "gateway-agent:" in result.output


@pytest.mark.parametrize(
    ("status", "words"),
    [(-9, "it was killed by SIGKILL"), (3, "it ended with status 3"), (-99, "it was killed by signal 99")],
)
def test_how_a_child_ended_in_words(status, words):
    assert agent.how_it_ended(status) == words


def test_published_facts_name_the_children(write, tmp_path):
    config = load(AgentConfig, write(), environment={})
    (tmp_path / "run").mkdir()
    made = agent.Agent(config, "id", {"link": ("x",)}, Stop(), FakeClock())
    made.children[0].process = SimpleNamespace(pid=5)
    made.publish()
    value = json.loads((tmp_path / "run" / "agent.json").read_text())
    assert (value["children"], value["restarts"], value["gateway_id"]) == ({"link": 5}, {"link": 0}, "id")


def test_check_config_looks_at_the_files(write, tmp_path):
    text = GOOD + '[[export]]\nvolume = "vol-2"\nbackend = "b"\nfile = "{dir}/disk.img"\n'
    path = write(text)

    def check():
        return CliRunner().invoke(cli, ["run", "--config", str(path), "--check-config"])

    missing = check()
    assert missing.exit_code == 66
    assert "volume vol-2" in missing.output
    assert "No such file" in missing.output
    (tmp_path / "disk.img").write_bytes(bytes(1024))
    assert (check().exit_code, (tmp_path / "disk.img").read_bytes()) == (0, bytes(1024))
    (tmp_path / "disk.img").write_bytes(bytes(1025))
    assert "multiple of 512" in check().output


@pytest.mark.parametrize("held", ["state", "run"])
def test_neither_directory_is_shared_with_another_agent(write, tmp_path, monkeypatch, held):
    monkeypatch.setattr(agent.Stop, "install_signals", lambda _stop: None)  # they would stay, for all tests
    (tmp_path / held).mkdir(mode=0o700)
    lock = state_files.lock_directory(tmp_path / held)
    try:
        with pytest.raises(AlreadyRunning, match=f"/{held}/agent.lock is locked"):
            agent.run(load(AgentConfig, write(), environment={}), write())
    finally:
        os.close(lock)
    assert not (tmp_path / "run" / "agent.json").exists()  # no child was started


TLS = """
tls = "require"
tls_certificate = "{dir}/server.pem"
listen = "tcp:0.0.0.0:10809"
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tcp:127.0.0.1:9", "tcp:localhost:9"),
        ("tcp:127.0.0.1:9", "tcp:0.0.0.0:9"),
        ("tcp:[::1]:9", "tcp:[0:0::1]:9"),
        ("unix:/a/b", "unix:/a//b"),
    ],
)
def test_an_address_belongs_to_one_plane(write, first, second):
    other = f'[[plane]]\nname = "nbd-1"\nlisten = "{second}"\nplain_networks = ["10.0.0.0/8"]\n'
    other += (
        '[[export]]\nvolume = "v"\nbackend = "b"\nfile = "/v"\nplane = "nbd-1"\n[[export]]\nplane = "nbd-0"'
    )
    text = GOOD.replace('"unix:{dir}/nbd.sock"', f'"{first}"')
    with pytest.raises(ConfigError, match=r"plane nbd-1: listen .* is taken by .* of plane nbd-0"):
        load_agent(write(text, "[[export]]", other))
    twice = GOOD.replace('"unix:{dir}/nbd.sock"', f'["{first}", "{first}"]')
    with pytest.raises(ConfigError, match="is taken by"):
        load_agent(write(twice))


def test_addresses_of_two_families_or_of_free_ports_do_not_collide():
    texts = ["tcp:0.0.0.0:9", "tcp:[::]:9", "tcp:127.0.0.1:0", "tcp:127.0.0.2:0", "unix:/a", "unix:/b"]
    pairs = itertools.combinations(map(parse_listen, texts), 2)
    assert not any(collide(one, other) for one, other in pairs)


def test_a_plane_gets_the_settings_of_its_listeners_and_the_stored_authority(write, tmp_path):
    text = GOOD.replace('listen = "unix:{dir}/nbd.sock"', TLS)
    plane = load(AgentConfig, write(text), environment={}).plane_config("nbd-0")
    assert (plane.security.tls, plane.security.tls_certificate) == ("require", str(tmp_path / "server.pem"))
    assert plane.security.client_ca == str(tmp_path / "state" / "tls" / "ca.crt")
    own = GOOD.replace('listen = "unix:{dir}/nbd.sock"', TLS + 'client_ca = "/own.pem"')
    assert (
        load(AgentConfig, write(own), environment={}).plane_config("nbd-0").security.client_ca == "/own.pem"
    )
    assert load(AgentConfig, write(), environment={}).plane_config("nbd-0").security.tls == "off"


def test_check_config_looks_for_the_group_of_unix_sockets(write):
    path = write(old='/nbd.sock"', new='/nbd.sock"\nsocket_group = "no-such-group"')
    result = CliRunner().invoke(cli, ["run", "--config", str(path), "--check-config"])
    assert result.exit_code == ConfigError.exit_status
    assert "[[plane]] nbd-0 socket_group: this host has no group 'no-such-group'" in result.output


def test_networks_that_are_named_allow_plain_nbd(write):
    text = GOOD.replace("nbd+unix:///disk?socket={dir}/up.sock", "nbd://10.0.0.5/disk")
    text = text.replace("cost_write = 2.0", 'plain_networks = ["10.0.0.0/24"]')
    text = text.replace(
        "listen = ", 'plain_networks = ["10.0.0.0/8", "fd00::/8"]\nlisten = "tcp:0.0.0.0:1" #'
    )
    config = load(AgentConfig, write(text), environment={})
    assert config.plane_config("nbd-0").security.plain_networks == ("10.0.0.0/8", "fd00::/8")


def test_check_config_and_the_start_look_at_the_certificates(write, tmp_path):
    path = write(GOOD.replace('listen = "unix:{dir}/nbd.sock"', TLS))
    result = CliRunner().invoke(cli, ["run", "--config", str(path), "--check-config"])
    assert result.exit_code == ConfigError.exit_status
    assert "[[plane]] nbd-0 tls_certificate" in result.output
    with pytest.raises(ConfigError, match="tls_certificate"):
        agent.run(load(AgentConfig, path, environment={}), path)


def test_check_config_looks_at_the_certificates_of_upstreams(write, tmp_path):
    text = GOOD.replace("nbd+unix:///disk?socket={dir}/up.sock", "nbds://10.0.0.5/disk")
    path = write(text.replace("cost_write = 2.0", 'upstream_ca = "{dir}/none.pem"'))
    result = CliRunner().invoke(cli, ["run", "--config", str(path), "--check-config"])
    assert result.exit_code == ConfigError.exit_status
    assert "[[export]] vol-1 upstream_ca: " in result.output


def test_a_static_cap_of_an_export_may_have_a_burst_and_one_of_a_drive_has_none(write):
    config = load(
        AgentConfig, write(old="ops_per_s = 100", new="ops_per_s = 100, burst_s = 2"), environment={}
    )
    assert config.export[0].cap.rates == Rates(100, burst_s=2)
    for bad in ("0", "301"):
        with pytest.raises(ConfigError, match="burst_s"):
            load(AgentConfig, write(old="ops_per_s = 100", new=f"burst_s = {bad}"), environment={})
    with pytest.raises(ConfigError, match="burst_s"):
        load(
            AgentConfig,
            write('name = "gw-a"\n' + QEMU, "ops_per_s = 500", "ops_per_s = 500, burst_s = 2"),
            environment={},
        )


QEMU = """
[[qemu]]
name = "vm-1"
socket = "/run/qemu/vm-1.qmp"
[[qemu.volume]]
name = "root"
drive = "disk0"
backend = "array-1"
cap = {{ops_per_s = 500}}
[[qemu.volume]]
name = "scratch"
group = "tg0"
backend = "array-1"
"""


def test_drives_and_groups_of_qemu(write):
    config = load(AgentConfig, write('name = "gw-a"\n' + QEMU), environment={})
    [entry] = config.qemu
    assert [each.volume("gw-a") for each in entry.volume] == ["qemu:gw-a:root", "throttle-group:gw-a:scratch"]
    assert list(entry.places()) == [(entry.socket, "drive", "disk0"), (entry.socket, "group", "tg0")]
    assert (entry.volume[0].cap.rates.ops_per_s, entry.volume[1].cap) == (500, None)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('drive = "disk0"\n', "", "volume root: set drive .*, group .*, or both"),
        ('socket = "/run', 'socket = "run', "must be a path from / on"),
        ("/run/qemu", "/" + "r" * 120, "of 107 bytes at most"),
        ('name = "scratch"', 'name = "root"\ndrive = "disk1"', "two volumes of .* have the name root"),
        ('group = "tg0"', 'drive = "disk0"', "drive disk0 limits two volumes"),
        ('backend = "array-1"\ncap', 'backend = "array 1"\ncap', "letters"),
        ('"root"', '"' + "r" * 120 + '"', "128 at most"),
        ("[[qemu]]", '[[qemu]]\nname = "vm-1"\nsocket = "/x"\nvolume = []\n[[qemu]]', "at least 1"),
        (
            "[[qemu]]",
            '[[qemu]]\nname = "vm-0"\nsocket = "/run/qemu/vm-1.qmp"\n'
            'volume = [{{name = "x", drive = "d", backend = "b"}}]\n[[qemu]]',
            "socket /run/qemu/vm-1.qmp is that of vm-0 already",
        ),
        (
            "[[qemu]]",
            '[[qemu]]\nname = "vm-1"\nsocket = "/y"\n'
            'volume = [{{name = "x", drive = "d", backend = "b"}}]\n[[qemu]]',
            r"two \[\[qemu\]\] tables have the name vm-1",
        ),
    ],
)
def test_mistakes_of_qemu_are_named(write, old, new, problem):
    text = 'name = "gw-a"\n' + QEMU
    assert old in text
    with pytest.raises(ConfigError, match=problem):
        load(AgentConfig, write(text.replace(old, new)), environment={})


def test_a_device_of_the_host_may_have_a_name_with_a_slash(write):
    devices = 'devices = ["sda", "/dev/mapper/vg0-data", "vg0/logs"]'
    config = load(AgentConfig, write(old="enabled = true", new=f"enabled = true\n{devices}"), environment={})
    assert config.host.devices[1:] == ("/dev/mapper/vg0-data", "vg0/logs")
    bad = write(old="enabled = true", new='enabled = true\ndevices = ["/dev/disk/by-label/a b"]')
    with pytest.raises(ConfigError, match=r"device '/dev/disk/by-label/a b' would be called 'a b'"):
        load(AgentConfig, bad, environment={})


def test_show_config_of_qemu_can_be_read_again(write, tmp_path):
    path = write('name = "gw-a"\n' + QEMU)
    result = CliRunner().invoke(cli, ["run", "--config", str(path), "--show-config"])
    again = tmp_path / "again.toml"
    again.write_text(result.output)
    assert load(AgentConfig, again, environment={}) == load(AgentConfig, path, environment={})


def test_show_config_leaves_out_what_is_not_set_and_quotes_keys(write, tmp_path):
    """A reload writes the file again like this, when a part of it needs a restart."""
    group = '[[cgroup]]\nname = "x"\nbackend = "b"\ngroup = "x.service"\ndevice = "sda"\n'
    path = write(GOOD.replace("sda =", '"/dev/mapper/vg0-data" =') + group)
    result = CliRunner().invoke(cli, ["run", "--config", str(path), "--show-config"])
    again = tmp_path / "again.toml"
    again.write_text(result.output)
    assert load(AgentConfig, again, environment={}) == load(AgentConfig, path, environment={})
