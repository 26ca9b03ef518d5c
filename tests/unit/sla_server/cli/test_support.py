"""``sla support bundle``: what is in it, and that nothing secret is."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pmdaemon.runtime.clock import Deadline, FakeClock
from sla_server.cli import support
from sla_server.cli.client import Client
from sla_server.cli.support import API_PARTS, REMOVED, Bundle, Scrubber
from tests.support import api
from tests.support.cli import Terminal
from tests.support.paths import ROOT

PASSWORD = "p4ss:w/rd"  # in the address of the database it is written with escapes
SECRETS = {
    "database": PASSWORD,
    "database, escaped": "p4ss%3Aw%2Frd",
    "reader": "re4der-secret",
    "webhook": "wh-0123456789abcdef",
    "mail": "mail-passphrase",
    "token file": "token-of-the-file-0123",
    "environment": "token-of-the-environment",
    "key": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
    "login": "one-time-code-77",
    "bearer": "eyJhbGciOiJIUzI1NiJ9.e30.abc",
    "unknown": "hunter2-hunter2",
    "object store": "s3cr3t-access",
}
CONFIG = f"""
data_dir = "{{folder}}/data"
runtime_dir = "{{folder}}/run"
[database]
url = "postgresql+psycopg://sla:{SECRETS["database, escaped"]}@db.example/sla"
reader_url = "postgresql+psycopg://reader:{SECRETS["reader"]}@db.example/sla"
"""
LOG = f"""\
2026-11-23T12:00:00 services-ready pid=7
2026-11-23T12:00:01 upstream-refused url=https://u:{SECRETS["webhook"]}@hook.example/x reason=401
2026-11-23T12:00:02 fault text="Authorization: Bearer {SECRETS["bearer"]}"
2026-11-23T12:00:03 odd password={SECRETS["unknown"]} secret_access_key="{SECRETS["object store"]}"
2026-11-23T12:00:04 page at http://127.0.0.1:8411/login?code={SECRETS["login"]}
-----BEGIN PRIVATE KEY-----
{SECRETS["key"]}
-----END PRIVATE KEY-----
2026-11-23T12:00:05 mail-failed said={SECRETS["mail"]}
2026-11-23T12:00:06 last-line
"""


@pytest.fixture
def site(sla: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A server's machine whose files, environment and answers are full of secrets."""
    data = tmp_path / "data"
    for folder in (data / "secrets", data / "queue", data / "ca", tmp_path / "run"):
        folder.mkdir(parents=True)
    (tmp_path / "server.toml").write_text(CONFIG.format(folder=tmp_path))
    (data / "api.token").write_text(SECRETS["token file"] + "\n")
    (data / "secrets" / "hook").write_text(SECRETS["webhook"] + "\n")
    (data / "secrets" / "mail").write_text(f"user\n{SECRETS['mail']}\n")
    (data / "ca" / "ca.key").write_text(SECRETS["key"])
    (data / "queue" / "ingest.queue").write_bytes(bytes(4096))
    (data / "server.log").write_text(LOG)
    (tmp_path / "run" / "dbmanager.failed").write_text(f"cannot connect, password is {PASSWORD}")
    monkeypatch.setenv("SLA_TOKEN", SECRETS["environment"])
    monkeypatch.setenv("PATH", "")  # no journalctl
    monkeypatch.chdir(tmp_path)
    sla.config = tmp_path / "server.toml"
    trouble = {"process": "delivery", "what": "hook", "since_us": 7, "reason": f"said {SECRETS['webhook']}"}
    more = {"token": SECRETS["unknown"], "note": f"{SECRETS['token file']} {SECRETS['environment']}"}
    event = {**api.snapshot()["events"][0], "details": more, "text": f"x {json.dumps(PASSWORD)}"}
    sla.context.live.put({**api.snapshot(), "problems": [trouble], "events": [event]})
    return sla


