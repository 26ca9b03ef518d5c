"""A real syslog daemon (rsyslog) takes messages over TCP, TLS and a Unix socket, and reads each field.

What it has understood is in a file, a line each: priority, time, program, kind, structured data, text.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import SyslogSpec
from sla_server.events.recipients.base import CONFIRMED, Answer, Outcome
from sla_server.events.recipients.network import Resolver
from sla_server.events.recipients.syslog import Syslog
from tests.support.nbd_certificates import NbdAuthority
from tests.support.notices import notice
from tests.support.ports import free_port

LIMIT_S = 120.0
TLS_DRIVER = "usr/lib/*/rsyslog/lmnsd_ossl.so"
CONFIG = """
global(workDirectory="{folder}" maxMessageSize="64k"
       defaultNetstreamDriverCAFile="{folder}/ca.pem"
       defaultNetstreamDriverCertFile="{keys}/server-cert.pem"
       defaultNetstreamDriverKeyFile="{keys}/server-key.pem")
module(load="imtcp")
module(load="imuxsock" SysSock.Use="off")
template(name="fields" type="string"
         string="%PRI%\\t%TIMESTAMP:::date-rfc3339%\\t%APP-NAME%\\t%MSGID%\\t%STRUCTURED-DATA%\\t%msg%\\n")
ruleset(name="file") {{ action(type="omfile" file="{folder}/taken" template="fields") }}
input(type="imtcp" address="127.0.0.1" port="{tcp}" ruleset="file")
input(type="imtcp" address="127.0.0.1" port="{tls}" ruleset="file"
      streamDriver.name="ossl" streamDriver.mode="1" streamDriver.authMode="anon")
input(type="imuxsock" socket="{folder}/log" useSpecialParser="off" useSysTimeStamp="off"
      ignoreTimestamp="off" ruleset="file")
"""


def _program() -> str | None:
    return shutil.which("rsyslogd", path="/usr/sbin:/sbin:/usr/bin")


class Daemon:
    """An rsyslogd with everything in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = NbdAuthority(folder / "ca")
        (folder / "ca.pem").write_bytes(authority.file.read_bytes())
        self.tcp, self.tls = free_port(), free_port()
        keys = authority.issue("server", "log", "127.0.0.1")
        text = CONFIG.format(folder=folder, keys=keys, tcp=self.tcp, tls=self.tls)
        (folder / "rsyslog.conf").write_text(text)
        self.socket = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; whoever sends tries until it listens, as delivery does."""
        program = _program()
        assert program is not None
        arguments = ["-n", "-f", str(self.folder / "rsyslog.conf"), "-i", str(self.folder / "pid")]
        with (self.folder / "said").open("ab") as said:
            self._process = subprocess.Popen([program, *arguments], stdout=said, stderr=said)

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(LIMIT_S)
            self._process = None
            (self.folder / "pid").unlink(missing_ok=True)

    def taken(self) -> list[list[str]]:
        """The fields of each message."""
        path = self.folder / "taken"
        return [line.split("\t") for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for(self, *numbers: int) -> None:
        """Until it has these, in this order."""
        wanted = [f'id="event-{number}"' for number in numbers]
        deadline = Deadline(LIMIT_S)
        while [fields[4].split(" ")[1] for fields in self.taken()] != wanted:
            assert not deadline.passed, (self.taken(), (self.folder / "said").read_text())
            time.sleep(0.05)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    if _program() is None or not list(Path("/").glob(TLS_DRIVER)):
        pytest.skip("rsyslogd or its driver for TLS (rsyslog-openssl) is missing: deploy/setup.sh test")
    made = Daemon(tmp_path)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def _send(daemon: Daemon, *numbers: int, **fields: Any) -> None:
    """Deliver, as often as delivery would, until it is confirmed."""
    target = Syslog(
        "log", SyslogSpec.model_validate(fields), daemon.folder, Resolver(), timeout_s=10, most_notices=100
    )
    deadline = Deadline(LIMIT_S)
    try:
        while _deliver(target, *numbers) != CONFIRMED:
            assert not deadline.passed, (daemon.folder / "said").read_text()
            time.sleep(0.05)
    finally:
        target.close()


def _deliver(target: Syslog, *numbers: int) -> Answer:
    text = 'erp-gold/latency: "p95" is 12 ms, more than 5 ms] for 3 s, Größe'
    made = [notice(number, event_fields={"text": text, "subject": 'erp "]\\ gold'}) for number in numbers]
    return target.deliver(made, Deadline(10))


def test_it_reads_each_field_over_tcp_tls_and_a_unix_socket(daemon: Daemon) -> None:
    host = {"server": "127.0.0.1"}
    _send(daemon, 1, 2, **host, port=daemon.tcp)
    daemon.wait_for(1, 2)
    _send(daemon, 3, 4, **host, port=daemon.tls, tls=True, ca_file="ca.pem")
    daemon.wait_for(1, 2, 3, 4)
    _send(daemon, 5, unix=str(daemon.socket))
    daemon.wait_for(1, 2, 3, 4, 5)
    for number, (priority, at, app, kind, data, text) in enumerate(daemon.taken(), 1):
        assert (priority, app, kind) == (str(16 * 8 + 2), "storage-sla", "violation-opened")
        assert at.startswith(f"2026-01-01T00:00:0{number}")
        assert data.startswith(
            f'[sla@32473 id="event-{number}" severity="critical" status="firing" element="sla"'
        )
        assert 'subject="erp \\"\\]\\\\ gold"' in data
        assert text.lstrip("\ufeff") == 'erp-gold/latency: "p95" is 12 ms, more than 5 ms] for 3 s, Größe'


def test_a_daemon_that_was_killed_and_is_back_gets_what_comes_then(daemon: Daemon) -> None:
    spec = SyslogSpec.model_validate({"server": "127.0.0.1", "port": daemon.tcp})
    target = Syslog("log", spec, daemon.folder, Resolver(), timeout_s=10, most_notices=100)
    try:
        deadline = Deadline(LIMIT_S)
        while _deliver(target, 1) != CONFIRMED:
            assert not deadline.passed
            time.sleep(0.05)
        daemon.wait_for(1)
        daemon.stop(signal.SIGKILL)
        assert _deliver(target, 2).outcome is Outcome.RETRY
        daemon.start()
        deadline = Deadline(LIMIT_S)
        while _deliver(target, 2) != CONFIRMED:
            assert not deadline.passed
            time.sleep(0.05)
        daemon.wait_for(1, 2)
    finally:
        target.close()
