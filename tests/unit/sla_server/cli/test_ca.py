"""``sla ca`` on files of its own; no server runs."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from pmdaemon.pki import certificates
from pmdaemon.pki.authority import Authority
from pmdaemon.pki.errors import CredentialRefused
from sla_server.cli.main import cli

GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"


class Shell:
    """Runs ``sla ca`` with a configuration whose authority is in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.ca = directory / "data" / "ca"
        self.config = directory / "server.toml"
        self.config.write_text(f'data_dir = "{directory}/data"\nruntime_dir = "{directory}/run"\n')

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, ["--config", str(self.config), "ca", *arguments])


@pytest.fixture
def sla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in ("SLA_SERVER", "SLA_CONFIG", "SLA__DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    return Shell(tmp_path)


def enrol(sla: Shell, name: str, gateway_id: str = GATEWAY) -> None:
    token = sla("token", name, "-q").stdout.strip()
    key = certificates.make_key()
    Authority(sla.ca).enrol(token, certificates.make_request(key, name), gateway_id)


def test_init_once(sla: Shell) -> None:
    first = sla("init")
    assert first.exit_code == 0
    assert Authority(sla.ca).fingerprint() in first.stdout
    assert "[pmdaemon.tls] enabled = true" in first.stdout
    second = sla("init")
    assert second.exit_code == 77
    assert "exists already" in second.stderr


def test_before_init_it_says_what_to_do(sla: Shell) -> None:
    for arguments in (("token", "gw-a"), ("list",), ("revoke", "gw-a")):
        done = sla(*arguments)
        assert done.exit_code == 78, arguments
        assert "sla ca init" in done.stderr


def test_token_prints_the_command_to_run(sla: Shell) -> None:
    sla("init")
    done = sla("token", "gw-a", "--for", "10m", "--address", "sla.example.org:7411")
    assert done.exit_code == 0
    said = re.search(
        r"read -rs SLA_ENROL_TOKEN && export SLA_ENROL_TOKEN +# then paste: ([\w-]{43})\n"
        r"\s+gateway-agent enrol --config agent.toml --server sla\.example\.org:7411 \\\n"
        r"\s+--fingerprint ([0-9a-f]{64})",
        done.stdout,
    )
    assert said is not None
    assert "--token" not in done.stdout  # a command line is seen by ps, and kept in the shell's history
    assert said[2] == Authority(sla.ca).fingerprint()
    key = certificates.make_key()
    assert Authority(sla.ca).enrol(said[1], certificates.make_request(key, "x"), GATEWAY)


@pytest.mark.parametrize(
    "arguments", [("token", "a b"), ("token", "gw-a", "--for", "31d"), ("token", "gw-a", "--for", "x")]
)
def test_wrong_tokens_are_usage_errors(sla: Shell, arguments: tuple[str, ...]) -> None:
    sla("init")
    assert sla(*arguments).exit_code == 2


def test_list_and_revoke(sla: Shell) -> None:
    sla("init")
    assert "sla ca token NAME" in sla("list").stdout
    enrol(sla, "gw-a")
    sla("token", "gw-b")
    listed = json.loads(sla("list", "-o", "json").stdout)
    assert [(item["name"], item["state"], item["by"]) for item in listed["certificates"]] == [
        ("gw-a", "valid", "token")
    ]
    assert [item["name"] for item in listed["tokens"]] == ["gw-b"]
    table = sla("list").stdout
    assert "gw-a" in table
    assert "token for gw-b" in table
    done = sla("revoke", "gw-a", "--reason", "stolen")
    assert done.exit_code == 0
    assert f"of gw-a ({GATEWAY})" in done.stdout
    [item] = json.loads(sla("list", "-o", "json").stdout)["certificates"]
    assert (item["state"], item["reason"]) == ("revoked", "stolen")
    again = sla("revoke", "gw-a")
    assert again.exit_code == 1
    assert "names no valid certificate" in again.stderr


def test_issue_by_hand(sla: Shell, tmp_path: Path) -> None:
    sla("init")
    out = tmp_path / "gateway.pem"
    done = sla("issue", "gw-a", "--gateway-id", GATEWAY, "-o", str(out))
    assert done.exit_code == 0, done.output
    assert out.stat().st_mode & 0o777 == 0o600
    assert b"PRIVATE KEY" in out.read_bytes()
    assert sla("issue", "gw-a", "--gateway-id", GATEWAY, "-o", str(out)).exit_code == 2, "it is not replaced"
    assert len(json.loads(sla("list", "-o", "json").stdout)["certificates"]) == 1, "nothing was issued either"
    request = tmp_path / "request.der"
    request.write_bytes(certificates.make_request(certificates.make_key(), "gw-a"))
    other = tmp_path / "other.pem"
    done = sla("issue", "gw-a", "--gateway-id", GATEWAY, "--csr", str(request), "-o", str(other))
    assert done.exit_code == 0
    assert b"PRIVATE KEY" not in other.read_bytes()
    request.write_bytes(b"junk")
    done = sla(
        "issue", "gw-a", "--gateway-id", GATEWAY, "--csr", str(request), "-o", str(tmp_path / "no.pem")
    )
    assert done.exit_code == 77
    assert "cannot be read" in done.stderr
    assert not (tmp_path / "no.pem").exists()


def test_serials_stand_in_one_piece(sla: Shell) -> None:
    sla("init")
    enrol(sla, "storage-host-with-a-long-name-1")
    (entry,) = Authority(sla.ca).entries()
    lines = sla("list").stdout.splitlines()
    assert any(entry.serial in line for line in lines)  # revoke takes it, copied from here
    assert max(map(len, lines)) <= 80


def test_an_address_without_its_port_is_refused_before_a_token_is_made(sla: Shell) -> None:
    sla("init")
    done = sla("token", "gw-a", "--address", "sla.example.org")
    assert done.exit_code == 2
    assert "HOST:PORT" in done.stderr
    assert Authority(sla.ca).waiting_tokens() == []


def test_certificates_for_nbd_have_the_names_that_their_peers_look_at(sla: Shell, tmp_path: Path) -> None:
    sla("init")
    client, server = tmp_path / "db-1", tmp_path / "gw"
    done = sla("nbd", "db-1", "-o", str(client), "--days", "30")
    assert done.exit_code == 0, done.output
    assert "tls-certificates=" in done.stdout
    done = sla("nbd", "gw-a", "--host", "gw-a.example", "--host", "10.0.0.5", "-o", str(server))
    assert 'client_ca = "' in done.stdout
    assert sorted(path.name for path in client.iterdir()) == [
        "ca-cert.pem",
        "client-cert.pem",
        "client-key.pem",
    ]
    assert (server / "server-key.pem").stat().st_mode & 0o777 == 0o600
    made = certificates.certificate_in((client / "client-cert.pem").read_bytes())
    assert certificates.uris(made) == ["urn:storage-sla:name:db-1"]
    with pytest.raises(CredentialRefused, match="names no gateway"):
        certificates.credential(made)
    made = certificates.certificate_in((server / "server-cert.pem").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gw-a.example"]
    assert [str(item) for item in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5"]
    assert json.loads(sla("list", "-o", "json").stdout)["certificates"] == [], "they are no gateways'"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("a b", "-o", "x"), "is no name"),
        (("gw", "--host", "10.0.0.5:10809", "-o", "x"), "without a port"),
        (("gw", "-o", "."), "does not exist yet"),
    ],
)
def test_mistakes_with_nbd_certificates(
    sla: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sla("init")
    done = sla("nbd", *arguments)
    assert done.exit_code == 2
    assert problem in done.stderr


def test_a_token_for_some_volumes(sla: Shell) -> None:
    sla("init")
    made = sla("token", "host-1", "--volumes", "vol-1*", "--volumes", "pool-1/db-?", "-q")
    assert made.exit_code == 0
    [token] = json.loads(sla("list", "-o", "json").stdout)["tokens"]
    assert token["volumes"] == ["vol-1*", "pool-1/db-?"]
    key = certificates.make_key()
    Authority(sla.ca).enrol(made.stdout.strip(), certificates.make_request(key, "host-1"), GATEWAY)
    [entry] = json.loads(sla("list", "-o", "json").stdout)["certificates"]
    assert entry["volumes"] == ["vol-1*", "pool-1/db-?"]
    for pattern in ("vol 1", "a/b/c", "", "[ab]"):
        refused = sla("token", "host-1", "--volumes", pattern)
        assert refused.exit_code == 2, pattern
        assert "give a volume or BACKEND/VOLUME" in refused.stderr
    many = [word for _ in range(17) for word in ("--volumes", "v")]
    assert "16 is the most" in sla("token", "host-1", *many).stderr


def test_a_certificate_for_a_partner_opens_both_ends_and_is_no_gateways(sla: Shell, tmp_path: Path) -> None:
    sla("init")
    done = sla("pair", "site-a", "-o", str(tmp_path / "pair"), "--days", "30")
    assert done.exit_code == 0, done.output
    assert "[events.pair]" in done.stdout
    data = (tmp_path / "pair" / "pair.pem").read_bytes()
    assert (tmp_path / "pair" / "ca.crt").read_bytes() == Authority(sla.ca).store.read("ca.crt")
    made = certificates.certificate_in(data)
    assert certificates.uris(made) == ["urn:storage-sla:partner:site-a"]
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert len(list(usage)) == 2
    with pytest.raises(CredentialRefused, match="names no gateway"):
        certificates.credential(made)
    assert sla("pair", "site-a", "-o", str(tmp_path / "pair")).exit_code == 2
    assert sla("pair", "no name", "-o", str(tmp_path / "other")).exit_code == 2


@pytest.mark.parametrize(
    "command",
    [
        ("issue", "host-1", "--gateway-id", GATEWAY, "-o"),
        ("nbd", "client-1", "-o"),
        ("page", "--host", "sla.example", "-o"),
        ("pair", "server-1", "-o"),
    ],
    ids=lambda command: command[0],
)
def test_keys_are_on_disk_before_they_are_recorded_or_not_there_at_all(
    sla: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """A certificate whose key a power cut has taken would be recorded, and of no use."""
    sla("init")
    synced: list[Path] = []
    fails_at = 0
    real = os.fsync

    def fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_relative_to(tmp_path / "made"):
            synced.append(path)
            if len(synced) == fails_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "made").mkdir()
    output = tmp_path / "made" / "out"
    done = sla(*command, str(output))
    assert done.exit_code == 0, done.output
    files = [path for path in output.rglob("*") if path.is_file()] if output.is_dir() else [output]
    assert {*files, *(path.parent for path in files), output.parent} <= set(synced)
    for fails_at in range(1, len(synced) + 1):
        output = tmp_path / "made" / str(fails_at)
        synced.clear()
        assert "Input/output error" in sla(*command, str(output)).output
        assert not output.exists()
