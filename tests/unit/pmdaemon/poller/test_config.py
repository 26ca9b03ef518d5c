"""Configuration and command line."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from pmdaemon.cli import cli
from pmdaemon.errors import ConfigError
from pmdaemon.poller import config
from pmdaemon.runtime.config import parse_address


def write(path: Path, table: str = "", top: str = 'runtime_dir = "/run/x"\n') -> Path:
    made = path / "server.toml"
    made.write_text(f"{top}[pmdaemon]\n{table}\n[services]\nanything = 1\n")
    return made


def test_reads_its_own_keys_of_the_shared_file(tmp_path: Path) -> None:
    got = config.load(write(tmp_path, "interval_s = 0.5"))
    assert got.pmdaemon.interval_ns == 500_000_000
    assert got.segment_path == Path("/run/x/main.mbx")
    assert got.port_path == Path("/run/x/pmdaemon.port")


def test_as_many_pairs_as_processors_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(6)))
    assert config.PmConfig().most_pairs == 6
    assert config.PmConfig(pairs=4).most_pairs == 4
    assert config.PmConfig(pairs=9).most_pairs == 9
    assert config.PmConfig(pairs=2, max_pairs=4).most_pairs == 2
    assert config.PmConfig(max_pairs=3).most_pairs == 3
    assert config.PmConfig(pairs="unified").most_pairs == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(1000)))
    assert config.PmConfig().most_pairs == config.MOST_PAIRS


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("intervall_s = 1", "intervall_s: no such key"),
        ("interval_s = 0.05", "interval_s"),
        ("interval_s = 61", "interval_s"),
        ("max_pairs = 0", "max_pairs"),
        ("pairs = 4\nmax_pairs = 2", "pairs = 4 is more than max_pairs = 2"),
        ('listen = "7411"', "expected \"address:port\""),
        ('listen = "127.0.0.1:99999"', "expected \"address:port\""),
        ('listen = "host:1"', "not an IP address"),
        ('listen = "0.0.0.0:7411"', "without TLS the server cannot tell a gateway from a stranger"),
        ('listen = "[::]:7411"', "without TLS the server cannot tell a gateway from a stranger"),
        ('forwarded = "192.168.1.5:7412"', "pmdaemon.forwarded: 192.168.1.5 can be reached"),
        ('forwarded = "127.0.0.1:0"', "no address that other servers can dial"),
        ('tls = {enabled = true}\nforwarded = "0.0.0.0:7412"', "no address that other servers can dial"),
        ('listen = "192.168.1.5:7411"', "without TLS the server cannot tell a gateway from a stranger"),
    ],
)  # fmt: skip
def test_refused_values(tmp_path: Path, table: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, table))
    assert said in str(caught.value)
    assert "pmdaemon" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:7411", ("127.0.0.1", 7411)),
        ("127.9.9.9:1", ("127.9.9.9", 1)),
        ("[::1]:7411", ("::1", 7411)),
    ],
)
def test_loopback_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


def test_another_address_with_tls(tmp_path: Path) -> None:
    got = config.load(
        write(tmp_path, 'listen = "0.0.0.0:7411"\ntls = {enabled = true, certificate_days = 2}')
    )
    assert got.pmdaemon.listen == "0.0.0.0:7411"
    assert got.pmdaemon.tls.lifetime_s == 2 * 86_400
    assert got.ca_dir == got.data_dir / "ca"


def test_no_runtime_directory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLA__RUNTIME_DIR", raising=False)
    with pytest.raises(ConfigError, match="Give --config FILE"):
        config.load(None)
    monkeypatch.setenv("SLA__RUNTIME_DIR", "/run/y")
    assert config.load(None).runtime_dir == Path("/run/y")


def test_show_config_is_toml_of_the_values_in_force(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["run", "--config", str(write(tmp_path, "interval_s = 2.0")), "--show-config"]
    )
    assert done.exit_code == 0, done.output
    shown = tomllib.loads(done.output)
    assert shown["pmdaemon"]["interval_s"] == 2.0
    assert shown["pmdaemon"]["listen"] == "127.0.0.1:7411"


def test_check_config(tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(cli, ["run", "--config", str(write(tmp_path)), "--check-config"])
    assert (good.exit_code, good.output) == (0, "configuration is valid\n")
    bad = runner.invoke(cli, ["run", "--config", str(write(tmp_path, "nothing = 1")), "--check-config"])
    assert bad.exit_code == 78
    assert "nothing: no such key" in bad.output
    missing = runner.invoke(cli, ["run", "--config", str(tmp_path / "none.toml"), "--check-config"])
    assert missing.exit_code == 78


def test_users_whose_agents_may_connect() -> None:
    assert config.PmConfig().agent_uids() == {0, os.geteuid()}
    assert config.PmConfig(agent_users=["root"]).agent_uids() == {0, os.geteuid()}
    assert config.PmConfig(agent_users=["*"]).agent_uids() is None
    assert config.PmConfig.model_validate({"tls": {"enabled": True}}).agent_uids() is None, (
        "certificates decide"
    )
    with pytest.raises(ValidationError, match="no user of this machine"):
        config.PmConfig(agent_users=["no-such-user"])
