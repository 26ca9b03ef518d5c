"""Engines as programs: probed, chosen, and with mutual TLS asking for a certificate."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path

import nats
import nats.errors
import pytest
from click.testing import CliRunner

from pmdaemon.runtime.clock import Deadline
from sla_server import config as configuration
from sla_server.cli.main import cli
from sla_server.cluster import account_file, engine
from sla_server.cluster.account_file import AccountConnection
from sla_server.cluster.errors import EngineMissing, EngineTooOld
from tests.support.cluster import READY_S, configurations

OLD = """#!/bin/sh
# Answers as nats-server 2.9.10 does: it does not know sync_interval.
case "$1" in
--version) echo "nats-server: v2.9.10" ;;
*) echo 'probe.conf:1:40: unknown field "sync_interval"' >&2; exit 1 ;;
esac
"""


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_engine_that_setup_installs_can_sync_each_message() -> None:
    found = engine.choose(None, "always")
    assert found.can_sync_always
    assert found.has_atomic_batch
    assert engine.probe(found.path) == found


def test_an_old_engine_on_the_path_gives_way_to_one_that_can_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _program(tmp_path / "nats-server", OLD)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert engine.candidates()[0] == old
    assert engine.choose(None, "always").path != old


def test_an_old_engine_is_refused_or_says_what_it_lacks(tmp_path: Path) -> None:
    old = _program(tmp_path / "nats-server", OLD)
    with pytest.raises(EngineTooOld, match='set sync = "if-possible"'):
        engine.choose(old, "always")
    found = engine.choose(old, "if-possible")
    assert (found.version, found.can_sync_always) == ((2, 9, 10), False)
    assert found.reduced


def test_another_program_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineMissing, match="is no nats-server"):
        engine.choose(_program(tmp_path / "x", "#!/bin/sh\necho hello\n"), "always")
    with pytest.raises(EngineMissing, match="cannot be run"):
        engine.choose(_program(tmp_path / "y", "#!/no/such/interpreter\n"), "always")


async def _connects(address: str, authority: Path) -> str:
    """How a client without a certificate fares."""
    context = ssl.create_default_context(cafile=str(authority))
    failed: list[str] = []

    async def keep(error: Exception) -> None:
        failed.append(str(error))

    try:
        client = await nats.connect(
            f"tls://{address}", tls=context, allow_reconnect=False, error_cb=keep, connect_timeout=10
        )
        await client.close()
    except (OSError, TimeoutError, nats.errors.Error) as exc:
        return f"refused: {type(exc).__name__}"
    return "connected"


async def _connect_as(account: AccountConnection, deadline: Deadline) -> None:
    """Until the node takes the account: with status 1 its agent had not answered in time."""
    while True:
        try:
            client = await nats.connect(
                list(account.urls), tls=account.tls, allow_reconnect=False, connect_timeout=10
            )
        except (OSError, TimeoutError, nats.errors.Error):
            if deadline.passed:
                raise
            await asyncio.sleep(0.1)
        else:
            await client.close()
            return


def test_with_tls_a_client_needs_a_certificate_of_the_authority(tmp_path: Path) -> None:
    [path] = configurations(tmp_path, 1, tls=True)

    def sla(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["--config", str(path), *words])
        return result.exit_code, result.output

    assert sla("ca", "init")[0] == 0
    assert sla("cluster", "init")[0] == 0
    config = configuration.load(path)
    assert config.cluster is not None
    command = [sys.executable, "-m", "sla_server", "node", "--config", str(path)]
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = Deadline(READY_S)
        while (found := sla("cluster", "status"))[0] != 0:
            assert not deadline.passed, found
        assert "n1" in found[1]
        authority = config.cluster.directory(config.data_dir) / "tls" / "authority.pem"
        assert asyncio.run(_connects(config.cluster.listen, authority)).startswith("refused")
        secret = tmp_path / "shop.json"
        assert sla("cluster", "account", "add", "shop", str(secret), "--role", "monitor")[0] in (0, 1)
        asyncio.run(_connect_as(account_file.connection(secret), deadline))
    finally:
        process.terminate()
        assert process.wait(READY_S) == 0