def parts_of(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        assert {member.name.split("/")[0] for member in members} == {path.name.removesuffix(".tar.gz")}
        assert all(member.isfile() and member.mode == 0o600 for member in members)
        found = {}
        for member in members:
            file = tar.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read().decode()
        return found


def made(site: Terminal, *options: str) -> dict[str, str]:
    done = site("support", "bundle", "-O", "b.tar.gz", *options)
    assert done.exit_code == 0, done.output
    return parts_of(Path("b.tar.gz"))


def test_no_secret_is_in_it(site: Terminal) -> None:
    found = made(site)
    for name, text in found.items():
        for what, secret in SECRETS.items():
            assert secret not in text, f"{what} in {name}"
            assert json.dumps(secret)[1:-1] not in text, f"{what} in {name}"
    everything = "".join(found.values())
    assert everything.count(REMOVED) >= 10, "they were there"
    assert "last-line" in found["logs/server.log"], "what follows a key is left"
    assert "sla:***@db.example" in found["config.toml"]


def test_the_journals_of_all_units_are_in_it(site: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command[-1])
        return SimpleNamespace(stdout="a line\n")

    monkeypatch.setattr("sla_server.cli.support.shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sla_server.cli.support.subprocess.run", run)
    found = made(site)
    units = [path.name for path in (ROOT / "deploy" / "systemd").glob("*.service")]
    assert sorted(asked) == sorted(unit.replace("@.", "@*.") for unit in units)
    journals = {unit.removesuffix(".service").removesuffix("@") for unit in units}
    assert {name for name in found if name.endswith(".journal")} == {
        f"logs/{each}.journal" for each in journals
    }


def test_all_that_helps_is_in_it(site: Terminal, tmp_path: Path) -> None:
    found = made(site)
    manifest = json.loads(found["manifest.json"])
    others = {"about.json", "config.toml", "server.json", "files.json", "metrics.prom", "logs/server.log"}
    assert found.keys() == {"manifest.json", *API_PARTS, *others}
    assert manifest["missing"] == {}
    assert manifest["parts"] == {
        name: len(text.encode()) for name, text in found.items() if name != "manifest.json"
    }
    parsed = {name: json.loads(text) for name, text in found.items() if name.endswith(".json")}
    assert parsed["about.json"]["packages"]["Flask"]
    assert parsed["health.json"]["problems"][0]["process"] == "delivery"
    assert parsed["sizes.json"]["tables"]
    assert parsed["files.json"][str(tmp_path / "data" / "queue")]["sizes"] == {"ingest.queue": 4096}
    assert "dbmanager" in parsed["server.json"]["failures"]
    assert parsed["live.json"]["slas"]
    assert "sla_objective_state{" in found["metrics.prom"]
    assert stat.S_IMODE(Path("b.tar.gz").stat().st_mode) == 0o600


def test_a_server_that_is_down_is_no_obstacle(site: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        raise httpx.ConnectError("connection refused")

    site.transport = httpx.MockTransport(refuse)
    found = made(site)
    manifest = json.loads(found["manifest.json"])
    assert found.keys() == {
        "manifest.json", "about.json", "config.toml", "server.json", "files.json", "logs/server.log",
    }  # fmt: skip
    assert manifest["missing"].keys() == {*API_PARTS, "metrics.prom"}
    assert len(asked) == 1, "it is asked once"


def test_a_server_in_trouble_says_why(site: Terminal) -> None:
    site.source.away = True
    found = made(site)
    assert json.loads(found["health.json"])["status"] == "down"
    assert "connection refused" in json.loads(found["sizes.json"])["detail"]


def test_a_configuration_that_is_wrong_is_named_without_its_secrets(site: Terminal, tmp_path: Path) -> None:
    url = f"oracle://sla:{SECRETS['database, escaped']}@db/sla"
    (tmp_path / "server.toml").write_text(f'[database]\nurl = "{url}"\n')
    found = made(site)
    reason = json.loads(found["manifest.json"])["missing"]["config.toml"]
    assert "is not supported" in reason
    assert SECRETS["database, escaped"] not in "".join(found.values())


def test_parts_are_bounded_logs_keep_their_end(site: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "PART_BYTES", 2000)
    found = made(site)
    assert all(len(text.encode()) <= 2000 for name, text in found.items() if name != "manifest.json")
    (Path("data") / "server.log").write_text("first\n" + "x" * 5000 + "\nthe end\n")
    Path("b.tar.gz").unlink()
    log = made(site)["logs/server.log"]
    assert log.endswith("the end\n")
    assert "first" not in log


def test_when_the_time_is_up_the_rest_is_named() -> None:
    clock = FakeClock()
    bundle = Bundle(Scrubber(()), Deadline(10, clock))
    bundle.add("a.txt", lambda: "a")

    def slow() -> str:
        clock.advance(11)
        return "b"

    bundle.add("b.txt", slow)
    bundle.add("c.txt", lambda: pytest.fail("it is not begun"))
    assert bundle.parts.keys() == {"a.txt", "b.txt"}
    assert bundle.missing == {"c.txt": "the time was up"}


def test_a_file_is_never_replaced(site: Terminal, tmp_path: Path) -> None:
    Path("b.tar.gz").write_text("mine")
    done = site("support", "bundle", "-O", "b.tar.gz")
    assert done.exit_code == 2
    assert "exists" in done.stderr
    bundle = Bundle(Scrubber(()), Deadline(10))
    with pytest.raises(support.BadUsage):
        bundle.write(Path("b.tar.gz"))
    assert Path("b.tar.gz").read_text() == "mine"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".b.tar")]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('"token": "abc"', f'"token": "{REMOVED}"'),
        ('"token": null', '"token": null'),
        ("password: hunter2, next", f"password: {REMOVED}, next"),
        ("PGPASSWORD=x y", f"PGPASSWORD={REMOVED} y"),
        ("token_file = /etc/token", "token_file = /etc/token"),
        ("secrets_dir = here", "secrets_dir = here"),
        ("Authorization: Basic dXNlcjpwYXNz", f"Authorization: Basic {REMOVED}"),
        ("amqp://u:p@h/x?api_key=k&b=1", "amqp://u:***@h/x?api_key=***&b=1"),
        ("-----BEGIN EC PRIVATE KEY-----\nabc", REMOVED),
        ("MIIEvQIB\nAAab+/==\n-----END PRIVATE KEY-----\nnext", f"{REMOVED}\nnext"),
        ("secret_key: hunter2, next", f"secret_key: {REMOVED}, next"),
        ("hmac-key=hunter2 next", f"hmac-key={REMOVED} next"),
        ('password="a\\"hunter2" next', f'password="{REMOVED}" next'),
        ('password="hunter2', f'password="{REMOVED}"'),
        (
            '{"text":"said {\\"password\\": \\"hunter2\\"}"}',
            f'{{"text":"said {{\\"password\\": \\"{REMOVED}\\"}}"}}',
        ),
        ("token=hunter2,hunter2 next", f"token={REMOVED} next"),
        ("password=x]hunter2", f"password={REMOVED}"),
        ('{"token":17,"next":1}', '{"token":17,"next":1}'),
        ("run with --password hunter2 next", f"run with --password {REMOVED} next"),
        ("Authorization: Token hunter2", f"Authorization: {REMOVED}"),
        ("Cookie: session=hunter2; a=b", f"Cookie: {REMOVED}"),
        ("said eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", f"said {REMOVED}"),
        ("a token of the agent was used", "a token of the agent was used"),
    ],
)
def test_what_has_the_form_of_a_secret_goes_and_the_rest_stays(text: str, left: str) -> None:
    assert Scrubber(()).text(text) == left


