"""Configuration of a relay: paths begin at its file, and what is unsafe is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.errors import ConfigError
from sla_server.relay.config import load

SENDER = '[[sender]]\nname = "site-a"\nsecret_file = "site-a.key"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "relay.toml"
    path.write_text(text)
    return path


def test_paths_begin_at_the_file_which_may_be_given_by_its_folder(tmp_path: Path) -> None:
    tls = '[tls]\ncert_file = "relay.pem"\nkey_file = "/keys/relay.key"\n'
    path = written(tmp_path, f'documents = "recipients"\n{SENDER}{tls}')
    for given in (path, tmp_path):
        config = load(given)
        assert config.data_dir == tmp_path / "relay-data"
        assert config.documents == tmp_path / "recipients"
        assert config.tls.cert_file == tmp_path / "relay.pem"
        assert config.tls.key_file == Path("/keys/relay.key")
        assert config.runtime_dir.name.startswith("relay-")
        assert [each.name for each in config.sender] == ["site-a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "sender: nothing may send events; add name and secret_file of each that may"),
        (f"{SENDER}{SENDER}", "a name is there twice"),
        (f'listen = "0.0.0.0:7430"\n{SENDER}', "give tls.cert_file and tls.key_file, listen on 127.0.0.1"),
        (f'listen = "here"\n{SENDER}', 'listen: expected "address:port"'),
        (f'confirm = "soon"\n{SENDER}', "confirm: "),
        (f"max_body_bytes = 5\n{SENDER}", "max_body_bytes: should be at least 65,536 (value: 5)"),
        (
            f"max_body_bytes = 22000000\n{SENDER}",
            "max_body_bytes: 22,000,000 is more than a fifth of events.queue_bytes (33,554,432), so that a "
            "body may never find room; set max_body_bytes to 6,710,886 at most, or events.queue_bytes to "
            "110,000,000 at least",
        ),
        (f"{SENDER}[events]\nqueue_bytes = 16777216\n", "set max_body_bytes to 3,355,443 at most"),
        (f'{SENDER}[tls]\ncert_file = "a"\n', "cert_file and key_file go together"),
        ('[[sender]]\nname = "../x"\nsecret_file = "a"\n', "sender.0.name: does not have the form"),
        (f"{SENDER}[[upstream]]\n", "upstream: no such key"),
        (
            f'{SENDER}[events.pair]\nenabled = true\nname = "a"\npartner = "b"\naddress = "127.0.0.1:1"\n',
            "a relay has no partner",
        ),
        (f"{SENDER}[events.receive]\n{SENDER.replace('[[', '[[events.receive.')}", "move them there"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(written(tmp_path, text))
    assert said in str(refused.value)


def test_the_environment_overrides_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLA_RELAY__CONFIRM", "final")
    monkeypatch.setenv("SLA_RELAY__DATA_DIR", "/var/lib/sla-relay")
    config = load(written(tmp_path, SENDER))
    assert (config.confirm, config.data_dir) == ("final", Path("/var/lib/sla-relay"))


def test_plain_http_for_others_is_a_decision(tmp_path: Path) -> None:
    assert load(written(tmp_path, f'listen = "0.0.0.0:7430"\nplain = true\n{SENDER}')).plain
