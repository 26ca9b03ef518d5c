"""Sign-in through a provider that shares no code with ours: Django OAuth Toolkit."""

from __future__ import annotations

import json
import select
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from pmdaemon.pki.authority import DAY_S, Authority
from pmdaemon.runtime.stop import Stop
from sla_server.api.config import ApiConfig
from sla_server.api.server import WebServer, open_listener
from tests.support import api
from tests.support.oidc_django import CLIENT, SECRET
from tests.support.paths import ROOT

PEOPLE = {
    "bea": {"preferred_username": "Bea", "groups": ["all", "storage"]},
    "ops": {"preferred_username": "acme-ops", "groups": [], "tenant": "acme"},
    "mallory": {"preferred_username": "mallory", "groups": ["all"], "tenant": "evil"},
}
START_S = 240.0


class Toolkit:
    """The provider in its process, and our server before it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = Authority(folder / "ca", DAY_S)
        authority.init()
        key, certificate = authority.nbd_credential("provider", ["127.0.0.1"], DAY_S)
        pem = folder / "provider.pem"
        pem.touch(0o600)
        pem.write_bytes(certificate + key)
        secret = folder / "client.secret"
        secret.touch(0o600)
        secret.write_text(SECRET)
        (folder / "people.json").write_text(json.dumps(PEOPLE))
        self.listener = open_listener("127.0.0.1:0")
        self.port = self.listener.getsockname()[1]
        self.process = self._start(f"http://127.0.0.1:{self.port}/login/oidc/callback")
        settings: dict[str, Any] = {
            "issuer": self._issuer(),
            "client_id": CLIENT,
            "client_secret_file": secret,
            "ca_file": folder / "ca" / "ca.crt",
            "map": [
                {"value": "storage", "role": "operator"},
                {"claim": "tenant", "value": "acme", "role": "viewer", "labels": "customer=acme"},
            ],
        }
        config = ApiConfig.model_validate(
            {"listen": f"127.0.0.1:{self.port}", "reading": "login", "oidc": settings}
        )
        self.stop = Stop()
        self.source = api.FakeSource()
        self.mailbox = api.AnsweringMailbox(answer=lambda _header: (True, 200, {}))
        self.mailbox.stored = self.source.access.stored
        data = api.data_dir(folder)
        self.server = WebServer(config, data, self.source, self.mailbox, self.listener, self.stop)
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        trust = ssl.create_default_context(cafile=folder / "ca" / "ca.crt")
        self.outside = httpx.Client(verify=trust, timeout=120)

    def _start(self, redirect_url: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.oidc_django", str(self.folder), redirect_url]
        with (self.folder / "provider.log").open("w") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)

    def _issuer(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        found = self.process.stdout.readline().strip() if ready else ""
        assert found, (self.folder / "provider.log").read_text()
        return found

    def sign_in(self, name: str) -> tuple[httpx.Client, httpx.Response]:
        """A new browser, as this person at the provider."""
        (self.folder / "at_the_browser").write_text(name)
        browser = httpx.Client(base_url=self.server.address, timeout=120)
        to = browser.get("/login/oidc")
        assert to.status_code == 303, to.text
        back = self.outside.get(to.headers["Location"])
        assert back.status_code == 302, back.text
        return browser, browser.get(back.headers["Location"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.outside.close()
        self.stop.set()
        self.thread.join(60)
        self.listener.close()
        self.mailbox.close()


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolkit]:
    made = Toolkit(tmp_path_factory.mktemp("toolkit"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "who", "role", "labels"),
    [("bea", "bea", "operator", ""), ("ops", "acme-ops", "viewer", "customer=acme")],
)
def test_who_is_mapped_signs_in_with_their_role(
    toolkit: Toolkit, name: str, who: str, role: str, labels: str
) -> None:
    browser, done = toolkit.sign_in(name)
    with closing(browser):
        assert done.status_code == 200, done.text
        assert browser.get("/api/v1/session").json()["who"] == who
    row = toolkit.source.access.rows["accounts"][who]
    assert (row["role"], row.get("labels") or "") == (role, labels)
    assert SECRET not in str(toolkit.mailbox.recorded)


def test_who_fits_no_row_is_refused(toolkit: Toolkit) -> None:
    browser, done = toolkit.sign_in("mallory")
    with closing(browser):
        assert done.status_code == 403
        assert browser.get("/api/v1/session").status_code in (200, 401)
        assert not browser.get("/api/v1/session").json().get("who")
    assert "mallory" not in toolkit.source.access.rows["accounts"]


def test_a_code_that_was_used_is_worth_nothing(toolkit: Toolkit) -> None:
    (toolkit.folder / "at_the_browser").write_text("bea")
    with httpx.Client(base_url=toolkit.server.address, timeout=120) as browser:
        back = toolkit.outside.get(browser.get("/login/oidc").headers["Location"]).headers["Location"]
        assert browser.get(back).status_code == 200
        with httpx.Client(base_url=toolkit.server.address, timeout=120) as other:
            assert other.get(back).status_code in (400, 401, 403)