def test_all_below_a_key_that_names_a_secret_goes() -> None:
    value = {"password": ["a", "b"], "secret": {"x": "c", "y": 7}, "apiToken": "d", "token": None}
    left = {
        "password": [REMOVED, REMOVED],
        "secret": {"x": REMOVED, "y": 7},
        "apiToken": REMOVED,
        "token": None,
    }
    assert Scrubber(()).value(value) == left


def test_secrets_of_environment_and_addresses_are_known_wherever_they_occur(
    site: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "plain-of-libpq")
    monkeypatch.setenv("PGURL", "postgresql://u@h/d?password=plain-of%20query&x=1")
    hook = "https://hooks.example/services/T0001/B0001/plain-of-the-path"
    (tmp_path / "data" / "secrets" / "chat").write_text(hook + "\n")
    found = ["plain-of-libpq", "plain-of-table", "plain-of query", "plain-of%20query", "plain-of-the-path"]
    (tmp_path / "data" / "server.log").write_text("".join(f"it said {each} here\n" for each in found))
    monkeypatch.setenv("SLA_DSN", '{url = "postgresql://u:plain-of-table@h/d"}')
    log = made(site)["logs/server.log"]
    assert log == f"it said {REMOVED} here\n" * len(found)


def test_a_log_begins_with_a_whole_line(site: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "PART_BYTES", 64)
    secret = SECRETS["webhook"]
    (Path("data") / "server.log").write_text(secret + "x" * (128 - len(secret) // 2 - 5) + "\nend\n")
    assert made(site)["logs/server.log"] == "end\n"


def test_known_secrets_go_in_each_form_and_short_ones_are_left() -> None:
    scrubber = Scrubber(['quo"te-secret', "longer-secret-1", "longer-secret", "abc"])
    value: dict[str, Any] = {"a": 'quo"te-secret', "b": ["longer-secret-1"], "c": "abc"}
    text = scrubber.text(json.dumps(value))
    assert json.loads(text) == {"a": REMOVED, "b": [REMOVED], "c": "abc"}


def test_the_client_hands_out_text(site: Terminal) -> None:
    assert "# TYPE" in Client("http://127.0.0.1:8411", transport=site.transport).text("/metrics")
